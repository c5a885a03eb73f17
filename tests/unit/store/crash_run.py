"""One random life of a target with crashes, beside a model of what it must still hold."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field

from millpond.core.chance import Chance
from millpond.core.errors import ChecksumMismatch, ExtentAbsent
from millpond.core.units import KIB
from millpond.policies.retention import BlockClass, RetentionParams, is_worth_copying
from millpond.store.segment import ShardKey
from millpond.store.target import Target, TargetParams
from tests.unit.store.crash_disk import Crash, CrashDisk
from tests.unit.store.records import Record, make_record, put, read

RETENTION = RetentionParams(ttl_s=240, one_shot_ttl_s=48, partitions=24)
PARAMS = TargetParams(capacity_bytes=64 << 20, segment_bytes=96 * KIB, retention=RETENTION)
CLASSES = (BlockClass.TURN, BlockClass.TURN, BlockClass.ONE_SHOT)


@dataclass
class Known:
    """What the model knows of one record."""

    record: Record
    ttl_s: int
    put_s: int
    durable: bool = False
    """An upkeep that began after the put has ended, and no drop was tried since."""
    dropping: bool = False
    """A drop was tried and is not durable yet: both answers are right."""
    last_read_s: int = -(1 << 40)
    """By this process; forgotten in a crash."""

    def may_be_gone(self, now_s: int) -> bool:
        hot = is_worth_copying(last_read_s=self.last_read_s, ttl_s=self.ttl_s, now_s=now_s)
        return not self.durable or self.dropping or (now_s >= self.put_s + self.ttl_s and not hot)


@dataclass
class Life:
    """A target on a disk that crashes."""

    chance: Chance
    disk: CrashDisk = field(default_factory=CrashDisk)
    now_s: int = 1_000_000
    known: dict[ShardKey, Known] = field(default_factory=dict)
    gone: list[Known] = field(default_factory=list)
    """Records that were dropped or expired durably: never found again."""
    num_crashes: int = 0
    num_lost: int = 0
    next_number: int = 0

    def __post_init__(self) -> None:
        self.target = self.start()

    def start(self) -> Target:
        return Target(self.disk, PARAMS, now_s=self.now_s)

    def round(self, num_steps: int, crash_within: int) -> None:
        """Some steps, a crash in one of their disk operations, a restart and a look at everything."""
        self.disk.crash_at = self.disk.num_changes + 1 + self.chance.below(crash_within)
        with contextlib.suppress(Crash):
            for _ in range(num_steps):
                self.step()
        self.crash()

    def crash(self) -> None:
        self.num_crashes += 1
        self.disk = self.disk.image(self.chance)
        if self.chance.below(4) == 0:  # a second crash, while it recovers
            self.disk.crash_at = 1 + self.chance.below(4)
            with contextlib.suppress(Crash):
                self.start()
            self.disk = self.disk.image(self.chance)
        self.target = self.start()
        assert self.target.fault == ""
        self.look_at_everything()

    def look_at_everything(self) -> None:
        for key, known in list(self.known.items()):
            may_be_gone = known.may_be_gone(self.now_s)
            known.last_read_s = -(1 << 40)
            if self.find(known):
                known.durable = known.durable and not known.dropping
                known.dropping = False
            else:
                assert may_be_gone, f"lost: {known}"
                self.num_lost += 1
                del self.known[key]
        for known in self.gone:
            assert not self.find(known), f"came back: {known}"
        self.look_at_the_directory()

    def look_at_the_directory(self) -> None:
        """Files, table and index agree."""
        segments = self.target.segments()
        names = {segment.identity.name for segment in segments}
        assert names == {name for name in self.disk.names() if name.endswith(".seg")}
        assert self.disk.num_open == len(segments) + 1

    def find(self, known: Known) -> bool:
        """Whether the record is found; if so, it must be exactly what was put."""
        try:
            payload = read(self.target, known.record.key, self.now_s)
        except ExtentAbsent:
            return False
        except ChecksumMismatch:  # an erasure, as the client sees it
            return False
        assert payload == known.record.payload
        known.last_read_s = self.now_s
        return True

    def step(self) -> None:
        kind = self.chance.below(20)
        if kind < 10:
            self.put()
        elif kind < 12:
            self.drop()
        elif kind < 14:
            self.read()
        elif kind < 19:
            self.now_s += 1 + self.chance.below(6) * self.chance.below(6)
            self.upkeep()
        else:
            self.target.close(now_s=self.now_s)
            for known in self.known.values():
                known.last_read_s = -(1 << 40)
                self.settle(known)
            self.target = self.start()
            self.forget_dropped()

    def put(self) -> None:
        if self.known and self.chance.below(5) == 0:  # a repair of a record that is there
            known = self.pick()
            known.durable = known.durable and not known.dropping
            known.dropping = False
            put(self.target, known.record, self.now_s)
            return
        self.next_number += 1
        block_class = CLASSES[self.chance.below(3)]
        rows = (64, 64 * (1 + self.chance.below(200)))
        record = make_record(self.next_number, row_bytes=rows, block_class=block_class)
        self.known[record.key] = Known(record, RETENTION.ttl_of(block_class), self.now_s)
        put(self.target, record, self.now_s)

    def drop(self) -> None:
        if self.known:
            known = self.pick()
            known.dropping = True
            self.target.drop(known.record.key, now_s=self.now_s)

    def read(self) -> None:
        if self.known:
            known = self.pick()
            if not self.find(known):
                assert known.dropping or known.may_be_gone(self.now_s)

    def upkeep(self) -> None:
        before = self.target.num_shards
        self.target.upkeep(now_s=self.now_s)
        assert self.target.num_shards <= before
        for known in self.known.values():
            self.settle(known)
        self.forget_dropped()
        for key, known in list(self.known.items()):
            if self.now_s >= known.put_s + known.ttl_s:
                if self.target.holds(key.fingerprint):
                    continue
                assert known.may_be_gone(self.now_s), f"expired though it was read: {known}"
                self.gone.append(self.known.pop(key))

    def settle(self, known: Known) -> None:
        known.durable = True

    def forget_dropped(self) -> None:
        for key, known in list(self.known.items()):
            if known.dropping:
                self.gone.append(self.known.pop(key))

    def pick(self) -> Known:
        keys = sorted(self.known)
        return self.known[keys[self.chance.below(len(keys))]]
