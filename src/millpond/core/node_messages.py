"""What ranks and their host's node daemon say to each other (interfaces A.6).

    rank   -> daemon   NodeHello, Load, LoadCancel, Put, PutClose, SnapshotPut, NodePing
    daemon -> rank     NodeWelcome, LoadAccepted, LoadRefused, LoadDone, PutSlots

A load goes by a number that its rank gives it, new for each: answers to a load that was cancelled are not
those to the next one of the same request.

The bytes of blocks lie in the arena, which both have mapped; the daemon owns every slot. What a rank holds
(loads, slots to write into) is a lease: it ends when the rank says so, when the same rank says hello with a
larger incarnation, or when nothing was heard of it for a while.
"""

from __future__ import annotations

from dataclasses import dataclass

from millpond.core.ids import RequestId
from millpond.core.request import KvIdentity

Slot = tuple[int, int]
"""(slot of the arena, its generation)."""


@dataclass(frozen=True, slots=True)
class NodeHello:
    """First message of a rank, and after each new connection."""

    incarnation: int
    """Larger after each restart: what an earlier life of this rank held is given back."""
    layout_fingerprint: bytes
    num_put_slots: int
    """Free slots that the rank would like to have at hand."""
    pid: int = 0
    """Of the rank's process on this host. While it exists it may write into slots that were lent to it,
    however long it was silent: only then may they become somebody else's."""


@dataclass(frozen=True, slots=True)
class NodeWelcome:
    """Answer to `NodeHello`, and to each `NodePing`."""

    arena: str
    """Path of the arena's file."""
    epoch: int
    """Of the daemon's life; with another one, all that the rank held is gone."""
    incarnation: int = 0
    """Of the hello that is answered; answers to an earlier one mean nothing."""


@dataclass(frozen=True, slots=True)
class NodePing:
    """The rank lives. About twice a second; renews its leases."""


@dataclass(frozen=True, slots=True)
class Load:
    """Bring leading blocks of a chain into the arena, row after row."""

    request_id: RequestId
    attempt: int
    kv: KvIdentity
    digests: bytes
    """32 bytes per block, from block 0 on."""
    located: bytes
    """Packed `store.net.messages.Matched`, a hint; empty: unknown."""
    deadline_ns: int
    """On the host's monotonic clock: when to give up what has not come."""
    wants_state: bool = False
    number: int = 0


@dataclass(frozen=True, slots=True)
class LoadAccepted:
    """The load has its slots and goes on; its lane counts its rows."""

    request_id: RequestId
    attempt: int
    lane: int
    """Row of the arena's table of counters: entry r = leading blocks whose row r is in its slot."""
    slots: tuple[Slot, ...]
    """Of the leading blocks that seem to be had; may be fewer than asked for, never none."""
    state_position: int = -1
    """Leading tokens that `state` stands for; -1: none found in time."""
    state: bytes = b""
    number: int = 0
    is_approximate: bool = False
    """As `Loaded.is_approximate`: of blocks and state. If False, no block that is will come later either."""


@dataclass(frozen=True, slots=True)
class LoadRefused:
    """Nothing is held for this load."""

    request_id: RequestId
    attempt: int
    reason: str
    """`absent`, `no_room`, `deadline`, `layout`, `stopping`."""
    number: int = 0


@dataclass(frozen=True, slots=True)
class LoadDone:
    """No more rows will come. The slots stay the rank's until `LoadCancel`."""

    request_id: RequestId
    attempt: int
    num_blocks: int
    """Leading blocks of which every row is in its slot."""
    reasons: tuple[str, ...] = ()
    """Why not all, by extent; empty if all came."""
    from_memory: int = 0
    """Blocks that were in this host's memory."""
    from_peers: int = 0
    from_pool: int = 0
    number: int = 0


@dataclass(frozen=True, slots=True)
class LoadCancel:
    """The rank needs the load no more, done or not: its slots are given back. Unknown ones are ignored."""

    request_id: RequestId
    attempt: int
    number: int = 0


@dataclass(frozen=True, slots=True)
class PutSlots:
    """Free slots that are the rank's to write blocks into, in addition to those it has."""

    slots: tuple[Slot, ...]
    incarnation: int = 0
    """Whose they are: as in `NodeWelcome`."""


@dataclass(frozen=True, slots=True)
class Put:
    """Blocks `[first_block, first_block + n)` of a sequence lie in these slots, which are the daemon's again.

    The first message of a (request, attempt) brings the digests of all blocks before, too, and so does one
    that does not go on where the last one ended.
    """

    request_id: RequestId
    attempt: int
    kv: KvIdentity
    first_block: int
    digests: bytes
    """32 bytes per block: of blocks `[first_block, first_block + n)`; in the first message, of `[0, ...)`."""
    slots: tuple[Slot, ...]
    is_approximate: bool = False
    """Computed downstream of a bounded replay."""


@dataclass(frozen=True, slots=True)
class PutClose:
    """The rank's part of the sequence has ended; what the daemon knew of its chain is dropped."""

    request_id: RequestId
    attempt: int


@dataclass(frozen=True, slots=True)
class SnapshotPut:
    """Keep a copy of the window state."""

    kv: KvIdentity
    digest: bytes
    """Of the last block before `position`."""
    position: int
    """Leading tokens that it stands for, a multiple of 128."""
    state: bytes
    replaces: bytes = b""
    """Digest of an older one of the same sequence that is not needed any more."""
    is_approximate: bool = False
    """As `Put.is_approximate`."""


ALL: tuple[type, ...] = (
    NodeHello,
    NodeWelcome,
    NodePing,
    Load,
    LoadAccepted,
    LoadRefused,
    LoadDone,
    LoadCancel,
    PutSlots,
    Put,
    PutClose,
    SnapshotPut,
)
