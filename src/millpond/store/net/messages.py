"""Messages between clients, storage nodes, metadata shards and daemons that lend memory.

A message travels as one frame (`store.net.framing`): kind, request id, this body as msgpack, then raw
payload bytes that are never packed. Bodies are arrays of the fields in order; fields are only appended.
"""

from __future__ import annotations

import msgspec


class Message(msgspec.Struct, frozen=True, array_like=True):
    """Base of every body."""


class Hello(Message, frozen=True, array_like=True):
    """First frame of a connection, both ways. `version` must be equal, and so must the cluster token."""

    version: int
    name: str
    token: str = ""
    boot: int = 0
    """Changes with each start of the answering process."""


class Failed(Message, frozen=True, array_like=True):
    """Answer to any request that could not be honoured."""

    code: str
    """`absent`, `full`, `read_only`, `io`, `stale`, `quota`, `bad_request`, `redirect`, `busy`, `deadline`,
    `version`."""
    detail: str = ""
    map_version: int = 0


class Done(Message, frozen=True, array_like=True):
    """Answer without content."""

    count: int = 0


class PutShard(Message, frozen=True, array_like=True):
    """Store one shard. Payload: the record, header first, as `store.record` packs it."""

    digest: bytes
    num_blocks: int
    shard: int
    nonce: int


class ReadShard(Message, frozen=True, array_like=True):
    """Read rows `[begin_row, end_row)` of one shard, of each the first `num_columns` columns.

    Answer `ShardData`.
    """

    digest: bytes
    num_blocks: int
    shard: int
    nonce: int
    begin_row: int
    end_row: int
    num_columns: int
    is_use: bool = True
    """Counts as a use, which lets the record live longer; upkeep reads without."""


class ShardData(Message, frozen=True, array_like=True):
    """Payload: `header_bytes` of record header, then the pieces of the rows asked for."""

    header_bytes: int
    generation: int
    """Of the segment; equal before and after the read."""


class CancelRead(Message, frozen=True, array_like=True):
    """The answer to `request` is not wanted any more. Not answered."""

    request: int


class DropShard(Message, frozen=True, array_like=True):
    """Forget one shard. Its bytes go with their segment."""

    digest: bytes
    num_blocks: int
    shard: int
    nonce: int


class ListShards(Message, frozen=True, array_like=True):
    """List the records of the node, `limit` headers from `cursor` on (0: the first). Answer `ShardList`."""

    cursor: int
    limit: int


class ShardList(Message, frozen=True, array_like=True):
    """Payload: whole record headers, one after the other."""

    next_cursor: int
    """0 at the end."""
    header_bytes: tuple[int, ...]
    last_read_s: tuple[int, ...] = ()
    """Calendar time of each record's last use, 0 if there was none since the node's start."""


class NodeStatusQuery(Message, frozen=True, array_like=True):
    """Answered from memory, without any disk I/O: this is the heartbeat."""


class NodeStatus(Message, frozen=True, array_like=True):
    """State of a storage node."""

    node: str
    boot: int
    capacity_bytes: int
    used_bytes: int
    num_shards: int
    targets_failed: tuple[int, ...]
    accepts_writes: bool
    written_bytes: int
    read_bytes: int
    queued_reads: int
    """Waiting and being served."""
    read_slots: int = 0
    """Reads that are served at once; 0: not told."""
    num_foreign_segments: int = 0
    """Files of another format that were set aside at the start."""


class Location(Message, frozen=True, array_like=True):
    """Where an extent lies, as the index knows it. A hint: the reader validates what it gets."""

    digest: bytes
    num_blocks: int
    epoch: int
    group: int
    nonce: int
    missing: int = 0
    """Bit j: shard j was not acknowledged by its writer."""
    lineage: int = 0
    """1: computed downstream of an approximate replay."""
    dram_host: str = ""
    """If set, the blocks lie in this host's memory and not in a stripe."""
    dram_epoch: int = 0
    dram_slots: tuple[tuple[int, int], ...] = ()
    """Per block: (slot, generation)."""


class Match(Message, frozen=True, array_like=True):
    """Longest prefix of a chain. Payload: the 16-byte hashes of its blocks, in order. Answer `Matched`."""

    tenant: int
    root: bytes
    """First 16 bytes of the root digest: the key domain."""
    map_version: int
    window: int = 32
    """Blocks of a full extent: a hint where extents end."""


class Matched(Message, frozen=True, array_like=True):
    """Extents that cover blocks `[0, num_blocks)`; the last one may reach beyond."""

    num_blocks: int
    extents: tuple[Location, ...]
    begins: tuple[int, ...]
    """Per extent: index in the chain of its first block."""
    map_version: int = 0
    """Newest that the shard knows."""


class Reserve(Message, frozen=True, array_like=True):
    """Ask which of these extents to write. Payload: none. Answer `Reserved`."""

    tenant: int
    extents: tuple[tuple[bytes, int], ...]
    """(digest, num_blocks)."""
    num_bytes: tuple[int, ...]
    """Logical bytes of each; charged to the tenant until commit or abort."""
    holder: int
    """The writer, 64 random bits; asking again renews."""


LEASE_HELD = -1


class Reserved(Message, frozen=True, array_like=True):
    """Per extent: lease in ns; 0 if the extent exists, `LEASE_HELD` if another writer holds the lease."""

    lease_ns: tuple[int, ...]


class Commit(Message, frozen=True, array_like=True):
    """Publish one extent. Payload: the 16-byte hashes of its blocks. First writer wins.

    Answer `Done`: count 1 if the index now holds this location, also when it was asked before; 0 if another
    writer was first.
    """

    tenant: int
    root: bytes
    location: Location
    first_block: int
    """Index in the chain of its first block."""
    parent: bytes
    """32-byte digest before its first block."""
    num_bytes: int
    holder: int
    prefix: bytes = b""
    """16-byte hashes of blocks 0 ... depth - 1, which choose the metadata shard."""


class Abort(Message, frozen=True, array_like=True):
    """Give up put leases."""

    tenant: int
    extents: tuple[tuple[bytes, int], ...]
    holder: int


class Forget(Message, frozen=True, array_like=True):
    """Compare-and-delete: remove this location if the index still holds exactly it."""

    tenant: int
    root: bytes
    location: Location
    first_block: int
    prefix: bytes = b""


class Pin(Message, frozen=True, array_like=True):
    """Keep these extents from being dropped, best effort. Answer `Done`: how many are pinned."""

    tenant: int
    extents: tuple[tuple[bytes, int], ...]
    """(digest, num_blocks)."""
    holder: int
    ttl_ns: int


class Unpin(Message, frozen=True, array_like=True):
    """End pins before their time. Answer `Done`."""

    tenant: int
    extents: tuple[tuple[bytes, int], ...]
    holder: int


class Touch(Message, frozen=True, array_like=True):
    """Count a chain as used now. Payload: the 16-byte hashes of its blocks. Answer `Done`: blocks found."""

    tenant: int
    root: bytes


class Evict(Message, frozen=True, array_like=True):
    """Forget a chain from block `first_block` on, with all that follows it. Payload: the 16-byte hashes of
    its blocks from block 0 on. Answer `Done`: extents removed.
    """

    tenant: int
    root: bytes
    first_block: int


class MapQuery(Message, frozen=True, array_like=True):
    """Answer: `MapAnswer`."""


class MapAnswer(Message, frozen=True, array_like=True):
    """Payload: the `PoolMap` as msgpack."""

    version: int


class MapUpdate(Message, frozen=True, array_like=True):
    """Replace the map by a newer one. Payload: the `PoolMap` as msgpack. Answer `Done`: 1 if it was newer."""

    version: int


class LookupReport(Message, frozen=True, array_like=True):
    """What a metadata shard was asked since its last report. Answer `MapAnswer`."""

    total: int
    """Look-ups."""
    keys: tuple[tuple[bytes, bytes, int], ...]
    """(hash of block 0, hash of the block that picked the shard, look-ups) of the busiest."""


class SetQuota(Message, frozen=True, array_like=True):
    """Change what a tenant may store on this shard; 0: no limit. Answer `Done`."""

    tenant: int
    max_mib: int
    write_mib_s: float
    max_pinned_mib: int


class DropTenant(Message, frozen=True, array_like=True):
    """Forget everything that a tenant wrote. Answer `Done`: extents forgotten."""

    tenant: int


class MetadataStatusQuery(Message, frozen=True, array_like=True):
    """Answer: `MetadataStatus`."""


class MetadataStatus(Message, frozen=True, array_like=True):
    """State of a metadata shard."""

    name: str
    boot: int
    map_version: int
    num_blocks: int
    num_extents: int
    num_leases: int
    num_pins: int
    rebuild_left: int
    """Storage nodes whose records are still being read after a start without a checkpoint."""
    counts: dict[str, int]
    """Since the start, by name."""
    tenants: tuple[tuple[int, int, int], ...] = ()
    """(tenant, KiB used, KiB reserved)."""
    memory_hosts: tuple[str, ...] = ()
    """Hosts whose memory the directory knows."""
    num_places: int = 0
    """What it knows of them, dead entries included until they are swept."""


class PeerRead(Message, frozen=True, array_like=True):
    """Read one block from a host's memory. Answer `PeerBlock`, or `Failed` with `stale` if it has left."""

    epoch: int
    """Of the host's life, as the directory says."""
    block_hash: bytes
    slot: int
    generation: int


class PeerBlock(Message, frozen=True, array_like=True):
    """Payload: the block, whole."""

    block_hash: bytes
    generation: int
    checksum: int
    """xxh3_64, made when the block came into memory."""
    lineage: int = 0
    """1: computed downstream of an approximate replay."""


class DirectoryJoin(Message, frozen=True, array_like=True):
    """A host keeps something in its memory, and lives. Said again every second or so.

    Answer `Done`: 1 if the directory knows nothing of this life, and has to be told all that the host keeps.
    """

    kind: str
    """`blocks`, or `states`: snapshots of window state, named by the last block before them."""
    host: str
    address: str
    """`host:port` where others read it."""
    epoch: int
    """Of the host's life."""


class DirectoryLeave(Message, frozen=True, array_like=True):
    """The life of a host has ended, and with it all that the directory says of it. Answer `Done`."""

    kind: str
    host: str
    epoch: int


class DirectoryPublish(Message, frozen=True, array_like=True):
    """A host keeps these. Payload: 28 bytes each: hash of the block, slot u32, generation u64, little-endian.

    Answer `Done`: how many the directory names at this host now. What another host has already stays there.
    `Failed` with `stale` if the host has not joined.
    """

    kind: str
    host: str
    epoch: int


class DirectoryDrop(Message, frozen=True, array_like=True):
    """A host does not keep these any more. Payload: 16-byte hashes. Answer `Done`: how many were there."""

    kind: str
    host: str
    epoch: int


class DirectoryFind(Message, frozen=True, array_like=True):
    """Who keeps these? Payload: 16-byte hashes. Answer `DirectoryFound`."""

    kind: str


class DirectoryFound(Message, frozen=True, array_like=True):
    """Payload: 16 bytes for each hash: index of the host i32 (-1: nobody), slot u32, generation u64."""

    hosts: tuple[tuple[str, str, int], ...]
    """(name, address, epoch)."""


KINDS: dict[int, type[Message]] = dict(
    enumerate(
        (
            Hello,
            Failed,
            Done,
            PutShard,
            ReadShard,
            ShardData,
            CancelRead,
            DropShard,
            ListShards,
            ShardList,
            NodeStatusQuery,
            NodeStatus,
            Match,
            Matched,
            Reserve,
            Reserved,
            Commit,
            Abort,
            Forget,
            MapQuery,
            MapAnswer,
            Pin,
            Unpin,
            Touch,
            Evict,
            MapUpdate,
            LookupReport,
            SetQuota,
            DropTenant,
            MetadataStatusQuery,
            MetadataStatus,
            PeerRead,
            PeerBlock,
            DirectoryJoin,
            DirectoryLeave,
            DirectoryPublish,
            DirectoryDrop,
            DirectoryFind,
            DirectoryFound,
        ),
        start=1,
    )
)
"""Number of each kind on the wire. Only appended."""
