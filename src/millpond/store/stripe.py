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
from millpond.store.cells import Block, BlockCells
from millpond.store.codec.backend import Checksums, Span, checksums
from millpond.store.codec.reed_solomon import ReedSolomon
from millpond.store.payload import payload_shape
from millpond.store.record import RecordHeader, pack_headers
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
    cells = BlockCells(shape, blocks)
    checks: list[list[int]] = [[] for _ in range(shape.num_shards)]
    for row in range(len(buffer.shape.rows)):
        cells.gather(buffer, row)
        sums = codec.encode(buffer.shards, buffer.shape.spans(row, row + 1))
        for found, of_row in zip(checks, sums, strict=True):
            found.extend(of_row)
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
    _write_headers(buffer, headers)
    return headers


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
    for intact in _repair(codec, buffer, headers, range(codec.k), begin_row, end_row):
        corrupt.update(headers.keys() - intact)
        is_complete &= len(intact) >= codec.k
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
    num_rows = len(buffer.shape.rows)
    for intact in _repair(codec, buffer, headers, wanted, 0, num_rows):
        if len(intact) < codec.k:
            raise ExtentLost(f"{len(intact)} intact shards of {codec.k}", code="pool.lost")
    sums = checksums(buffer.shards, buffer.shape.spans(0, num_rows), wanted)
    model = next(iter(headers.values()))
    made = [
        replace(model, shard=shard, checks=found, generation=0)
        for shard, found in zip(wanted, sums, strict=True)
    ]
    _write_headers(buffer, made)
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
    cells = BlockCells(shape, blocks)
    for row in range(begin_row, end_row):
        cells.scatter(buffer, row)


def _repair(
    codec: ReedSolomon,
    buffer: StripeBuffer,
    headers: Mapping[int, RecordHeader],
    wanted: Sequence[int],
    begin_row: int,
    end_row: int,
) -> list[set[int]]:
    """Make rows of the wanted shards right; return, per span, which of the shards at hand are intact there.

    The shards at hand are first taken to be intact, so that verifying and rebuilding are one pass. Only if
    some are not, the spans where that shows are rebuilt again without them.
    """
    spans = buffer.shape.spans(begin_row, end_row)
    columns = buffer.shape.num_blocks
    expected = {s: header.checks_of(begin_row, end_row, columns) for s, header in headers.items()}
    everywhere = set(headers)
    found = _try(codec, buffer, sorted(headers), wanted, spans)
    if all(found[shard] == expected[shard] for shard in headers):
        return [everywhere] * len(spans)
    intact_at: list[set[int]] = []
    for i, span in enumerate(spans):
        intact = {shard for shard in headers if found[shard][i] == expected[shard][i]}
        if intact != everywhere:
            _try(codec, buffer, sorted(intact), wanted, [span])
        intact_at.append(intact)
    return intact_at


def _try(
    codec: ReedSolomon,
    buffer: StripeBuffer,
    at_hand: Sequence[int],
    wanted: Sequence[int],
    spans: Sequence[Span],
) -> dict[int, Checksums]:
    """Rebuild from the shards at hand, unless they are too few, and return their checksums."""
    if len(at_hand) < codec.k:
        sums = checksums(buffer.shards, spans, at_hand)
    else:
        missing = [shard for shard in wanted if shard not in at_hand]
        sums = codec.decode(buffer.shards, at_hand, missing, spans, at_hand)
    return dict(zip(at_hand, sums, strict=True))


def _write_headers(buffer: StripeBuffer, headers: Sequence[RecordHeader]) -> None:
    for header, packed in zip(headers, pack_headers(headers), strict=True):
        buffer.record(header.shard)[: buffer.header_bytes] = packed


def _check_blocks(shape: StripeShape, blocks: Sequence[Block]) -> None:
    size = shape.block_bytes
    if not blocks or len(blocks) != shape.num_blocks:
        raise InvalidRequest(f"{len(blocks)} blocks, expected {shape.num_blocks}", code="pool.blocks")
    if any(block.shape != (size,) or block.dtype != np.uint8 for block in blocks):
        raise InvalidRequest(f"a block is not {size} bytes", code="pool.blocks")
