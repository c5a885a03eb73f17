"""Blocks of an extent <-> records of its stripe, in place in a `StripeBuffer`.

A writer gathers blocks into the buffer, encodes, and sends the records from where they are. A reader receives
payloads where they belong, verifies them and rebuilds missing shards in place. What it then has of a row is a
view `[blocks, shards, column]`; a consumer that copies the row anyway, as swap-in does, copies from the view
and so pays nothing for the cut into columns. `copy_rows_out` makes whole blocks for everyone else.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from millpond.core.errors import ExtentLost, InvalidRequest, InvariantBroken
from millpond.core.extents import ExtentId, StripeId, StripeShape
from millpond.store.cells import Block, gather_row, scatter_row
from millpond.store.codec.backend import checksums
from millpond.store.codec.reed_solomon import ReedSolomon
from millpond.store.payload import Piece, payload_shape
from millpond.store.record import RecordHeader, pack_header
from millpond.store.stripe_buffer import StripeBuffer


@dataclass(frozen=True, slots=True)
class ExtentMeta:
    """What an extent's records say besides the bytes of its blocks."""

    extent: ExtentId
    stripe: StripeId
    parent: bytes
    """32-byte digest before the first block."""
    root: bytes
    """First 16 bytes of the root digest."""
    first_block: int
    """Index in the chain of the first block."""
    hashes: bytes
    """16-byte hashes of all blocks, one after the other."""
    tenant: int = 0
    lineage: int = 0
    created_s: int = 0
    expiry_class: int = 0


def encode_extent(
    codec: ReedSolomon, shape: StripeShape, buffer: StripeBuffer, meta: ExtentMeta, blocks: Sequence[Block]
) -> list[RecordHeader]:
    """Make the records of an extent in `buffer`, tile by tile while the bytes are in the cache.

    Args:
        codec: Of the shape's k and m.
        shape: Of the extent.
        buffer: Of shape `payload_shape(shape)`; its former content is overwritten.
        meta: Names, written to each header.
        blocks: The extent's blocks in order, each `[block bytes]`, uint8.

    Returns:
        The headers, by shard; `buffer.record(shard)` is what to store.

    Raises:
        InvalidRequest: No blocks, or of another number or size than the shape's.
    """
    _check_blocks(shape, blocks)
    if meta.extent.num_blocks != shape.num_blocks or buffer.shape != payload_shape(shape):
        raise InvariantBroken(f"extent of {meta.extent.num_blocks} blocks, shape of {shape.num_blocks}")
    checks: list[list[int]] = [[] for _ in range(shape.num_shards)]
    for piece in buffer.shape.pieces(0, len(buffer.shape.rows)):
        if piece.group == 0:
            gather_row(shape, buffer, piece.row, blocks)
        for found, check in zip(checks, encode_piece(codec, buffer, piece), strict=True):
            found.append(check)
    headers = [
        RecordHeader(
            extent=meta.extent,
            stripe=meta.stripe,
            shard=shard,
            shape=buffer.shape,
            parent=meta.parent,
            root=meta.root,
            first_block=meta.first_block,
            hashes=meta.hashes,
            layout=shape.layout_id,
            checks=tuple(found),
            tenant=meta.tenant,
            lineage=meta.lineage,
            created_s=meta.created_s,
            expiry_class=meta.expiry_class,
        )
        for shard, found in enumerate(checks)
    ]
    for header in headers:
        _write_header(buffer, header)
    return headers


def encode_piece(codec: ReedSolomon, buffer: StripeBuffer, piece: Piece) -> list[int]:
    """Compute the parity of a piece; return its checksums by shard."""
    return codec.encode(buffer.shards, piece.begin, piece.end - piece.begin)


@dataclass(frozen=True, slots=True)
class OpenedRows:
    """What `open_rows` found."""

    corrupt: frozenset[int]
    """Shards with a piece that does not match its checksum. The rows are still right if `is_complete`."""
    is_complete: bool
    """Whether all data shards' bytes of the rows are now right and in place."""


def open_rows(
    codec: ReedSolomon,
    buffer: StripeBuffer,
    headers: Mapping[int, RecordHeader],
    begin_row: int,
    end_row: int,
) -> OpenedRows:
    """Verify rows `[begin_row, end_row)` of the shards at hand and rebuild those of the missing data shards.

    A piece that fails its checksum is an erasure like a missing shard, and is rebuilt too.

    Args:
        codec: Of the buffer's k and m.
        buffer: Holds these rows of the shards in `headers`; full, or narrowed to leading columns.
        headers: By shard; of one stripe (`RecordHeader.shared`) and of the right layout (`check_fits`).
        begin_row: First row.
        end_row: One past the last.

    Returns:
        Which shards are corrupt, and whether the rows can be used. Never raises for wrong bytes.
    """
    corrupt: set[int] = set()
    is_complete = True
    for piece in buffer.shape.pieces(begin_row, end_row):
        good = _repair_piece(codec, buffer, headers, range(codec.k), piece)
        corrupt.update(headers.keys() - good)
        is_complete &= len(good) >= codec.k
    return OpenedRows(frozenset(corrupt), is_complete)


def rebuild_shards(
    codec: ReedSolomon, buffer: StripeBuffer, headers: Mapping[int, RecordHeader], wanted: Sequence[int]
) -> list[RecordHeader]:
    """Rebuild whole shards, data or parity, from the verified pieces of others.

    Args:
        codec: Of the buffer's k and m.
        buffer: Holds the payloads of the shards in `headers`; the wanted records are made in it.
        headers: By shard, of one stripe; at least k.
        wanted: Shards to make, none of them in `headers`.

    Returns:
        The headers of the wanted shards; `buffer.record(shard)` is what to store.

    Raises:
        ExtentLost: Fewer than k intact pieces somewhere.
    """
    checks: dict[int, list[int]] = {shard: [] for shard in wanted}
    for piece in buffer.shape.pieces(0, len(buffer.shape.rows)):
        good = _repair_piece(codec, buffer, headers, wanted, piece)
        if len(good) < codec.k:
            raise ExtentLost(f"{len(good)} intact shards of {codec.k}", code="pool.lost")
        for shard, found in checks.items():
            found.extend(checksums(buffer.shards, piece.begin, piece.end - piece.begin, [shard]))
    model = next(iter(headers.values()))
    made = [replace(model, shard=shard, checks=tuple(found), generation=0) for shard, found in checks.items()]
    for header in made:
        _write_header(buffer, header)
    return made


def copy_rows_out(
    shape: StripeShape, buffer: StripeBuffer, begin_row: int, end_row: int, blocks: Sequence[Block]
) -> None:
    """Copy rows `[begin_row, end_row)` into whole blocks.

    Args:
        shape: Of the extent, whatever the number of columns in the buffer.
        buffer: Has these rows complete.
        begin_row: First row.
        end_row: One past the last.
        blocks: Each `[block bytes]`, uint8, for the first `len(blocks)` blocks of the buffer.
    """
    for row in range(begin_row, end_row):
        scatter_row(shape, buffer, row, blocks)


def _repair_piece(
    codec: ReedSolomon,
    buffer: StripeBuffer,
    headers: Mapping[int, RecordHeader],
    wanted: Sequence[int],
    piece: Piece,
) -> list[int]:
    """Make a piece of the wanted shards right; return the intact ones at hand, ascending.

    The shards at hand are first taken to be intact, so that verifying and rebuilding are one pass; only if
    some are not, the piece is rebuilt again without them. Nothing is rebuilt from fewer than k.
    """
    good = sorted(headers)
    size = piece.end - piece.begin
    while True:
        if len(good) < codec.k:
            sums = checksums(buffer.shards, piece.begin, size, good)
        else:
            missing = [shard for shard in wanted if shard not in good]
            sums = codec.decode(buffer.shards, good, missing, piece.begin, size, good)
        intact = [s for s, found in zip(good, sums, strict=True) if found == headers[s].check_of(piece)]
        if len(intact) == len(good):
            return intact
        good = intact


def _write_header(buffer: StripeBuffer, header: RecordHeader) -> None:
    buffer.record(header.shard)[: buffer.header_bytes] = pack_header(header)


def _check_blocks(shape: StripeShape, blocks: Sequence[Block]) -> None:
    size = shape.layout.block_bytes
    if not blocks or len(blocks) != shape.num_blocks:
        raise InvalidRequest(f"{len(blocks)} blocks, expected {shape.num_blocks}", code="pool.blocks")
    if any(block.shape != (size,) or block.dtype != np.uint8 for block in blocks):
        raise InvalidRequest(f"a block is not {size} bytes", code="pool.blocks")
