import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from millpond.core.errors import InvariantBroken
from millpond.core.extents import StripeShape
from millpond.store.cells import BlockCells, gather_numpy, scatter_numpy
from tests.unit.store.stripes import blocks_of, buffer_of, layout


@settings(max_examples=60, deadline=None)
@given(
    rows=st.lists(st.integers(1, 30_000), min_size=1, max_size=3),
    num_blocks=st.integers(1, 5),
    k=st.integers(1, 12),
    odd=st.integers(0, 31),
)
def test_native_copies_equal_numpy(rows, num_blocks, k, odd):
    shape = StripeShape(layout(*rows), num_blocks, k, 1)
    size = shape.layout.block_bytes
    blocks = blocks_of(shape, seed=k)
    native, plain = buffer_of(shape), buffer_of(shape)
    native.shards.memory[:] = plain.shards.memory[:] = 0xEE
    cells = BlockCells(shape, blocks)
    # At odd places too: what goes past the cache needs aligned targets, so there is another way.
    out = [np.full(size + 64, 0x11, np.uint8) for _ in blocks]
    inside = [block[odd : odd + size] for block in out]
    out_cells = BlockCells(shape, inside)
    for row in range(len(rows)):
        cells.gather(native, row)
        gather_numpy(shape, plain, row, blocks)
        out_cells.scatter(native, row)
    assert (native.shards.memory == plain.shards.memory).all()
    numpy_out = [np.zeros(size, np.uint8) for _ in blocks]
    for row in range(len(rows)):
        scatter_numpy(shape, plain, row, numpy_out)
    for block, whole, found, other in zip(blocks, out, inside, numpy_out, strict=True):
        assert (found[:size] == other).all()
        begin = 0
        for row in shape.layout.rows:
            assert (found[begin : begin + row.num_bytes] == block[begin : begin + row.num_bytes]).all()
            begin += row.num_bytes
        assert (whole[:odd] == 0x11).all()
        assert (whole[odd + size :] == 0x11).all()


def test_blocks_of_another_kind_never_reach_native_code():
    shape = StripeShape(layout(100, 3_000), 2)
    size = shape.layout.block_bytes
    for wrong in (
        np.zeros(size - 1, np.uint8),
        np.zeros(2 * size, np.uint8)[::2],
        np.zeros(size // 4, np.uint32),
    ):
        with pytest.raises(InvariantBroken):
            BlockCells(shape, [wrong])
    too_many = BlockCells(shape, [np.zeros(size, np.uint8)] * 3)
    with pytest.raises(InvariantBroken):
        too_many.gather(buffer_of(shape), 0)
    other = BlockCells(StripeShape(layout(100, 3_700), 2), [np.zeros(3_840, np.uint8)] * 2)
    with pytest.raises(InvariantBroken):
        other.scatter(buffer_of(shape), 1)
