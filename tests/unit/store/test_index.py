"""The block index against a dict, and what it promises about mistakes."""

from __future__ import annotations

import hashlib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from millpond.core.errors import InvariantBroken, OverloadError
from millpond.core.extents import ExtentId, StripeId, TenantId
from millpond.store.index import BlockIndex, ExtentEntry

WINDOW = 8


def digests(path: tuple[int, ...]) -> list[bytes]:
    """One digest per block of a chain: equal for equal prefixes."""
    chain, parent = [], b"root"
    for choice in path:
        parent = hashlib.sha256(parent + bytes([choice])).digest()
        chain.append(parent)
    return chain


def hashes(chain: list[bytes]) -> bytes:
    return b"".join(digest[:16] for digest in chain)


def insert(index: BlockIndex, chain: list[bytes], begin: int, end: int, nonce: int, tenant: int = 1) -> int:
    entry = ExtentEntry(
        extent=ExtentId(chain[end - 1], end - begin),
        stripe=StripeId(epoch=3, group=2**31, nonce=nonce),
        first_block=begin,
        missing=0b100000000001,
        approximate=bool(nonce % 2),
        tenant=TenantId(tenant),
        access_hour=7,
        num_kib=445,
    )
    insertion = index.insert(entry, hashes(chain[begin:end]))
    if insertion.slot >= 0:
        assert index.entry(insertion.slot) == entry
    return insertion.slot


def test_a_record_keeps_every_field_at_its_largest() -> None:
    index = BlockIndex(1024)
    chain = digests((1, 2))
    entry = ExtentEntry(
        ExtentId(chain[1], 2), StripeId(0xFFFF, 0xFFFFFFFF, 2**64 - 1), 0, 0xFFFF, True, TenantId(0xFFFFFFFF),
        0xFFFF, 0xFFFFFF,
    )  # fmt: skip
    assert index.entry(index.insert(entry, hashes(chain)).slot) == entry


paths = st.lists(st.integers(0, 1), min_size=1, max_size=24).map(tuple)


writes = st.lists(st.tuples(paths, st.integers(0, 2), st.integers(0, WINDOW - 1)), min_size=1, max_size=30)


@given(writes, st.lists(paths, max_size=10))
@settings(deadline=None, max_examples=100)
def test_match_equals_a_dict(
    writes: list[tuple[tuple[int, ...], int, int]], reads: list[tuple[int, ...]]
) -> None:
    index = BlockIndex(4096)
    model: dict[bytes, tuple[int, int]] = {}  # block -> (blocks of its extent, nonce)
    contents: list[list[bytes]] = []
    for nonce, (path, window, shorter) in enumerate(writes):
        chain = digests(path)
        begin = min(window, (len(path) - 1) // WINDOW) * WINDOW
        end = max(begin + 1, min(begin + WINDOW, len(path)) - shorter)
        contents.append(chain[begin:end])
        slot = insert(index, chain, begin, end, nonce)
        won = [d for d in chain[begin:end] if model.get(d, (0, 0))[0] < end - begin]
        assert (slot >= 0) == bool(won)
        model.update(dict.fromkeys(won, (end - begin, nonce)))
    assert index.num_blocks == len(model)
    assert index.num_extents == len(set(model.values()))
    for path in reads + [path for path, _, _ in writes]:
        chain = digests(path)
        expected = next((i for i, d in enumerate(chain) if d not in model), len(chain))
        num_blocks, found = index.match(hashes(chain), WINDOW, hour=9)
        assert num_blocks == expected
        check_cover(index, contents, chain, num_blocks, found.tolist())


def check_cover(
    index: BlockIndex,
    contents: list[list[bytes]],
    chain: list[bytes],
    num_blocks: int,
    found: list[list[int]],
) -> None:
    """Each extent serves from where the one before ends, and holds this chain there."""
    position = 0
    for slot, first in found:
        entry = index.entry(slot)
        assert entry.access_hour == 9
        assert entry.first_block == first <= position < first + entry.extent.num_blocks
        begin = position
        for digest in contents[entry.stripe.nonce][position - first :]:
            if position == num_blocks or chain[position] != digest:
                break
            position += 1
        assert position > begin
    assert position == num_blocks


def test_first_writer_wins_and_a_longer_extent_replaces() -> None:
    index = BlockIndex(1024)
    chain = digests(tuple(range(8)))
    short = insert(index, chain, 0, 3, nonce=1)
    assert insert(index, chain, 0, 3, nonce=2) == -1
    assert insert(index, chain, 0, 2, nonce=3) == -1
    longer = insert(index, chain, 0, 8, nonce=4)
    assert index.num_extents == 1
    assert index.find(chain[0][:16]) == index.find(chain[7][:16]) == longer != short


def test_removed_extents_are_never_found_and_their_memory_comes_back() -> None:
    index = BlockIndex(1024)
    chain = digests(tuple(range(16)))
    first, second = insert(index, chain, 0, 8, nonce=1), insert(index, chain, 8, 16, nonce=2)
    index.remove(first)
    index.remove(first)
    assert index.match(hashes(chain), WINDOW, 9)[0] == 0
    assert index.find(chain[3][:16]) == -1 != index.find(chain[9][:16])
    assert index.sweep() == 8
    assert insert(index, chain, 0, 8, nonce=3) == first
    assert index.match(hashes(chain), WINDOW, 9)[0] == 16
    index.remove(second)
    assert insert(index, chain, 8, 16, nonce=4) >= 0, "a dead extent does not block its successor"
    assert index.match(hashes(chain), WINDOW, 9)[0] == 16
    index.sweep()
    assert index.match(hashes(chain), WINDOW, 9)[0] == 16


@given(st.sets(st.integers(0, 199), max_size=200))
@settings(deadline=None, max_examples=25)
def test_removal_leaves_every_other_chain_whole(removed: set[int]) -> None:
    index = BlockIndex(16384)
    chains = [digests((n % 256, n // 256, *range(14))) for n in range(200)]
    slots = [insert(index, chain, 0, 16, nonce=n) for n, chain in enumerate(chains)]
    for n in removed:
        index.remove(slots[n])
    index.sweep()
    for n, chain in enumerate(chains):
        assert index.match(hashes(chain), 16, 9)[0] == (0 if n in removed else 16)
    assert index.num_blocks == 16 * (200 - len(removed))


def test_access_hours_order_chains_from_root_to_leaf() -> None:
    index = BlockIndex(1024)
    chain = digests(tuple(range(16)))
    slots = [insert(index, chain, 0, 8, nonce=1), insert(index, chain, 8, 16, nonce=2)]
    index.match(hashes(chain[:8]), WINDOW, 20)
    assert index.slots_before(hour=32, max_age_hours=12).tolist() == [slots[1]]
    assert index.slots_before(hour=33, max_age_hours=12).tolist() == slots
    # the hour wraps
    index.match(hashes(chain), WINDOW, 0xFFFF)
    assert index.slots_before(hour=3, max_age_hours=4).tolist() == []
    assert index.slots_before(hour=4, max_age_hours=4).tolist() == slots


def test_tenants_and_checkpoint() -> None:
    index = BlockIndex(8192)
    chains = [digests((n, *range(7))) for n in range(100)]
    slots = [insert(index, chain, 0, 8, nonce=n, tenant=n % 3) for n, chain in enumerate(chains)]
    assert index.slots_of(TenantId(2)).tolist() == slots[2::3]
    for slot in slots[2::3]:
        index.remove(slot)
    again = BlockIndex.restore(index.save(), 8192)
    assert (again.num_extents, again.num_blocks) == (67, 67 * 8)
    for n, chain in enumerate(chains):
        assert again.match(hashes(chain), WINDOW, 9)[0] == (0 if n % 3 == 2 else 8)
    assert insert(again, chains[2], 0, 8, nonce=500) in slots[2::3]


def test_a_full_index_says_so_and_stays_usable() -> None:
    index = BlockIndex(1024)
    written: list[list[bytes]] = []

    def fill() -> None:
        for n in range(100_000):
            chain = digests((n % 256, n // 256 % 256, n // 65536))
            insert(index, chain, 0, 3, nonce=n)
            written.append(chain)

    with pytest.raises(OverloadError, match="block index is full"):
        fill()
    assert index.match(hashes(written[0]), WINDOW, 9)[0] == 3
    assert index.match(hashes(written[-1]), WINDOW, 9)[0] == 3


def test_hashes_that_are_not_the_extent_are_our_own_bug() -> None:
    chain = digests((1, 2, 3))
    with pytest.raises(InvariantBroken):
        BlockIndex(1024).insert(
            ExtentEntry(ExtentId(chain[2], 3), StripeId(0, 0, 0), 0, 0, False, TenantId(0), 0, 0),
            hashes(chain[:2]),
        )
