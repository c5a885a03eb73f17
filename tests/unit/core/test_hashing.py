"""Block hash chain against golden vectors and its laws (interfaces A.1, fault row 27)."""

from __future__ import annotations

import json
import subprocess
import sys
from array import array
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from millpond.core.errors import InvariantBroken
from millpond.core.hashing import ExtraKey, ExtraKind, HashChain, block_hash, chain_digest, root_digest
from millpond.core.units import BLOCK_TOKENS

GOLDEN = Path(__file__).parents[2] / "golden" / "hash.json"
CASES = json.loads(GOLDEN.read_text())

ROOT = root_digest(b"model", b"layout", b"tenant", b"cache")

PRINT_CHAIN = """
import json, sys
from array import array
from itertools import pairwise
from millpond.core.hashing import HashChain, root_digest
chain = HashChain(root_digest(b"model", b"layout", b"tenant", b"cache"))
chain.extend(array("i", range(300)))
print(hash("salted"), *(digest.hex() for digest in chain.digests))
"""


def extra_keys(case: dict) -> list[ExtraKey]:
    return [
        ExtraKey(ExtraKind(kind), position, bytes.fromhex(value)) for kind, position, value in case["extras"]
    ]


@pytest.mark.parametrize("case", CASES, ids=[case["name"] for case in CASES])
def test_chain_equals_golden_vector(case: dict) -> None:
    names = ("model_fingerprint", "layout_fingerprint", "tenant_salt", "cache_salt")
    root = root_digest(*(bytes.fromhex(case[name]) for name in names))
    chain = HashChain(root)
    chain.extend(array("i", case["token_ids"]), list(reversed(extra_keys(case))))

    assert root.hex() == case["root"]
    assert [digest.hex() for digest in chain.digests] == case["digests"]
    assert chain.hashes == tuple(bytes.fromhex(digest)[:16] for digest in case["digests"])


def test_golden_vectors_come_from_the_script_beside_them() -> None:
    script = GOLDEN.with_name("make_hash_golden.py")
    made = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, timeout=60, check=True
    )
    assert made.stdout == GOLDEN.read_text()


def test_bug_27_chain_does_not_depend_on_the_hash_seed() -> None:
    lines = [
        subprocess.run(
            [sys.executable, "-c", PRINT_CHAIN],
            env={"PYTHONHASHSEED": seed, "PYTHONPATH": ":".join(sys.path)},
            capture_output=True,
            text=True,
            timeout=60,
            check=True,
        ).stdout.split()
        for seed in ("1", "2")
    ]
    here = HashChain(ROOT)
    here.extend(array("i", range(300)))
    assert lines[0][0] != lines[1][0], "the two processes must really differ in their hash seed"
    assert lines[0][1:] == lines[1][1:] == [digest.hex() for digest in here.digests]


@given(
    tokens=st.lists(st.integers(0, 2**31 - 1), max_size=600),
    cuts=st.lists(st.integers(0, 600), max_size=6),
    extra_positions=st.lists(st.integers(0, 599), max_size=5),
)
def test_chain_does_not_depend_on_the_split_into_calls(
    tokens: list[int], cuts: list[int], extra_positions: list[int]
) -> None:
    keys = [
        ExtraKey(ExtraKind.IMAGE, pos, bytes([i]))
        for i, pos in enumerate(extra_positions)
        if pos < len(tokens)
    ]
    whole, pieces = HashChain(ROOT), HashChain(ROOT)
    whole.extend(array("i", tokens), keys)
    borders = [0, *sorted(min(cut, len(tokens)) for cut in cuts), len(tokens)]
    for begin, end in pairwise(borders):
        pieces.extend(array("i", tokens[begin:end]), [key for key in keys if begin <= key.position < end])
    assert pieces.digests == whole.digests
    assert pieces.growing_digest() == whole.growing_digest()
    assert pieces.num_tokens == len(tokens)


@given(
    common=st.lists(st.integers(0, 3), max_size=300),
    rests=st.tuples(*[st.lists(st.integers(0, 3), max_size=200)] * 2),
    salts=st.tuples(*[st.sampled_from([b"", b"a", b"b"])] * 2),
)
def test_equal_hash_iff_equal_prefix(
    common: list[int], rests: tuple[list[int], list[int]], salts: tuple[bytes, bytes]
) -> None:
    sides = [common + rest for rest in rests]
    chains = []
    for tokens, salt in zip(sides, salts, strict=True):
        chain = HashChain(root_digest(b"m", b"l", salt, b""))
        chain.extend(array("i", tokens))
        chains.append(chain)
    for i, left in enumerate(chains[0].hashes):
        for j, right in enumerate(chains[1].hashes):
            same_prefix = (
                i == j
                and salts[0] == salts[1]
                and sides[0][: (i + 1) * BLOCK_TOKENS] == sides[1][: (i + 1) * BLOCK_TOKENS]
            )
            assert (left == right) == same_prefix


@given(st.tuples(*[st.binary(max_size=3)] * 4), st.tuples(*[st.binary(max_size=3)] * 4))
def test_roots_are_equal_iff_all_four_parts_are(left: tuple[bytes, ...], right: tuple[bytes, ...]) -> None:
    assert (root_digest(*left) == root_digest(*right)) == (left == right)


def test_every_part_of_an_extra_key_changes_the_block() -> None:
    ids = array("i", range(BLOCK_TOKENS))
    keys = [
        (),
        (ExtraKey(ExtraKind.IMAGE, 0, b"x"),),
        (ExtraKey(ExtraKind.ADAPTER, 0, b"x"),),
        (ExtraKey(ExtraKind.APPROXIMATE, 0, b"x"),),
        (ExtraKey(ExtraKind.IMAGE, 1, b"x"),),
        (ExtraKey(ExtraKind.IMAGE, 0, b"y"),),
        (ExtraKey(ExtraKind.IMAGE, 0, b"x"), ExtraKey(ExtraKind.IMAGE, 1, b"")),
    ]
    assert len({block_hash(chain_digest(ROOT, ids, extras)) for extras in keys}) == len(keys)


def test_extra_key_outside_the_appended_tokens_is_refused() -> None:
    chain = HashChain(ROOT)
    chain.extend(array("i", range(10)))
    with pytest.raises(InvariantBroken, match="extra key at 9"):
        chain.extend(array("i", range(5)), [ExtraKey(ExtraKind.IMAGE, 9, b"")])
    assert chain.num_tokens == 10
