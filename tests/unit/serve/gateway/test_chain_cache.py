"""Digests from the cache are those of a plain chain, and a growing session pays for what is new."""

from __future__ import annotations

from array import array

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from millpond.core.chance import Chance
from millpond.core.hashing import HashChain
from millpond.core.units import BLOCK_TOKENS
from millpond.serve.gateway.chain_cache import MAX_BRANCHES, ChainCache

ROOT = b"r" * 32


def tokens(seed: int, num_blocks: int) -> array[int]:
    chance = Chance(seed, "tokens")
    return array("i", [chance.below(1000) for _ in range(num_blocks * BLOCK_TOKENS)])


def plain(root: bytes, ids: array[int], num_blocks: int) -> tuple[bytes, ...]:
    chain = HashChain(root)
    chain.extend(ids)
    return tuple(chain.digests[:num_blocks])


ASK = st.tuples(st.integers(0, 2), st.integers(0, 3), st.integers(0, 6), st.integers(0, 6))
"""Root, branch, blocks that all branches share, blocks of its own."""


@settings(deadline=None, max_examples=60)
@given(asks=st.lists(ASK, max_size=25), max_blocks=st.integers(1, 30))
def test_digests_are_those_of_a_plain_chain(asks, max_blocks: int):
    cache = ChainCache(max_blocks * BLOCK_TOKENS)
    for root, seed, num_shared, num_own in asks:
        ids = tokens(0, num_shared) + tokens(seed, num_own) + array("i", [5] * 17)
        num_blocks = num_shared + num_own
        key = bytes([root]) * 32
        assert cache.digests(key, ids, num_blocks) == plain(key, ids, num_blocks)
        assert 0 <= cache.num_tokens <= max_blocks * BLOCK_TOKENS


def test_a_growing_session_is_hashed_once():
    cache = ChainCache()
    ids = tokens(1, 100)
    for num_blocks in range(10, 101, 10):
        cache.digests(ROOT, ids, num_blocks)
    assert cache.num_hashed == 100
    assert cache.num_tokens == len(ids), "a longer chain takes the place of its beginning"
    cache.digests(ROOT, ids, 50)
    assert (cache.num_hashed, cache.num_tokens) == (100, len(ids)), "and keeps it"
    cache.digests(b"s" * 32, ids, 50)
    assert cache.num_hashed == 150, "another root shares nothing"


def test_sessions_with_one_system_prompt_are_each_hashed_once():
    cache = ChainCache()
    system = tokens(0, 20)
    for length in (5, 10):
        for seed in range(1, MAX_BRANCHES + 1):
            cache.digests(ROOT, system + tokens(seed, length), 20 + length)
    assert cache.num_hashed == 20 + MAX_BRANCHES * 10


def test_equal_hashes_are_not_believed_one_token_is_enough_to_differ():
    cache = ChainCache()
    ids = tokens(1, 64)
    cache.digests(ROOT, ids, 64)
    for at in (0, 127, 128, 64 * 64, len(ids) - 1):
        changed = ids[:]
        changed[at] += 1
        assert cache.digests(ROOT, changed, 64) == plain(ROOT, changed, 64)


@pytest.mark.parametrize("num_blocks", [0, 1])
def test_short_prompts(num_blocks: int):
    ids = tokens(1, num_blocks) + array("i", [3])
    assert ChainCache().digests(ROOT, ids, num_blocks) == plain(ROOT, ids, num_blocks)
