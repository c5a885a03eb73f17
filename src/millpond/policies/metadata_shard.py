"""Which metadata shard knows a chain, and when a popular prefix must be spread over more of them.

A chain belongs to the shard that the hash of its block d picks, d = 8 (1,024 tokens) unless its first block
is listed with more. All agents with one tool prompt share the first blocks: with d = 2 one of 8 shards got
every request of a public trace (kvstore 1.10). Blocks above d are on every shard.

Source:
    Seed 003 (trie sharded over CPU servers by the first tokens); kvstore 2.12.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeAlias

from millpond.core.hashing import BLOCK_HASH_BYTES
from millpond.core.pool_map import PoolMap

MAX_DEPTH = 1024
_MASK = (1 << 64) - 1

LookupKey: TypeAlias = tuple[bytes, bytes]
"""Hashes of block 0 and of the block that picks the shard."""


class ShardTable:
    """Chain -> shard under one pool map. Chains are 16 bytes per block, from block 0 on, at least one.

    Guarantees:
        Adding or removing one of n shards moves 1/n of the chains and no other (rendezvous hashing).
    """

    def __init__(self, pool_map: PoolMap) -> None:
        self.num_shards = len(pool_map.metadata)
        self._seeds = tuple(map(_seed, pool_map.metadata))
        self._default_depth = pool_map.default_depth
        self._depths = dict(pool_map.depths)

    def depth_of(self, first: bytes) -> int:
        """Blocks of a chain with this first block whose last one picks the shard."""
        return self._depths.get(first, self._default_depth)

    def lookup_key(self, hashes: bytes) -> LookupKey:
        """Under which a look-up of a chain counts; see `deepened`."""
        first = hashes[:BLOCK_HASH_BYTES]
        return first, _block_of(hashes, self.depth_of(first))

    def pick(self, block_hash: bytes) -> int:
        """Shard that a block picks."""
        if self.num_shards == 1:
            return 0
        key = int.from_bytes(block_hash, "little") & _MASK
        draws = [_mix(key ^ seed) for seed in self._seeds]
        return draws.index(max(draws))

    def owner(self, hashes: bytes) -> int:
        """Shard of a chain; one shorter than its depth goes by its last block."""
        return self.pick(self.lookup_key(hashes)[1])

    def in_order(self, hashes: bytes) -> list[int]:
        """The shard of a chain first, then those it belonged to when its depth was smaller, newest first.

        Extents written before the depth grew are still there: a reader that finds less than the whole chain
        asks them next.
        """
        depth = self.depth_of(hashes[:BLOCK_HASH_BYTES])
        order = [self.pick(_block_of(hashes, depth))]
        while depth > self._default_depth:
            depth //= 2
            shard = self.pick(_block_of(hashes, depth))
            if shard not in order:
                order.append(shard)
        return order


def deepened(pool_map: PoolMap, lookups: Mapping[LookupKey, int], total: int) -> dict[bytes, int]:
    """New depths of the prefixes that are asked for too often.

    Args:
        pool_map: The table as it is.
        lookups: Look-ups of the busiest keys in the window, over all shards; only of chains longer than their
            depth, as nothing else can be spread.
        total: Look-ups of all chains.

    Returns:
        Doubled depth of the first block of every key with more than 1 / (4 x shards) of the look-ups; nothing
        if there is only one shard.
    """
    num_shards = len(pool_map.metadata)
    if num_shards < 2:
        return {}
    depths = dict(pool_map.depths)
    busy = {first for (first, _), count in lookups.items() if count * 4 * num_shards > total}
    wanted = {first: depths.get(first, pool_map.default_depth) * 2 for first in busy}
    return {first: depth for first, depth in wanted.items() if depth <= MAX_DEPTH}


def _block_of(hashes: bytes, depth: int) -> bytes:
    end = min(depth * BLOCK_HASH_BYTES, len(hashes))
    return hashes[end - BLOCK_HASH_BYTES : end]


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
