"""`ExtentPuts`: writes extents, several on their way at once, each as `ExtentWrite` decides.

The caller's thread encodes and decides; worker threads send, because a node that has stopped blocks its
sender. Everything that happens comes back through one queue.
"""

from __future__ import annotations

import queue
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import structlog

from millpond.control.extent_write import (
    AskLease,
    EndWrite,
    ExtentWrite,
    ExtentWriteParams,
    GiveUpLease,
    Publish,
    SendShards,
    WriteAction,
    WriteEnd,
)
from millpond.core.errors import DeadlineExceeded, InvariantBroken, MillpondError
from millpond.core.extents import NodeId, StripeId
from millpond.core.units import MILLISECOND_NS, SECOND_NS
from millpond.store.buffers import BufferLease, BufferPool
from millpond.store.chain import BlockChain
from millpond.store.net.connection import Call
from millpond.store.net.messages import Abort, Commit, Done, Location, PutShard, Reserve, Reserved
from millpond.store.net.node_link import NodePort
from millpond.store.payload import payload_shape
from millpond.store.ports import MetadataPort
from millpond.store.stripe import Block, ExtentMeta, encode_extent
from millpond.store.stripe_buffer import StripeBuffer
from millpond.store.stripe_plans import StripePlan

log = structlog.get_logger(__name__)

SEND_S = 2
"""A shard that the kernel does not take for so long meets a node that has stopped."""
_GRACE_NS = 300 * MILLISECOND_NS
"""After its deadline, a put may take so long to give its leases back; they expire otherwise."""
BATCH = 16
"""Extents whose leases are asked for at once, so that the last one is written before its lease ends."""
_IDLE_NS = 50 * MILLISECOND_NS


@dataclass(frozen=True, slots=True)
class PutRequest:
    """Blocks of one chain to be written."""

    chain: BlockChain
    ranges: tuple[tuple[int, int], ...]
    """Blocks `[begin, end)` of each extent."""
    blocks: Sequence[Block]
    """From the first block of the first range on."""
    lineage: int = 0
    expiry_class: int = 0

    def blocks_of(self, begin: int, end: int) -> Sequence[Block]:
        """Blocks `[begin, end)` of the chain."""
        first = self.ranges[0][0]
        return self.blocks[begin - first : end - first]


@dataclass(frozen=True, slots=True)
class PutResult:
    """What became of one extent."""

    begin: int
    end: int
    result: WriteEnd
    acknowledged: int = 0
    """Bit j: the node of shard j has it."""


@dataclass(frozen=True, slots=True)
class WriteTools:
    """What every write of a pool shares."""

    links: Mapping[NodeId, NodePort]
    buffers: BufferPool
    metadata: MetadataPort
    senders: ThreadPoolExecutor
    new_stripe: Callable[[], StripeId]
    """Epoch and group that take writes, and a nonce never used before."""
    plan_of: Callable[[StripeId, int], StripePlan]
    holder: int
    """Our name in put leases, 64 bits."""
    unix_s: Callable[[], int]
    params: ExtentWriteParams


@dataclass(slots=True, eq=False)
class _Write:
    begin: int
    end: int
    machine: ExtentWrite
    stripe: StripeId
    plan: StripePlan
    lease: BufferLease | None = None


class ExtentPuts:
    """One put: a run over the extents of a `PutRequest`. `run` is called once."""

    def __init__(self, tools: WriteTools, request: PutRequest, *, deadline_ns: int) -> None:
        self._tools = tools
        self._request = request
        self._deadline_ns = deadline_ns
        self._events: queue.SimpleQueue[tuple[_Write, int, bool]] = queue.SimpleQueue()
        """(write, shard, whether it is stored)."""
        self._results: dict[int, PutResult] = {}

    def run(self) -> list[PutResult]:
        """Write.

        Returns:
            One result per range, in order.

        Raises:
            QuotaExceeded: The tenant may not write so much.
            DeadlineExceeded, TransientError: The metadata does not answer; nothing was sent.
            InvalidRequest: Blocks of a wrong size.
        """
        ranges = self._request.ranges
        for first in range(0, len(ranges), BATCH):
            self._run_batch(ranges[first : first + BATCH])
        return [self._results[begin] for begin, _ in ranges]

    def _run_batch(self, ranges: Sequence[tuple[int, int]]) -> None:
        waiting = self._reserve(ranges)
        active: list[_Write] = []
        try:
            while waiting or active:
                self._fill(waiting, active)
                self._turn(active)
                active = [write for write in active if not write.machine.is_over]
        finally:
            for write in [*active, *waiting]:
                self._abort(write)
                self._let_go(write)

    def _reserve(self, ranges: Sequence[tuple[int, int]]) -> list[_Write]:
        """Ask for all leases at once; writes that got one have not sent anything yet."""
        request, tools = self._request, self._tools
        writes: list[_Write] = []
        for begin, end in ranges:
            stripe = tools.new_stripe()
            plan = tools.plan_of(stripe, end - begin)
            machine = ExtentWrite(len(plan.nodes), plan.shape.m, tools.params)
            writes.append(_Write(begin, end, machine, stripe, plan))
        began_ns = time.monotonic_ns()
        for write in writes:
            if write.machine.begin(began_ns) != [AskLease()]:
                raise InvariantBroken("a write begins with its lease")
        names = [request.chain.extent(*pair) for pair in ranges]
        answer = tools.metadata.call(
            Reserve(
                request.chain.tenant,
                tuple((name.digest, name.num_blocks) for name in names),
                tuple(write.plan.shape.payload_bytes for write in writes),
                tools.holder,
            ),
            prefix=request.chain.hashes,
            deadline_ns=self._deadline_ns,
        )
        if not isinstance(answer, Reserved) or len(answer.lease_ns) != len(writes):
            raise InvariantBroken(f"reserve of {len(writes)} extents is answered with {answer}")
        leased: list[_Write] = []
        for write, lease_ns in zip(writes, answer.lease_ns, strict=True):
            actions = write.machine.on_lease(time.monotonic_ns(), lease_ns)
            if actions == [SendShards()]:
                leased.append(write)
            else:
                self._carry_out(write, actions)
        return leased

    def _fill(self, waiting: list[_Write], active: list[_Write]) -> None:
        """Encode and send as many of the waiting writes as there are buffers."""
        while waiting:
            lease = self._tools.buffers.try_take()
            if lease is None:
                if active:
                    return
                try:
                    lease = self._tools.buffers.take(deadline_ns=self._deadline_ns)
                except DeadlineExceeded:
                    for write in waiting:
                        self._carry_out(write, write.machine.give_up())
                    waiting.clear()
                    return
            write = waiting[0]
            write.lease = lease
            self._send(write)
            active.append(waiting.pop(0))

    def _send(self, write: _Write) -> None:
        request, plan, lease = self._request, write.plan, write.lease
        if lease is None:
            raise InvariantBroken("a write without a buffer")
        extent = request.chain.extent(write.begin, write.end)
        buffer = StripeBuffer(payload_shape(plan.shape), lease.memory)
        meta = ExtentMeta(
            extent=extent,
            stripe=write.stripe,
            parent=request.chain.parent(write.begin),
            root=request.chain.domain,
            first_block=write.begin,
            hashes=request.chain.hashes_of(write.begin, write.end),
            tenant=request.chain.tenant,
            lineage=request.lineage,
            created_s=self._tools.unix_s(),
            expiry_class=request.expiry_class,
        )
        encode_extent(plan.codec, plan.shape, buffer, meta, request.blocks_of(write.begin, write.end))
        for shard, node in enumerate(plan.nodes):
            message = PutShard(extent.digest, extent.num_blocks, shard, write.stripe.nonce)
            lease.hold()
            self._tools.senders.submit(
                self._send_shard, write, shard, node, message, buffer.record(shard), lease
            )

    def _send_shard(
        self,
        write: _Write,
        shard: int,
        node: NodeId,
        message: PutShard,
        record: memoryview,
        lease: BufferLease,
    ) -> None:
        """Send one shard; runs in a sender thread. The outcome comes through the queue."""
        try:
            link = self._tools.links.get(node)
            if link is None or write.machine.is_over:
                self._events.put((write, shard, False))
                return
            deadline_ns = min(self._deadline_ns, time.monotonic_ns() + SEND_S * SECOND_NS)
            link.start(
                message,
                [record],
                deadline_ns=deadline_ns,
                on_done=lambda call: self._events.put((write, shard, _is_stored(call))),
            )
        except MillpondError as error:
            log.debug("shard not sent", node=node, code=error.code)
            self._events.put((write, shard, False))
        finally:
            lease.release()

    def _turn(self, active: list[_Write]) -> None:
        """Wait for one event or the next due time, and let the machines decide."""
        now_ns = time.monotonic_ns()
        due_ns = [next_ns for write in active if (next_ns := write.machine.next_time_ns) is not None]
        wait_ns = max(0, min([*due_ns, now_ns + _IDLE_NS]) - now_ns)
        try:
            event = self._events.get(timeout=wait_ns / SECOND_NS) if wait_ns else self._events.get_nowait()
        except queue.Empty:
            event = None
        now_ns = time.monotonic_ns()
        if event is not None:
            write, shard, is_stored = event
            self._carry_out(write, write.machine.on_shard(now_ns, shard, is_stored=is_stored))
        for write in active:
            self._carry_out(write, write.machine.on_time(now_ns))
            if now_ns >= self._deadline_ns and not write.machine.is_over:
                self._carry_out(write, write.machine.give_up())

    def _carry_out(self, write: _Write, actions: list[WriteAction]) -> None:
        todo = list(actions)
        for action in todo:
            match action:
                case Publish(missing):
                    is_ours = self._publish(write, missing)
                    todo += write.machine.on_published(time.monotonic_ns(), is_ours=is_ours)
                case GiveUpLease():
                    self._abort(write)
                case EndWrite(end, acknowledged):
                    self._results[write.begin] = PutResult(write.begin, write.end, end, acknowledged)
                    self._let_go(write)
                case _:
                    raise InvariantBroken(f"{action} in the middle of a write")

    def _publish(self, write: _Write, missing: int) -> bool | None:
        request, tools = self._request, self._tools
        extent, stripe = request.chain.extent(write.begin, write.end), write.stripe
        location = Location(
            extent.digest,
            extent.num_blocks,
            stripe.epoch,
            stripe.group,
            stripe.nonce,
            missing=missing,
            lineage=request.lineage,
        )
        commit = Commit(
            request.chain.tenant,
            request.chain.domain,
            location,
            write.begin,
            request.chain.parent(write.begin),
            write.plan.shape.payload_bytes,
            tools.holder,
            request.chain.hashes_of(0, write.end),
        )
        try:
            answer = tools.metadata.call(
                commit,
                request.chain.hashes_of(write.begin, write.end),
                prefix=request.chain.hashes,
                deadline_ns=self._deadline_ns,
            )
        except MillpondError as error:
            log.warning("extent not published", code=error.code, error=error.message)
            return None
        return isinstance(answer, Done) and answer.count == 1

    def _abort(self, write: _Write) -> None:
        extent = self._request.chain.extent(write.begin, write.end)
        abort = Abort(self._request.chain.tenant, ((extent.digest, extent.num_blocks),), self._tools.holder)
        try:
            until_ns = min(time.monotonic_ns() + SECOND_NS, self._deadline_ns + _GRACE_NS)
            self._tools.metadata.call(abort, prefix=self._request.chain.hashes, deadline_ns=until_ns)
        except MillpondError as error:
            log.info("lease left to expire", code=error.code)

    @staticmethod
    def _let_go(write: _Write) -> None:
        lease, write.lease = write.lease, None
        if lease is not None:
            lease.release()


def _is_stored(call: Call) -> bool:
    try:
        return isinstance(call.result().message, Done)
    except MillpondError:
        return False
