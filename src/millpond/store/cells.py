"""Copies between blocks and the columns of a stripe: one row of an extent at a time.

A cell is the bytes of one block in one row. Its columns lie one in each data shard, so a copy is many short
pieces; the native loop does them at the speed of memory, numpy's at a quarter of it.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from millpond.core.errors import InvariantBroken
from millpond.core.extents import StripeShape
from millpond.store.codec.native import load_kernels
from millpond.store.stripe_buffer import StripeBuffer

Block = NDArray[np.uint8]
"""`[block bytes]`, uint8, contiguous."""


class BlockCells:
    """Blocks of one extent, to be copied to or from stripes row by row."""

    def __init__(self, shape: StripeShape, blocks: Sequence[Block]) -> None:
        """Take the blocks' addresses.

        Args:
            shape: Of the extent.
            blocks: Its first blocks, in order.

        Raises:
            InvariantBroken: A block is not contiguous bytes of the layout's size.
        """
        size = shape.block_bytes
        if any(b.shape != (size,) or b.strides != (1,) or b.dtype != np.uint8 for b in blocks):
            raise InvariantBroken(f"blocks are not {size} contiguous bytes")
        self._shape = shape
        self._blocks = blocks
        self._addresses = [block.__array_interface__["data"][0] for block in blocks]

    def gather(self, buffer: StripeBuffer, row: int) -> None:
        """Copy one row of all blocks into the buffer's data shards; padding becomes zero."""
        kernels = load_kernels()
        if kernels is None:
            gather_numpy(self._shape, buffer, row, self._blocks)
        else:
            kernels.mp_copy_cells(*self._arguments(buffer, row), 1)

    def scatter(self, buffer: StripeBuffer, row: int) -> None:
        """Copy one row out of the buffer's data shards into all blocks."""
        kernels = load_kernels()
        if kernels is None:
            scatter_numpy(self._shape, buffer, row, self._blocks)
        else:
            kernels.mp_copy_cells(*self._arguments(buffer, row), 0)

    def _arguments(self, buffer: StripeBuffer, row: int) -> tuple[int, int, int, int, bytes, int, int]:
        cut, count = _cut(self._shape, row), len(self._addresses)
        is_same = buffer.shape.k == self._shape.k and buffer.shape.column_bytes[row] == cut.column_bytes
        if count > buffer.shape.num_blocks or not is_same:
            raise InvariantBroken(f"{count} blocks of another shape than the buffer's")
        columns = buffer.shards.addresses[0] + buffer.shape.row_offsets[row]
        cells = struct.pack(f"{count}P", *[address + cut.begin for address in self._addresses])
        return columns, buffer.stride, cut.column_bytes, buffer.shape.k, cells, cut.end - cut.begin, count


def gather_numpy(shape: StripeShape, buffer: StripeBuffer, row: int, blocks: Sequence[Block]) -> None:
    """Twin of the native loop, and what is used without a compiler."""
    view, cut = buffer.row(row), _cut(shape, row)
    for index, block in enumerate(blocks):
        cell = block[cut.begin : cut.end]
        view[index, : cut.num_full] = cell[: cut.full_bytes].reshape(cut.num_full, cut.column_bytes)
        if cut.num_full < shape.k:
            rest = view[index, cut.num_full]
            rest[: cut.rest_bytes] = cell[cut.full_bytes :]
            rest[cut.rest_bytes :] = 0
            view[index, cut.num_full + 1 :] = 0


def scatter_numpy(shape: StripeShape, buffer: StripeBuffer, row: int, blocks: Sequence[Block]) -> None:
    """Twin of the native loop, and what is used without a compiler."""
    view, cut = buffer.row(row), _cut(shape, row)
    for index, block in enumerate(blocks):
        cell = block[cut.begin : cut.end]
        cell[: cut.full_bytes].reshape(cut.num_full, cut.column_bytes)[:] = view[index, : cut.num_full]
        if cut.rest_bytes:
            cell[cut.full_bytes :] = view[index, cut.num_full, : cut.rest_bytes]


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
