"""Segment files: a header page, records one after the other, and once sealed a footer.

    page 0      magic, format, slot, generation, created, time to live, checksum
    records     each at a multiple of 4 KiB, stamped with the generation (`store.record`)
    footer      at a multiple of 4 KiB: directory sorted by fingerprint, zeros, tail in the last 64 bytes

A segment is appended to, sealed once and removed whole. A record is dropped by overwriting its magic, which a
scan can step over. Without a valid footer the records are found by a scan that ends at the first page
that is not a record of this generation: that is where an unsynced tail is cut off.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import xxhash

from millpond.core.errors import ChecksumMismatch, DataError, WireVersionMismatch
from millpond.core.units import KIB, align_up
from millpond.store.files import Files
from millpond.store.record import MAGIC as RECORD_MAGIC
from millpond.store.record import (
    MAX_HEADER_BYTES,
    RecordHeader,
    check_payload,
    parse_header,
    peek_header_bytes,
)

PAGE_BYTES = 4 * KIB
FORMAT = 1
DROPPED_MAGIC = b"MPXX"
"""Stands in the place of a dropped record's magic."""

_HEADER = struct.Struct("<4sHHIIQQQ")
_HEADER_MAGIC = b"MPSG"
_TAIL = struct.Struct("<4sHHIIQQQQ")
_TAIL_MAGIC = b"MPSF"
_TAIL_BYTES = 64
_CHECKSUM = struct.Struct("<Q")
_KEY = struct.Struct("<32sHBQ")
_DIGEST_BYTES = 32

DIRECTORY = np.dtype([("fingerprint", "<u8"), ("page", "<u4"), ("num_bytes", "<u4")])
"""One record: hash of its key, where it begins in pages, its length with header."""

Directory = npt.NDArray[Any]


class ShardKey(NamedTuple):
    """Name of one shard on a node."""

    digest: bytes
    num_blocks: int
    shard: int
    nonce: int

    @property
    def is_valid(self) -> bool:
        """Whether a record can have this key; fields from the wire may hold anything."""
        return (
            len(self.digest) == _DIGEST_BYTES
            and 0 < self.num_blocks < 1 << 16
            and 0 <= self.shard < 1 << 8
            and 0 <= self.nonce < 1 << 64
        )

    @property
    def fingerprint(self) -> int:
        """64-bit hash. Two keys may share one: the record's header decides."""
        return xxhash.xxh3_64_intdigest(_KEY.pack(self.digest, self.num_blocks, self.shard, self.nonce))


def key_of(header: RecordHeader) -> ShardKey:
    """Key of the record with this header."""
    return ShardKey(header.extent.digest, header.num_blocks, header.shard, header.stripe.nonce)


@dataclass(frozen=True, slots=True)
class SegmentId:
    """Which segment a file is. A generation is never used twice on a target."""

    slot: int
    """Place in the target's generation table."""
    generation: int
    created_s: int
    ttl_s: int
    """How long after its last record the segment expires."""

    @property
    def name(self) -> str:
        """File name."""
        return f"{self.slot:06d}-{self.generation:016x}.seg"


@dataclass(frozen=True, slots=True)
class SealedContent:
    """What a footer says, or a scan found."""

    directory: Directory
    """Sorted by fingerprint."""
    newest_s: int
    """When the last record was added; 0 if a scan cannot know."""
    end_bytes: int
    """Where the records end."""


def is_segment_name(name: str) -> bool:
    """Whether a file is a segment."""
    return name.endswith(".seg")


def pack_segment_header(segment: SegmentId) -> bytes:
    """Page 0."""
    page = _HEADER.pack(
        *(_HEADER_MAGIC, FORMAT, 0, segment.slot, 0, segment.generation, segment.created_s, segment.ttl_s)
    ).ljust(PAGE_BYTES - _CHECKSUM.size, b"\0")
    return page + _CHECKSUM.pack(xxhash.xxh3_64_intdigest(page))


def parse_segment_header(page: bytes | bytearray) -> SegmentId:
    """Parse page 0.

    Raises:
        DataError: Not a segment, or damaged.
        WireVersionMismatch: A segment of another format.
    """
    if len(page) < PAGE_BYTES:
        raise DataError("segment is shorter than its header", code="segment.short")
    magic, version, _, slot, _, generation, created_s, ttl_s = _HEADER.unpack_from(page)
    body, expected = page[: PAGE_BYTES - _CHECKSUM.size], _CHECKSUM.unpack_from(page, PAGE_BYTES - 8)[0]
    if magic != _HEADER_MAGIC:
        raise DataError("not a segment", code="segment.magic")
    if version != FORMAT:
        raise WireVersionMismatch(f"segment format {version}, not {FORMAT}", code="segment.format")
    if xxhash.xxh3_64_intdigest(body) != expected:
        raise ChecksumMismatch("segment header is damaged", code="segment.checksum")
    return SegmentId(slot, generation, created_s, ttl_s)


def read_segment_header(files: Files, file: int) -> SegmentId:
    """Read and parse page 0.

    Raises:
        DataError: Not a segment, or damaged.
        WireVersionMismatch: A segment of another format.
        OSError: It cannot be read.
    """
    page = bytearray(PAGE_BYTES)
    got = files.read_into(file, 0, memoryview(page))
    return parse_segment_header(page[:got])


def check_record_format(files: Files, file: int) -> None:
    """Look at the first record of a segment, which was written by whoever wrote the others.

    Raises:
        WireVersionMismatch: It is of another format.
        OSError: It cannot be read.
    """
    try:
        read_packed_header(files, file, PAGE_BYTES)
    except WireVersionMismatch:
        raise
    except DataError:
        return  # none there, or damaged: the others may be whole


def pack_footer(segment: SegmentId, directory: Directory, newest_s: int, end_bytes: int) -> bytes:
    """Pack what goes behind the records, at `end_bytes`, a multiple of the page size."""
    entries = np.sort(directory, order="fingerprint").tobytes()
    size = align_up(len(entries) + _TAIL_BYTES, PAGE_BYTES)
    tail = _TAIL.pack(
        *(_TAIL_MAGIC, FORMAT, 0, len(directory), size, segment.generation, end_bytes, newest_s, 0)
    ).ljust(_TAIL_BYTES - _CHECKSUM.size, b"\0")
    body = entries.ljust(size - _TAIL_BYTES, b"\0") + tail
    return body + _CHECKSUM.pack(xxhash.xxh3_64_intdigest(body))


def read_footer(files: Files, file: int, segment: SegmentId) -> SealedContent:
    """Read the footer of a sealed segment.

    Raises:
        DataError: There is none of this generation, or it is damaged.
        OSError: It cannot be read.
    """
    file_bytes = files.size(file)
    tail = _read(files, file, file_bytes - _TAIL_BYTES, _TAIL_BYTES)
    magic, version, _, count, size, generation, end_bytes, newest_s, _ = _TAIL.unpack_from(tail)
    if magic != _TAIL_MAGIC or version != FORMAT or generation != segment.generation:
        raise DataError("segment has no footer", code="segment.open")
    if end_bytes + size != file_bytes or count * DIRECTORY.itemsize > size - _TAIL_BYTES:
        raise DataError("footer does not fit its segment", code="segment.footer")
    footer = _read(files, file, end_bytes, size)
    if xxhash.xxh3_64_intdigest(memoryview(footer)[:-8]) != _CHECKSUM.unpack_from(footer, size - 8)[0]:
        raise ChecksumMismatch("footer is damaged", code="segment.checksum")
    directory = np.frombuffer(footer, DIRECTORY, count)
    return SealedContent(directory, newest_s, end_bytes)


def scan_records(files: Files, file: int, segment: SegmentId) -> SealedContent:
    """Find the records of a segment without footer, reading all of it.

    Records with a damaged payload and dropped ones are left out.

    Raises:
        OSError: It cannot be read.
    """
    entries: list[tuple[int, int, int]] = []
    end = PAGE_BYTES
    for record in walk_headers(files, file, segment, end):
        end = align_up(record.offset + record.header.record_bytes, PAGE_BYTES)
        if not record.dropped and _payload_is_whole(files, file, record):
            entries.append(directory_entry(record.header, record.offset))
    return SealedContent(as_directory(entries), 0, end)


class FoundRecord(NamedTuple):
    """A header met by a scan."""

    header: RecordHeader
    offset: int
    dropped: bool


def walk_headers(files: Files, file: int, segment: SegmentId, offset: int) -> Iterator[FoundRecord]:
    """Headers of the records from `offset` on, dropped ones included; payloads are not looked at."""
    while True:
        try:
            header, dropped = read_record_header(files, file, offset)
        except DataError:
            return
        if header.generation != segment.generation:
            return
        yield FoundRecord(header, offset, dropped)
        offset = align_up(offset + header.record_bytes, PAGE_BYTES)


def read_record_header(files: Files, file: int, offset: int) -> tuple[RecordHeader, bool]:
    """Header of the record at `offset`, and whether it was dropped.

    Raises:
        DataError: There is no valid one.
        OSError: It cannot be read.
    """
    packed, dropped = read_packed_header(files, file, offset)
    return parse_header(packed), dropped


def read_packed_header(files: Files, file: int, offset: int) -> tuple[bytearray, bool]:
    """Read the header at `offset` without verifying it; `(header, dropped)` as in `read_record_header`.

    Raises:
        DataError: No header begins there.
        OSError: It cannot be read.
    """
    data = _read(files, file, offset, PAGE_BYTES)
    dropped = data[:4] == DROPPED_MAGIC
    if dropped:
        data[:4] = RECORD_MAGIC
    size = peek_header_bytes(data)
    if size > PAGE_BYTES:
        data += _read(files, file, offset + PAGE_BYTES, min(size, MAX_HEADER_BYTES) - PAGE_BYTES)
    return data, dropped


def directory_entry(header: RecordHeader, offset: int) -> tuple[int, int, int]:
    """Entry of a record that begins at `offset`."""
    return key_of(header).fingerprint, offset // PAGE_BYTES, header.record_bytes


def as_directory(entries: list[tuple[int, int, int]]) -> Directory:
    """Directory of these entries, sorted."""
    return np.sort(np.array(entries, DIRECTORY), order="fingerprint")


def _payload_is_whole(files: Files, file: int, record: FoundRecord) -> bool:
    try:
        payload = _read(files, file, record.offset + record.header.header_bytes, record.header.payload_bytes)
        check_payload(record.header, payload)
    except DataError:
        return False
    return True


def _read(files: Files, file: int, offset: int, num_bytes: int) -> bytearray:
    if offset < 0:
        raise DataError("file is too short", code="segment.short")
    data = bytearray(num_bytes)
    if files.read_into(file, offset, memoryview(data)) < num_bytes:
        raise DataError("file ends early", code="segment.short")
    return data
