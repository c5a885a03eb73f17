"""`LiveSegment`: a segment file in use, with the records in it and the readers that keep it open."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from types import TracebackType
from typing import Self

import numpy as np

from millpond.core.errors import ExtentAbsent, NodeRefused
from millpond.core.units import align_up
from millpond.store.files import Files
from millpond.store.record import RecordHeader
from millpond.store.segment import DIRECTORY, PAGE_BYTES, Directory, SealedContent, SegmentId, as_directory

_PAGE_BITS = 24


def pack_location(generation: int, page: int) -> int:
    """Where a record lies on a target, as one number that grows with time."""
    return generation << _PAGE_BITS | page


def unpack_location(location: int) -> tuple[int, int]:
    """`(generation, page)`."""
    return location >> _PAGE_BITS, location & (1 << _PAGE_BITS) - 1


class LiveSegment:
    """A segment of a target. Changed under the target's lock, but for the count of readers.

    Args:
        files: The target's folder.
        file: The open file; closed when the segment is retired and nobody reads it.
        identity: Slot, generation, time to live.
    """

    def __init__(self, files: Files, file: int, identity: SegmentId) -> None:
        self.identity = identity
        self.file = file
        self.end_bytes = PAGE_BYTES
        """Where the next record goes."""
        self.newest_s = identity.created_s
        self.sealed = False
        self.name_synced = False
        self.last_read_s: dict[int, int] = {}
        """Page of a record -> when it was read last."""
        self._files = files
        self._added: list[tuple[int, int, int]] = []
        self._directory: Directory = np.empty(0, DIRECTORY)
        self._lock = threading.Lock()
        self._readers = 0
        self._retired = False

    @property
    def generation(self) -> int:
        """Generation."""
        return self.identity.generation

    @property
    def num_records(self) -> int:
        """Records added or found."""
        return len(self._added) + len(self._directory)

    def load(self, content: SealedContent, newest_s: int) -> None:
        """Take over what the disk held."""
        self._directory = content.directory
        self.end_bytes = content.end_bytes
        self.newest_s = newest_s
        self.name_synced = True

    def add(self, entry: tuple[int, int, int], now_s: int) -> int:
        """Count a record that was written at `end_bytes`; its location."""
        _, page, num_bytes = entry
        self._added.append(entry)
        self.end_bytes = align_up(page * PAGE_BYTES + num_bytes, PAGE_BYTES)
        self.newest_s = max(self.newest_s, now_s)
        return pack_location(self.generation, page)

    def directory(self) -> Directory:
        """All records, sorted by fingerprint."""
        if self._added:
            self._directory = np.sort(
                np.concatenate([self._directory, as_directory(self._added)]), order="fingerprint"
            )
            self._added = []
        return self._directory

    def pin(self) -> Self:
        """Keep the file open; use as a context manager.

        Raises:
            ExtentAbsent: The segment is gone.
        """
        with self._lock:
            if self._retired:
                raise ExtentAbsent("its segment is gone", code="store.absent")
            self._readers += 1
        return self

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.unpin()

    def unpin(self) -> None:
        """End a `pin`."""
        with self._lock:
            self._readers -= 1
            self._close_if_unused()

    @property
    def retired(self) -> bool:
        """Whether the segment is gone."""
        return self._retired

    def retire(self) -> None:
        """Close the file now or when the last reader is done."""
        with self._lock:
            self._retired = True
            self._close_if_unused()

    def _close_if_unused(self) -> None:
        if self._retired and not self._readers and self.file >= 0:
            self._files.close(self.file)
            self.file = -1


class OpenRecord:
    """A record that was found and proved itself; its file stays open inside a `with`.

    The file of a removed segment stays readable and unchanged, so that no later check of the generation is
    needed: what is read here belongs to the header.
    """

    def __init__(
        self, files: Files, segment: LiveSegment, offset: int, packed: bytes, header: RecordHeader
    ) -> None:
        self._files = files
        self._segment = segment
        self.packed_header = packed
        self.header = header
        self.payload_offset = offset + header.header_bytes

    @property
    def generation(self) -> int:
        """Of its segment."""
        return self._segment.generation

    def read_ranges(self, ranges: Sequence[tuple[int, int]], view: memoryview) -> None:
        """Read payload ranges (offset, bytes), one after the other, into `view`, which has their size.

        Raises:
            NodeRefused: The drive cannot read them.
        """
        done = 0
        for offset, num_bytes in ranges:
            part = view[done : done + num_bytes]
            try:
                got = self._files.read_into(self._segment.file, self.payload_offset + offset, part)
            except OSError as error:
                raise NodeRefused(f"cannot read: {error.strerror}", code="store.io") from error
            if got < num_bytes:
                raise NodeRefused("the record is cut off", code="store.io")
            done += num_bytes

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._segment.unpin()
