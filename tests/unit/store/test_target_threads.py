"""A target under many threads at once, while its segments are shed and sealed below them."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from pathlib import Path

from millpond.core.chance import Chance
from millpond.core.errors import ExtentAbsent
from millpond.core.units import KIB, MIB
from millpond.store.files import DiskFiles
from millpond.store.target import Target, TargetParams, TargetState
from tests.unit.store.records import make_record, put, read

NOW = 1_000_000
PARAMS = TargetParams(capacity_bytes=2 * MIB, segment_bytes=128 * KIB)
RECORDS = [make_record(i, row_bytes=(64, 1024)) for i in range(150)]


def test_no_thread_ever_sees_wrong_bytes_or_a_closed_file(tmp_path: Path):
    target = Target(DiskFiles(tmp_path), PARAMS, now_s=NOW)
    num_read = [0] * 4
    failures: list[BaseException] = []
    writing = threading.Event()
    writing.set()

    def write(number: int) -> None:
        chance = Chance(number, "writes")
        for _ in range(200):
            record = RECORDS[chance.below(len(RECORDS))]
            if chance.below(8):
                put(target, record, NOW)
            else:
                target.drop(record.key, now_s=NOW)

    def look(number: int) -> None:
        chance = Chance(number, "reads")
        while writing.is_set():
            record = RECORDS[chance.below(len(RECORDS))]
            with contextlib.suppress(ExtentAbsent):
                assert read(target, record.key, NOW) == record.payload
                num_read[number] += 1

    def keep_up() -> None:
        now_s = NOW
        while writing.is_set():
            now_s += 1800  # seals at every other turn, expires what was not shed
            target.upkeep(now_s=now_s)

    def guarded(run: Callable[..., None], *arguments: int) -> threading.Thread:
        def call() -> None:
            try:
                run(*arguments)
            except BaseException as error:  # noqa: BLE001 - reported below
                failures.append(error)

        return threading.Thread(target=call)

    writers = [guarded(write, i) for i in range(3)]
    others = [*(guarded(look, i) for i in range(4)), guarded(keep_up)]
    for thread in [*writers, *others]:
        thread.start()
    for thread in writers:
        thread.join(120)
    writing.clear()
    for thread in others:
        thread.join(20)
    assert failures == []
    assert all(num_read)
    assert target.state is TargetState.OK
    assert target.num_lost_segments == 0
    assert target.used_bytes <= PARAMS.capacity_bytes
    target.close(now_s=NOW)
    assert Target(DiskFiles(tmp_path), PARAMS, now_s=NOW).state is TargetState.OK
