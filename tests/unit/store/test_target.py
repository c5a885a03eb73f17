"""A storage target: what is put is read, removed whole when its time or the room is over, and errors of the
drive cost at most what they touch."""

from __future__ import annotations

import errno

import pytest

from millpond.core.chance import Chance
from millpond.core.errors import ChecksumMismatch, ExtentAbsent, NodeRefused
from millpond.core.units import KIB, MIB
from millpond.policies.retention import BlockClass, RetentionParams
from millpond.store.target import RETRY_S, Target, TargetParams, TargetState
from tests.unit.store.crash_disk import CrashDisk
from tests.unit.store.records import Record, make_record, put, read

HOUR = 3600
NOW = 1_000_000
PARAMS = TargetParams(capacity_bytes=16 * MIB, segment_bytes=256 * KIB)
RECORD_BYTES = 8 * KIB
"""In a segment: header page and payload page."""


def new_target(disk: CrashDisk | None = None, params: TargetParams = PARAMS, now_s: int = NOW) -> Target:
    return Target(disk or CrashDisk(), params, now_s=now_s)


def fill(target: Target, count: int, now_s: int = NOW, first: int = 0, **kinds) -> list[Record]:
    records = [make_record(first + i, **kinds) for i in range(count)]
    for record in records:
        put(target, record, now_s)
    return records


def found(target: Target, records: list[Record], now_s: int = NOW) -> list[int]:
    """Numbers of the records that are read with their right bytes."""
    numbers = []
    for record in records:
        try:
            assert read(target, record.key, now_s) == record.payload
        except ExtentAbsent:
            continue
        numbers.append(record.number)
    return numbers


def test_what_is_put_is_read_before_and_after_a_restart():
    disk = CrashDisk()
    target = new_target(disk)
    records = fill(target, 100)
    assert found(target, records) == list(range(100))
    target.close(now_s=NOW)
    assert disk.num_open == 0
    again = new_target(disk)
    assert again.num_shards == 100
    assert found(again, records) == list(range(100))


def test_a_key_differs_in_every_field():
    target = new_target()
    record = fill(target, 1)[0]
    for other in (
        record.key._replace(digest=bytes(32)),
        record.key._replace(num_blocks=3),
        record.key._replace(shard=4),
        record.key._replace(nonce=1),
    ):
        with pytest.raises(ExtentAbsent):
            read(target, other, NOW)


def test_a_fingerprint_shared_by_two_keys_is_a_miss_and_never_the_other_record(monkeypatch):
    from millpond.store import segment

    monkeypatch.setattr(segment.ShardKey, "fingerprint", property(lambda key: key.digest[0] % 4))
    target = new_target()
    records = fill(target, 50)
    numbers = found(target, records)
    assert 1 <= len(numbers) <= 4
    assert 49 in numbers


def test_dropped_records_stay_dropped():
    disk = CrashDisk()
    target = new_target(disk)
    records = fill(target, 40)
    assert all(target.drop(record.key, now_s=NOW) for record in records[:20])
    assert not target.drop(records[0].key, now_s=NOW)
    assert found(target, records) == list(range(20, 40))
    target.close(now_s=NOW)
    again = new_target(disk)
    assert found(again, records) == list(range(20, 40))
    assert again.drop(records[30].key, now_s=NOW)
    again.close(now_s=NOW)
    assert 30 not in found(new_target(disk), records)


def test_a_newer_copy_replaces_a_damaged_one():
    disk = CrashDisk()
    target = new_target(disk)
    record = fill(target, 1)[0]
    name = target.segments()[0].identity.name
    disk.flip(name, 8 * (4096 + 4096 + 5))
    with pytest.raises(ChecksumMismatch):
        read(target, record.key, NOW)
    put(target, record, NOW)
    assert read(target, record.key, NOW) == record.payload
    target.close(now_s=NOW)
    assert found(new_target(disk), [record]) == [0]


def test_segments_are_removed_whole_when_their_time_is_over():
    disk = CrashDisk()
    target = new_target(disk)
    old = fill(target, 10)
    target.upkeep(now_s=NOW + HOUR)  # an hour is a partition of the day: the segment is sealed
    young = fill(target, 10, NOW + HOUR, first=10)
    target.upkeep(now_s=NOW + 2 * HOUR)
    target.upkeep(now_s=NOW + 24 * HOUR - 1)
    assert target.num_shards == 20
    target.upkeep(now_s=NOW + 24 * HOUR)
    assert found(target, old + young) == list(range(10, 20))
    target.upkeep(now_s=NOW + 25 * HOUR)
    assert target.num_shards == 0
    assert [name for name in disk.names() if name.endswith(".seg")] == []


def test_one_expired_segment_goes_at_a_time():
    target = new_target()
    for i in range(3):
        fill(target, 1, NOW, first=i)
        target.upkeep(now_s=NOW + HOUR * (i + 1))
    assert [segment.sealed for segment in target.segments()] == [True, True, True]
    left = []
    for _ in range(3):
        target.upkeep(now_s=NOW + 30 * HOUR)
        left.append(len(target.segments()))
    assert left == [2, 1, 0]


def test_one_shot_blocks_go_sooner_and_do_not_share_segments():
    target = new_target()
    fill(target, 5)
    fill(target, 5, first=5, block_class=BlockClass.ONE_SHOT)
    assert len(target.segments()) == 2
    target.upkeep(now_s=NOW + HOUR)
    target.upkeep(now_s=NOW + 2 * HOUR)
    assert target.num_shards == 5


def test_what_was_read_lately_is_copied_forward():
    disk = CrashDisk()
    target = new_target(disk)
    records = fill(target, 10)
    target.upkeep(now_s=NOW + HOUR)
    for record in records[:3]:
        read(target, record.key, NOW + 13 * HOUR)
    for record in records[3:6]:
        read(target, record.key, NOW + 11 * HOUR)  # more than half its life ago: not copied
    target.upkeep(now_s=NOW + 24 * HOUR)
    assert found(target, records, NOW + 24 * HOUR) == [0, 1, 2]
    target.close(now_s=NOW + 24 * HOUR)
    again = new_target(disk, now_s=NOW + 24 * HOUR)
    assert found(again, records, NOW + 24 * HOUR) == [0, 1, 2]


def test_a_damaged_record_is_not_copied_forward():
    disk = CrashDisk()
    target = new_target(disk)
    records = fill(target, 2)
    name = target.segments()[0].identity.name
    target.upkeep(now_s=NOW + HOUR)
    for record in records:
        read(target, record.key, NOW + 20 * HOUR)
    disk.flip(name, 8 * (4096 + 100))  # the header of record 0
    target.upkeep(now_s=NOW + 24 * HOUR)
    assert found(target, records, NOW + 24 * HOUR) == [1]
    assert target.num_damaged == 1


def test_the_oldest_give_way_when_the_capacity_is_reached():
    params = TargetParams(capacity_bytes=1 * MIB, segment_bytes=128 * KIB)
    disk = CrashDisk()
    target = new_target(disk, params)
    records = fill(target, 300)
    assert target.used_bytes <= params.capacity_bytes
    numbers = found(target, records)
    assert numbers == list(range(300 - len(numbers), 300))
    assert len(numbers) * RECORD_BYTES >= params.capacity_bytes * 3 // 4
    target.close(now_s=NOW)
    assert sum(disk.file_bytes(name) for name in disk.names()) <= params.capacity_bytes + 64 * KIB


def test_two_classes_share_a_target_that_is_smaller_than_both_want():
    target = new_target(params=TargetParams(capacity_bytes=300 * KIB))
    for i in range(200):
        fill(target, 1, first=2 * i)
        fill(target, 1, first=2 * i + 1, block_class=BlockClass.ONE_SHOT)
    assert target.used_bytes <= 300 * KIB
    assert target.state is TargetState.OK


def test_a_record_larger_than_a_segment_is_refused_and_nothing_else_happens():
    target = new_target(params=TargetParams(capacity_bytes=1 * MIB, segment_bytes=64 * KIB))
    records = fill(target, 3)
    with pytest.raises(NodeRefused) as refused:
        put(target, make_record(9, row_bytes=(64 * KIB,)), NOW)
    assert refused.value.code == "store.full"
    assert found(target, records) == [0, 1, 2]


@pytest.mark.parametrize(
    ("capacity", "segment"), [(1_000_000, 333_333 // 4096 * 4096), (64 * MIB, 4 * MIB), (1 << 45, 256 * MIB)]
)
def test_segments_of_small_targets_are_small(capacity: int, segment: int):
    assert TargetParams(capacity_bytes=capacity).max_segment_bytes == segment


def test_a_full_disk_sheds_the_oldest_and_goes_on():
    """The capacity says more than the disk has (fault row 44)."""
    disk = CrashDisk()
    room = 600 * KIB

    def fail(kind: str, name: str) -> int:
        if kind != "write" or name == "generations":  # that one is written in place
            return 0
        return errno.ENOSPC if sum(map(disk.file_bytes, disk.names())) > room else 0

    disk.fail = fail
    target = new_target(disk)
    records = fill(target, 300)
    numbers = found(target, records)
    assert numbers[-1] == 299
    assert numbers == list(range(300 - len(numbers), 300))
    assert target.state is TargetState.OK


def test_a_disk_without_any_room_refuses_and_is_tried_again_later():
    disk = CrashDisk()
    target = new_target(disk)
    disk.fail = lambda kind, name: errno.ENOSPC if kind == "write" else 0
    for _ in range(2):
        with pytest.raises(NodeRefused) as refused:
            fill(target, 1)
        assert refused.value.code == "store.read_only"
    assert target.state is TargetState.READ_ONLY
    disk.fail = lambda kind, name: 0
    target.upkeep(now_s=NOW + RETRY_S - 1)
    assert target.state is TargetState.READ_ONLY
    target.upkeep(now_s=NOW + RETRY_S)
    assert found(target, fill(target, 1)) == [0]


def test_a_disk_remounted_read_only_is_still_read():
    disk = CrashDisk()
    target = new_target(disk)
    records = fill(target, 10)
    target.upkeep(now_s=NOW)
    changes = ("write", "create", "remove", "truncate", "sync")
    disk.fail = lambda kind, name: errno.EROFS if kind in changes else 0
    with pytest.raises(NodeRefused):
        fill(target, 1, first=10)
    assert target.state is TargetState.READ_ONLY
    for second in range(1, 30):
        target.upkeep(now_s=NOW + second)
        assert found(target, records) == list(range(10))
    target.close(now_s=NOW)
    again = new_target(disk)
    assert found(again, records) == list(range(10))


def test_a_write_error_fails_the_target_for_writes_and_keeps_its_records():
    disk = CrashDisk()
    target = new_target(disk)
    records = fill(target, 10)
    target.upkeep(now_s=NOW)
    disk.fail = lambda kind, name: errno.EIO if kind == "write" else 0
    with pytest.raises(NodeRefused) as refused:
        fill(target, 1, first=10)
    assert refused.value.code == "store.io"
    disk.fail = lambda kind, name: 0
    with pytest.raises(NodeRefused):
        fill(target, 1, first=11)
    target.upkeep(now_s=NOW + 100)
    assert target.state is TargetState.FAILED
    assert found(target, records) == list(range(10))


def test_a_failed_sync_loses_the_segment_and_is_never_tried_again():
    """The page cache calls its pages clean after a failed sync: a second one would succeed and lie."""
    disk = CrashDisk()
    target = new_target(disk)
    safe = fill(target, 10)
    target.upkeep(now_s=NOW + HOUR)
    lost = fill(target, 10, NOW + HOUR, first=10)
    failing = target.segments()[-1].identity.name
    syncs = []
    disk.fail = lambda kind, name: (
        (syncs.append(name), errno.EIO)[1] if (kind, name) == ("sync", failing) else 0
    )
    target.upkeep(now_s=NOW + HOUR + 1)
    target.upkeep(now_s=NOW + HOUR + 2)
    assert syncs == [failing]
    assert target.num_lost_segments == 1
    assert failing not in disk.names()
    assert found(target, safe + lost) == list(range(10))
    assert found(target, fill(target, 5, NOW + HOUR, first=20)) == list(range(20, 25))
    after = new_target(disk.image(Chance(1, "image")), now_s=NOW + HOUR)
    assert found(after, safe + lost) == list(range(10))


def test_an_older_copy_is_found_again_when_the_newer_is_lost_in_a_failed_sync():
    disk = CrashDisk()
    target = new_target(disk)
    records = fill(target, 5)
    target.upkeep(now_s=NOW + HOUR)
    fill(target, 5, NOW + HOUR)
    failing = target.segments()[-1].identity.name
    disk.fail = lambda kind, name: errno.EIO if (kind, name) == ("sync", failing) else 0
    target.upkeep(now_s=NOW + HOUR + 1)
    assert found(target, records) == list(range(5))


def test_a_read_error_is_refused_and_other_segments_are_read():
    disk = CrashDisk()
    target = new_target(disk)
    first = fill(target, 5)
    target.upkeep(now_s=NOW + HOUR)
    second = fill(target, 5, NOW + HOUR, first=5)
    broken = target.segments()[0].identity.name
    disk.fail = lambda kind, name: errno.EIO if (kind, name) == ("read", broken) else 0
    with pytest.raises(NodeRefused) as refused:
        read(target, first[0].key, NOW)
    assert refused.value.code == "store.io"
    assert found(target, second) == list(range(5, 10))


def test_a_table_that_cannot_be_written_fails_the_target():
    disk = CrashDisk()
    target = new_target(disk)
    disk.fail = lambda kind, name: errno.EIO if name == "generations" else 0
    with pytest.raises(NodeRefused):
        fill(target, 1)
    assert target.state is TargetState.FAILED
    disk.fail = lambda kind, name: 0
    assert found(new_target(disk), fill(new_target(disk), 1)) == []


@pytest.mark.parametrize("kind", ["names", "open", "create", "read"])
def test_a_folder_that_cannot_be_read_is_a_failed_target_and_no_error(kind: str):
    disk = CrashDisk()
    if kind != "create":
        fill(new_target(disk), 1)
    disk.fail = lambda what, name: errno.EIO if what == kind else 0
    target = new_target(disk)
    assert target.state is TargetState.FAILED
    assert target.num_shards == 0
    with pytest.raises(NodeRefused):
        fill(target, 1)
    target.upkeep(now_s=NOW)
    target.close(now_s=NOW)


def test_a_damaged_generation_table_is_a_failed_target_and_its_files_stay():
    disk = CrashDisk()
    target = new_target(disk)
    fill(target, 1)
    target.close(now_s=NOW)
    names = disk.names()
    disk.flip("generations", 3)
    assert new_target(disk).state is TargetState.FAILED
    assert disk.names() == names


def test_a_clock_that_ran_ahead_does_not_make_data_immortal():
    disk = CrashDisk()
    target = new_target(disk, now_s=NOW + 1000 * HOUR)
    fill(target, 5, NOW + 1000 * HOUR)
    target.close(now_s=NOW + 1000 * HOUR)
    again = new_target(disk, now_s=NOW)
    again.upkeep(now_s=NOW + 24 * HOUR)
    assert again.num_shards == 0


def test_a_reader_keeps_its_bytes_when_the_segment_is_removed():
    disk = CrashDisk()
    target = new_target(disk)
    record = fill(target, 1)[0]
    target.upkeep(now_s=NOW + HOUR)
    with target.open_record(record.key, now_s=NOW) as reading:
        target.upkeep(now_s=NOW + 48 * HOUR)
        target.upkeep(now_s=NOW + 96 * HOUR)
        assert target.num_shards == 0
        payload = bytearray(len(record.payload))
        reading.read_ranges([(0, 100), (100, len(payload) - 100)], memoryview(payload))
        assert payload == record.payload
        open_while_read = disk.num_open
    assert disk.num_open == open_while_read - 1


def test_generations_are_never_used_twice():
    disk = CrashDisk()
    params = TargetParams(capacity_bytes=1 * MIB, segment_bytes=64 * KIB, retention=RetentionParams())
    seen: list[int] = []
    for _ in range(5):
        target = new_target(disk, params)
        for i in range(60):
            fill(target, 1, first=i)
            newest = target.segments()[-1].generation
            if not seen or newest != seen[-1]:
                seen.append(newest)
        target.close(now_s=NOW)
    assert seen == sorted(set(seen))
    assert disk.file_bytes("generations") < 4096 + 40 * 8  # slots are used again


def test_write_amplification_of_a_node_is_small():
    """Header pages, padding, table and footers, for shards of 16 blocks as V4.1-Flash has them."""
    disk = CrashDisk()
    target = new_target(disk, TargetParams(capacity_bytes=64 * MIB, segment_bytes=16 * MIB))
    rows = (2304, 2304, 2304, 4608)
    payload_bytes = 0
    for i in range(60):
        record = make_record(i, row_bytes=rows, num_blocks=16)
        payload_bytes += len(record.payload)
        put(target, record, NOW)
    target.close(now_s=NOW)
    assert disk.written_bytes / payload_bytes * 1.2 <= 1.27  # 10 + 2


def set_format(disk: CrashDisk, name: str, offset: int, version: int) -> None:
    """Write a version into the header that begins there, behind its magic."""
    file = disk.open(name)
    disk.write(file, offset + 4, [version.to_bytes(2, "little")])
    disk.close(file)


@pytest.mark.parametrize(("offset", "what"), [(0, "segment"), (4 * KIB, "record")])
def test_what_has_another_format_is_a_miss_and_is_set_aside(offset: int, what: str):
    disk = CrashDisk()
    target = new_target(disk)
    records = fill(target, 100)
    target.close(now_s=NOW)
    names = sorted(name for name in disk.names() if name.endswith(".seg"))
    assert len(names) == 4
    set_format(disk, names[1], offset, 2)
    again = new_target(disk)
    assert again.num_foreign_segments == 1
    assert (again.state, again.num_shards) == (TargetState.OK, len(found(again, records))), what
    assert 60 < again.num_shards < 80
    assert names[1] + ".aside" in disk.names()
    assert names[1] not in disk.names()
    fresh = fill(again, 100, first=1000)
    assert len(found(again, fresh)) == 100, "the target takes writes as ever"
    again.close(now_s=NOW)
    later = new_target(disk)
    assert later.num_foreign_segments == 0
    assert names[1] + ".aside" not in disk.names(), "kept until the next start only"
    assert len(found(later, fresh)) == 100


def test_a_generation_table_of_another_format_is_set_aside_and_the_target_starts_anew():
    disk = CrashDisk()
    target = new_target(disk)
    records = fill(target, 10)
    target.close(now_s=NOW)
    set_format(disk, "generations", 0, 2)
    again = new_target(disk)
    assert (again.state, again.num_shards) == (TargetState.OK, 0)
    assert found(again, records) == []
    assert "generations.aside" in disk.names()
    fresh = fill(again, 10)
    again.close(now_s=NOW)
    assert len(found(new_target(disk), fresh)) == 10
