"""`ExtentReads`: all coded reads of one receiver, as a state machine.

    actions = reads.begin(now_ns, read_id, coded_read)     # the caller carries actions out, in order
    actions = reads.on_shard(now_ns, read_id, shard, outcome)
    actions = reads.on_time(now_ns)                        # at reads.next_time_ns

A read starts k + 1 shards, one more when it is later than most, and ends as soon as any k have arrived valid,
when k cannot be had any more, or at its deadline. What arrives after the end is ignored.
"""

from __future__ import annotations

import heapq
from collections import deque
from dataclasses import dataclass
from enum import IntEnum

from millpond.core.errors import InvariantBroken
from millpond.core.extents import NodeId
from millpond.policies.receive_window import ReceiveWindow, ReceiveWindowParams
from millpond.policies.shard_pick import HedgeBudget, HedgeTimer, NodeHealth, ShardPickParams


class ShardOutcome(IntEnum):
    """What came of one shard that was asked for."""

    VALID = 0
    """Arrived; identity, generation and checksums are right."""
    ABSENT = 1
    """The node answered that it does not have it."""
    CORRUPT = 2
    """Arrived, but is not what it should be: an erasure."""
    REFUSED = 3
    """The node answered that it cannot serve now."""
    UNREACHABLE = 4
    """The connection broke or could not be made."""


class ReadEnd(IntEnum):
    """How a read ended."""

    DECODABLE = 0
    LOST = 1
    """Fewer than k shards exist that can be read."""
    LATE = 2
    """The deadline passed first."""
    CANCELLED = 3


@dataclass(frozen=True, slots=True)
class CodedRead:
    """One read of one piece of a stripe: the same rows and columns of any k shards."""

    nodes: tuple[NodeId, ...]
    """Node of each shard, data shards first."""
    k: int
    num_bytes: int
    """Bytes of each shard's answer."""
    deadline_ns: int
    missing: int = 0
    """Bit j: shard j was not acknowledged by its writer; asked for last, because it may have come later."""
    excluded: int = 0
    """Bit j: shard j is not asked for."""


@dataclass(frozen=True, slots=True)
class StartShards:
    """Ask for these shards of a read."""

    read_id: int
    shards: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class CancelShards:
    """These shards of a read are not wanted any more."""

    read_id: int
    shards: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class EndRead:
    """A read is over. After this action nothing names its id again."""

    read_id: int
    end: ReadEnd
    shards: tuple[int, ...]
    """Valid shards, ascending; k of them if it is decodable."""


@dataclass(frozen=True, slots=True)
class HealShard:
    """A shard that should be there is not, or not as it was written."""

    read_id: int
    shard: int
    outcome: ShardOutcome


ReadAction = StartShards | CancelShards | EndRead | HealShard


@dataclass(slots=True)
class ReadCounts:
    """What happened so far."""

    reads: int = 0
    needed_bytes: int = 0
    """k shards of each read."""
    asked_bytes: int = 0
    """All shards asked for, but those of nodes that could not be reached."""
    hedges: int = 0
    hedges_refused: int = 0
    """No budget."""
    narrow_reads: int = 0
    """Started with k shards: the nodes are busy or the budget is used up."""
    losers: int = 0
    peak_in_flight_bytes: int = 0
    bad_shards: int = 0
    ends: tuple[int, int, int, int] = (0, 0, 0, 0)
    """Per `ReadEnd`."""

    @property
    def extra_ratio(self) -> float:
        """Bytes asked for beyond those needed, as a share of those needed."""
        return self.asked_bytes / self.needed_bytes - 1 if self.needed_bytes else 0.0


class _Read:
    __slots__ = ("began_ns", "is_over", "query", "queued", "sent_ns", "spares", "valid", "width")

    def __init__(self, query: CodedRead, now_ns: int, order: list[int], width: int) -> None:
        self.query = query
        self.began_ns = now_ns
        self.width = width
        self.queued = order[:width]
        self.spares = order[width:]
        self.spares.reverse()
        self.sent_ns: dict[int, int] = {}
        """Outstanding shard -> when it was asked for."""
        self.valid: list[int] = []
        self.is_over = False


class ExtentReads:
    """See module. One per receiver: window, budget and health are shared by all its reads.

    Guarantees:
        Every begun read gets exactly one `EndRead`, at the latest from the first `on_time` at or after its
        deadline. Bytes in flight stay within the window.
    """

    def __init__(self, pick: ShardPickParams, window: ReceiveWindowParams) -> None:
        self.health = NodeHealth(pick)
        self.counts = ReadCounts()
        self.utilisation = 0.0
        """Busy share of the storage nodes, 0 to 1, as the caller learns it from their status."""
        self._late_above = pick.late_above_utilisation
        self._timer = HedgeTimer(pick)
        self._budget = HedgeBudget(pick)
        self._window = ReceiveWindow(window)
        self._reads: dict[int, _Read] = {}
        self._waiting: deque[tuple[int, _Read]] = deque()
        """Reads with shards that the window has not let go yet, first come first served."""
        self._times: list[tuple[int, int, bool]] = []
        """Heap of (time, read, whether it is the deadline); entries of reads that are over are skipped."""

    @property
    def in_flight_bytes(self) -> int:
        """Bytes asked for and not yet there."""
        return self._window.in_flight_bytes

    @property
    def num_reads(self) -> int:
        """Reads that are not over."""
        return len(self._reads)

    @property
    def next_time_ns(self) -> int | None:
        """When `on_time` is due next; None if only answers can change anything."""
        times = self._times
        while times and times[0][1] not in self._reads:
            heapq.heappop(times)
        next_ns = times[0][0] if times else None
        if self._waiting:
            start_ns = self._window.next_start_ns(self._waiting[0][1].query.num_bytes)
            if start_ns is not None and (next_ns is None or start_ns < next_ns):
                return start_ns
        return next_ns

    def begin(self, now_ns: int, read_id: int, query: CodedRead) -> list[ReadAction]:
        """Begin a read.

        Args:
            now_ns: Time.
            read_id: Of the caller's choice; not in use.
            query: What to read.
        """
        if read_id in self._reads:
            raise InvariantBroken(f"read {read_id} has begun already")
        order = self._order(now_ns, query)
        self.counts.reads += 1
        self.counts.needed_bytes += query.k * query.num_bytes
        self._budget.earn(query.k * query.num_bytes)
        width = query.k
        if len(order) - (query.missing & ~query.excluded).bit_count() > query.k:
            if self.utilisation <= self._late_above and self._budget.spend(query.num_bytes):
                width += 1
            else:
                self.counts.narrow_reads += 1
        read = _Read(query, now_ns, order, width)
        self._reads[read_id] = read
        if len(order) < query.k:
            return self._end(now_ns, read_id, read, ReadEnd.LOST)
        heapq.heappush(self._times, (query.deadline_ns, read_id, True))
        self._waiting.append((read_id, read))
        return self._send_waiting(now_ns)

    def on_shard(self, now_ns: int, read_id: int, shard: int, outcome: ShardOutcome) -> list[ReadAction]:
        """Learn what came of one shard. Shards that nobody waits for are ignored."""
        read = self._reads.get(read_id)
        sent_ns = read.sent_ns.pop(shard, None) if read else None
        if read is None or sent_ns is None:
            return []
        query = read.query
        self._window.finish(query.num_bytes)
        node = query.nodes[shard]
        actions: list[ReadAction] = []
        if outcome == ShardOutcome.VALID:
            self.health.observe(now_ns, node, query.num_bytes, now_ns - sent_ns)
            read.valid.append(shard)
            if len(read.valid) == query.k:
                self._timer.observe(query.num_bytes, read.width, now_ns - read.began_ns)
                actions = self._end(now_ns, read_id, read, ReadEnd.DECODABLE)
        else:
            actions = self._on_bad_shard(now_ns, read_id, read, shard, outcome)
        if self._waiting:
            actions += self._send_waiting(now_ns)
        return actions

    def on_time(self, now_ns: int) -> list[ReadAction]:
        """Do what is due: hedges, deadlines, spaced requests."""
        actions: list[ReadAction] = []
        while self._times and self._times[0][0] <= now_ns:
            _, read_id, is_deadline = heapq.heappop(self._times)
            read = self._reads.get(read_id)
            if read is None:
                continue
            if is_deadline:
                actions += self._end(now_ns, read_id, read, ReadEnd.LATE)
            elif not read.queued:
                self._hedge(now_ns, read_id, read)
        return actions + self._send_waiting(now_ns)

    def cancel(self, now_ns: int, read_id: int) -> list[ReadAction]:
        """End a read that nobody wants any more. Unknown ids are ignored: it may just have ended."""
        read = self._reads.get(read_id)
        if read is None:
            return []
        return self._end(now_ns, read_id, read, ReadEnd.CANCELLED) + self._send_waiting(now_ns)

    def _order(self, now_ns: int, query: CodedRead) -> list[int]:
        """Shards in the order in which they are to be asked for."""
        shards = [shard for shard in range(len(query.nodes)) if not query.excluded >> shard & 1]
        present = [shard for shard in shards if not query.missing >> shard & 1]
        picked = self.health.pick_order(now_ns, [query.nodes[shard] for shard in present])
        return [present[index] for index in picked] + [s for s in shards if query.missing >> s & 1]

    def _on_bad_shard(
        self, now_ns: int, read_id: int, read: _Read, shard: int, outcome: ShardOutcome
    ) -> list[ReadAction]:
        query = read.query
        node = query.nodes[shard]
        self.counts.bad_shards += 1
        if outcome == ShardOutcome.UNREACHABLE:
            self.health.eject(now_ns, node)
            self.counts.asked_bytes -= query.num_bytes
        elif outcome == ShardOutcome.ABSENT:
            self.health.withdraw(node)
        else:
            self.health.strike(now_ns, node)
        actions: list[ReadAction] = []
        if outcome in {ShardOutcome.ABSENT, ShardOutcome.CORRUPT}:
            actions.append(HealShard(read_id, shard, outcome))
        if len(read.valid) + len(read.sent_ns) + len(read.queued) + len(read.spares) < query.k:
            return actions + self._end(now_ns, read_id, read, ReadEnd.LOST)
        # A replacement is owed, not extra, and is not held back by the budget; without a spare left, the
        # shards that are still out must do.
        if read.spares and len(read.valid) + len(read.sent_ns) + len(read.queued) < read.width:
            self._ask_more(read_id, read)
        return actions

    def _hedge(self, now_ns: int, read_id: int, read: _Read) -> None:
        query = read.query
        if not read.spares:
            return
        if self._budget.spend(query.num_bytes):
            self.counts.hedges += 1
            self._ask_more(read_id, read)
        else:
            self.counts.hedges_refused += 1
            wait_ns = self._timer.wait_ns(query.num_bytes, read.width)
            heapq.heappush(self._times, (now_ns + wait_ns, read_id, False))

    def _ask_more(self, read_id: int, read: _Read) -> None:
        if not read.queued:
            self._waiting.append((read_id, read))
        read.queued.append(read.spares.pop())

    def _send_waiting(self, now_ns: int) -> list[ReadAction]:
        actions: list[ReadAction] = []
        while self._waiting:
            read_id, read = self._waiting[0]
            query = read.query
            started = 0
            for _ in read.queued:
                if not self._window.try_start(now_ns, query.num_bytes):
                    break
                started += 1
            if started:
                shards = tuple(read.queued[:started])
                del read.queued[:started]
                for shard in shards:
                    read.sent_ns[shard] = now_ns
                self.counts.asked_bytes += started * query.num_bytes
                self.counts.peak_in_flight_bytes = max(
                    self.counts.peak_in_flight_bytes, self._window.in_flight_bytes
                )
                actions.append(StartShards(read_id, shards))
            if read.queued:
                break
            self._waiting.popleft()
            if read.spares and not read.is_over:
                wait_ns = self._timer.wait_ns(query.num_bytes, read.width)
                heapq.heappush(self._times, (now_ns + wait_ns, read_id, False))
        return actions

    def _end(self, now_ns: int, read_id: int, read: _Read, end: ReadEnd) -> list[ReadAction]:
        del self._reads[read_id]
        read.is_over = True
        read.queued.clear()
        ends = list(self.counts.ends)
        ends[end] += 1
        self.counts.ends = (ends[0], ends[1], ends[2], ends[3])
        actions: list[ReadAction] = []
        if read.sent_ns:
            query = read.query
            losers = tuple(read.sent_ns)
            self.counts.losers += len(losers)
            for shard, sent_ns in read.sent_ns.items():
                self._window.finish(query.num_bytes)
                if end in {ReadEnd.DECODABLE, ReadEnd.LATE}:
                    self.health.lost_race(now_ns, query.nodes[shard], query.num_bytes, now_ns - sent_ns)
                else:
                    self.health.withdraw(query.nodes[shard])
            actions.append(CancelShards(read_id, losers))
        actions.append(EndRead(read_id, end, tuple(sorted(read.valid))))
        return actions
