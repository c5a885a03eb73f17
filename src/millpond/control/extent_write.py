"""`ExtentWrite`: one extent on its way into the pool, as a state machine.

Ask for the put lease, send all k + m shards, publish as soon as all are acknowledged, or after a short wait
for the last one with a note of what is missing; with fewer than k + m - 1 acknowledged nothing is published.
The first writer to publish wins; whoever comes second has written garbage that goes with its segments.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, IntEnum, auto

from millpond.core.errors import InvariantBroken
from millpond.core.units import MILLISECOND_NS, SECOND_NS


@dataclass(frozen=True, slots=True)
class ExtentWriteParams:
    """Patience of a writer."""

    max_missing: int = 1
    """Shards that may be missing when an extent is published. Source: interfaces A.3 (11 of 12)."""
    last_shard_ms: int = 50
    """How long the last shards are waited for once enough are acknowledged."""
    deadline_s: float = 10.0
    """Longest time from the lease to the end of the write; the lease itself (30 s) is the other limit."""
    max_publish_tries: int = 3
    """Times that publishing is tried; it is safe to repeat."""


class WriteEnd(IntEnum):
    """How a write ended."""

    PUBLISHED = 0
    EXISTS = 1
    """The extent is there already: nothing was sent."""
    BEATEN = 2
    """Another writer published first; our shards are garbage."""
    REFUSED = 3
    """Too few shards were acknowledged."""
    LATE = 4
    """The deadline or the lease ran out first."""
    UNKNOWN = 5
    """The metadata did not answer: it may or may not be published."""
    HELD = 6
    """Another writer holds the lease: nothing was sent, and nobody knows yet whether it will be there."""


@dataclass(frozen=True, slots=True)
class AskLease:
    """Ask the metadata for the put lease."""


@dataclass(frozen=True, slots=True)
class SendShards:
    """Send every shard to its node."""


@dataclass(frozen=True, slots=True)
class Publish:
    """Commit the extent; bit j of `missing`: shard j was not acknowledged."""

    missing: int


@dataclass(frozen=True, slots=True)
class GiveUpLease:
    """Tell the metadata that the lease is not needed any more."""


@dataclass(frozen=True, slots=True)
class EndWrite:
    """The write is over; bit j of `acknowledged`: the node of shard j has it."""

    end: WriteEnd
    acknowledged: int


WriteAction = AskLease | SendShards | Publish | GiveUpLease | EndWrite


class _Phase(Enum):
    NEW = auto()
    LEASING = auto()
    SENDING = auto()
    PUBLISHING = auto()
    OVER = auto()


class ExtentWrite:
    """See module.

    Args:
        num_shards: k + m.
        num_parity: m; with m = 0 every shard is needed.
        params: Patience.

    Guarantees:
        Exactly one `EndWrite`, at the latest from the first `on_time` at or after the deadline. `Publish`
        only with at least k + m - `max_missing` shards acknowledged, and never after the lease ran out.
    """

    def __init__(self, num_shards: int, num_parity: int, params: ExtentWriteParams) -> None:
        self._all = (1 << num_shards) - 1
        self._num_needed = num_shards - min(params.max_missing, num_parity)
        self._params = params
        self._phase = _Phase.NEW
        self._acked = 0
        self._failed = 0
        self._missing = 0
        self._deadline_ns = 0
        self._last_shard_ns: int | None = None
        self._tries = 0

    @property
    def is_over(self) -> bool:
        """Whether `EndWrite` has been returned."""
        return self._phase == _Phase.OVER

    @property
    def next_time_ns(self) -> int | None:
        """When `on_time` is due next."""
        if self._phase in {_Phase.NEW, _Phase.OVER}:
            return None
        if self._phase == _Phase.SENDING and self._last_shard_ns is not None:
            return min(self._last_shard_ns, self._deadline_ns)
        return self._deadline_ns

    def begin(self, now_ns: int) -> list[WriteAction]:
        """Begin."""
        if self._phase != _Phase.NEW:
            raise InvariantBroken("a write begins once")
        self._phase = _Phase.LEASING
        self._deadline_ns = now_ns + int(self._params.deadline_s * SECOND_NS)
        return [AskLease()]

    def on_lease(self, now_ns: int, lease_ns: int) -> list[WriteAction]:
        """Learn the answer to `AskLease`.

        Args:
            now_ns: Time.
            lease_ns: How long the lease lasts from its asking on; 0: the extent is there already; negative:
                another writer holds the lease.
        """
        if self._phase != _Phase.LEASING:
            return []
        if lease_ns <= 0:
            return self._end(WriteEnd.HELD if lease_ns else WriteEnd.EXISTS)
        began_ns = self._deadline_ns - int(self._params.deadline_s * SECOND_NS)
        self._deadline_ns = min(self._deadline_ns, began_ns + lease_ns)
        if now_ns >= self._deadline_ns:
            return self._give_up(WriteEnd.LATE)
        self._phase = _Phase.SENDING
        return [SendShards()]

    def on_shard(self, now_ns: int, shard: int, *, is_stored: bool) -> list[WriteAction]:
        """Learn that a node has stored its shard, or that it will not."""
        bit = 1 << shard
        if (self._acked | self._failed) & bit:
            return []
        if self._phase == _Phase.PUBLISHING:
            # Too late for the note of what is missing; readers ask for that shard last, and find it.
            return []
        if self._phase != _Phase.SENDING:
            return []
        if is_stored:
            self._acked |= bit
        else:
            self._failed |= bit
        num_acked = self._acked.bit_count()
        if num_acked >= self._num_needed:
            if self._acked | self._failed == self._all:
                return self._publish()
            if self._last_shard_ns is None:
                self._last_shard_ns = now_ns + self._params.last_shard_ms * MILLISECOND_NS
        elif self._all.bit_count() - self._failed.bit_count() < self._num_needed:
            return self._give_up(WriteEnd.REFUSED)
        return []

    def on_published(self, now_ns: int, *, is_ours: bool | None) -> list[WriteAction]:
        """Learn the answer to `Publish`; None: there was none."""
        if self._phase != _Phase.PUBLISHING:
            return []
        if is_ours is not None:
            return self._end(WriteEnd.PUBLISHED if is_ours else WriteEnd.BEATEN)
        if self._tries < self._params.max_publish_tries and now_ns < self._deadline_ns:
            return self._publish()
        return self._end(WriteEnd.UNKNOWN)

    def on_time(self, now_ns: int) -> list[WriteAction]:
        """Do what is due."""
        next_ns = self.next_time_ns
        if next_ns is None or now_ns < next_ns:
            return []
        if now_ns < self._deadline_ns:
            return self._publish()
        return self.give_up()

    def give_up(self) -> list[WriteAction]:
        """End a write that nobody can wait for any longer."""
        if self._phase == _Phase.OVER:
            return []
        if self._phase == _Phase.PUBLISHING:
            return self._end(WriteEnd.UNKNOWN)
        return self._give_up(WriteEnd.LATE)

    def _publish(self) -> list[WriteAction]:
        if self._phase != _Phase.PUBLISHING:
            self._missing = self._all & ~self._acked
        self._phase = _Phase.PUBLISHING
        self._tries += 1
        return [Publish(self._missing)]

    def _give_up(self, end: WriteEnd) -> list[WriteAction]:
        return [GiveUpLease(), *self._end(end)]

    def _end(self, end: WriteEnd) -> list[WriteAction]:
        self._phase = _Phase.OVER
        return [EndWrite(end, self._acked)]
