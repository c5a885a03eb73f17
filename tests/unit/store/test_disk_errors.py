"""Each operation of a target's life fails once: no wrong byte, no half record, and the target goes on."""

from __future__ import annotations

import contextlib
import errno

import pytest

from millpond.core.chance import Chance
from millpond.core.errors import ChecksumMismatch, ExtentAbsent, NodeRefused
from millpond.core.units import KIB
from millpond.policies.retention import BlockClass
from millpond.store.target import RETRY_S, Target, TargetParams, TargetState
from tests.unit.store.crash_disk import CrashDisk
from tests.unit.store.records import Record, make_record, put, read

NOW = 1_000_000
HOUR = 3600
PARAMS = TargetParams(capacity_bytes=600 * KIB, segment_bytes=64 * KIB)
RECORDS = [
    make_record(i, row_bytes=(64, 3000 * (1 + i % 3) // 64 * 64), block_class=BlockClass(i % 5))
    for i in range(60)
]


def live(target: Target) -> None:
    """Fill, drop, repair, seal, shed, expire with copies, stop."""
    now_s = NOW
    for number, record in enumerate(RECORDS):
        with contextlib.suppress(NodeRefused):
            put(target, record, now_s)
        if number % 5 == 4:
            with contextlib.suppress(NodeRefused):
                target.drop(RECORDS[number - 2].key, now_s=now_s)
            with contextlib.suppress(NodeRefused):
                put(target, RECORDS[number - 3], now_s)
        if number % 7 == 0:
            now_s += HOUR
            target.upkeep(now_s=now_s)
        if number % 3 == 0:
            with contextlib.suppress(ExtentAbsent, NodeRefused, ChecksumMismatch):
                read(target, RECORDS[number // 2].key, now_s)
    for _ in range(3):
        now_s += 9 * HOUR
        target.upkeep(now_s=now_s)
    target.close(now_s=now_s)


def check(target: Target, records: list[Record]) -> int:
    """How many are found; each must be exactly what was put."""
    count = 0
    for record in records:
        with contextlib.suppress(ExtentAbsent):
            assert read(target, record.key, NOW) == record.payload
            count += 1
    return count


def failing_once(number: int, code: int):
    """Fail the `number`-th operation; `left` says whether there was one."""
    calls = iter(range(1, 1 << 30))

    def fail(kind: str, name: str) -> int:
        del kind, name
        return code if next(calls) == number else 0

    return fail


def count_operations() -> int:
    disk = CrashDisk()
    calls: list[str] = []
    disk.fail = lambda kind, name: calls.append(kind) or 0
    live(Target(disk, PARAMS, now_s=NOW))
    return len(calls)


@pytest.mark.campaign("disk_errors")
@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO, errno.EROFS], ids=errno.errorcode.get)
def test_bug_44_campaign_disk_errors_any_operation_may_fail(code: int, num_rounds: int):
    total = count_operations()
    assert total > 300
    found = 0
    step = 1 if num_rounds else 17
    for number in range(1 + code % step, total + 1, step):
        disk = CrashDisk()
        disk.fail = failing_once(number, code)
        live(Target(disk, PARAMS, now_s=NOW))
        disk.fail = lambda kind, name: 0
        assert disk.num_open == 0
        after = Target(disk, PARAMS, now_s=NOW + 30 * HOUR)
        assert after.state is TargetState.OK
        found += check(after, RECORDS)
        after.upkeep(now_s=NOW + 30 * HOUR + RETRY_S)
        put(after, RECORDS[0], NOW + 30 * HOUR)
        assert check(after, RECORDS[:1]) == 1
        found += check(Target(disk.image(Chance(number, "image")), PARAMS, now_s=NOW), RECORDS)
    assert found
