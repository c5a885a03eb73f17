"""`StripeBuffer`: the memory that a stripe's records are made in, received in and rebuilt in."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from millpond.core.extents import COLUMN_ALIGN_BYTES
from millpond.core.units import KIB, align_up
from millpond.store.codec.backend import Memory, ShardMemory
from millpond.store.payload import PayloadShape
from millpond.store.record import header_size

_PAGE_BYTES = 4 * KIB
_STAGGER_BYTES = 13 * COLUMN_ALIGN_BYTES
"""Shards begin at different places of a page: at equal places twelve streams share one cache set of eight
lines, which costs a third of the coding rate."""


class StripeBuffer:
    """All shards of one stripe, each as its record lies on disk: header, then payload.

    Owned by one user at a time. The memory is the caller's, who allocates and touches it once: fresh pages
    cost ten times the copy.
    """

    def __init__(self, shape: PayloadShape, memory: Memory) -> None:
        """Lay the shards of `shape` out in `memory`.

        Args:
            shape: Of the payloads; for a partial read `PayloadShape.narrowed`.
            memory: Flat, at least `stripe_bytes(shape)`, at a multiple of 64.
        """
        self.shape = shape
        self.header_bytes = header_size(shape)
        self.stride = _stride(shape)
        """From the beginning of one shard to that of the next."""
        self.shards = ShardMemory(
            memory, shape.num_shards, self.header_bytes, self.stride, shape.payload_bytes
        )
        self.view = memory.data
        """All of the memory; payloads begin at `shards.begins`."""

    def record(self, shard: int) -> memoryview:
        """Header and payload of a shard, to be sent or written as they are."""
        begin = self.shards.begins[shard]
        return self.view[begin - self.header_bytes : begin + self.shape.payload_bytes]

    def payload(self, shard: int, begin_row: int = 0, end_row: int | None = None) -> memoryview:
        """Rows `[begin_row, end_row)` of a shard: where a reader receives them."""
        begin, offsets = self.shards.begins[shard], self.shape.row_offsets
        return self.view[begin + offsets[begin_row] : begin + offsets[-1 if end_row is None else end_row]]

    def row(self, row: int) -> NDArray[np.uint8]:
        """View of one row of all blocks, `[blocks, k, column bytes]`: per block its bytes in order.

        Bytes beyond the row's size are padding.
        """
        shape, shards = self.shape, self.shards
        column = shape.column_bytes[row]
        return np.lib.stride_tricks.as_strided(
            shards.memory[shards.begins[0] + shape.row_offsets[row] :],
            (shape.num_blocks, shape.k, column),
            (column, self.stride, 1),
        )


def stripe_bytes(shape: PayloadShape) -> int:
    """Memory that a `StripeBuffer` of this shape needs."""
    return _stride(shape) * shape.num_shards


def _stride(shape: PayloadShape) -> int:
    return align_up(header_size(shape) + shape.payload_bytes, _PAGE_BYTES) + _STAGGER_BYTES
