"""Records: one shard on disk and on the wire, with a header that proves what it is (interfaces A.3).

    header, padded to a multiple of 4 KiB | payload: row after row, of each row `num_blocks` columns

The header names the extent, its blocks and its stripe, and carries checksums of the payload in groups of
columns, so that a reader of some rows or columns can verify what it read without reading the rest. Whatever
the bytes are, parsing gives either exactly the header that was packed or a `DataError`.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from millpond.core.errors import ChecksumMismatch, DataError, InvariantBroken, WireVersionMismatch
from millpond.core.extents import COLUMN_ALIGN_BYTES, ExtentId, StripeId, StripeShape
from millpond.core.units import KIB, align_up
from millpond.store.codec.checksum import checksum
from millpond.store.payload import PayloadShape, RowPiece, payload_shape

MAGIC = b"MPEX"
FORMAT = 1
CAUCHY_MATRIX = 1
"""Id of the coding matrix of `store.codec.gf256.coding_matrix`."""

RECORD_ALIGN_BYTES = 4 * KIB
MAX_HEADER_BYTES = 60 * KIB
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
_SHARD_AT = struct.calcsize("<4sHHBBB")
_GENERATION_AT = struct.calcsize("<4sHHBBBB")
_GENERATION = struct.Struct("<Q")
_ROW = struct.Struct("<III")
_CHECKSUM = struct.Struct("<Q")
_HASH_BYTES = 16


@dataclass(frozen=True)
class RecordHeader:
    """Header of one shard's record."""

    extent: ExtentId
    stripe: StripeId
    """Epoch and group say where the other shards are; only the nonce tells stripes apart."""
    shard: int
    shape: PayloadShape
    """Of every record of the stripe."""
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

    @property
    def payload_bytes(self) -> int:
        """Bytes after the header."""
        return self.shape.payload_bytes

    @property
    def header_bytes(self) -> int:
        """Bytes of the packed header, a multiple of 4 KiB."""
        return header_size(self.shape)

    @property
    def record_bytes(self) -> int:
        """Header and payload, without the padding up to the next record."""
        return self.header_bytes + self.payload_bytes

    @property
    def shared(self) -> tuple[object, ...]:
        """Everything that the records of one stripe have in common."""
        return (
            self.extent,
            self.stripe,
            self.shape,
            self.matrix,
            self.parent,
            self.root,
            self.first_block,
            self.hashes,
            self.layout,
            self.tenant,
            self.lineage,
            self.created_s,
            self.expiry_class,
        )

    def checks_of(self, begin_row: int, end_row: int, num_columns: int) -> tuple[int, ...]:
        """Checksums of rows `[begin_row, end_row)`, of each the first `readable_columns`, in order."""
        firsts, shape = self.shape.first_checks, self.shape.narrowed(num_columns)
        if shape is self.shape:
            return self.checks[firsts[begin_row] : firsts[end_row]]
        counts = ((firsts[row], shape.rows[row].num_checks) for row in range(begin_row, end_row))
        return tuple(check for first, count in counts for check in self.checks[first : first + count])

    def check_fits(self, shape: StripeShape) -> None:
        """Check that the record is one shard of a stripe of this shape.

        Raises:
            DataError: Another layout or other sizes.
        """
        if self.layout != shape.layout_id or self.shape != payload_shape(shape):
            raise DataError("shard of another layout or code", code="record.shape")


def header_size(shape: PayloadShape) -> int:
    """Bytes of the header of a record of this shape, a multiple of 4 KiB."""
    return _header_size(shape.num_blocks, len(shape.rows), shape.num_checks)


def _header_size(num_blocks: int, num_rows: int, num_checks: int) -> int:
    used = _FIXED.size + _HASH_BYTES * num_blocks + _ROW.size * num_rows + _CHECKSUM.size * (num_checks + 1)
    return align_up(used, RECORD_ALIGN_BYTES)


def pack_header(header: RecordHeader) -> bytes:
    """Pack a header, its own checksum in the last 8 bytes.

    Raises:
        InvariantBroken: The fields do not fit together or exceed the format.
    """
    size = header.header_bytes
    stripe, extent, shape = header.stripe, header.extent, header.shape
    fits = len(header.hashes) == _HASH_BYTES * extent.num_blocks and len(header.checks) == shape.num_checks
    if size > MAX_HEADER_BYTES or not fits or shape.num_blocks != extent.num_blocks:
        raise InvariantBroken(
            f"header of {size} bytes, {extent.num_blocks} blocks, {len(header.checks)} checks"
        )
    try:
        fixed = _FIXED.pack(
            MAGIC,
            FORMAT,
            size,
            shape.k,
            shape.m,
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
            len(shape.rows),
            len(header.checks),
            0,
            header.payload_bytes,
        )
        checks = struct.pack(f"<{len(header.checks)}Q", *header.checks)
    except struct.error as error:
        raise InvariantBroken(f"header field out of range: {error}") from error
    rows = b"".join(_ROW.pack(*row) for row in shape.rows)
    body = (fixed + header.hashes + rows + checks).ljust(size - _CHECKSUM.size, b"\0")
    return body + _CHECKSUM.pack(checksum(body))


def pack_headers(headers: Sequence[RecordHeader]) -> list[bytes]:
    """Pack the headers of one stripe; what they share is packed once."""
    model = bytearray(pack_header(headers[0]))
    body_end = len(model) - _CHECKSUM.size
    checks = struct.Struct(f"<{headers[0].shape.num_checks}Q")
    checks_at = _FIXED.size + len(headers[0].hashes) + _ROW.size * len(headers[0].shape.rows)
    packed: list[bytes] = []
    for header in headers:
        model[_SHARD_AT] = header.shard
        checks.pack_into(model, checks_at, *header.checks)
        _CHECKSUM.pack_into(model, body_end, checksum(memoryview(model)[:body_end]))
        packed.append(bytes(model))
    return packed


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
    if size != _header_size(num_blocks, num_rows, num_checks) or zero_a or zero_b:
        raise DataError("record header of a wrong size", code="record.size")
    if not num_blocks or not num_rows or not k or shard >= k + m or matrix != CAUCHY_MATRIX:
        raise DataError(f"shard {shard} of {k}+{m}, {num_blocks} blocks", code="record.fields")
    rows_at = _FIXED.size + _HASH_BYTES * num_blocks
    checks_at = rows_at + _ROW.size * num_rows
    hashes = bytes(view[_FIXED.size : rows_at])
    if hashes[-_HASH_BYTES:] != digest[:_HASH_BYTES]:
        raise DataError("last hash is not that of the extent", code="record.fields")
    shape = _parse_shape(k, m, num_blocks, num_checks, bytes(view[rows_at:checks_at]))
    if shape.payload_bytes != payload_bytes:
        raise DataError("rows and payload differ in size", code="record.rows")
    used_end = checks_at + _CHECKSUM.size * num_checks
    if bytes(view[used_end:body_end]).strip(b"\0"):
        raise DataError("record header is not padded with zeros", code="record.fields")
    return RecordHeader(
        extent=ExtentId(digest, num_blocks),
        stripe=StripeId(epoch, group, nonce),
        shard=shard,
        shape=shape,
        parent=parent,
        root=root,
        first_block=first_block,
        hashes=hashes,
        layout=layout,
        checks=struct.unpack_from(f"<{num_checks}Q", data, checks_at),
        tenant=tenant,
        lineage=lineage,
        created_s=created_s,
        expiry_class=expiry_class,
        generation=generation,
        matrix=matrix,
    )


@lru_cache(maxsize=1024)
def _parse_shape(k: int, m: int, num_blocks: int, num_checks: int, table: bytes) -> PayloadShape:
    """Parse and check a row table. Cached: the records of one layout and length have the same."""
    rows = tuple(RowPiece(*fields) for fields in _ROW.iter_unpack(table))
    offset = 0
    for row in rows:
        column, rest = divmod(row.num_bytes, num_blocks)
        if row.offset != offset or rest or not column or column % COLUMN_ALIGN_BYTES:
            raise DataError("rows of a record do not follow each other", code="record.rows")
        columns, rest = divmod(row.check_bytes, column)
        is_group = columns == num_blocks or (0 < columns < num_blocks and columns & (columns - 1) == 0)
        if rest or not is_group:
            raise DataError("checksum groups of a record cut columns", code="record.rows")
        offset += row.num_bytes
    shape = PayloadShape(k, m, num_blocks, rows)
    if shape.num_checks != num_checks:
        raise DataError("checksums of a record do not cover it", code="record.rows")
    return shape


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
    check_rows(header, payload, 0, len(header.shape.rows), header.num_blocks)


def check_rows(header: RecordHeader, data: Bytes, begin_row: int, end_row: int, num_columns: int) -> None:
    """Verify what `PayloadShape.read_ranges` of the same arguments gives, one range after the other.

    Raises:
        ChecksumMismatch: Some byte differs, or the size does.
        DataError: No such rows or columns.
    """
    ranges = header.shape.read_ranges(begin_row, end_row, num_columns)
    if len(data) != sum(size for _, size in ranges):
        raise ChecksumMismatch(f"{len(data)} bytes of rows", code="record.payload")
    spans = header.shape.narrowed(num_columns).spans(begin_row, end_row)
    view, base = memoryview(data), spans[0][0]
    for (begin, end), check in zip(spans, header.checks_of(begin_row, end_row, num_columns), strict=True):
        if checksum(view[begin - base : end - base]) != check:
            raise ChecksumMismatch(f"shard {header.shard} is damaged", code="record.payload")
