"""Reading a node's records without the node: the same bytes, and the same refusals."""

from __future__ import annotations

from pathlib import Path

import pytest

from millpond.core.errors import DataError, ExtentAbsent, NodeRefused
from millpond.core.units import KIB, MIB
from millpond.store.files import DiskFiles
from millpond.store.local_reader import LocalNodeReader
from millpond.store.record import check_rows
from millpond.store.segment import ShardKey
from millpond.store.target import Target, TargetParams
from tests.unit.store.records import Record, make_record, put

NOW = 1_000_000
HOUR = 3600
PARAMS = TargetParams(capacity_bytes=4 * MIB, segment_bytes=128 * KIB)


def read(reader: LocalNodeReader, key: ShardKey) -> bytes:
    with reader.open_record(key) as record:
        payload = bytearray(record.header.payload_bytes)
        record.read_ranges([(0, 64), (64, len(payload) - 64)], memoryview(payload))
        check_rows(record.header, payload, 0, len(record.header.shape.rows), record.header.num_blocks)
        assert record.generation == record.header.generation
        return bytes(payload)


def fill(target: Target, first: int, count: int, now_s: int = NOW) -> list[Record]:
    records = [make_record(first + i) for i in range(count)]
    for record in records:
        put(target, record, now_s)
    return records


@pytest.fixture
def targets(tmp_path: Path) -> list[Target]:
    return [Target(DiskFiles(tmp_path / f"t{i}"), PARAMS, now_s=NOW) for i in range(2)]


def test_records_of_all_targets_are_read_while_the_node_writes(targets: list[Target], tmp_path: Path):
    reader = LocalNodeReader(tmp_path)
    for round_ in range(4):  # some in open segments, some in sealed ones
        for i, target in enumerate(targets):
            records = fill(target, 100 * round_ + 50 * i, 40)
            assert [read(reader, record.key) for record in records] == [r.payload for r in records]
            if round_ % 2:
                target.upkeep(now_s=NOW + HOUR)
    reader.close()


def test_one_target_may_be_named_itself(targets: list[Target], tmp_path: Path):
    record = fill(targets[1], 0, 1)[0]
    reader = LocalNodeReader(tmp_path / "t1")
    assert read(reader, record.key) == record.payload
    reader.close()


def test_what_is_dropped_removed_or_never_was_is_absent(targets: list[Target], tmp_path: Path):
    target = targets[0]
    records = fill(target, 0, 10)
    reader = LocalNodeReader(tmp_path)
    assert read(reader, records[0].key) == records[0].payload
    with pytest.raises(ExtentAbsent):
        read(reader, make_record(99).key)
    target.drop(records[0].key, now_s=NOW)
    with pytest.raises(ExtentAbsent):
        read(reader, records[0].key)
    target.upkeep(now_s=NOW + HOUR)
    target.upkeep(now_s=NOW + 25 * HOUR)
    assert target.num_shards == 0
    with pytest.raises(ExtentAbsent):
        read(reader, records[1].key)
    reader.close()


def test_a_segment_that_goes_away_during_a_read_is_noticed(targets: list[Target], tmp_path: Path):
    target = targets[0]
    record = fill(target, 0, 1)[0]
    target.upkeep(now_s=NOW + HOUR)
    reader = LocalNodeReader(tmp_path)
    payload = bytearray(len(record.payload))
    with reader.open_record(record.key) as reading:
        target.upkeep(now_s=NOW + 25 * HOUR)
        with pytest.raises(ExtentAbsent):
            reading.read_ranges([(0, len(payload))], memoryview(payload))
    reader.close()


def test_copies_and_repairs_are_followed(targets: list[Target], tmp_path: Path):
    target = targets[0]
    record = fill(target, 0, 1)[0]
    reader = LocalNodeReader(tmp_path)
    assert read(reader, record.key) == record.payload
    segment = target.segments()[0]
    target.upkeep(now_s=NOW + HOUR)
    path = tmp_path / "t0" / segment.identity.name
    data = bytearray(path.read_bytes())
    data[4096 + 50] ^= 1  # the header of the record
    path.write_bytes(data)
    with pytest.raises((ExtentAbsent, DataError)):
        read(reader, record.key)
    put(target, record, NOW + HOUR)
    assert read(reader, record.key) == record.payload
    reader.close()


def test_no_target_is_a_typed_error(tmp_path: Path):
    with pytest.raises(NodeRefused):
        LocalNodeReader(tmp_path)
    with pytest.raises(NodeRefused):
        LocalNodeReader(tmp_path / "missing")
