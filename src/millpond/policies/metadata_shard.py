"""Which metadata shard knows a chain, and when a popular prefix must be spread over more of them.

A chain belongs to the shard that the hash of its block d picks, d = 8 (1,024 tokens) unless its first block
is listed with more. All agents with one tool prompt share the first blocks: with d = 2 one of 8 shards got
every request of a public trace (kvstore 1.10). Blocks above d are on every shard.

Source:
    Seed 003 (trie sharded over CPU servers by the first tokens); kvstore 2.12.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from millpond.core.hashing import BLOCK_HASH_BYTES
from millpond.core.pool_map import PoolMap

MAX_DEPTH = 1024
_MASK = (1 << 64) - 1


def depth_of(pool_map: PoolMap, hashes: bytes) -> int:
    """Blocks of a chain whose last one picks the shard.

    Args:
        pool_map: Has the table.
        hashes: 16 bytes per block, from block 0 on.
    """
    first = hashes[:BLOCK_HASH_BYTES]
    return dict(pool_map.depths).get(first, pool_map.default_depth)


def shard_of(shards: Sequence[str], hashes: bytes, depth: int) -> int:
    """Index of the shard of a chain; a chain shorter than `depth` goes by its last block.

    Guarantees:
        Adding or removing one of n shards moves 1/n of the chains and no other (rendezvous hashing).
    """
    end = min(depth * BLOCK_HASH_BYTES, len(hashes))
    key = int.from_bytes(hashes[end - BLOCK_HASH_BYTES : end], "little") & _MASK
    return max(range(len(shards)), key=lambda index: _mix(key ^ _seed(shards[index])))


def shards_in_order(pool_map: PoolMap, hashes: bytes) -> list[int]:
    """The shard of a chain first, then those it belonged to when its depth was smaller, newest first.

    Extents written before the depth grew are still there: a reader that finds less than the whole chain asks
    them next.
    """
    depth = depth_of(pool_map, hashes)
    order: list[int] = []
    while depth >= pool_map.default_depth:
        shard = shard_of(pool_map.metadata, hashes, depth)
        if shard not in order:
            order.append(shard)
        depth //= 2
    return order


def deepened(pool_map: PoolMap, lookups: Mapping[bytes, int]) -> dict[bytes, int]:
    """New depths of the prefixes that are asked for too often.

    Args:
        pool_map: The table as it is.
        lookups: Hash of block 0 -> look-ups in the window, over all shards.

    Returns:
        Doubled depth of every prefix with more than 1 / (4 x shards) of the look-ups; nothing if there is
        only one shard.
    """
    num_shards, total = len(pool_map.metadata), sum(lookups.values())
    if num_shards < 2 or not total:
        return {}
    depths = dict(pool_map.depths)
    busy = {first: count for first, count in lookups.items() if count * 4 * num_shards > total}
    wanted = {first: depths.get(first, pool_map.default_depth) * 2 for first in busy}
    return {first: depth for first, depth in wanted.items() if depth <= MAX_DEPTH}


def _mix(value: int) -> int:
    """splitmix64's finaliser."""
    value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9 & _MASK
    value = (value ^ (value >> 27)) * 0x94D049BB133111EB & _MASK
    return value ^ (value >> 31)


def _seed(name: str) -> int:
    seed = 0x9E3779B97F4A7C15
    for byte in name.encode():
        seed = _mix(seed ^ byte) * 0x100000001B3 & _MASK
    return seed
