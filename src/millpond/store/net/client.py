"""`ShardClient`: carries out what `ExtentReads` decides, with one connection and one receiver thread a node.

Receiver threads land payloads straight in the reader's buffer, check the record's header and report to the
state machine; one timer thread wakes it for hedges and deadlines; whoever reads only waits.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from millpond.control.extent_read import (
    CancelShards,
    CodedRead,
    EndRead,
    ExtentReads,
    HealShard,
    ReadAction,
    ReadEnd,
    ShardOutcome,
    StartShards,
)
from millpond.core.errors import (
    ChecksumMismatch,
    DataError,
    ExtentAbsent,
    InvariantBroken,
    MillpondError,
    PoolError,
    StaleEpoch,
)
from millpond.core.extents import ExtentId, NodeId, StripeId
from millpond.core.units import MILLISECOND_NS, SECOND_NS
from millpond.policies.receive_window import ReceiveWindowParams
from millpond.policies.shard_pick import ShardPickParams
from millpond.store.net.connection import Call
from millpond.store.net.messages import Message, NodeStatus, NodeStatusQuery, ReadShard, ShardData
from millpond.store.net.node_link import NodePort
from millpond.store.record import RecordHeader, parse_header
from millpond.store.stripe_buffer import StripeBuffer

if TYPE_CHECKING:
    from millpond.store.chain import BlockChain, HitExtent

SEND_MS = 100
"""A request of a few bytes that the kernel does not take for so long meets a node that has stopped."""
STATUS_PERIOD_S = 1
STATUS_DEADLINE_S = 3


@dataclass(frozen=True, slots=True)
class ShardRange:
    """What is read of each shard of a stripe, and how an answer proves to be it."""

    extent: ExtentId
    stripe: StripeId
    begin_row: int
    end_row: int
    num_columns: int
    header_bytes: int
    """Of the stripe's records."""
    check_header: Callable[[RecordHeader], None]
    """Raises a `DataError` if it is not a record that was asked for."""
    chain: BlockChain | None = None
    """What it is read for; None: upkeep, which does not count as use."""
    hit: HitExtent | None = None
    """The extent in that chain."""

    def request(self, shard: int) -> ReadShard:
        """Message for one shard."""
        return ReadShard(
            self.extent.digest,
            self.extent.num_blocks,
            shard,
            self.stripe.nonce,
            self.begin_row,
            self.end_row,
            self.num_columns,
            self.chain is not None,
        )


class StripeRead:
    """One coded read on its way. Made by `ShardClient.begin`.

    Attributes:
        end: How it ended; None while it runs.
        headers: Header of each shard whose bytes are in the buffer, once it has ended.
    """

    def __init__(self, read_id: int, query: CodedRead, part: ShardRange, buffer: StripeBuffer) -> None:
        self.read_id = read_id
        self.query = query
        self.part = part
        self.buffer = buffer
        self.end: ReadEnd | None = None
        self.headers: dict[int, RecordHeader] = {}
        self.absent = 0
        """Bit j: shard j is absent or corrupt, so far as this read has found."""
        self.calls: dict[int, tuple[NodePort, Call]] = {}
        """Outstanding, by shard. Guarded by the client's lock, as is `end`."""
        self._header_pages: dict[int, bytearray] = {}
        self._ended = threading.Event()

    def wait(self) -> ReadEnd:
        """Wait until the read has ended, which it does at its deadline at the latest."""
        limit_s = max(0, self.query.deadline_ns - time.monotonic_ns()) / SECOND_NS + STATUS_DEADLINE_S
        if not self._ended.wait(limit_s) or self.end is None:
            raise InvariantBroken("a coded read outlived its deadline")
        return self.end

    def finish(self, end: ReadEnd, shards: Sequence[int]) -> None:
        """Set the end. For the client."""
        self.headers = {shard: self.headers[shard] for shard in shards}
        self.end = end
        self._ended.set()

    def give_up(self, shard: int) -> None:
        """Cancel an outstanding shard; when this returns it is not received any more. For the client."""
        link, call = self.calls.pop(shard, (None, None))
        if link is not None and call is not None:
            link.cancel(call)

    def places(self, shard: int, message: Message, payload_bytes: int) -> Sequence[memoryview]:
        """Where an answer's payload goes: the header into a page of its own, the rows into the buffer."""
        if not isinstance(message, ShardData):
            raise DataError(f"a read is answered with {type(message).__name__}", code="pool.answer")
        rows = self.buffer.payload(shard, self.part.begin_row, self.part.end_row)
        if (
            message.header_bytes != self.part.header_bytes
            or payload_bytes != message.header_bytes + rows.nbytes
        ):
            raise DataError(
                f"{message.header_bytes} + {payload_bytes - message.header_bytes} bytes of a shard, expected "
                f"{self.part.header_bytes} + {rows.nbytes}",
                code="pool.answer",
            )
        page = self._header_pages[shard] = bytearray(message.header_bytes)
        return (memoryview(page), rows)

    def accept(self, shard: int, message: Message) -> None:
        """Check the header that has landed.

        Raises:
            DataError: It is not the record that was asked for, or not whole.
        """
        header = parse_header(self._header_pages[shard])
        if not isinstance(message, ShardData) or message.generation != header.generation:
            raise ChecksumMismatch("the segment was reused while it was read", code="pool.generation")
        if header.shard != shard:
            raise ChecksumMismatch(f"shard {header.shard} instead of {shard}", code="pool.identity")
        self.part.check_header(header)
        if any(other.shared != header.shared for other in list(self.headers.values())):
            raise ChecksumMismatch("shards of one stripe disagree", code="pool.identity")
        self.headers[shard] = header


HealOrder = Callable[[StripeRead, int, ShardOutcome], None]
"""(read, shard, what is wrong with it): called in any thread; must be quick."""


class ShardClient:
    """See module. Thread-safe; owns its timer thread, not the links.

    Args:
        links: Way to each node; may grow, never shrinks while reads run.
        pick: Choice of shards and hedges.
        window: Bytes in flight.
        on_heal: Told about shards that are absent or corrupt.
    """

    def __init__(
        self,
        links: Mapping[NodeId, NodePort],
        pick: ShardPickParams,
        window: ReceiveWindowParams,
        on_heal: HealOrder,
    ) -> None:
        self._links = links
        self._reads = ExtentReads(pick, window)
        self._on_heal = on_heal
        self._open: dict[int, StripeRead] = {}
        self._next_id = 0
        self._lock = threading.RLock()
        self._timer_wakes = threading.Condition(self._lock)
        self._wake_ns = 0
        self._busy: dict[NodeId, float] = {}
        self._status_calls: dict[NodeId, tuple[NodePort, Call, int]] = {}
        self._next_status_ns = 0
        self._is_closed = False
        self._timer = threading.Thread(target=self._run_timer, name="coded reads")
        self._timer.start()

    @property
    def reads(self) -> ExtentReads:
        """The state machine, for its counts and its view of the nodes."""
        return self._reads

    def begin(self, query: CodedRead, part: ShardRange, buffer: StripeBuffer) -> StripeRead:
        """Begin a coded read into a buffer.

        Args:
            query: Nodes, shards needed and deadline.
            part: What to read of each shard.
            buffer: Of the shape that the read gives (`PayloadShape.narrowed`); the caller keeps it until the
                read has ended.
        """
        with self._lock:
            self._next_id += 1
            read = StripeRead(self._next_id, query, part, buffer)
            if self._is_closed:
                read.finish(ReadEnd.CANCELLED, ())
                return read
            self._open[read.read_id] = read
            self._carry_out(self._reads.begin(time.monotonic_ns(), read.read_id, query))
            return read

    def cancel(self, read: StripeRead) -> None:
        """End a read that nobody wants any more; when this returns its buffer is not written any more."""
        with self._lock:
            self._carry_out(self._reads.cancel(time.monotonic_ns(), read.read_id))

    def report_corrupt(self, read: StripeRead, shard: int) -> None:
        """Tell that a shard's payload failed its checksum after the read had ended."""
        with self._lock:
            self._reads.health.strike(time.monotonic_ns(), read.query.nodes[shard])
            self._reads.counts.bad_shards += 1
        self._on_heal(read, shard, ShardOutcome.CORRUPT)

    def close(self) -> None:
        """Cancel every read, those that begin later too, and stop the timer."""
        with self._lock:
            self._is_closed = True
            for read in list(self._open.values()):
                self._carry_out(self._reads.cancel(time.monotonic_ns(), read.read_id))
            self._timer_wakes.notify()
        self._timer.join()

    def _carry_out(self, actions: list[ReadAction]) -> None:
        """Do what the machine says; failures to send come back to it as events of their own."""
        todo = list(actions)
        for action in todo:
            read = self._open[action.read_id]
            match action:
                case StartShards(_, shards):
                    for shard in shards:
                        if not self._start(read, shard):
                            todo += self._reads.on_shard(
                                time.monotonic_ns(), read.read_id, shard, ShardOutcome.UNREACHABLE
                            )
                case CancelShards(_, shards):
                    for shard in shards:
                        read.give_up(shard)
                case HealShard(_, shard, outcome):
                    read.absent |= 1 << shard
                    self._on_heal(read, shard, outcome)
                case EndRead(_, end, shards):
                    del self._open[read.read_id]
                    read.finish(end, shards)
        next_ns = self._reads.next_time_ns
        if next_ns is not None and next_ns < self._wake_ns:
            self._timer_wakes.notify()

    def _start(self, read: StripeRead, shard: int) -> bool:
        if read.end is not None:
            return True  # it ended while its first shards were being sent
        link = self._links.get(read.query.nodes[shard])
        if link is None:
            return False
        try:
            call = link.start(
                read.part.request(shard),
                deadline_ns=time.monotonic_ns() + SEND_MS * MILLISECOND_NS,
                landing=lambda message, num_bytes: read.places(shard, message, num_bytes),
                on_done=lambda call: self._on_answer(read, shard, call),
            )
        except MillpondError:
            return False
        if not call.done:
            read.calls[shard] = (link, call)
        return True

    def _on_answer(self, read: StripeRead, shard: int, call: Call) -> None:
        outcome = outcome_of(read, shard, call)
        with self._lock:
            read.calls.pop(shard, None)
            if read.end is None:
                actions = self._reads.on_shard(time.monotonic_ns(), read.read_id, shard, outcome)
                self._carry_out(actions)

    def _run_timer(self) -> None:
        with self._lock:
            while not self._is_closed:
                now_ns = time.monotonic_ns()
                if now_ns >= self._next_status_ns:
                    self._next_status_ns = now_ns + STATUS_PERIOD_S * SECOND_NS
                    self._ask_status(now_ns)
                next_ns = self._reads.next_time_ns
                self._wake_ns = min(next_ns or self._next_status_ns, self._next_status_ns)
                if now_ns < self._wake_ns:
                    self._timer_wakes.wait((self._wake_ns - now_ns) / SECOND_NS)
                self._wake_ns = 0
                self._carry_out(self._reads.on_time(time.monotonic_ns()))

    def _ask_status(self, now_ns: int) -> None:
        """Ask every node how busy it is; one that does not answer has stopped."""
        for node, (link, call, asked_ns) in list(self._status_calls.items()):
            if call.done:
                del self._status_calls[node]
            elif now_ns - asked_ns > STATUS_DEADLINE_S * SECOND_NS:
                del self._status_calls[node]
                link.cancel(call)
                self._reads.health.eject(now_ns, node)
        for node, link in list(self._links.items()):
            if node in self._status_calls:
                continue
            try:
                call = link.start(
                    NodeStatusQuery(),
                    deadline_ns=now_ns + SEND_MS * MILLISECOND_NS,
                    on_done=lambda call, node=node: self._on_status(node, call),
                )
            except MillpondError:
                self._busy.pop(node, None)
                continue
            self._status_calls[node] = (link, call, now_ns)

    def _on_status(self, node: NodeId, call: Call) -> None:
        try:
            status = call.result().message
        except MillpondError:
            return
        if not isinstance(status, NodeStatus) or not status.read_slots:
            return
        with self._lock:
            self._busy[node] = min(1.0, status.queued_reads / status.read_slots)
            mean = sum(self._busy.values()) / len(self._busy)
            self._reads.utilisation += 0.3 * (mean - self._reads.utilisation)


def outcome_of(read: StripeRead, shard: int, call: Call) -> ShardOutcome:
    """What came of a call for one shard that is done; if it is valid, its header is in `read.headers`."""
    try:
        read.accept(shard, call.result().message)
    except (ExtentAbsent, StaleEpoch):
        return ShardOutcome.ABSENT
    except PoolError:
        return ShardOutcome.REFUSED
    except DataError:
        return ShardOutcome.CORRUPT
    except MillpondError:
        return ShardOutcome.UNREACHABLE
    return ShardOutcome.VALID
