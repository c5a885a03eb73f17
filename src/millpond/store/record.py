"""Records: one shard on disk and on the wire, with a header that proves what it is (interfaces A.3).

    header, padded to a multiple of 4 KiB | payload: row after row, of each row `num_blocks` columns

The header names the extent, its blocks and its stripe, and carries checksums of the payload in groups of
columns, so that a reader of some rows or columns can verify what it read without reading the rest. Whatever
the bytes are, parsing gives either exactly the header that was packed or a `DataError`.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import NamedTuple

import xxhash

from millpond.core.errors import ChecksumMismatch, DataError, InvariantBroken, WireVersionMismatch
from millpond.core.extents import COLUMN_ALIGN_BYTES, ExtentId, StripeId, StripeShape
from millpond.core.units import KIB, align_up, ceil_div

MAGIC = b"MPEX"
FORMAT = 1
CAUCHY_MATRIX = 1
"""Id of the coding matrix of `store.codec.gf256.coding_matrix`."""

RECORD_ALIGN_BYTES = 4 * KIB
MAX_HEADER_BYTES = 60 * KIB
CHECK_MIN_BYTES = 16 * KIB
"""Smaller pieces would cost more in calls than in hashing."""

Bytes = bytes | bytearray | memoryview

_PREFIX = struct.Struct("<4sHH")
_FIXED = struct.Struct(
    "<4sHH"  # magic, format, header bytes
    "BBBB"  # k, m, matrix, shard
    "QQIHBB"  # generation; stripe: nonce, group, epoch; blocks, lineage
    "32s32s16s16s"  # digest, parent, root, layout fingerprint
    "QIIBBHHH"  # created, tenant, first block, expiry class, 0, rows, checks, 0
    "I"  # payload bytes
)
_GENERATION_AT = struct.calcsize("<4sHHBBBB")
_GENERATION = struct.Struct("<Q")
_ROW = struct.Struct("<III")
_CHECKSUM = struct.Struct("<Q")
_HASH_BYTES = 16

checksum = xxhash.xxh3_64_intdigest
"""Checksum of our own bytes: xxh3, 64 bits."""


class RowPiece(NamedTuple):
    """Where the columns of one row lie in the payload."""

    offset: int
    num_bytes: int
    check_bytes: int
    """Bytes under one checksum, a whole number of columns; the last group may be shorter."""

    @property
    def num_checks(self) -> int:
        """Checksums of the row."""
        return ceil_div(self.num_bytes, self.check_bytes)


@dataclass(frozen=True)
class RecordHeader:
    """Header of one shard's record."""

    extent: ExtentId
    stripe: StripeId
    """Epoch and group say where the other shards are; only the nonce tells stripes apart."""
    shard: int
    k: int
    m: int
    parent: bytes
    """32-byte digest before the first block."""
    root: bytes
    """First 16 bytes of the root digest: the key domain."""
    first_block: int
    """Index in the chain of the first block."""
    hashes: bytes
    """16-byte hashes of all blocks, one after the other."""
    layout: bytes
    """First 16 bytes of the layout's fingerprint."""
    rows: tuple[RowPiece, ...]
    checks: tuple[int, ...]
    """Checksums in the order of the payload."""
    tenant: int = 0
    lineage: int = 0
    created_s: int = 0
    expiry_class: int = 0
    generation: int = 0
    """Of the segment; stamped by the node (`stamp_generation`)."""
    matrix: int = CAUCHY_MATRIX

    @property
    def num_blocks(self) -> int:
        """Blocks of the extent."""
        return self.extent.num_blocks

    @cached_property
    def payload_bytes(self) -> int:
        """Bytes after the header."""
        return sum(row.num_bytes for row in self.rows)

    @cached_property
    def header_bytes(self) -> int:
        """Bytes of the packed header, a multiple of 4 KiB."""
        return header_size(self.num_blocks, len(self.rows), len(self.checks))

    @property
    def record_bytes(self) -> int:
        """Header and payload, without the padding up to the next record."""
        return self.header_bytes + self.payload_bytes

    @cached_property
    def column_step(self) -> int:
        """Reads of columns are rounded up to a multiple of this, or to all: what can be verified."""
        return max(row.check_bytes * self.num_blocks // row.num_bytes for row in self.rows)

    @cached_property
    def first_checks(self) -> tuple[int, ...]:
        """Per row: index in `checks` of its first checksum."""
        firsts = [0]
        for row in self.rows:
            firsts.append(firsts[-1] + row.num_checks)
        return tuple(firsts)

    @property
    def shared(self) -> tuple[object, ...]:
        """Everything that the records of one stripe have in common."""
        return (
            self.extent,
            self.stripe,
            self.k,
            self.m,
            self.matrix,
            self.parent,
            self.root,
            self.first_block,
            self.hashes,
            self.layout,
            self.rows,
            self.tenant,
            self.lineage,
            self.created_s,
            self.expiry_class,
        )

    def readable_columns(self, num_columns: int) -> int:
        """Columns that a read of the first `num_columns` >= 1 gives: rounded up to what can be verified."""
        return min(self.num_blocks, align_up(num_columns, self.column_step))

    def read_ranges(self, begin_row: int, end_row: int, num_columns: int) -> list[tuple[int, int]]:
        """Payload ranges (offset, bytes) of rows `[begin_row, end_row)`, of each `readable_columns`.

        One after the other they are those rows of the payload of a stripe with that many blocks. Ranges
        that touch are merged.

        Raises:
            DataError: No such rows or columns.
        """
        if not 0 <= begin_row < end_row <= len(self.rows) or not 1 <= num_columns <= self.num_blocks:
            raise DataError(
                f"rows [{begin_row}, {end_row}) x {num_columns} columns of a record of "
                f"{len(self.rows)} rows x {self.num_blocks} columns",
                code="record.range",
            )
        columns = self.readable_columns(num_columns)
        rows = self.rows[begin_row:end_row]
        if columns == self.num_blocks:
            return [(rows[0].offset, rows[-1].offset + rows[-1].num_bytes - rows[0].offset)]
        return [(row.offset, row.num_bytes // self.num_blocks * columns) for row in rows]

    def check_fits(self, shape: StripeShape) -> None:
        """Check that the record is one shard of a stripe of this shape.

        Raises:
            DataError: Another layout or other sizes.
        """
        if (self.k, self.m) != (shape.k, shape.m):
            raise DataError(f"shard of {self.k}+{self.m}, not {shape.k}+{shape.m}", code="record.shape")
        if self.layout != shape.layout_id:
            raise DataError("shard of another layout", code="record.shape")
        if self.rows != row_table(shape):
            raise DataError("shard with other rows than its layout has", code="record.shape")


@lru_cache(maxsize=256)
def row_table(shape: StripeShape) -> tuple[RowPiece, ...]:
    """Rows of a shard's payload with their checksum groups.

    A group is the smallest power of two of columns with at least 16 KiB, or the whole row.
    """
    pieces: list[RowPiece] = []
    for offset, column in zip(shape.row_offsets, shape.column_bytes, strict=False):
        columns = 1
        while columns < shape.num_blocks and columns * column < CHECK_MIN_BYTES:
            columns *= 2
        columns = min(columns, shape.num_blocks)
        pieces.append(RowPiece(offset, column * shape.num_blocks, column * columns))
    return tuple(pieces)


def header_size(num_blocks: int, num_rows: int, num_checks: int) -> int:
    """Bytes of a packed header, a multiple of 4 KiB."""
    used = _FIXED.size + _HASH_BYTES * num_blocks + _ROW.size * num_rows + _CHECKSUM.size * (num_checks + 1)
    return align_up(used, RECORD_ALIGN_BYTES)


def shape_header_bytes(shape: StripeShape) -> int:
    """Bytes of the header of a shard of this shape."""
    rows = row_table(shape)
    return header_size(shape.num_blocks, len(rows), sum(row.num_checks for row in rows))


def pack_header(header: RecordHeader) -> bytes:
    """Pack a header, its own checksum in the last 8 bytes.

    Raises:
        InvariantBroken: The fields do not fit together or exceed the format.
    """
    size = header.header_bytes
    if size > MAX_HEADER_BYTES or len(header.hashes) != _HASH_BYTES * header.num_blocks:
        raise InvariantBroken(f"header of {size} bytes with {len(header.hashes)} bytes of hashes")
    stripe, extent = header.stripe, header.extent
    try:
        fixed = _FIXED.pack(
            MAGIC,
            FORMAT,
            size,
            header.k,
            header.m,
            header.matrix,
            header.shard,
            header.generation,
            stripe.nonce,
            stripe.group,
            stripe.epoch,
            extent.num_blocks,
            header.lineage,
            extent.digest,
            header.parent,
            header.root,
            header.layout,
            header.created_s,
            header.tenant,
            header.first_block,
            header.expiry_class,
            0,
            len(header.rows),
            len(header.checks),
            0,
            header.payload_bytes,
        )
        checks = struct.pack(f"<{len(header.checks)}Q", *header.checks)
    except struct.error as error:
        raise InvariantBroken(f"header field out of range: {error}") from error
    rows = b"".join(_ROW.pack(*row) for row in header.rows)
    body = (fixed + header.hashes + rows + checks).ljust(size - _CHECKSUM.size, b"\0")
    return body + _CHECKSUM.pack(checksum(body))


def peek_header_bytes(data: Bytes) -> int:
    """Size of the header that begins with these bytes; at least 8 of them.

    Raises:
        DataError: No record begins here, or one of another format (`WireVersionMismatch`).
    """
    if len(data) < _PREFIX.size:
        raise DataError(f"record cut off after {len(data)} bytes", code="record.short")
    magic, version, size = _PREFIX.unpack_from(data)
    if magic != MAGIC:
        raise DataError("no record begins here", code="record.magic")
    if version != FORMAT:
        raise WireVersionMismatch(f"record format {version}, expected {FORMAT}", code="record.format")
    if not RECORD_ALIGN_BYTES <= size <= MAX_HEADER_BYTES or size % RECORD_ALIGN_BYTES:
        raise DataError(f"record header of {size} bytes", code="record.size")
    return size


def parse_header(data: Bytes) -> RecordHeader:
    """Parse and verify the header at the start of `data`; more may follow.

    Raises:
        DataError: Not a record, cut off, of another format (`WireVersionMismatch`), damaged
            (`ChecksumMismatch`) or inconsistent.
    """
    size = peek_header_bytes(data)
    if len(data) < size:
        raise DataError(f"record header of {size} bytes cut off after {len(data)}", code="record.short")
    view = memoryview(data)
    body_end = size - _CHECKSUM.size
    if checksum(view[:body_end]) != _CHECKSUM.unpack_from(data, body_end)[0]:
        raise ChecksumMismatch("record header is damaged", code="record.checksum")
    # A valid checksum does not make the content ours: whoever writes to the port can compute it too.
    (
        _magic,
        _version,
        _size,
        k,
        m,
        matrix,
        shard,
        generation,
        nonce,
        group,
        epoch,
        num_blocks,
        lineage,
        digest,
        parent,
        root,
        layout,
        created_s,
        tenant,
        first_block,
        expiry_class,
        zero_a,
        num_rows,
        num_checks,
        zero_b,
        payload_bytes,
    ) = _FIXED.unpack_from(data)
    if size != header_size(num_blocks, num_rows, num_checks) or zero_a or zero_b:
        raise DataError("record header of a wrong size", code="record.size")
    if not num_blocks or not num_rows or not k or shard >= k + m or matrix != CAUCHY_MATRIX:
        raise DataError(f"shard {shard} of {k}+{m}, {num_blocks} blocks", code="record.fields")
    rows_at = _FIXED.size + _HASH_BYTES * num_blocks
    checks_at = rows_at + _ROW.size * num_rows
    hashes = bytes(view[_FIXED.size : rows_at])
    if hashes[-_HASH_BYTES:] != digest[:_HASH_BYTES]:
        raise DataError("last hash is not that of the extent", code="record.fields")
    rows = _parse_rows(bytes(view[rows_at:checks_at]), num_blocks, num_checks)
    if rows[-1].offset + rows[-1].num_bytes != payload_bytes:
        raise DataError("rows and payload differ in size", code="record.rows")
    used_end = checks_at + _CHECKSUM.size * num_checks
    if bytes(view[used_end:body_end]).strip(b"\0"):
        raise DataError("record header is not padded with zeros", code="record.fields")
    return RecordHeader(
        extent=ExtentId(digest, num_blocks),
        stripe=StripeId(epoch, group, nonce),
        shard=shard,
        k=k,
        m=m,
        parent=parent,
        root=root,
        first_block=first_block,
        hashes=hashes,
        layout=layout,
        rows=rows,
        checks=struct.unpack_from(f"<{num_checks}Q", data, checks_at),
        tenant=tenant,
        lineage=lineage,
        created_s=created_s,
        expiry_class=expiry_class,
        generation=generation,
        matrix=matrix,
    )


@lru_cache(maxsize=1024)
def _parse_rows(table: bytes, num_blocks: int, num_checks: int) -> tuple[RowPiece, ...]:
    """Parse and check a row table. Cached: the records of one layout and length have the same."""
    rows = tuple(RowPiece(*fields) for fields in _ROW.iter_unpack(table))
    offset = 0
    checks = 0
    for row in rows:
        column, rest = divmod(row.num_bytes, num_blocks)
        if row.offset != offset or rest or not column or column % COLUMN_ALIGN_BYTES:
            raise DataError("rows of a record do not follow each other", code="record.rows")
        if not column <= row.check_bytes <= row.num_bytes or row.check_bytes % column:
            raise DataError("checksum groups of a record cut columns", code="record.rows")
        offset += row.num_bytes
        checks += row.num_checks
    # Groups are powers of two of columns, so the largest is a multiple of every other one.
    if checks != num_checks or any(not _is_group(row, num_blocks) for row in rows):
        raise DataError("checksum groups of a record do not cover it", code="record.rows")
    return rows


def _is_group(row: RowPiece, num_blocks: int) -> bool:
    columns = row.check_bytes * num_blocks // row.num_bytes
    return columns == num_blocks or columns & (columns - 1) == 0


def stamp_generation(header: Bytes, generation: int) -> bytes:
    """Return the packed header with the segment's generation in it; `header` was verified before."""
    body = bytearray(header[: peek_header_bytes(header) - _CHECKSUM.size])
    _GENERATION.pack_into(body, _GENERATION_AT, generation)
    return bytes(body) + _CHECKSUM.pack(checksum(body))


def check_payload(header: RecordHeader, payload: Bytes) -> None:
    """Verify a whole payload.

    Raises:
        ChecksumMismatch: Some byte differs, or the size does.
    """
    if len(payload) != header.payload_bytes:
        raise ChecksumMismatch(
            f"payload of {len(payload)} bytes, expected {header.payload_bytes}", code="record.payload"
        )
    check_rows(header, payload, 0, len(header.rows), header.num_blocks)


def check_rows(header: RecordHeader, pieces: Bytes, begin_row: int, end_row: int, num_columns: int) -> None:
    """Verify what `read_ranges` of the same arguments delivers, one range after the other.

    Raises:
        ChecksumMismatch: Some byte differs, or the size does.
        DataError: No such rows or columns.
    """
    ranges = header.read_ranges(begin_row, end_row, num_columns)
    if len(pieces) != sum(size for _, size in ranges):
        raise ChecksumMismatch(f"{len(pieces)} bytes of rows", code="record.payload")
    view = memoryview(pieces)
    columns = header.readable_columns(num_columns)
    row_begin = 0
    for index in range(begin_row, end_row):
        row = header.rows[index]
        row_end = row_begin + row.num_bytes // header.num_blocks * columns
        check = header.first_checks[index]
        for begin in range(row_begin, row_end, row.check_bytes):
            if checksum(view[begin : min(begin + row.check_bytes, row_end)]) != header.checks[check]:
                raise ChecksumMismatch(
                    f"row {index} of shard {header.shard} is damaged", code="record.payload"
                )
            check += 1
        row_begin = row_end
