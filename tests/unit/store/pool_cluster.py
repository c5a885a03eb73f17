"""A pool of shard peers and a dict of metadata, and chains whose bytes follow from their names."""

from __future__ import annotations

import hashlib
import time
from array import array
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import numpy as np

from millpond.core.extents import NodeId, TenantId
from millpond.core.hashing import HashChain, root_digest
from millpond.core.kv_layout import KvLayout, uniform_layout
from millpond.core.pool_map import PlacementEpoch, PoolMap, StorageNodeInfo
from millpond.policies.shard_pick import ShardPickParams
from millpond.store.chain import BlockChain
from millpond.store.extent_get import BlockSink
from millpond.store.pool import Pool
from millpond.store.pool_settings import PoolParams, PoolSettings
from tests.unit.store.dict_metadata import DictMetadata
from tests.unit.store.shard_peer import ShardPeer

LAYOUT = uniform_layout(num_layers=4, kv_bytes_per_token=16, dtype="bf16")
K, M = 4, 2
SETTINGS = PoolSettings(
    pool=PoolParams(num_buffers=6, min_piece_kib=4), pick=ShardPickParams(first_hedge_ms=50)
)


def chain_of(num_blocks: int, *, salt: bytes = b"", tenant: int = 7, first_id: int = 0) -> BlockChain:
    hashes = HashChain(root_digest(b"m", LAYOUT.fingerprint, salt, b""))
    hashes.extend(array("i", range(first_id, first_id + 128 * num_blocks)))
    return BlockChain(TenantId(tenant), hashes.root, tuple(hashes.digests))


def bytes_of(digest: bytes, layout: KvLayout = LAYOUT) -> np.ndarray:
    """Content of the block with this digest."""
    return np.frombuffer(hashlib.shake_128(digest).digest(layout.block_bytes), np.uint8)


def blocks_of(chain: BlockChain, begin: int = 0, end: int | None = None) -> list[np.ndarray]:
    return [bytes_of(digest) for digest in chain.digests[begin:end]]


def empty_blocks(count: int, layout: KvLayout = LAYOUT) -> list[np.ndarray]:
    return [np.zeros(layout.block_bytes, np.uint8) for _ in range(count)]


def soon(seconds: float = 10.0) -> int:
    return time.monotonic_ns() + int(seconds * 1e9)


@dataclass
class Cluster:
    peers: dict[NodeId, ShardPeer]
    metadata: DictMetadata
    pool: Pool

    def put(self, chain: BlockChain, begin: int = 0, end: int | None = None) -> list:
        blocks = blocks_of(chain, begin, end)
        return self.pool.put(chain, begin, blocks, deadline_ns=soon())

    def read(self, chain: BlockChain, **options: object) -> tuple:
        """Match and get; checks that every block delivered is the right one."""
        hit = self.pool.match(chain)
        blocks = empty_blocks(hit.num_blocks)
        result = self.pool.get(hit, BlockSink(blocks), **{"deadline_ns": soon(), **options})
        for block, digest in zip(blocks[: result.num_blocks], chain.digests, strict=False):
            assert np.array_equal(block, bytes_of(digest)), "wrong bytes"
        return hit, result


def pool_map(peers: dict[NodeId, ShardPeer], k: int = K, m: int = M) -> PoolMap:
    names = tuple(peers)
    groups = tuple(
        tuple((first + shard) % len(names) for shard in range(k + m)) for first in range(len(names))
    )
    nodes = tuple(StorageNodeInfo(name, peer.address) for name, peer in peers.items())
    return PoolMap(1, nodes, (PlacementEpoch(0, k, m, names, groups),), ())


@contextmanager
def cluster(num_nodes: int = 8, settings: PoolSettings = SETTINGS, **changes: object) -> Iterator[Cluster]:
    peers = {NodeId(f"s{index}"): ShardPeer(f"s{index}") for index in range(num_nodes)}
    try:
        metadata = DictMetadata(pool_map(peers))
        with Pool(LAYOUT, metadata, name="test", token="t", settings=replace(settings, **changes)) as pool:
            yield Cluster(peers, metadata, pool)
        assert pool.num_free_buffers == settings.pool.num_buffers
        assert pool.client.reads.in_flight_bytes == 0
    finally:
        for peer in peers.values():
            peer.close()
