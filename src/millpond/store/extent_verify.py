"""Reads every shard of an extent whole and checks every byte of it."""

from __future__ import annotations

from collections.abc import Mapping

from millpond.control.extent_read import CodedRead, ShardOutcome
from millpond.core.errors import DataError, MillpondError
from millpond.core.extents import NodeId
from millpond.store.buffers import BufferPool
from millpond.store.chain import Hit, HitExtent
from millpond.store.extent_get import check_identity
from millpond.store.net.client import ShardRange, StripeRead, outcome_of
from millpond.store.net.connection import Call
from millpond.store.net.node_link import NodePort
from millpond.store.payload import payload_shape
from millpond.store.record import check_payload, header_size
from millpond.store.stripe_buffer import StripeBuffer
from millpond.store.stripe_plans import StripePlan


def verify_extent(
    links: Mapping[NodeId, NodePort],
    buffers: BufferPool,
    plan: StripePlan,
    hit: Hit,
    part: HitExtent,
    *,
    deadline_ns: int,
) -> tuple[ShardOutcome, ...]:
    """Check all k + m shards of one extent of a hit.

    Returns:
        Per shard what came of it.

    Raises:
        DeadlineExceeded: No buffer came free.
    """
    payload = payload_shape(plan.shape)
    lease = buffers.take(deadline_ns=deadline_ns)
    try:
        buffer = StripeBuffer(payload, lease.memory)
        query = CodedRead(plan.nodes, plan.shape.k, payload.payload_bytes, deadline_ns)
        read = StripeRead(0, query, _whole(plan, hit, part), buffer)
        calls: dict[int, tuple[NodePort, Call]] = {}
        for shard, node in enumerate(plan.nodes):
            call = _start(links.get(node), read, shard, deadline_ns)
            if call is not None:
                calls[shard] = call
        outcomes = [ShardOutcome.UNREACHABLE] * len(plan.nodes)
        for shard, (link, call) in calls.items():
            if not call.wait(deadline_ns):
                link.cancel(call)
            outcomes[shard] = _check(read, shard, call)
        return tuple(outcomes)
    finally:
        lease.release()


def _whole(plan: StripePlan, hit: Hit, part: HitExtent) -> ShardRange:
    payload = payload_shape(plan.shape)
    return ShardRange(
        extent=part.extent,
        stripe=part.stripe,
        begin_row=0,
        end_row=len(payload.rows),
        num_columns=part.location.num_blocks,
        header_bytes=header_size(payload),
        check_header=lambda header: check_identity(hit, part, plan.shape, header),
    )


def _start(
    link: NodePort | None, read: StripeRead, shard: int, deadline_ns: int
) -> tuple[NodePort, Call] | None:
    if link is None:
        return None
    try:
        call = link.start(
            read.part.request(shard),
            deadline_ns=deadline_ns,
            landing=lambda message, num_bytes: read.places(shard, message, num_bytes),
        )
    except MillpondError:
        return None
    return link, call


def _check(read: StripeRead, shard: int, call: Call) -> ShardOutcome:
    outcome = outcome_of(read, shard, call)
    if outcome != ShardOutcome.VALID:
        return outcome
    try:
        check_payload(read.headers[shard], read.buffer.payload(shard))
    except DataError:
        return ShardOutcome.CORRUPT
    return outcome
