"""`SegmentLog`: the segments of a target and the steps of their lives. Errors of the drive pass through.

Opened with a new generation, appended to, full, sealed with a footer, removed. The order of the writes is
what recovery relies on; what to do about a failing drive is the target's matter.
"""

from __future__ import annotations

import heapq

from millpond.core.units import align_up
from millpond.policies.retention import expiry_s
from millpond.store.files import Bytes, Files
from millpond.store.live_segment import LiveSegment, unpack_location
from millpond.store.record import RecordHeader, stamp_generation
from millpond.store.recovery import Recovered
from millpond.store.segment import (
    DROPPED_MAGIC,
    PAGE_BYTES,
    Directory,
    SegmentId,
    directory_entry,
    pack_footer,
    pack_segment_header,
)


class SegmentLog:
    """Segments by generation. Called under the target's lock, but for `sync` and `write_footer`.

    Args:
        files: The target's folder.
        recovered: What it holds.
        segment_bytes: Size at which a segment is full.
    """

    def __init__(self, files: Files, recovered: Recovered, segment_bytes: int) -> None:
        self._files = files
        self._table = recovered.table
        self._segment_bytes = segment_bytes
        self._segments = {segment.generation: segment for segment in recovered.segments}  # oldest first
        self._open: dict[int, LiveSegment] = {}  # by time to live
        self._dirty: set[LiveSegment] = set()
        self._ends: list[tuple[int, int]] = []  # heap of (expiry, generation) of the sealed ones
        self.used_bytes = sum(segment.end_bytes for segment in recovered.segments)
        """Of all segments, without footers."""
        self.full = [segment for segment in recovered.segments if not segment.sealed]
        """Segments that wait for their footer."""
        for segment in recovered.segments:
            if segment.sealed:
                self._expect_end(segment)

    def get(self, generation: int) -> LiveSegment | None:
        """A segment that is not removed. Needs no lock."""
        return self._segments.get(generation)

    def all(self) -> list[LiveSegment]:
        """All of them, oldest first. Needs no lock."""
        return list(self._segments.copy().values())

    def is_alive(self, location: int) -> bool:
        """Whether the segment of a location is not removed."""
        return unpack_location(location)[0] in self._segments

    def charged_bytes(self) -> int:
        """Bytes of all segments, open ones counted as if they were full."""
        free = sum(self._segment_bytes - segment.end_bytes for segment in self._open.values())
        return self.used_bytes + free

    def with_room(self, num_bytes: int, ttl_s: int) -> LiveSegment | None:
        """The open segment with this time to live; None if there is none or it is full now."""
        segment = self._open.get(ttl_s)
        if segment is None or segment.end_bytes + num_bytes <= self._segment_bytes:
            return segment
        self._close_open(ttl_s)
        return None

    def begin(self, ttl_s: int, now_s: int) -> LiveSegment:
        """Open a segment: live in the table first, then its file."""
        slot, generation = self._table.begin()
        identity = SegmentId(slot, generation, now_s, ttl_s)
        try:
            segment = LiveSegment(self._files, self._files.create(identity.name), identity)
            try:
                self._files.write(segment.file, 0, [pack_segment_header(identity)])
            except OSError:
                segment.retire()
                self._files.remove(identity.name)
                raise
        except OSError:
            self._table.end(slot)
            raise
        self._segments[generation] = segment
        self._open[ttl_s] = segment
        self._dirty.add(segment)
        self.used_bytes += segment.end_bytes
        return segment

    def append(
        self, segment: LiveSegment, header: RecordHeader, packed_header: Bytes, payload: Bytes, now_s: int
    ) -> tuple[int, int]:
        """Write a record behind the segment's end; its fingerprint and location."""
        stamped = stamp_generation(packed_header, segment.generation)
        self._files.write(segment.file, segment.end_bytes, [stamped, payload])
        self._dirty.add(segment)
        entry = directory_entry(header, segment.end_bytes)
        self.used_bytes -= segment.end_bytes
        location = segment.add(entry, now_s)
        self.used_bytes += segment.end_bytes
        return entry[0], location

    def mark_dropped(self, location: int) -> None:
        """Make a record unreadable, if its segment still exists."""
        generation, page = unpack_location(location)
        segment = self._segments.get(generation)
        if segment is not None:
            self._files.write(segment.file, page * PAGE_BYTES, [DROPPED_MAGIC])
            self._dirty.add(segment)

    def begin_sync(self) -> list[LiveSegment]:
        """Segments to `sync`, pinned; what is written from here on belongs to the next sync."""
        dirty = [segment.pin() for segment in self._dirty]
        self._dirty.clear()
        return dirty

    def sync(self, segment: LiveSegment) -> None:
        """Make the content of a segment durable."""
        self._files.sync(segment.file)

    def sync_names(self) -> None:
        """Make the existence of all files durable."""
        self._files.sync_names()

    def close_old(self, ttl_s: int, created_by_s: int) -> None:
        """Take no more records into the open segment with this time to live if it is that old."""
        segment = self._open.get(ttl_s)
        if segment is not None and segment.num_records and segment.identity.created_s <= created_by_s:
            self._close_open(ttl_s)

    def close_all(self) -> None:
        """Take no more records into any segment."""
        for ttl_s in list(self._open):
            self._close_open(ttl_s)

    def open_ttls(self) -> list[int]:
        """Times to live of the open segments."""
        return list(self._open)

    def write_footer(self, segment: LiveSegment, directory: Directory) -> int:
        """Write the footer of a pinned, full segment; its size. A sync must follow before `sealed` is set."""
        footer = pack_footer(segment.identity, directory, segment.newest_s, segment.end_bytes)
        self._files.truncate(segment.file, segment.end_bytes)  # a write that failed may have left a tail
        self._files.write(segment.file, segment.end_bytes, [footer])
        return len(footer)

    def set_sealed(self, segment: LiveSegment) -> None:
        """The footer of a segment is durable."""
        segment.sealed = True
        if segment in self.full:
            self.full.remove(segment)
            self._expect_end(segment)

    def next_expired(self, now_s: int) -> LiveSegment | None:
        """A sealed segment whose time is over, which must be removed now."""
        while self._ends and self._ends[0][0] <= now_s:
            segment = self._segments.get(heapq.heappop(self._ends)[1])
            if segment is not None:
                return segment
        return None

    def oldest(self) -> LiveSegment | None:
        """The segment to give up first: the oldest, an open one only if all are."""
        open_ones = set(self._open.values())
        for segment in self._segments.values():
            if segment not in open_ones:
                return segment
        return next(iter(self._segments.values()), None)

    def take_out(self, segment: LiveSegment) -> None:
        """First step of a removal: nobody finds the segment any more."""
        if self._segments.pop(segment.generation, None) is not None:
            self.used_bytes -= segment.end_bytes
        self._dirty.discard(segment)
        if segment in self.full:
            self.full.remove(segment)
        if self._open.get(segment.identity.ttl_s) is segment:
            del self._open[segment.identity.ttl_s]

    def remove(self, segment: LiveSegment) -> None:
        """The other steps: its generation ends durably, then its file goes (readers still have it)."""
        try:
            self._table.end(segment.identity.slot)
        finally:  # also if the table is full or broken: the room may be what is needed
            try:
                self._files.remove(segment.identity.name)
            finally:
                segment.retire()

    def close(self) -> None:
        """Close all files."""
        for segment in self._segments.values():
            segment.retire()
        self._segments.clear()
        self._table.close()

    def _expect_end(self, segment: LiveSegment) -> None:
        end_s = expiry_s(newest_s=segment.newest_s, ttl_s=segment.identity.ttl_s)
        heapq.heappush(self._ends, (end_s, segment.generation))

    def _close_open(self, ttl_s: int) -> None:
        self.full.append(self._open.pop(ttl_s))


def record_space(record_bytes: int) -> int:
    """Bytes that a record takes in a segment."""
    return align_up(record_bytes, PAGE_BYTES)
