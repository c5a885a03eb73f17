"""Makes shards of a stripe again from the others, and stores them where placement wants them.

Needs no layout: a record's header says how its stripe is cut.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from millpond.control.extent_read import CodedRead, ShardOutcome
from millpond.core.errors import ChecksumMismatch, DataError, ExtentLost, MillpondError, TransferFailed
from millpond.core.extents import ExtentId, NodeId, StripeId
from millpond.core.units import KIB
from millpond.store.codec.backend import Memory
from millpond.store.codec.reed_solomon import ReedSolomon
from millpond.store.net.client import ShardRange, StripeRead, outcome_of
from millpond.store.net.connection import Answer, Call, Landing
from millpond.store.net.messages import PutShard, ReadShard, ShardData
from millpond.store.net.node_link import NodePort
from millpond.store.payload import PayloadShape
from millpond.store.record import RecordHeader, check_payload, header_size, parse_header
from millpond.store.stripe import rebuild_shards
from millpond.store.stripe_buffer import StripeBuffer, stripe_bytes

_PAGE_BYTES = 4 * KIB


@dataclass(frozen=True, slots=True)
class RepairJob:
    """Shards to make again."""

    extent: ExtentId
    stripe: StripeId
    nodes: tuple[NodeId, ...]
    """Of each shard."""
    wanted: tuple[int, ...]
    """Shards to make."""
    sources: tuple[int, ...]
    """Shards to read, best first: as many as are needed are read, others if some of these fail."""


@dataclass(frozen=True, slots=True)
class RepairResult:
    """What came of a job."""

    stored: tuple[int, ...]
    """Shards that are on their nodes now."""
    unreachable: tuple[int, ...]
    """Shards that were made and whose nodes did not take them."""
    read_bytes: int
    written_bytes: int


class StripeRepairer:
    """Does one job after the other in its own memory. One thread.

    Args:
        links: Way to each node.
    """

    def __init__(self, links: Mapping[NodeId, NodePort]) -> None:
        self._links = links
        self._memory = np.empty(0, np.uint8)
        self._codecs: dict[tuple[int, int], ReedSolomon] = {}

    def repair(self, job: RepairJob, *, deadline_ns: int) -> RepairResult:
        """Read, make and store.

        Raises:
            ExtentLost: Fewer than k whole shards could be read.
        """
        shape = self._shape(job, deadline_ns)
        memory = self._take_memory(stripe_bytes(shape))
        buffer = StripeBuffer(shape, memory)
        query = CodedRead(job.nodes, shape.k, shape.payload_bytes, deadline_ns)
        read = StripeRead(0, query, _whole(job, shape), buffer)
        valid = self._read_valid(read, job, deadline_ns)
        headers = {shard: read.headers[shard] for shard in valid}
        if len(valid) < shape.k:
            raise ExtentLost(f"{len(valid)} whole shards of {shape.k}", code="pool.lost")
        rebuild_shards(self._codec(shape), buffer, headers, job.wanted)
        record_bytes = buffer.record(0).nbytes
        stored = self._store(job, buffer, deadline_ns)
        return RepairResult(
            stored=stored,
            unreachable=tuple(shard for shard in job.wanted if shard not in stored),
            read_bytes=record_bytes * len(read.headers),
            written_bytes=record_bytes * len(stored),
        )

    def is_whole(self, job: RepairJob, shard: int, shape: PayloadShape, *, deadline_ns: int) -> bool | None:
        """Read one shard and check every byte of it; None if it could not be read, which proves nothing."""
        buffer = StripeBuffer(shape, self._take_memory(stripe_bytes(shape)))
        query = CodedRead(job.nodes, shape.k, shape.payload_bytes, deadline_ns)
        read = StripeRead(0, query, _whole(job, shape), buffer)
        outcome = self._read(read, job, [shard], deadline_ns)[shard]
        if outcome in {ShardOutcome.UNREACHABLE, ShardOutcome.REFUSED}:
            return None
        return outcome == ShardOutcome.VALID

    def _shape(self, job: RepairJob, deadline_ns: int) -> PayloadShape:
        """How the stripe is cut, from the first header that can be had."""
        for shard in job.sources:
            query = ReadShard(
                job.extent.digest, job.extent.num_blocks, shard, job.stripe.nonce, 0, 1, 1, is_use=False
            )
            try:
                answer = self._start(job, shard, query, deadline_ns).result_by(deadline_ns)
                if not isinstance(answer.message, ShardData):
                    raise DataError("a read is answered with something else", code="pool.answer")
                header = parse_header(answer.payload[: answer.message.header_bytes])
                _check_same(job, header)
            except MillpondError:
                continue
            return header.shape
        raise ExtentLost("no shard can be read", code="pool.lost")

    def _read_valid(self, read: StripeRead, job: RepairJob, deadline_ns: int) -> list[int]:
        """Read shards until enough are whole or there are no more."""
        valid: list[int] = []
        left = list(job.sources)
        while left and len(valid) < read.query.k:
            batch = left[: read.query.k - len(valid)]
            del left[: len(batch)]
            outcomes = self._read(read, job, batch, deadline_ns)
            valid += [shard for shard, outcome in outcomes.items() if outcome == ShardOutcome.VALID]
        return valid

    def _read(
        self, read: StripeRead, job: RepairJob, shards: Sequence[int], deadline_ns: int
    ) -> dict[int, ShardOutcome]:
        """Read whole shards into their places, all at once, and check every byte of them."""
        outcomes = dict.fromkeys(shards, ShardOutcome.UNREACHABLE)
        waits: dict[int, _Wait] = {}
        for shard in shards:
            try:
                waits[shard] = self._start(
                    job,
                    shard,
                    read.part.request(shard),
                    deadline_ns,
                    lambda message, num_bytes, shard=shard: read.places(shard, message, num_bytes),
                )
            except MillpondError:
                continue
        for shard, wait in waits.items():
            wait.end(deadline_ns)
            outcomes[shard] = outcome_of(read, shard, wait.call)
            if outcomes[shard] == ShardOutcome.VALID:
                try:
                    check_payload(read.headers[shard], read.buffer.payload(shard))
                except DataError:
                    outcomes[shard] = ShardOutcome.CORRUPT
        return outcomes

    def _store(self, job: RepairJob, buffer: StripeBuffer, deadline_ns: int) -> tuple[int, ...]:
        waits: dict[int, _Wait] = {}
        for shard in job.wanted:
            query = PutShard(job.extent.digest, job.extent.num_blocks, shard, job.stripe.nonce)
            try:
                link = self._link(job, shard)
                call = link.start(query, [buffer.record(shard)], deadline_ns=deadline_ns)
            except MillpondError:
                continue
            waits[shard] = _Wait(link, call)
        # A node may take its time to write; what it has not taken by the deadline may be stored or not.
        stored: list[int] = []
        for shard, wait in waits.items():
            try:
                wait.result_by(deadline_ns)
            except MillpondError:
                continue
            stored.append(shard)
        return tuple(stored)

    def _start(
        self,
        job: RepairJob,
        shard: int,
        query: ReadShard,
        deadline_ns: int,
        landing: Landing | None = None,
    ) -> _Wait:
        link = self._link(job, shard)
        return _Wait(link, link.start(query, deadline_ns=deadline_ns, landing=landing))

    def _link(self, job: RepairJob, shard: int) -> NodePort:
        link = self._links.get(job.nodes[shard])
        if link is None:
            raise TransferFailed(f"no way to {job.nodes[shard]}", code="pool.unreachable")
        return link

    def _codec(self, shape: PayloadShape) -> ReedSolomon:
        return self._codecs.setdefault((shape.k, shape.m), ReedSolomon(shape.k, shape.m))

    def _take_memory(self, num_bytes: int) -> Memory:
        """Memory of the last job, or more."""
        if self._memory.nbytes < num_bytes:
            memory = np.zeros(num_bytes + _PAGE_BYTES, np.uint8)
            self._memory = memory[-memory.ctypes.data % _PAGE_BYTES :]
        return self._memory


@dataclass(frozen=True, slots=True)
class _Wait:
    """A call and the way it went."""

    link: NodePort
    call: Call

    def end(self, deadline_ns: int) -> None:
        """Wait; after the deadline nothing lands any more."""
        if not self.call.wait(deadline_ns):
            self.link.cancel(self.call)

    def result_by(self, deadline_ns: int) -> Answer:
        self.end(deadline_ns)
        return self.call.result()


def _whole(job: RepairJob, shape: PayloadShape) -> ShardRange:
    def check(header: RecordHeader) -> None:
        _check_same(job, header)
        if header.shape != shape:
            raise DataError("shard of another shape", code="record.shape")

    return ShardRange(
        extent=job.extent,
        stripe=job.stripe,
        begin_row=0,
        end_row=len(shape.rows),
        num_columns=shape.num_blocks,
        header_bytes=header_size(shape),
        check_header=check,
    )


def _check_same(job: RepairJob, header: RecordHeader) -> None:
    if (header.extent, header.stripe) != (job.extent, job.stripe):
        raise ChecksumMismatch("record of another stripe", code="pool.identity")
