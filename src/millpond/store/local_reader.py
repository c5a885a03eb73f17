"""`LocalNodeReader`: reads a storage node's records straight from its folders, without the node's process.

Only for a node on the same host. It keeps an index of its own, from the footers and headers on disk, and
looks for newer records when it is asked for one it does not know. Everything is checked as the node checks
it: the generation table says that a segment is live before and after the read, the header says what it is.
Who must not wait for a drive gets what is known and in memory, while another thread may hang in the drive.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from millpond.core.errors import DataError, ExtentAbsent, NodeRefused
from millpond.store.files import CachedFiles, DiskFiles, Files
from millpond.store.generations import TABLE_NAME, is_live_entry
from millpond.store.live_segment import pack_location, unpack_location
from millpond.store.record import RecordHeader, parse_header
from millpond.store.segment import (
    PAGE_BYTES,
    SegmentId,
    ShardKey,
    directory_entry,
    is_segment_name,
    key_of,
    read_footer,
    read_packed_header,
    read_segment_header,
    walk_headers,
)
from millpond.store.segment_log import record_space


@dataclass(slots=True)
class _Segment:
    identity: SegmentId
    file: int
    end_bytes: int = PAGE_BYTES
    """Up to here its records are known."""
    sealed: bool = False
    num_readers: int = 0
    is_gone: bool = False


class _Folder:
    """One target's folder, read only."""

    def __init__(self, path: Path) -> None:
        self._files = DiskFiles(path, create=False)
        self._cached = CachedFiles(path, create=False)
        self._counting = threading.Lock()
        """Of readers; never held while a drive is read."""
        self._table = self._files.open(TABLE_NAME)
        self._segments: dict[int, _Segment] = {}
        self._index: dict[int, int] = {}

    def files(self, waits: bool) -> Files:
        return self._files if waits else self._cached

    def find(self, key: ShardKey) -> tuple[_Segment, int] | None:
        """Segment and offset, from memory."""
        location = self._index.get(key.fingerprint)
        if location is None:
            return None
        generation, page = unpack_location(location)
        segment = self._segments.get(generation)
        return None if segment is None else (segment, page * PAGE_BYTES)

    def is_live(self, segment: _Segment, files: Files) -> bool:
        return is_live_entry(files, self._table, segment.identity.slot, segment.identity.generation)

    def read_header(
        self, segment: _Segment, offset: int, key: ShardKey, files: Files
    ) -> tuple[bytes, RecordHeader]:
        packed, dropped = read_packed_header(files, segment.file, offset)
        header = parse_header(packed)
        if dropped or key_of(header) != key or header.generation != segment.identity.generation:
            raise ExtentAbsent("no such shard", code="store.absent")
        return bytes(packed), header

    def refresh(self) -> None:
        """Find new segments and records; forget segments that are gone."""
        names = {name for name in self._files.names() if is_segment_name(name)}
        gone = [segment for segment in self._segments.values() if segment.identity.name not in names]
        for segment in gone:
            del self._segments[segment.identity.generation]
            self._forget(segment)
        if gone:
            self._index = {
                fingerprint: location
                for fingerprint, location in self._index.items()
                if unpack_location(location)[0] in self._segments
            }
        known = {segment.identity.name for segment in self._segments.values()}
        for name in names - known:
            segment = self._opened(name)
            if segment is not None:
                self._segments[segment.identity.generation] = segment
        for segment in sorted(self._segments.values(), key=lambda one: one.identity.generation):
            if not segment.sealed:
                self._catch_up(segment)

    def hold(self, segment: _Segment) -> None:
        with self._counting:
            segment.num_readers += 1

    def release(self, segment: _Segment) -> None:
        with self._counting:
            segment.num_readers -= 1
            self._close_unused(segment)

    def close(self) -> None:
        for segment in self._segments.values():
            self._forget(segment)
        self._segments.clear()
        self._files.close(self._table)
        self._files.close_folder()
        self._cached.close_folder()

    def _forget(self, segment: _Segment) -> None:
        with self._counting:
            segment.is_gone = True
            self._close_unused(segment)

    def _close_unused(self, segment: _Segment) -> None:
        if segment.is_gone and not segment.num_readers and segment.file >= 0:
            self._files.close(segment.file)
            segment.file = -1

    def _opened(self, name: str) -> _Segment | None:
        try:
            file = self._files.open(name)
        except FileNotFoundError:
            return None  # removed since the listing
        try:
            identity = read_segment_header(self._files, file)
        except DataError:
            self._files.close(file)
            return None  # just begun
        return _Segment(identity, file)

    def _catch_up(self, segment: _Segment) -> None:
        if segment.end_bytes == PAGE_BYTES:
            try:
                content = read_footer(self._files, segment.file, segment.identity)
            except DataError:
                pass  # still open
            else:
                segment.sealed = True
                first = pack_location(segment.identity.generation, 0)
                for fingerprint, page, _ in content.directory.tolist():
                    self._point(fingerprint, first + page)
                return
        for found in walk_headers(self._files, segment.file, segment.identity, segment.end_bytes):
            segment.end_bytes = found.offset + record_space(found.header.record_bytes)
            if not found.dropped:
                fingerprint, page, _ = directory_entry(found.header, found.offset)
                self._point(fingerprint, pack_location(segment.identity.generation, page))

    def _point(self, fingerprint: int, location: int) -> None:
        self._index[fingerprint] = max(location, self._index.get(fingerprint, 0))


class LocalRecord:
    """A record that was found and proved itself, inside a `with` of `LocalNodeReader.open_record`."""

    def __init__(
        self,
        folder: _Folder,
        segment: _Segment,
        offset: int,
        packed: bytes,
        header: RecordHeader,
        files: Files,
    ) -> None:
        self.packed_header = packed
        self.header = header
        self.generation = segment.identity.generation
        self._folder = folder
        self._segment = segment
        self._payload_offset = offset + header.header_bytes
        self._files = files

    def release(self) -> None:
        """Let the file be closed. For `LocalNodeReader`."""
        self._folder.release(self._segment)

    def read_ranges(self, ranges: Sequence[tuple[int, int]], view: memoryview) -> None:
        """Read payload ranges (offset, bytes), one after the other, into `view`, which has their size.

        Raises:
            ExtentAbsent: The segment went away meanwhile; what is in `view` is worth nothing.
            NodeRefused: The drive cannot read them.
            BlockingIOError: Only for who does not wait: the drive is needed.
        """
        done = 0
        try:
            for offset, num_bytes in ranges:
                part = view[done : done + num_bytes]
                got = self._files.read_into(self._segment.file, self._payload_offset + offset, part)
                if got < num_bytes:
                    raise NodeRefused("the record is cut off", code="store.io")
                done += num_bytes
            if not self._folder.is_live(self._segment, self._files):
                raise ExtentAbsent("its segment is gone", code="store.absent")
        except BlockingIOError:
            raise
        except OSError as error:
            raise NodeRefused(f"cannot read: {error.strerror}", code="store.io") from error


class LocalNodeReader:
    """Reads from the targets below a node's folder. Thread-safe.

    Args:
        path: The folder of one target, or of several in its subfolders (`StorageNodeInfo.path`).

    Raises:
        NodeRefused: There is no target.
    """

    def __init__(self, path: Path) -> None:
        self._lock = threading.Lock()
        self._folders: list[_Folder] = []
        try:
            inside = sorted(path.iterdir())
            paths = [path] if path / TABLE_NAME in inside else [one for one in inside if one.is_dir()]
            for one in paths:
                if (one / TABLE_NAME).exists():
                    self._folders.append(_Folder(one))
        except OSError as error:
            self.close()
            raise NodeRefused(f"cannot read {path}: {error.strerror}", code="store.io") from error
        if not self._folders:
            raise NodeRefused(f"no storage target in {path}", code="store.io")

    @contextmanager
    def open_record(self, key: ShardKey, *, waits: bool = True) -> Iterator[LocalRecord]:
        """Find a record and verify its header.

        Args:
            key: Of the shard.
            waits: Whether this and the record's reads may wait for a drive.

        Raises:
            ExtentAbsent: Not on this node, dropped or damaged.
            NodeRefused: The drive cannot read it.
            BlockingIOError: Only without `waits`: the drive is needed.
        """
        record = self._open(key) if waits else self._open_cached(key)
        try:
            yield record
        finally:
            record.release()

    def close(self) -> None:
        """Close all files; records that are open stay so."""
        with self._lock:
            for folder in self._folders:
                folder.close()
            self._folders = []

    def _open(self, key: ShardKey) -> LocalRecord:
        with self._lock:
            try:
                for refreshed in (False, True):
                    for folder in self._folders:
                        if refreshed:
                            folder.refresh()
                        record = self._known(folder, key, waits=True)
                        if record is not None:
                            return record
            except OSError as error:
                raise NodeRefused(f"cannot read: {error.strerror}", code="store.io") from error
        raise ExtentAbsent("no such shard", code="store.absent")

    def _open_cached(self, key: ShardKey) -> LocalRecord:
        if not self._lock.acquire(blocking=False):
            raise BlockingIOError("another thread may be waiting for the drive")
        try:
            for folder in self._folders:
                record = self._known(folder, key, waits=False)
                if record is not None:
                    return record
        except OSError as error:
            raise BlockingIOError(f"whoever may wait has to see to it: {error}") from error
        finally:
            self._lock.release()
        raise BlockingIOError("only the drive knows whether there is such a shard")

    def _known(self, folder: _Folder, key: ShardKey, *, waits: bool) -> LocalRecord | None:
        found = folder.find(key)
        if found is None:
            return None
        segment, offset = found
        files = folder.files(waits)
        try:
            packed, header = folder.read_header(segment, offset, key, files)
        except (DataError, ExtentAbsent):
            return None
        if not folder.is_live(segment, files):
            return None
        folder.hold(segment)
        return LocalRecord(folder, segment, offset, packed, header, files)
