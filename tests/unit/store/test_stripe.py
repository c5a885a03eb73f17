import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from millpond.core.errors import ExtentLost, InvalidRequest
from millpond.core.extents import StripeShape
from millpond.store.codec.reed_solomon import ReedSolomon
from millpond.store.payload import payload_shape
from millpond.store.record import check_payload, check_rows, parse_header
from millpond.store.stripe import copy_rows_out, encode_extent, open_rows, rebuild_shards
from millpond.store.stripe_buffer import StripeBuffer, stripe_bytes
from tests.unit.store.stripes import aligned_memory, blocks_of, buffer_of, flash_layout, layout, meta_of

SMALL = layout(100, 32, 3_000, 64)


def written(shape, seed=1, nonce=1):
    blocks = blocks_of(shape, seed)
    buffer = buffer_of(shape)
    codec = ReedSolomon(shape.k, shape.m)
    headers = encode_extent(codec, shape, buffer, meta_of(shape.num_blocks, nonce), blocks)
    return codec, buffer, headers, blocks


def records_of(buffer, headers):
    return [bytes(buffer.record(header.shard)) for header in headers]


def received(shape, records, shards):
    """A reader's buffer that holds these records' payloads, and their headers."""
    buffer = buffer_of(shape)
    buffer.shards.memory[:] = 0xEE
    headers = {}
    for shard in shards:
        headers[shard] = parse_header(records[shard])
        buffer.payload(shard)[:] = records[shard][headers[shard].header_bytes :]
    return buffer, headers


def blocks_in(shape, buffer, num_blocks=None):
    out = [np.full(shape.layout.block_bytes, 0x55, np.uint8) for _ in range(num_blocks or shape.num_blocks)]
    copy_rows_out(shape, buffer, 0, len(shape.layout.rows), out)
    return out


def same(found, expected):
    return all(np.array_equal(a, b) for a, b in zip(found, expected, strict=False))


def test_every_loss_of_one_or_two_shards_is_undone():
    shape = StripeShape(SMALL, 3)
    codec, buffer, headers, blocks = written(shape)
    records = records_of(buffer, headers)
    patterns = [*itertools.combinations(range(12), 1), *itertools.combinations(range(12), 2)]
    assert len(patterns) == 78
    for lost in patterns:
        shards = [shard for shard in range(12) if shard not in lost]
        reader, at_hand = received(shape, records, shards)
        opened = open_rows(codec, reader, at_hand, 0, 4)
        assert opened.is_complete
        assert not opened.corrupt
        assert same(blocks_in(shape, reader), blocks)
        # The lost records themselves, byte for byte, headers included.
        rebuilt = rebuild_shards(codec, reader, at_hand, lost)
        assert [header.shard for header in rebuilt] == list(lost)
        assert [bytes(reader.record(shard)) for shard in lost] == [records[shard] for shard in lost]


def test_rows_arrive_one_by_one():
    shape = StripeShape(flash_layout(), 5)
    codec, buffer, headers, blocks = written(shape)
    reader = buffer_of(shape)
    at_hand = {header.shard: header for header in headers if header.shard not in {4, 9}}
    out = [np.zeros(shape.layout.block_bytes, np.uint8) for _ in blocks]
    begin = 0
    for row, num_bytes in enumerate([22_784, 22_784, 22_784, 45_568]):
        for shard in at_hand:
            reader.payload(shard, row, row + 1)[:] = buffer.payload(shard, row, row + 1)
        assert open_rows(codec, reader, at_hand, row, row + 1).is_complete
        copy_rows_out(shape, reader, row, row + 1, out)
        end = begin + num_bytes
        assert same([block[begin:end] for block in out], [block[begin:end] for block in blocks])
        begin = end


def test_a_row_view_is_the_row_without_a_copy():
    shape = StripeShape(flash_layout(), 4)
    _, buffer, _, blocks = written(shape)
    view = buffer.row(3)
    assert view.shape == (4, 10, 4_608)
    flat = view.reshape(4, -1)[:, :45_568]
    assert same(list(flat), [block[3 * 22_784 :] for block in blocks])
    view[2, 0, 0] ^= 1
    assert buffer.payload(0, 3, 4)[2 * 4_608] == view[2, 0, 0]


@pytest.mark.parametrize("num_columns", [1, 8, 9, 16, 24, 31, 32])
def test_a_partial_hit_reads_only_its_columns(num_columns):
    shape = StripeShape(flash_layout(), 32)
    codec, writer, headers, blocks = written(shape)
    full = headers[0].shape
    narrow = full.narrowed(num_columns)
    assert narrow.num_blocks == min(32, -(-num_columns // 8) * 8)
    reader = StripeBuffer(narrow, aligned_memory(stripe_bytes(narrow)))
    at_hand = {header.shard: header for header in headers if header.shard not in {0, 7}}
    for shard, header in at_hand.items():
        ranges = header.shape.read_ranges(1, 4, num_columns)
        payload = writer.payload(shard)
        data = b"".join(payload[begin : begin + size] for begin, size in ranges)
        check_rows(header, data, 1, 4, num_columns)
        reader.payload(shard, 1, 4)[:] = data
    assert open_rows(codec, reader, at_hand, 1, 4).is_complete
    out = [np.zeros(shape.layout.block_bytes, np.uint8) for _ in range(num_columns)]
    copy_rows_out(shape, reader, 1, 4, out)
    assert same([block[22_784:] for block in out], [block[22_784:] for block in blocks])


def test_corrupt_pieces_are_erasures_and_named():
    shape = StripeShape(flash_layout(), 16)
    codec, buffer, headers, blocks = written(shape)
    records = records_of(buffer, headers)
    reader, at_hand = received(shape, records, range(12))
    # Three corrupt shards are too many at one place, but not at different places.
    reader.payload(2)[100] ^= 0x10
    reader.payload(5)[90_000] ^= 0x01
    reader.payload(11)[184_319] ^= 0x80
    opened = open_rows(codec, reader, at_hand, 0, 4)
    assert opened.is_complete
    assert opened.corrupt == {2, 5, 11}
    assert same(blocks_in(shape, reader), blocks)


def test_too_many_corrupt_shards_at_one_place_are_not_used():
    shape = StripeShape(SMALL, 3)
    codec, buffer, headers, _ = written(shape)
    reader, at_hand = received(shape, records_of(buffer, headers), range(12))
    for shard in (1, 6, 10):
        reader.payload(shard)[0] ^= 1
    opened = open_rows(codec, reader, at_hand, 0, 4)
    assert not opened.is_complete
    assert opened.corrupt == {1, 6, 10}
    del at_hand[3]
    with pytest.raises(ExtentLost):
        rebuild_shards(codec, reader, at_hand, [3])


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_any_code_any_layout_any_loss(data):
    k, m = data.draw(st.integers(1, 14)), data.draw(st.integers(0, 4))
    rows = data.draw(st.lists(st.integers(1, 5_000), min_size=1, max_size=4))
    shape = StripeShape(layout(*rows), data.draw(st.integers(1, 9)), k, m)
    codec, buffer, headers, blocks = written(shape, seed=data.draw(st.integers(0, 99)))
    shards = data.draw(st.permutations(range(k + m)))[:k]
    reader, at_hand = received(shape, records_of(buffer, headers), shards)
    for header in at_hand.values():
        header.check_fits(shape)
        check_payload(header, reader.payload(header.shard))
    assert open_rows(codec, reader, at_hand, 0, len(rows)).is_complete
    assert same(blocks_in(shape, reader), blocks)


def test_the_same_blocks_give_the_same_bytes_whatever_lay_in_the_buffer():
    shape = StripeShape(SMALL, 2)
    codec, buffer, headers, blocks = written(shape)
    other = buffer_of(shape)
    other.shards.memory[:] = 0xAA
    again = encode_extent(codec, shape, other, meta_of(2), blocks)
    assert records_of(other, again) == records_of(buffer, headers)


def test_wrong_blocks_are_refused_before_anything_is_written():
    shape = StripeShape(SMALL, 2)
    codec, buffer, headers, blocks = written(shape)
    before = records_of(buffer, headers)
    size = SMALL.block_bytes
    for wrong in (
        [],
        blocks[:1],
        [*blocks, blocks[0]],
        [blocks[0], np.zeros(0, np.uint8)],
        [blocks[0], np.zeros(size + 1, np.uint8)],
        [blocks[0], np.zeros(size // 2, np.uint16)],
    ):
        with pytest.raises(InvalidRequest):
            encode_extent(codec, shape, buffer, meta_of(2), wrong)
    assert records_of(buffer, headers) == before


def test_shards_stand_apart_in_the_cache():
    payload = payload_shape(StripeShape(flash_layout(), 16))
    begins = StripeBuffer(payload, aligned_memory(stripe_bytes(payload))).shards.begins
    assert len({begin % 4096 for begin in begins}) == 12
