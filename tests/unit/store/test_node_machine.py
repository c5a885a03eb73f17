"""A storage node beside a dict of what it was given, under any order of events and any crash.

As `crash_run`, but hypothesis chooses what happens, to two targets under one node, and shrinks what fails.
"""

from __future__ import annotations

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from millpond.core.chance import Chance
from millpond.core.errors import ChecksumMismatch, ExtentAbsent
from millpond.core.units import KIB, MIB, SECOND_NS
from millpond.policies.retention import RetentionParams
from millpond.store.node import Calendar, StorageNode
from millpond.store.record import check_payload, parse_header
from millpond.store.segment import ShardKey, key_of
from millpond.store.target import Target, TargetParams, TargetState
from tests.unit.store.crash_disk import CrashDisk
from tests.unit.store.records import Record, make_record

PARAMS = TargetParams(
    capacity_bytes=4 * MIB, segment_bytes=48 * KIB, retention=RetentionParams(ttl_s=240, partitions=24)
)
NUM_TARGETS = 2
SEEDS = st.integers(0, 2**32)
PICKS = st.integers(0, 1000)


class MovedClock:
    def __init__(self) -> None:
        self.now_ns = 1_000_000 * SECOND_NS

    def monotonic_ns(self) -> int:
        return self.now_ns

    def unix_s(self) -> int:
        return self.now_ns // SECOND_NS


class NodeMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.clock = MovedClock()
        self.disks = [CrashDisk() for _ in range(NUM_TARGETS)]
        self.records: dict[ShardKey, Record] = {}
        self.certain: dict[ShardKey, int] = {}
        """Durable, not dropped -> when it was put."""
        self.unsure: set[ShardKey] = set()
        """Put or dropped since the last sync: a crash may take or keep it."""
        self.start()

    def start(self) -> None:
        calendar = Calendar(self.clock)
        targets = [Target(disk, PARAMS, now_s=calendar.now_s()) for disk in self.disks]
        assert [target.state for target in targets] == [TargetState.OK] * NUM_TARGETS
        self.node = StorageNode("s0", targets, calendar=calendar)

    def read(self, key: ShardKey) -> bytes | None:
        try:
            with self.node.open_record(key) as record:
                payload = bytearray(record.header.payload_bytes)
                record.read_ranges([(0, len(payload))], memoryview(payload))
                header = parse_header(record.packed_header)
        except ExtentAbsent:
            return None
        assert key_of(header) == key
        try:
            check_payload(header, payload)
        except ChecksumMismatch:
            return None
        return bytes(payload)

    def may_be_expired(self, key: ShardKey) -> bool:
        return self.clock.unix_s() >= self.certain.get(key, 0) + PARAMS.retention.ttl_s

    @rule(number=st.integers(0, 30), nonce=st.integers(0, 1))
    def put(self, number: int, nonce: int) -> None:
        record = make_record(number, row_bytes=(64, 64 * (1 + number * 7)), nonce=nonce)
        self.node.put(record.key, memoryview(record.whole))
        self.records[record.key] = record
        if record.key not in self.certain:
            self.unsure.add(record.key)
        assert self.read(record.key) == record.payload

    @precondition(lambda self: self.records)
    @rule(pick=PICKS)
    def drop(self, pick: int) -> None:
        key = sorted(self.records)[pick % len(self.records)]
        self.node.drop(key)
        assert self.read(key) is None
        self.certain.pop(key, None)
        self.unsure.add(key)

    @precondition(lambda self: self.records)
    @rule(pick=PICKS)
    def look(self, pick: int) -> None:
        key = sorted(self.records)[pick % len(self.records)]
        payload = self.read(key)
        assert payload in {None, self.records[key].payload}
        if key in self.certain and not self.may_be_expired(key):
            assert payload is not None

    @rule(seconds=st.integers(1, 100))
    def wait(self, seconds: int) -> None:
        self.clock.now_ns += seconds * SECOND_NS

    @rule()
    def sync(self) -> None:
        for index in range(NUM_TARGETS):
            self.node.upkeep(index)
        self.make_certain()

    @rule()
    def stop_and_start(self) -> None:
        self.node.close()
        assert [disk.num_open for disk in self.disks] == [0] * NUM_TARGETS
        self.make_certain()
        self.start()

    @rule(seed=SEEDS)
    def crash(self, seed: int) -> None:
        chance = Chance(seed, "crash")
        self.disks = [disk.image(chance) for disk in self.disks]
        self.start()
        for key in list(self.certain):
            assert self.read(key) is not None or self.may_be_expired(key), f"lost {key}"
        self.make_certain()

    @invariant()
    def certain_records_are_found(self) -> None:
        for key in self.certain:  # from memory: reading would keep all of them alive for ever
            assert self.node.find(key.fingerprint) is not None or self.may_be_expired(key), f"lost {key}"

    def make_certain(self) -> None:
        """What is found now is durable, what is not found stays away."""
        for key in list(self.certain):
            if self.node.find(key.fingerprint) is None:
                del self.certain[key]
        for key in self.unsure:
            if self.read(key) is not None:
                self.certain[key] = self.clock.unix_s()
        self.unsure.clear()


class TestNode(NodeMachine.TestCase):
    settings = settings(
        max_examples=40, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
    )
