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


def gather_row(shape: StripeShape, buffer: StripeBuffer, row: int, blocks: Sequence[Block]) -> None:
    """Copy one row of all blocks into the buffer's data shards; padding becomes zero."""
    kernels = load_kernels()
    if kernels is None:
        gather_row_numpy(shape, buffer, row, blocks)
    else:
        kernels.mp_copy_cells(*_arguments(shape, buffer, row, blocks), 1)


def scatter_row(shape: StripeShape, buffer: StripeBuffer, row: int, blocks: Sequence[Block]) -> None:
    """Copy one row out of the buffer's data shards into the first `len(blocks)` blocks."""
    kernels = load_kernels()
    if kernels is None:
        scatter_row_numpy(shape, buffer, row, blocks)
    else:
        kernels.mp_copy_cells(*_arguments(shape, buffer, row, blocks), 0)


def gather_row_numpy(shape: StripeShape, buffer: StripeBuffer, row: int, blocks: Sequence[Block]) -> None:
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


def scatter_row_numpy(shape: StripeShape, buffer: StripeBuffer, row: int, blocks: Sequence[Block]) -> None:
    """Twin of the native loop, and what is used without a compiler."""
    view, cut = buffer.row(row), _cut(shape, row)
    for index, block in enumerate(blocks):
        cell = block[cut.begin : cut.end]
        cell[: cut.full_bytes].reshape(cut.num_full, cut.column_bytes)[:] = view[index, : cut.num_full]
        if cut.rest_bytes:
            cell[cut.full_bytes :] = view[index, cut.num_full, : cut.rest_bytes]


def _arguments(
    shape: StripeShape, buffer: StripeBuffer, row: int, blocks: Sequence[Block]
) -> tuple[int, int, int, int, bytes, int, int]:
    cut = _cut(shape, row)
    fits = len(blocks) <= buffer.shape.num_blocks and buffer.shape.k == shape.k
    if not fits or buffer.shape.column_bytes[row] != cut.column_bytes:
        raise InvariantBroken(f"{len(blocks)} blocks of another shape than the buffer's")
    if any(block.nbytes < cut.end or not block.flags.c_contiguous for block in blocks):
        raise InvariantBroken("blocks are not whole and contiguous")
    cells = [block.ctypes.data + cut.begin for block in blocks]
    columns = buffer.shards.addresses[0] + buffer.shape.row_offsets[row]
    pointers = struct.pack(f"{len(cells)}P", *cells)
    return columns, buffer.stride, cut.column_bytes, shape.k, pointers, cut.end - cut.begin, len(cells)


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
