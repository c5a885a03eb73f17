"""Segment headers and footers: what was packed is read, anything else is an error."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from millpond.core.errors import DataError
from millpond.store.record import stamp_generation
from millpond.store.segment import (
    DIRECTORY,
    PAGE_BYTES,
    SegmentId,
    pack_footer,
    pack_segment_header,
    parse_segment_header,
    read_footer,
    scan_records,
)
from tests.unit.store.crash_disk import CrashDisk
from tests.unit.store.records import make_record

SEGMENT = SegmentId(slot=3, generation=1 << 40, created_s=1_800_000_000, ttl_s=86_400)


def directory_of(count: int) -> np.ndarray:
    rng = np.random.default_rng(count)
    directory = np.empty(count, DIRECTORY)
    directory["fingerprint"] = rng.integers(0, 1 << 64, count, dtype=np.uint64)
    directory["page"] = 1 + np.arange(count)
    directory["num_bytes"] = PAGE_BYTES
    return directory


def sealed(count: int) -> tuple[CrashDisk, int, int]:
    """A disk with a sealed segment of so many records, its open file and where the footer begins."""
    disk = CrashDisk()
    file = disk.create(SEGMENT.name)
    end_bytes = (1 + count) * PAGE_BYTES
    disk.write(file, 0, [pack_segment_header(SEGMENT)])
    disk.write(file, end_bytes, [pack_footer(SEGMENT, directory_of(count), 77, end_bytes)])
    return disk, file, end_bytes


@given(
    st.builds(
        SegmentId,
        st.integers(0, 2**32 - 1),
        st.integers(0, 2**62),
        st.integers(0, 2**62),
        st.integers(0, 2**62),
    )
)
def test_a_header_is_read_as_packed(segment: SegmentId):
    assert parse_segment_header(pack_segment_header(segment)) == segment


@given(st.integers(0, 8 * PAGE_BYTES - 1))
def test_any_flipped_bit_of_a_header_is_noticed(bit: int):
    page = bytearray(pack_segment_header(SEGMENT))
    page[bit // 8] ^= 1 << bit % 8
    with pytest.raises(DataError):
        parse_segment_header(page)


@given(st.binary(max_size=5000))
def test_any_bytes_are_no_header(data: bytes):
    with pytest.raises(DataError):
        parse_segment_header(data)


@pytest.mark.parametrize("count", [0, 1, 251, 252, 253, 1500])
def test_a_footer_is_read_as_packed_and_sorted(count: int):
    disk, file, end_bytes = sealed(count)
    content = read_footer(disk, file, SEGMENT)
    assert content.directory.tolist() == sorted(directory_of(count).tolist())
    assert (content.newest_s, content.end_bytes) == (77, end_bytes)
    assert disk.size(file) % PAGE_BYTES == 0


@given(st.integers(0, 2**20))
def test_any_flipped_bit_of_a_footer_is_noticed(seed: int):
    disk, file, end_bytes = sealed(600)
    footer_bits = 8 * (disk.size(file) - end_bytes)
    disk.flip(SEGMENT.name, 8 * end_bytes + seed * 7919 % footer_bits)
    with pytest.raises(DataError):
        read_footer(disk, file, SEGMENT)


@pytest.mark.parametrize("cut", [1, 64, 4095, 4096, 8192])
def test_a_cut_footer_is_none(cut: int):
    disk, file, _ = sealed(600)
    disk.truncate(file, disk.size(file) - cut)
    with pytest.raises(DataError):
        read_footer(disk, file, SEGMENT)


def test_a_footer_of_another_generation_is_none():
    disk, file, _ = sealed(5)
    other = SegmentId(SEGMENT.slot, SEGMENT.generation + 1, SEGMENT.created_s, SEGMENT.ttl_s)
    with pytest.raises(DataError):
        read_footer(disk, file, other)


def test_a_scan_ends_at_a_record_of_another_segment_that_had_its_place_before():
    disk = CrashDisk()
    file = disk.create(SEGMENT.name)
    offset = PAGE_BYTES
    for number, generation in enumerate([SEGMENT.generation] * 3 + [SEGMENT.generation - 1] * 3):
        record = make_record(number)
        disk.write(file, offset, [stamp_generation(record.packed, generation), record.payload])
        offset += 2 * PAGE_BYTES
    content = scan_records(disk, file, SEGMENT)
    assert sorted(content.directory["fingerprint"].tolist()) == sorted(
        make_record(number).key.fingerprint for number in range(3)
    )
    assert content.end_bytes == 7 * PAGE_BYTES


def test_an_empty_file_has_none():
    disk = CrashDisk()
    with pytest.raises(DataError):
        read_footer(disk, disk.create("x"), SEGMENT)
