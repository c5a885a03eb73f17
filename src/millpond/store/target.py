"""`Target`: one folder of a storage node, usually one drive. Segments, their index, their end.

Records are appended to the open segment of their time to live. A full or old segment is sealed; an expired
one, or the oldest when room is needed, is removed whole: first its records are no longer found, then its
generation ends durably, then the file goes. Synced once a second (`upkeep`); a record is durable when an
`upkeep` that began after it was put has ended.
"""

from __future__ import annotations

import errno
import threading
from dataclasses import dataclass, field
from enum import Enum

from millpond.core.errors import DataError, ExtentAbsent, NodeRefused
from millpond.core.units import GIB, MIB
from millpond.policies.retention import BlockClass, RetentionParams, is_worth_copying
from millpond.store.files import Bytes, Files
from millpond.store.live_segment import LiveSegment, OpenRecord, unpack_location
from millpond.store.record import RecordHeader, parse_header
from millpond.store.recovery import Recovered, recover
from millpond.store.segment import PAGE_BYTES, ShardKey, key_of, read_packed_header
from millpond.store.segment_log import SegmentLog, record_space
from millpond.store.shard_index import ShardIndex

MAX_SEGMENT_BYTES = 256 * MIB
MIN_SEGMENT_BYTES = 1 * MIB
RETRY_S = 10
"""After a full or read-only disk, writes are tried again this much later."""


class TargetState(Enum):
    """What a target can still do."""

    OK = "ok"
    READ_ONLY = "read_only"
    """Full or mounted so; tried again later."""
    FAILED = "failed"
    """Broken: not written again before a restart."""


@dataclass(frozen=True, slots=True)
class TargetParams:
    """Sizes and times of a target."""

    capacity_bytes: int = 8 * GIB
    """Oldest segments go when it is reached."""
    segment_bytes: int = 0
    """Size of a segment; 0: 256 MiB, or less on a small target."""
    retention: RetentionParams = field(default_factory=RetentionParams)
    """How long records live."""

    @property
    def max_segment_bytes(self) -> int:
        """Size at which a segment is full: a sixteenth of a small target, at least 1 MiB or a third."""
        if self.segment_bytes:
            return self.segment_bytes
        small = max(self.capacity_bytes // 16, min(MIN_SEGMENT_BYTES, self.capacity_bytes // 3))
        return min(MAX_SEGMENT_BYTES, small // PAGE_BYTES * PAGE_BYTES)


class Target:
    """One folder with segments. Thread-safe.

    A folder that cannot be read gives a failed target without records, not an error: the node goes on.

    Args:
        files: The folder.
        params: Sizes and times.
        now_s: Calendar time.
    """

    def __init__(self, files: Files, params: TargetParams, *, now_s: int) -> None:
        self.params = params
        self.state = TargetState.OK
        self.fault = ""
        """What went wrong last, for people."""
        self.written_bytes = 0
        self.num_lost_segments = 0
        self.num_foreign_segments = 0
        """Segments of another format, set aside at the start."""
        self.num_damaged = 0
        """Records whose header did not prove what the index said."""
        self.files = files
        self._retry_at_s = 0
        self._index = ShardIndex()
        self._log: SegmentLog | None = None
        self._lock = threading.RLock()
        try:
            recovered = recover(files, now_s=now_s, retention=params.retention)
        except (OSError, DataError) as error:
            self.state, self.fault = TargetState.FAILED, str(error)
        else:
            self._adopt(recovered, now_s)

    @property
    def num_shards(self) -> int:
        """Records that can be found."""
        return len(self._index)

    @property
    def used_bytes(self) -> int:
        """Bytes of all segments."""
        return self._log.used_bytes if self._log else 0

    def segments(self) -> list[LiveSegment]:
        """Segments, oldest first."""
        return self._log.all() if self._log else []

    def holds(self, fingerprint: int) -> bool:
        """Whether a record with this fingerprint may be here; from memory."""
        return fingerprint in self._index

    def current_pages(self, segment: LiveSegment) -> list[int]:
        """Pages of a segment at which records begin that can be found, ascending."""
        with self._lock:
            return sorted(
                page
                for fingerprint, page, _ in segment.directory().tolist()
                if self._index.is_current(fingerprint, segment.generation, page)
            )

    def put(self, header: RecordHeader, packed_header: Bytes, payload: Bytes, *, now_s: int) -> None:
        """Append a record; a newer copy takes the place of an older one.

        Args:
            header: Parsed and verified, of a known class.
            packed_header: The same, packed; stamped here.
            payload: Its payload.
            now_s: Calendar time.

        Raises:
            NodeRefused: Full, read-only or failing. Nothing of the record can be found.
        """
        ttl_s = self.params.retention.ttl_of(BlockClass(header.expiry_class))
        with self._lock:
            self._append(header, packed_header, payload, ttl_s, now_s)

    def open_record(self, key: ShardKey, *, now_s: int, is_use: bool = True) -> OpenRecord:
        """Find a record and verify its header. Close the result.

        Args:
            key: Of the shard.
            now_s: Calendar time.
            is_use: It counts as read and so may outlive its segment.

        Raises:
            ExtentAbsent: Not here, dropped or damaged.
            NodeRefused: The drive cannot read it.
        """
        location = self._index.get(key.fingerprint)
        log = self._log
        if location is None or log is None:
            raise ExtentAbsent("no such shard", code="store.absent")
        generation, page = unpack_location(location)
        segment = log.get(generation)
        if segment is None:
            raise ExtentAbsent("its segment is gone", code="store.absent")
        segment.pin()
        try:
            record = self._read_header(segment, page * PAGE_BYTES, key)
        except BaseException:
            segment.unpin()
            raise
        if is_use:
            segment.last_read_s[page] = now_s
        return record

    def drop(self, key: ShardKey, *, now_s: int) -> bool:
        """Forget a record and its older copies, durably with the next sync; whether it was there.

        Raises:
            NodeRefused: The drive cannot be written; it may be found again after a restart.
        """
        log = self._log
        if log is None:
            return False
        with self._lock:
            copies = self._index.forget(key.fingerprint)
            try:
                for copy in copies:
                    log.mark_dropped(copy)
            except OSError as error:
                raise self._refusal(error, now_s) from error
            return bool(copies)

    def upkeep(self, *, now_s: int) -> None:
        """Sync, seal what is full or old, remove at most one expired segment. Once a second, one thread."""
        log = self._log
        if log is None:
            return
        if self.state is TargetState.READ_ONLY and now_s >= self._retry_at_s:
            self.state = TargetState.OK
        self._sync(log, now_s)
        with self._lock:
            for ttl_s in log.open_ttls():
                log.close_old(ttl_s, now_s - self.params.retention.partition_s(ttl_s))
        self._seal_full(log, now_s)
        with self._lock:
            expired = log.next_expired(now_s)
        if expired is not None:
            self._expire(log, expired, now_s)

    def close(self, *, now_s: int) -> None:
        """Seal everything and close the files. The target is failed from then on."""
        log = self._log
        if log is None:
            return
        with self._lock:
            log.close_all()
            self._log = None
        self._sync(log, now_s)
        self._seal_full(log, now_s)
        with self._lock:
            log.close()
            self.state, self.fault = TargetState.FAILED, "closed"

    def _adopt(self, recovered: Recovered, now_s: int) -> None:
        log = self._log = SegmentLog(self.files, recovered, self.params.max_segment_bytes)
        self.num_foreign_segments = len(recovered.foreign)
        for segment in recovered.segments:
            self._index.load(segment)
        try:
            recovered.clean(self.files)
        except OSError as error:
            self._note(error, now_s)
        for segment in recovered.segments:
            if not segment.num_records:
                self._remove(log, segment, now_s)

    def _append(
        self, header: RecordHeader, packed_header: Bytes, payload: Bytes, ttl_s: int, now_s: int
    ) -> None:
        num_bytes = record_space(header.record_bytes)
        limit = self.params.max_segment_bytes
        if PAGE_BYTES + num_bytes > limit or limit > self.params.capacity_bytes:
            raise NodeRefused(f"record of {num_bytes} bytes is larger than a segment", code="store.full")
        log = self._writable_log()
        try:
            while True:
                try:
                    segment = self._segment_for(log, num_bytes, ttl_s, now_s)
                    fingerprint, location = log.append(segment, header, packed_header, payload, now_s)
                    break
                except OSError as error:
                    if error.errno != errno.ENOSPC or not self._shed_oldest(log, now_s):
                        raise
        except OSError as error:
            raise self._refusal(error, now_s) from error
        self._index.point(fingerprint, location)
        self.written_bytes += num_bytes

    def _segment_for(self, log: SegmentLog, num_bytes: int, ttl_s: int, now_s: int) -> LiveSegment:
        """The open segment if it has room, or a new one in the place of the oldest."""
        segment = log.with_room(num_bytes, ttl_s)
        if segment is None:
            limit = self.params.max_segment_bytes
            while log.charged_bytes() + limit > self.params.capacity_bytes:
                self._shed_oldest(log, now_s)
            segment = log.begin(ttl_s, now_s)
        return segment

    def _writable_log(self) -> SegmentLog:
        if self._log is None or self.state is not TargetState.OK:
            raise NodeRefused(f"target is {self.state.value}: {self.fault}", code=self._code())
        return self._log

    def _read_header(self, segment: LiveSegment, offset: int, key: ShardKey) -> OpenRecord:
        try:
            packed, dropped = read_packed_header(self.files, segment.file, offset)
            header = parse_header(packed)
        except DataError as error:
            self.num_damaged += 1
            raise ExtentAbsent(f"its record is damaged: {error.message}", code="store.absent") from error
        except OSError as error:
            self.fault = str(error)
            raise NodeRefused(f"cannot read: {error.strerror}", code="store.io") from error
        if dropped or key_of(header) != key or header.generation != segment.generation:
            raise ExtentAbsent("no such shard", code="store.absent")
        return OpenRecord(self.files, segment, offset, bytes(packed), header)

    def _sync(self, log: SegmentLog, now_s: int) -> None:
        with self._lock:
            dirty = log.begin_sync()
            replaced = self._index.replaced()
        synced = [segment for segment in dirty if self._is_synced(log, segment)]
        if any(not segment.name_synced for segment in synced):
            try:
                log.sync_names()
            except OSError as error:
                self.fault = str(error)
                synced = [segment for segment in synced if segment.name_synced]
        for segment in dirty:
            segment.name_synced = True
            segment.unpin()
        with self._lock:
            for segment in dirty:
                if segment not in synced:
                    self._lose(log, segment, now_s)
            try:
                for fingerprint, older in replaced.items():
                    for copy in self._index.settle(fingerprint, older, log.is_alive):
                        log.mark_dropped(copy)
            except OSError as error:
                self._note(error, now_s)  # the newer copies have larger generations and win after a restart

    def _is_synced(self, log: SegmentLog, segment: LiveSegment) -> bool:
        try:
            log.sync(segment)
        except OSError as error:
            self.fault = str(error)
            return False
        return True

    def _lose(self, log: SegmentLog, segment: LiveSegment, now_s: int) -> None:
        """Give up a segment whose sync failed: what the disk holds of it is unknown, now and later."""
        if not segment.retired:
            self.num_lost_segments += 1
            self._remove(log, segment, now_s)

    def _seal_full(self, log: SegmentLog, now_s: int) -> None:
        if self.state is TargetState.FAILED:
            return  # they stay readable, and a restart scans them
        with self._lock:
            full = [(segment.pin(), self._index.live_directory(segment)) for segment in log.full]
        for segment, directory in full:
            with segment:
                try:
                    self.written_bytes += log.write_footer(segment, directory)
                except OSError as error:
                    self._note(error, now_s)
                    continue
                synced = self._is_synced(log, segment)
            with self._lock:
                if synced:
                    log.set_sealed(segment)
                else:
                    self._lose(log, segment, now_s)

    def _shed_oldest(self, log: SegmentLog, now_s: int) -> bool:
        oldest = log.oldest()
        if oldest is not None:
            self._remove(log, oldest, now_s)
        return oldest is not None

    def _expire(self, log: SegmentLog, segment: LiveSegment, now_s: int) -> None:
        try:
            self._copy_forward(segment, now_s)
        except NodeRefused as error:
            self.fault = error.message  # no room for copies: they expire with the rest
        self._sync(log, now_s)  # the copies must be durable before the originals go
        with self._lock:
            if not segment.retired:
                self._remove(log, segment, now_s)

    def _copy_forward(self, segment: LiveSegment, now_s: int) -> None:
        ttl_s = segment.identity.ttl_s
        with self._lock:
            fingerprints = {page: fingerprint for fingerprint, page, _ in segment.directory().tolist()}
        for page, last_read_s in sorted(segment.last_read_s.items()):
            if not is_worth_copying(last_read_s=last_read_s, ttl_s=ttl_s, now_s=now_s):
                continue
            with self._lock:
                fingerprint = fingerprints.get(page)
                if fingerprint is not None and self._index.is_current(fingerprint, segment.generation, page):
                    self._copy_record(segment, page * PAGE_BYTES, now_s)

    def _copy_record(self, segment: LiveSegment, offset: int, now_s: int) -> None:
        try:
            packed, _ = read_packed_header(self.files, segment.file, offset)
            header = parse_header(packed)
            payload = bytearray(header.payload_bytes)
            self.files.read_into(segment.file, offset + header.header_bytes, memoryview(payload))
        except (DataError, OSError) as error:
            self.num_damaged += 1
            self.fault = str(error)  # an erasure: the stripe's other shards are copied by their nodes
            return
        self._append(header, packed, payload, segment.identity.ttl_s, now_s)

    def _remove(self, log: SegmentLog, segment: LiveSegment, now_s: int) -> None:
        log.take_out(segment)
        self._index.forget_segment(segment)
        try:
            log.remove(segment)
        except OSError as error:
            self._note(error, now_s)

    def _refusal(self, error: OSError, now_s: int) -> NodeRefused:
        self._note(error, now_s)
        return NodeRefused(f"target cannot be written: {error.strerror}", code=self._code())

    def _note(self, error: OSError, now_s: int) -> None:
        """Remember what an error of the drive means for the target."""
        self.fault = str(error)
        if error.errno not in {errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM}:
            self.state = TargetState.FAILED
        elif self.state is TargetState.OK:
            self.state = TargetState.READ_ONLY
            self._retry_at_s = now_s + RETRY_S

    def _code(self) -> str:
        return "store.io" if self.state is TargetState.FAILED else "store.read_only"
