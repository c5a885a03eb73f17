"""Which shard knows a chain: even, stable under join and leave, and spread again when a prefix is popular."""

from __future__ import annotations

import hashlib
from collections import Counter
from dataclasses import replace

import pytest

from millpond.core.pool_map import PoolMap
from millpond.policies.metadata_shard import MAX_DEPTH, ShardTable, deepened

SHARDS = tuple(f"10.0.0.{i}:7000" for i in range(8))


def pool_map(num_shards: int, depths: dict[bytes, int] | None = None) -> PoolMap:
    return PoolMap(1, (), (), SHARDS[:num_shards], depths=tuple((depths or {}).items()))


def chain(seed: int, num_blocks: int = 20, shared: bytes = b"") -> bytes:
    """Hashes; the first blocks are `shared`."""
    own = num_blocks * 16 - len(shared)
    return shared + hashlib.shake_128(seed.to_bytes(8, "little")).digest(own)


def test_chains_are_spread_evenly():
    table = ShardTable(pool_map(8))
    counts = Counter(table.owner(chain(seed)) for seed in range(8000))
    assert set(counts) == set(range(8))
    assert max(counts.values()) <= 1.15 * 1000


@pytest.mark.parametrize("num_shards", [1, 2, 4, 7])
def test_join_and_leave_move_one_nth_of_the_chains_and_only_to_or_from_the_shard(num_shards: int):
    before, after = ShardTable(pool_map(num_shards)), ShardTable(pool_map(num_shards + 1))
    chains = [chain(seed) for seed in range(4000)]
    moved = [(before.owner(c), after.owner(c)) for c in chains if before.owner(c) != after.owner(c)]
    assert {new for _, new in moved} == {num_shards}, "a join moves chains to the new shard only"
    assert len(moved) <= 1.2 * len(chains) / (num_shards + 1)
    assert len(moved) >= 0.8 * len(chains) / (num_shards + 1)


def test_a_chain_goes_by_its_block_d_and_a_short_one_by_its_last():
    table = ShardTable(pool_map(8))
    long = chain(1)
    assert table.owner(long) == table.owner(long[: 8 * 16] + chain(2)) == table.pick(long[7 * 16 : 8 * 16])
    assert table.owner(long[: 3 * 16]) == table.pick(long[2 * 16 : 3 * 16])
    assert ShardTable(pool_map(1)).owner(long) == 0


def test_previous_owners_are_asked_newest_first():
    shared = chain(9, 64)
    table = ShardTable(pool_map(8, {shared[:16]: 32}))
    picks = [table.pick(shared[(depth - 1) * 16 : depth * 16]) for depth in (32, 16, 8)]
    assert table.in_order(shared) == list(dict.fromkeys(picks))
    assert table.in_order(chain(1)) == [table.owner(chain(1))], "nothing grew: nobody else to ask"


def test_a_popular_prefix_deepens_until_its_chains_are_spread_and_no_further():
    shared = chain(0, 118)
    chains = [chain(seed, 140, shared) for seed in range(2000)]
    current = pool_map(8)
    for _ in range(20):
        table = ShardTable(current)
        keys = [table.lookup_key(c) for c in chains]
        lookups = Counter(key for key, c in zip(keys, chains, strict=True) if not c.endswith(key[1]))
        grown = deepened(current, lookups, len(chains))
        if not grown:
            break
        current = replace(current, depths=tuple({**dict(current.depths), **grown}.items()))
    assert dict(current.depths) == {shared[:16]: 128}
    loads = Counter(ShardTable(current).owner(c) for c in chains)
    assert max(loads.values()) <= 1.2 * len(chains) / 8


def test_only_keys_with_more_than_their_share_deepen():
    current = pool_map(8)
    limit = 3200 // (4 * 8)
    lookups = {(b"a" * 16, b"x" * 16): limit, (b"b" * 16, b"y" * 16): limit + 1}
    assert deepened(current, lookups, 3200) == {b"b" * 16: 16}
    assert deepened(pool_map(1), lookups, 3200) == {}
    assert deepened(current, {}, 0) == {}


def test_depth_is_bounded():
    current = pool_map(8, {b"a" * 16: MAX_DEPTH})
    assert deepened(current, {(b"a" * 16, b"x" * 16): 10}, 10) == {}
