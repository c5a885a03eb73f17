"""`PoolMap`: the nodes of the pool, its placement epochs and its metadata shards.

Small, versioned, replicated to every client and daemon; whoever finds a newer version in an answer fetches
it. Epochs are never changed, only added: old stripes stay where they are until they expire.
"""

from __future__ import annotations

from dataclasses import dataclass

from millpond.core.extents import NodeId


@dataclass(frozen=True, slots=True)
class StorageNodeInfo:
    """One storage node."""

    node: NodeId
    address: str
    """`host:port`; never renumbered while an epoch names the node."""
    rack: str = ""
    weight: int = 1
    """Relative capacity: virtual points in the placement."""
    path: str = ""
    """Folder with the node's targets if this host can read them directly, else empty."""


@dataclass(frozen=True, slots=True)
class PlacementEpoch:
    """One version of the placement table, developed from its base blocks by `policies.stripe_placement`."""

    epoch: int
    k: int
    m: int
    points: tuple[NodeId, ...]
    """Point -> node. A node of weight w stands here w times."""
    groups: tuple[tuple[int, ...], ...]
    """Group -> the point of each of its k + m shards, in shard order."""


@dataclass(frozen=True, slots=True)
class PoolMap:
    """Everything a client must know to find shards and metadata."""

    version: int
    nodes: tuple[StorageNodeInfo, ...]
    epochs: tuple[PlacementEpoch, ...]
    """Ascending; the last one takes the writes."""
    metadata: tuple[str, ...]
    """Addresses of the metadata shards."""
    default_depth: int = 8
    """Blocks of a chain whose last hash picks the metadata shard (kvstore 1.10)."""
    depths: tuple[tuple[bytes, int], ...] = ()
    """(hash of block 0 of a chain, depth) of the prefixes that were too popular for the default."""
