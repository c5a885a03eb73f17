"""Shape of a shard's payload: its rows, and the spans of them that stand under one checksum.

It follows from a layout (`payload_shape`) or stands in a record's header, so that whoever rebuilds or scrubs
needs no layout.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import NamedTuple

from millpond.core.errors import DataError
from millpond.core.extents import StripeShape
from millpond.core.units import KIB, align_up, ceil_div

CHECK_MIN_BYTES = 16 * KIB
"""Smaller pieces would cost more in calls than in hashing."""


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
class PayloadShape:
    """Sizes that the k + m payloads of a stripe have in common.

    Keep shapes: what is derived from one is computed once per object.
    """

    k: int
    m: int
    num_blocks: int
    rows: tuple[RowPiece, ...]

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        return hash((self.k, self.m, self.num_blocks, self.rows))

    @property
    def num_shards(self) -> int:
        """Data and parity shards."""
        return self.k + self.m

    @cached_property
    def row_offsets(self) -> tuple[int, ...]:
        """Per row: where it begins in the payload; one more entry: the payload's size."""
        return (*(row.offset for row in self.rows), self.rows[-1].offset + self.rows[-1].num_bytes)

    @cached_property
    def column_bytes(self) -> tuple[int, ...]:
        """Per row: bytes of one column."""
        return tuple(row.num_bytes // self.num_blocks for row in self.rows)

    @property
    def payload_bytes(self) -> int:
        """Bytes of one shard."""
        return self.row_offsets[-1]

    @cached_property
    def first_checks(self) -> tuple[int, ...]:
        """Per row: index of its first checksum; one more entry: how many there are."""
        firsts = [0]
        for row in self.rows:
            firsts.append(firsts[-1] + row.num_checks)
        return tuple(firsts)

    @property
    def num_checks(self) -> int:
        """Checksums of one shard."""
        return self.first_checks[-1]

    @cached_property
    def column_step(self) -> int:
        """Reads of columns are rounded up to a multiple of this, or to all: what can be verified.

        Groups are powers of two of columns or whole rows, so the largest is a multiple of every other one.
        """
        return max(
            row.check_bytes // column for row, column in zip(self.rows, self.column_bytes, strict=True)
        )

    def readable_columns(self, num_columns: int) -> int:
        """Columns that a read of the first `num_columns` >= 1 gives: rounded up to what can be verified."""
        return min(self.num_blocks, align_up(num_columns, self.column_step))

    def read_ranges(self, begin_row: int, end_row: int, num_columns: int) -> list[tuple[int, int]]:
        """Payload ranges (offset, bytes) of rows `[begin_row, end_row)`, of each `readable_columns`.

        One after the other they are those rows of the payload of shape `narrowed`. Ranges that touch are
        merged.

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
        if columns == self.num_blocks:
            begin, end = self.row_offsets[begin_row], self.row_offsets[end_row]
            return [(begin, end - begin)]
        rows = range(begin_row, end_row)
        return [(self.row_offsets[row], self.column_bytes[row] * columns) for row in rows]

    def narrowed(self, num_columns: int) -> PayloadShape:
        """Shape of what a read of the first `num_columns` columns of all rows gives."""
        return _narrowed(self, self.readable_columns(num_columns))

    def spans(self, begin_row: int, end_row: int) -> tuple[tuple[int, int], ...]:
        """Ranges of the payload under one checksum each, in rows `[begin_row, end_row)`."""
        return self._spans[self.first_checks[begin_row] : self.first_checks[end_row]]

    @cached_property
    def _spans(self) -> tuple[tuple[int, int], ...]:
        found: list[tuple[int, int]] = []
        for row in self.rows:
            end = row.offset + row.num_bytes
            found.extend(
                (at, min(at + row.check_bytes, end)) for at in range(row.offset, end, row.check_bytes)
            )
        return tuple(found)


@lru_cache(maxsize=256)
def payload_shape(shape: StripeShape) -> PayloadShape:
    """Payload of a shard of this stripe.

    A checksum covers the smallest power of two of columns with at least 16 KiB, or the whole row.
    """
    rows: list[RowPiece] = []
    for offset, column in zip(shape.row_offsets, shape.column_bytes, strict=False):
        columns = 1
        while columns < shape.num_blocks and columns * column < CHECK_MIN_BYTES:
            columns *= 2
        columns = min(columns, shape.num_blocks)
        rows.append(RowPiece(offset, column * shape.num_blocks, column * columns))
    return PayloadShape(shape.k, shape.m, shape.num_blocks, tuple(rows))


@lru_cache(maxsize=1024)
def _narrowed(shape: PayloadShape, columns: int) -> PayloadShape:
    if columns == shape.num_blocks:
        return shape
    rows: list[RowPiece] = []
    offset = 0
    for row, column in zip(shape.rows, shape.column_bytes, strict=True):
        rows.append(RowPiece(offset, column * columns, row.check_bytes))
        offset += column * columns
    return PayloadShape(shape.k, shape.m, columns, tuple(rows))
