"""One flipped bit anywhere on a target: never a wrong byte, and what is damaged can be put again."""

from __future__ import annotations

import pytest

from millpond.core.chance import Chance
from millpond.core.errors import ChecksumMismatch, ExtentAbsent
from millpond.core.units import KIB, MIB
from millpond.store.target import Target, TargetParams, TargetState
from tests.unit.store.crash_disk import CrashDisk
from tests.unit.store.records import make_record, put, read

NOW = 1_000_000
PARAMS = TargetParams(capacity_bytes=8 * MIB, segment_bytes=64 * KIB)
SHORT_ROUNDS = 300


@pytest.mark.campaign("bitflip")
def test_campaign_bitflip_returns_no_wrong_byte(num_rounds):
    chance = Chance(1, "bitflip")
    disk = CrashDisk()
    target = Target(disk, PARAMS, now_s=NOW)
    records = [make_record(i, row_bytes=(64, 1024)) for i in range(20)]
    for record in records:
        put(target, record, NOW)
    for record in records[18:]:
        target.drop(record.key, now_s=NOW)
    records, dropped = records[:18], records[18:]
    damaged = 0
    for _ in range(num_rounds or SHORT_ROUNDS):
        name = sorted(name for name in disk.names() if name.endswith(".seg"))[chance.below(2)]
        disk.flip(name, chance.below(8 * disk.file_bytes(name)))
        if chance.below(8) == 0:
            target.close(now_s=NOW)
            target = Target(disk, PARAMS, now_s=NOW)
            assert target.state is TargetState.OK
        for record in records:
            try:
                assert read(target, record.key, NOW) == record.payload
            except (ExtentAbsent, ChecksumMismatch):
                damaged += 1
                put(target, record, NOW)
                assert read(target, record.key, NOW) == record.payload
        for record in dropped:
            with pytest.raises(ExtentAbsent):
                read(target, record.key, NOW)
    assert damaged
