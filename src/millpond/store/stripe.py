"""Blocks of an extent <-> records of its stripe, in place in a `StripeBuffer`.

A writer gathers blocks into the buffer, encodes, and sends the records from where they are. A reader receives
payloads where they belong, verifies them and rebuilds missing shards in place. What it then has of a row is a
view `[blocks, shards, column]`; a consumer that copies the row anyway, as swap-in does, copies from the view
and so pays nothing for the cut into columns. `copy_rows_out` makes whole blocks for everyone else.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from millpond.core.errors import ExtentLost, InvalidRequest, InvariantBroken
from millpond.core.extents import ExtentId, StripeId, StripeShape
from millpond.store.codec.reed_solomon import ReedSolomon
from millpond.store.payload import Tile, payload_shape
from millpond.store.record import RecordHeader, checksum, pack_header
from millpond.store.stripe_buffer import StripeBuffer

Block = NDArray[np.uint8]


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
    next_row = 0
    for tile in buffer.shape.tiles(0, len(buffer.shape.rows)):
        while next_row < tile.end_row:
            _gather_row(shape, buffer, next_row, blocks)
            next_row += 1
        encode_tile(codec, buffer, tile, checks)
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


def encode_tile(codec: ReedSolomon, buffer: StripeBuffer, tile: Tile, checks: Sequence[list[int]]) -> None:
    """Compute the parity of a tile and append the checksums of all its pieces, by shard."""
    codec.encode(buffer.shards, tile.begin, tile.end - tile.begin)
    for shard, found in enumerate(checks):
        found.extend(_checks(buffer, shard, tile))


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
    for tile in buffer.shape.tiles(begin_row, end_row):
        good = _intact(buffer, headers, tile)
        corrupt.update(headers.keys() - good)
        if len(good) < codec.k:
            is_complete = False
            continue
        missing = [shard for shard in range(codec.k) if shard not in good]
        codec.decode(buffer.shards, good, missing, tile.begin, tile.end - tile.begin)
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
    for tile in buffer.shape.tiles(0, len(buffer.shape.rows)):
        good = _intact(buffer, headers, tile)
        if len(good) < codec.k:
            raise ExtentLost(f"{len(good)} intact shards of {codec.k}", code="pool.lost")
        codec.decode(buffer.shards, good, wanted, tile.begin, tile.end - tile.begin)
        for shard, found in checks.items():
            found.extend(_checks(buffer, shard, tile))
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
        view, cut = buffer.row(row), _cut(shape, row)
        for index, block in enumerate(blocks):
            cell = block[cut.begin : cut.end]
            cell[: cut.full_bytes].reshape(cut.num_full, cut.column_bytes)[:] = view[index, : cut.num_full]
            if cut.rest_bytes:
                cell[cut.full_bytes :] = view[index, cut.num_full, : cut.rest_bytes]


def _checks(buffer: StripeBuffer, shard: int, tile: Tile) -> list[int]:
    base, view = buffer.shards.begins[shard], buffer.view
    return [checksum(view[base + piece.begin : base + piece.end]) for piece in tile.pieces]


def _intact(buffer: StripeBuffer, headers: Mapping[int, RecordHeader], tile: Tile) -> list[int]:
    """Shards whose pieces of the tile match their checksums, ascending: data before parity."""
    return [shard for shard in sorted(headers) if _is_intact(buffer, headers[shard], shard, tile)]


def _is_intact(buffer: StripeBuffer, header: RecordHeader, shard: int, tile: Tile) -> bool:
    # A narrowed buffer has fewer groups per row than the header has checksums, beginning with the same.
    firsts, checks = header.shape.first_checks, header.checks
    expected = [checks[firsts[piece.row] + piece.group] for piece in tile.pieces]
    return _checks(buffer, shard, tile) == expected


def _write_header(buffer: StripeBuffer, header: RecordHeader) -> None:
    buffer.record(header.shard)[: buffer.header_bytes] = pack_header(header)


def _check_blocks(shape: StripeShape, blocks: Sequence[Block]) -> None:
    size = shape.layout.block_bytes
    if not blocks or len(blocks) != shape.num_blocks:
        raise InvalidRequest(f"{len(blocks)} blocks, expected {shape.num_blocks}", code="pool.blocks")
    if any(block.shape != (size,) or block.dtype != np.uint8 for block in blocks):
        raise InvalidRequest(f"a block is not {size} bytes", code="pool.blocks")


def _gather_row(shape: StripeShape, buffer: StripeBuffer, row: int, blocks: Sequence[Block]) -> None:
    view, cut = buffer.row(row), _cut(shape, row)
    for index, block in enumerate(blocks):
        cell = block[cut.begin : cut.end]
        view[index, : cut.num_full] = cell[: cut.full_bytes].reshape(cut.num_full, cut.column_bytes)
        if cut.num_full < shape.k:
            rest = view[index, cut.num_full]
            rest[: cut.rest_bytes] = cell[cut.full_bytes :]
            rest[cut.rest_bytes :] = 0
            view[index, cut.num_full + 1 :] = 0


class _Cut(NamedTuple):
    """How one row of a block falls into columns: full ones, a partial one, padding."""

    begin: int
    """Within the block."""
    end: int
    column_bytes: int
    num_full: int
    full_bytes: int
    rest_bytes: int


@lru_cache(maxsize=4096)
def _cut(shape: StripeShape, row: int) -> _Cut:
    sizes = [r.num_bytes for r in shape.layout.rows]
    begin = sum(sizes[:row])
    column = shape.column_bytes[row]
    num_full, rest = divmod(sizes[row], column)
    return _Cut(begin, begin + sizes[row], column, num_full, sizes[row] - rest, rest)
