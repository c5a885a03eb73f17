import pytest

from millpond.core.extents import StripeShape, window_blocks
from millpond.core.kv_layout import KvLayout, KvPart, KvRow, uniform_layout
from millpond.store.payload import payload_shape


def flash() -> KvLayout:
    """V4.1-Flash: three groups at m = 2 with 64 entries per block, one at m = 1 with 128 (kvstore 1.2)."""
    rows = tuple(
        KvRow(layer, (KvPart("main", 288 * entries, "fp4"), KvPart("index_k", 68 * entries, "fp4")))
        for layer, entries in enumerate([64, 64, 64, 128])
    )
    return KvLayout(rows)


SMOLLM2 = uniform_layout(30, 2 * 3 * 64, "bf16")


def test_known_sizes_of_v41_flash():
    assert [row.num_bytes for row in flash().rows] == [22_784, 22_784, 22_784, 45_568]
    assert flash().block_bytes == 113_920
    assert window_blocks(flash()) == 32
    shape = StripeShape(flash(), 16)
    assert shape.column_bytes == (2_304, 2_304, 2_304, 4_608)
    # Whole pages: 9, 9, 9 and 18, 45 in all.
    assert [offset / 4096 for offset in shape.row_offsets] == [0, 9, 18, 27, 45]
    assert shape.shard_bytes == 184_320
    assert StripeShape(flash(), 1).shard_bytes == 11_520


@pytest.mark.parametrize(("num_blocks", "ratio"), [(16, 1.240), (32, 1.227)])
def test_physical_bytes_per_logical_byte(num_blocks, ratio):
    """Kvstore 2.1: parity, padding and one page of header per shard."""
    shape = StripeShape(flash(), num_blocks)
    physical = shape.num_shards * (shape.shard_bytes + 4096)
    assert physical / shape.payload_bytes == pytest.approx(ratio, abs=0.001)


def test_known_sizes_of_smollm2():
    assert SMOLLM2.block_bytes == 2_949_120
    assert window_blocks(SMOLLM2) == 1
    shape = StripeShape(SMOLLM2, 1)
    assert set(shape.column_bytes) == {9_856}
    assert shape.shard_bytes == 295_680


@pytest.mark.parametrize(
    ("block_bytes", "blocks"),
    [(32, 32), (128 << 10, 32), ((128 << 10) + 32, 16), (2 << 20, 2), ((2 << 20) + 32, 1), (64 << 20, 1)],
)
def test_windows_are_the_largest_power_of_two_within_four_mebibytes(block_bytes, blocks):
    layout = KvLayout((KvRow(0, (KvPart("main", block_bytes, "fp8"),)),))
    assert window_blocks(layout) == blocks


def test_checksums_cover_sixteen_kibibytes_or_a_row():
    groups = {
        n: [row.check_bytes for row in payload_shape(StripeShape(flash(), n)).rows] for n in (1, 5, 16, 32)
    }
    assert groups[1] == [2_304, 2_304, 2_304, 4_608]
    assert groups[5] == [11_520, 11_520, 11_520, 18_432]
    assert groups[16] == groups[32] == [18_432] * 4


def test_equal_shapes_are_one_key():
    shape, same = StripeShape(flash(), 4), StripeShape(flash(), 4)
    assert shape == same
    assert hash(shape) == hash(same)
    assert shape != StripeShape(flash(), 5)
    assert shape.layout_id == flash().fingerprint[:16]
