"""`ExtentGet`: reads the extents of one hit, row after row, and says how much of the hit is true.

Reads of all rows of all extents are started in the order in which they are wanted; the window of the receiver
lets them go in that order. Each part is verified and rebuilt in its buffer and handed to the sink. The first
extent that cannot be had ends the hit there: what lies behind it is worthless without it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Protocol

from millpond.control.extent_read import CodedRead, ReadEnd
from millpond.core.errors import ChecksumMismatch, DeadlineExceeded, StaleEpoch
from millpond.core.extents import StripeId, StripeShape
from millpond.core.units import KIB, MILLISECOND_NS
from millpond.store.buffers import BufferLease, BufferPool
from millpond.store.chain import Hit, HitExtent
from millpond.store.net.client import ShardClient, ShardRange, StripeRead
from millpond.store.payload import PayloadShape, payload_shape
from millpond.store.record import RecordHeader, header_size
from millpond.store.stripe import Block, copy_rows_out, open_rows
from millpond.store.stripe_buffer import StripeBuffer
from millpond.store.stripe_plans import StripePlan

_CANCEL_NS = 50 * MILLISECOND_NS
"""How soon a read that waits for a buffer notices that nobody wants it any more."""


class GetEnd(IntEnum):
    """Why an extent was or was not read."""

    WHOLE = 0
    LOST = 1
    """Too few shards can be read now."""
    LATE = 2
    """The deadline passed."""
    CANCELLED = 3
    STALE = 4
    """Its location names a placement that nobody knows."""
    BEHIND = 5
    """Not read because an extent before it failed."""


class RowOrder(IntEnum):
    """What comes first."""

    ROWS = 0
    """The first rows of all extents: for a consumer that computes layer by layer."""
    EXTENTS = 1
    """All rows of the first extent: a deadline then leaves the longest prefix."""


@dataclass(frozen=True, slots=True)
class RowsReady:
    """Rows of one extent, verified and complete, in a buffer that is the sink's until it returns."""

    shape: StripeShape
    """Of the whole extent."""
    buffer: StripeBuffer
    begin_row: int
    end_row: int
    begin_block: int
    """Index in the chain of the first block."""
    num_blocks: int
    """Blocks that belong to the hit; the buffer may hold more."""


class RowSink(Protocol):
    """Where rows go. Both calls come from the thread that reads."""

    def on_rows(self, ready: RowsReady) -> None:
        """Take rows."""
        ...

    def on_shortened(self, num_blocks: int, reason: GetEnd) -> None:
        """Learn that the hit ends earlier, before rows of what remains are delivered."""
        ...


class BlockSink:
    """Copies rows into whole blocks.

    Args:
        blocks: One `[block bytes]` array per block of the hit, from block 0 of the chain on.
    """

    def __init__(self, blocks: Sequence[Block]) -> None:
        self._blocks = blocks

    def on_rows(self, ready: RowsReady) -> None:
        """See `RowSink`."""
        blocks = self._blocks[ready.begin_block : ready.begin_block + ready.num_blocks]
        copy_rows_out(ready.shape, ready.buffer, ready.begin_row, ready.end_row, blocks)

    def on_shortened(self, num_blocks: int, reason: GetEnd) -> None:
        """See `RowSink`."""


@dataclass(frozen=True, slots=True)
class GetResult:
    """How much of a hit is true."""

    num_blocks: int
    """Leading blocks of the chain of which every row was delivered."""
    ends: tuple[GetEnd, ...]
    """Per extent of the hit."""
    gone: tuple[int, ...]
    """Extents of the hit whose shards are gone for good: their index entries are wrong."""


@dataclass(frozen=True, slots=True)
class ReadTools:
    """What every read of a pool shares."""

    client: ShardClient
    buffers: BufferPool
    plan_of: Callable[[StripeId, int], StripePlan]
    """(stripe, number of blocks); raises `StaleEpoch`."""
    min_piece_bytes: int = 128 * KIB
    """Rows are read in groups of at least this size per shard."""


class _Slot:
    """One extent of the hit with its buffer."""

    def __init__(self, index: int, hit: HitExtent, plan: StripePlan, lease: BufferLease) -> None:
        self.index = index
        self.hit = hit
        self.plan = plan
        self.lease = lease
        self.full = payload_shape(plan.shape)
        self.payload = self.full.narrowed(hit.num_blocks)
        self.buffer = StripeBuffer(self.payload, lease.memory)
        self.reads: dict[tuple[int, int], StripeRead] = {}
        """By rows `[begin, end)`."""


class ExtentGet:
    """See module. `run` is called once; `cancel` from any thread."""

    def __init__(
        self,
        tools: ReadTools,
        hit: Hit,
        sink: RowSink,
        *,
        deadline_ns: int,
        order: RowOrder,
        is_use: bool = True,
    ) -> None:
        self._tools = tools
        self._hit = hit
        self._sink = sink
        self._deadline_ns = deadline_ns
        self._order = order
        self._is_use = is_use
        self._ends = [GetEnd.BEHIND] * len(hit.extents)
        self._limit = len(hit.extents)
        """Extents from here on are not wanted any more."""
        self._gone: set[int] = set()
        self._cancelled = threading.Event()
        self._open: set[StripeRead] = set()
        self._lock = threading.Lock()

    def cancel(self) -> None:
        """Give up: `run` returns soon, with what it has."""
        self._cancelled.set()
        with self._lock:
            reads = list(self._open)
        for read in reads:
            self._tools.client.cancel(read)

    def run(self) -> GetResult:
        """Read, and deliver to the sink.

        Returns:
            The valid prefix. Nothing about the pool raises; an error of the sink does.
        """
        for groups in self._passes():
            next_extent = 0
            while next_extent < self._limit:
                slots = self._take_slots(next_extent)
                if not slots:
                    break
                next_extent = slots[-1].index + 1
                try:
                    self._read_wave(slots, groups)
                finally:
                    self._drop_wave(slots)
        self._ends[: self._limit] = [GetEnd.WHOLE] * self._limit
        covered = self._hit.extents[self._limit - 1].end if self._limit else 0
        return GetResult(min(covered, self._hit.num_blocks), tuple(self._ends), tuple(sorted(self._gone)))

    def _passes(self) -> list[Sequence[tuple[int, int]]]:
        """Groups of rows that are read of all extents before the next pass begins.

        One pass reads all rows, unless the first rows are wanted first and the buffers are too few for that.
        """
        payloads: list[PayloadShape] = []
        for hit in self._hit.extents:
            try:
                plan = self._tools.plan_of(hit.stripe, hit.location.num_blocks)
            except StaleEpoch:
                break  # the hit ends here, as the first pass will find
            payloads.append(payload_shape(plan.shape).narrowed(hit.num_blocks))
        if not payloads:
            return [()]
        widest = max(payloads, key=lambda payload: payload.num_blocks)
        groups = row_groups(widest, self._tools.min_piece_bytes)
        if self._order == RowOrder.ROWS and len(payloads) > self._tools.buffers.num_free:
            return [[group] for group in groups]
        return [groups]

    def _take_slots(self, first: int) -> list[_Slot]:
        """Buffers for as many of the next extents as there are, at least one."""
        slots: list[_Slot] = []
        for index in range(first, self._limit):
            hit = self._hit.extents[index]
            try:
                plan = self._tools.plan_of(hit.stripe, hit.location.num_blocks)
            except StaleEpoch:
                self._shorten(index, GetEnd.STALE)
                break
            lease = self._tools.buffers.try_take() if slots else self._wait_for_buffer()
            if lease is None:
                if not slots:
                    self._shorten(index, GetEnd.CANCELLED if self._cancelled.is_set() else GetEnd.LATE)
                break
            slots.append(_Slot(index, hit, plan, lease))
        return slots

    def _wait_for_buffer(self) -> BufferLease | None:
        while not self._cancelled.is_set():
            now_ns = time.monotonic_ns()
            try:
                return self._tools.buffers.take(deadline_ns=min(self._deadline_ns, now_ns + _CANCEL_NS))
            except DeadlineExceeded:
                if now_ns >= self._deadline_ns:
                    break
        return None

    def _read_wave(self, slots: list[_Slot], groups: Sequence[tuple[int, int]]) -> None:
        if self._order == RowOrder.ROWS:
            parts = [(slot, group) for group in groups for slot in slots]
        else:
            parts = [(slot, group) for slot in slots for group in groups]
        for slot, group in parts:
            self._begin(slot, group, excluded=0, k=slot.plan.shape.k)
        for slot, group in parts:
            if slot.index < self._limit:
                self._finish(slot, group)

    def _begin(self, slot: _Slot, rows: tuple[int, int], *, excluded: int, k: int) -> StripeRead:
        begin_row, end_row = rows
        header_bytes = header_size(slot.full)
        num_bytes = slot.payload.row_offsets[end_row] - slot.payload.row_offsets[begin_row] + header_bytes
        part = ShardRange(
            extent=slot.hit.extent,
            stripe=slot.hit.stripe,
            begin_row=begin_row,
            end_row=end_row,
            num_columns=slot.hit.num_blocks,
            header_bytes=header_bytes,
            check_header=lambda header: check_identity(self._hit, slot.hit, slot.plan.shape, header),
            chain=self._hit.chain if self._is_use else None,
            hit=slot.hit,
        )
        query = CodedRead(
            slot.plan.nodes, k, num_bytes, self._deadline_ns, slot.hit.location.missing, excluded
        )
        read = self._tools.client.begin(query, part, slot.buffer)
        slot.reads[rows] = read
        with self._lock:
            self._open.add(read)
        if self._cancelled.is_set():
            self._tools.client.cancel(read)
        return read

    def _finish(self, slot: _Slot, rows: tuple[int, int]) -> None:
        """Wait for one part, verify it, ask for more shards as long as some are corrupt, deliver it."""
        codec = slot.plan.codec
        read = slot.reads[rows]
        headers: dict[int, RecordHeader] = {}
        bad = 0
        while True:
            end = read.wait()
            if end != ReadEnd.DECODABLE:
                if end == ReadEnd.LOST and (bad | read.absent).bit_count() > slot.plan.shape.m:
                    self._gone.add(slot.index)
                self._shorten(slot.index, _GET_ENDS[end])
                return
            headers |= read.headers
            opened = open_rows(codec, slot.buffer, headers, *rows)
            for shard in opened.corrupt:
                self._tools.client.report_corrupt(read, shard)
                del headers[shard]
                bad |= 1 << shard
            if opened.is_complete:
                break
            have = sum(1 << shard for shard in headers)
            wanted = slot.plan.shape.k - len(headers)
            bad |= read.absent
            read = self._begin(slot, rows, excluded=bad | have, k=wanted)
        self._sink.on_rows(
            RowsReady(slot.plan.shape, slot.buffer, *rows, slot.hit.begin, slot.hit.num_blocks)
        )

    def _shorten(self, limit: int, reason: GetEnd) -> None:
        self._ends[limit] = reason
        self._limit = limit
        num_blocks = self._hit.extents[limit - 1].end if limit else 0
        self._sink.on_shortened(num_blocks, reason)

    def _drop_wave(self, slots: list[_Slot]) -> None:
        for slot in slots:
            for read in slot.reads.values():
                self._tools.client.cancel(read)
            slot.lease.release()
        with self._lock:
            self._open.clear()


_GET_ENDS = {
    ReadEnd.LOST: GetEnd.LOST,
    ReadEnd.LATE: GetEnd.LATE,
    ReadEnd.CANCELLED: GetEnd.CANCELLED,
}


def row_groups(shape: PayloadShape, min_bytes: int) -> list[tuple[int, int]]:
    """Cut the rows of a payload into groups `[begin, end)` of at least `min_bytes`, but for the last."""
    groups: list[tuple[int, int]] = []
    begin = 0
    for end in range(1, len(shape.rows) + 1):
        is_last = end == len(shape.rows)
        if is_last or shape.row_offsets[end] - shape.row_offsets[begin] >= min_bytes:
            groups.append((begin, end))
            begin = end
    return groups


def check_identity(hit: Hit, part: HitExtent, shape: StripeShape, header: RecordHeader) -> None:
    """Check that a record is a shard of the extent that a hit names, of this chain and this write.

    Raises:
        DataError: It is something else.
    """
    header.check_fits(shape)
    chain, location = hit.chain, part.location
    expected = {
        "extent": (header.extent, part.extent),
        "stripe": (header.stripe, part.stripe),
        "key domain": (header.root, chain.domain),
        "tenant": (header.tenant, chain.tenant),
        "place in the chain": (header.first_block, part.begin),
        "parent": (header.parent, chain.parent(part.begin)),
        "blocks": (
            header.hashes[: len(header.hashes) // header.num_blocks * part.num_blocks],
            chain.hashes_of(part.begin, part.end),
        ),
        "lineage": (header.lineage, location.lineage),
    }
    for what, (found, wanted) in expected.items():
        if found != wanted:
            raise ChecksumMismatch(f"record of another {what}", code="pool.identity")
