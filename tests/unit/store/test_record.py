import dataclasses
import struct

import numpy as np
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from millpond.core.errors import ChecksumMismatch, DataError, InvariantBroken, WireVersionMismatch
from millpond.core.extents import ExtentId, StripeId, StripeShape
from millpond.store.codec.reed_solomon import ReedSolomon
from millpond.store.payload import payload_shape
from millpond.store.record import (
    RecordHeader,
    check_payload,
    check_rows,
    header_size,
    pack_header,
    pack_headers,
    parse_header,
    peek_header_bytes,
    stamp_generation,
)
from millpond.store.stripe import encode_extent
from tests.unit.store.stripes import blocks_of, buffer_of, flash_layout, layout, meta_of


def a_header(num_blocks=5, shard=3):
    shape = payload_shape(StripeShape(flash_layout(), num_blocks))
    hashes = bytes(i % 256 for i in range(16 * num_blocks))
    return RecordHeader(
        extent=ExtentId(hashes[-16:] + bytes(16), num_blocks),
        stripe=StripeId(2, 7, (1 << 64) - 1),
        shard=shard,
        shape=shape,
        parent=b"p" * 32,
        root=b"r" * 16,
        first_block=96,
        hashes=hashes,
        layout=flash_layout().fingerprint[:16],
        checks=tuple(range(shape.num_checks)),
        tenant=9,
        lineage=1,
        created_s=1_800_000_000,
        expiry_class=2,
        generation=4,
    )


def records_of(num_blocks=3, row_bytes=(100, 32, 3_000, 64)):
    shape = StripeShape(layout(*row_bytes), num_blocks)
    buffer = buffer_of(shape)
    headers = encode_extent(ReedSolomon(10, 2), shape, buffer, meta_of(num_blocks), blocks_of(shape, 1))
    return [bytes(buffer.record(header.shard)) for header in headers]


def resealed(data: bytearray) -> bytes:
    """A header with wrong content but the right checksum, as an enemy would send it."""
    return bytes(data[:-8]) + struct.pack("<Q", xxhash.xxh3_64_intdigest(bytes(data[:-8])))


@pytest.mark.parametrize("num_blocks", [1, 2, 5, 16, 32])
def test_what_is_packed_is_parsed(num_blocks):
    header = a_header(num_blocks)
    data = pack_header(header)
    assert len(data) == 4096 == header.header_bytes == peek_header_bytes(data[:8])
    assert parse_header(data) == header
    assert parse_header(data + b"payload") == header
    assert parse_header(memoryview(data)) == header


def test_long_tables_take_more_pages():
    shape = payload_shape(StripeShape(layout(*[20_000] * 300), 1))
    assert header_size(shape) == 8192
    with pytest.raises(InvariantBroken):
        pack_header(dataclasses.replace(a_header(), checks=()))


def test_headers_of_a_stripe_are_packed_together_as_alone():
    headers = [
        dataclasses.replace(a_header(16, shard), checks=tuple(range(shard, shard + 10)))
        for shard in range(12)
    ]
    assert pack_headers(headers) == [pack_header(header) for header in headers]
    assert pack_headers(headers[::-1]) == [pack_header(header) for header in headers[::-1]]


def test_the_node_stamps_its_generation():
    header = a_header()
    stamped = stamp_generation(pack_header(header), 123_456_789_012)
    assert parse_header(stamped) == dataclasses.replace(header, generation=123_456_789_012)
    assert parse_header(stamped).shared == header.shared


@settings(max_examples=300, deadline=None)
@given(data=st.binary(max_size=9_000), begin=st.booleans())
def test_any_bytes_are_refused(data, begin):
    if begin:
        data = pack_header(a_header())[:40] + data
    with pytest.raises(DataError):
        parse_header(data)


@settings(max_examples=300, deadline=None)
@given(at=st.integers(0, 4087), value=st.integers(1, 255), width=st.integers(1, 8))
def test_changed_headers_with_a_right_checksum_parse_to_what_they_say_or_not_at_all(at, value, width):
    data = bytearray(pack_header(a_header()))
    for i in range(at, min(at + width, 4088)):
        data[i] ^= value
    data = resealed(data)
    try:
        header = parse_header(data)
    except DataError:
        return
    assert pack_header(header) == data


def test_every_flipped_bit_of_a_record_is_found():
    record = records_of()[11]
    header = parse_header(record)
    for position in range(8 * len(record)):
        if header.header_bytes * 8 > position >= 8 * 700 and position % 61:
            continue  # of the header's padding every 61st bit
        damaged = bytearray(record)
        damaged[position // 8] ^= 1 << position % 8
        with pytest.raises(DataError):
            check_payload(parse_header(damaged), memoryview(damaged)[header.header_bytes :])


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_pieces_of_rows_and_columns_are_verified_alone(data):
    record = LARGE[data.draw(st.integers(0, 11))]
    header = parse_header(record)
    payload = memoryview(record)[header.header_bytes :]
    begin_row = data.draw(st.integers(0, 3))
    end_row = data.draw(st.integers(begin_row + 1, 4))
    columns = data.draw(st.integers(1, 20))
    ranges = header.shape.read_ranges(begin_row, end_row, columns)
    pieces = bytearray(b"".join(payload[at : at + size] for at, size in ranges))
    assert len(pieces) < len(payload) or (columns > 16 and end_row - begin_row == 4)
    check_rows(header, pieces, begin_row, end_row, columns)
    narrow = header.shape.narrowed(columns)
    assert len(pieces) == narrow.row_offsets[end_row] - narrow.row_offsets[begin_row]
    with pytest.raises(ChecksumMismatch):
        check_rows(header, pieces[:-64], begin_row, end_row, columns)
    pieces[data.draw(st.integers(0, len(pieces) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    with pytest.raises(ChecksumMismatch):
        check_rows(header, pieces, begin_row, end_row, columns)


LARGE = records_of(20, (22_784, 22_784, 22_784, 45_568))


@pytest.mark.parametrize(
    ("rows", "columns"), [((0, 0), 1), ((2, 1), 1), ((0, 5), 1), ((-1, 2), 1), ((0, 1), 0), ((0, 1), 6)]
)
def test_rows_and_columns_that_are_not_there(rows, columns):
    with pytest.raises(DataError):
        a_header().shape.read_ranges(*rows, columns)


def test_reads_of_neighbouring_rows_are_one_range():
    shape = a_header(32).shape
    assert shape.read_ranges(0, 4, 32) == [(0, shape.payload_bytes)]
    assert shape.read_ranges(1, 3, 25) == [(73_728, 147_456)]
    assert shape.read_ranges(1, 3, 9) == [(73_728, 36_864), (147_456, 36_864)]


def test_refusals_name_their_reason():
    good = pack_header(a_header())
    other_format = bytearray(good)
    other_format[4] = 2
    damaged = bytearray(good)
    damaged[100] ^= 1
    for data, error, code in (
        (b"", DataError, "record.short"),
        (good[:100], DataError, "record.short"),
        (b"MPSX" + good[4:], DataError, "record.magic"),
        (bytes(other_format), WireVersionMismatch, "record.format"),
        (bytes(damaged), ChecksumMismatch, "record.checksum"),
    ):
        with pytest.raises(error) as caught:
            parse_header(data)
        assert caught.value.code == code


def test_records_of_another_layout_or_code_are_refused():
    header = parse_header(records_of()[0])
    header.check_fits(StripeShape(layout(100, 32, 3_000, 64), 3))
    for shape in (
        StripeShape(layout(100, 32, 3_000, 65), 3),
        StripeShape(layout(100, 32, 3_000, 64), 2),
        StripeShape(layout(100, 32, 3_000, 64), 3, 8, 4),
    ):
        with pytest.raises(DataError):
            header.check_fits(shape)


def test_the_golden_record():
    """Bytes on disk never change their meaning."""
    golden = np.array([header_digest(record) for record in records_of()], np.uint64)
    assert f"{xxhash.xxh3_64_intdigest(golden.tobytes()):016x}" == GOLDEN


def header_digest(record):
    return xxhash.xxh3_64_intdigest(record)


GOLDEN = "3e481bdda6f5640d"
