"""Parameters of a client of the pool."""

from __future__ import annotations

from dataclasses import dataclass, field

from millpond.control.extent_write import ExtentWriteParams
from millpond.policies.receive_window import ReceiveWindowParams
from millpond.policies.shard_pick import ShardPickParams
from millpond.store.net.node_link import NodeLinkParams


@dataclass(frozen=True, slots=True)
class PoolParams:
    """One client of the pool."""

    num_buffers: int = 24
    """Stripes on their way at once; each takes 1.2 windows of memory."""
    num_senders: int = 24
    """Threads that send shards; a node that has stopped blocks one of them for 2 s."""
    num_prefetches: int = 2
    """Prefetches that run at once; more wait."""
    min_piece_kib: int = 128
    """Rows are read in groups of at least this size per shard."""
    metadata_s: float = 2.0
    """Deadline of calls to the metadata that have none of their own."""
    open_s: float = 3.0
    """How long opening waits for the first connection to each node."""
    home: str = ""
    """Write only to groups that lie on this node alone; empty: to all groups."""


@dataclass(frozen=True, slots=True)
class PoolSettings:
    """Every parameter of a client."""

    pool: PoolParams = field(default_factory=PoolParams)
    pick: ShardPickParams = field(default_factory=ShardPickParams)
    window: ReceiveWindowParams = field(default_factory=ReceiveWindowParams)
    write: ExtentWriteParams = field(default_factory=ExtentWriteParams)
    link: NodeLinkParams = field(default_factory=NodeLinkParams)
