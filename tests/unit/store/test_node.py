"""A node of several targets: where shards go, what a failed target costs, and time that cannot jump."""

from __future__ import annotations

import errno

import pytest

from millpond.core.errors import BadFrame, ExtentAbsent, NodeRefused
from millpond.core.units import KIB, MIB, SECOND_NS
from millpond.policies.retention import BlockClass
from millpond.store.node import Calendar, StorageNode
from millpond.store.record import check_payload, parse_header
from millpond.store.target import RETRY_S, Target, TargetParams, TargetState
from millpond.store.wear import WearBudget
from tests.unit.store.crash_disk import CrashDisk
from tests.unit.store.records import Record, make_record

HOUR = 3600
PARAMS = TargetParams(capacity_bytes=8 * MIB, segment_bytes=256 * KIB)


class MovedClock:
    def __init__(self) -> None:
        self.now_ns = 5 * SECOND_NS
        self.unix = 1_000_000

    def monotonic_ns(self) -> int:
        return self.now_ns

    def unix_s(self) -> int:
        return self.unix

    def wait(self, seconds: int) -> None:
        self.now_ns += seconds * SECOND_NS
        self.unix += seconds


class Setup:
    def __init__(self, num_targets: int = 4, budget_bytes: float = 0) -> None:
        self.clock = MovedClock()
        self.disks = [CrashDisk() for _ in range(num_targets)]
        calendar = Calendar(self.clock)
        now_s = calendar.now_s()
        self.node = StorageNode(
            "s0",
            [Target(disk, PARAMS, now_s=now_s) for disk in self.disks],
            calendar=calendar,
            budget=WearBudget(budget_bytes, now_s) if budget_bytes else None,
        )

    def put(self, *records: Record) -> None:
        for record in records:
            self.node.put(record.key, memoryview(record.whole))

    def read(self, record: Record) -> bytes:
        with self.node.open_record(record.key) as found:
            payload = bytearray(found.header.payload_bytes)
            found.read_ranges([(0, len(payload))], memoryview(payload))
            check_payload(parse_header(found.packed_header), payload)
            return bytes(payload)

    def upkeep(self) -> None:
        for index in range(len(self.disks)):
            self.node.upkeep(index)


RECORDS = [make_record(i) for i in range(400)]


def test_shards_spread_over_the_targets():
    setup = Setup()
    setup.put(*RECORDS)
    counts = [target.num_shards for target in setup.node.targets]
    assert sum(counts) == 400
    assert max(counts) <= 1.4 * 100
    assert [setup.read(record) for record in RECORDS] == [record.payload for record in RECORDS]


def test_a_failed_target_costs_its_own_records_and_moves_only_its_own_share():
    setup = Setup()
    before = [setup.node.pick(record.key.fingerprint) for record in RECORDS]
    setup.put(*RECORDS)
    setup.disks[1].fail = lambda kind, name: errno.EIO
    more = [make_record(i) for i in range(1000, 1100)]
    setup.put(*more)
    assert setup.node.targets[1].state is TargetState.FAILED
    after = [setup.node.pick(record.key.fingerprint) for record in RECORDS]
    assert [a for a, b in zip(after, before, strict=True) if b != 1] == [b for b in before if b != 1]
    assert 1 not in after
    for record, target in zip(RECORDS, before, strict=True):
        if target == 1:
            with pytest.raises(NodeRefused):
                setup.read(record)
        else:
            assert setup.read(record) == record.payload
    assert [setup.read(record) for record in more] == [record.payload for record in more]


def test_a_node_without_a_target_that_writes_says_so():
    setup = Setup(num_targets=2)
    for disk in setup.disks:
        disk.fail = lambda kind, name: errno.EROFS if kind in {"write", "create"} else 0
    for _ in range(2):
        with pytest.raises(NodeRefused) as refused:
            setup.put(RECORDS[0])
        assert refused.value.code == "store.read_only"


def test_of_two_copies_on_two_targets_the_newer_one_is_read():
    setup = Setup(num_targets=2)
    record = RECORDS[0]
    home = setup.node.pick(record.key.fingerprint)
    setup.disks[home].fail = lambda kind, name: errno.ENOSPC if kind == "write" else 0
    setup.put(record)  # goes to the other one
    setup.disks[home].fail = lambda kind, name: 0
    setup.clock.wait(RETRY_S)
    setup.upkeep()
    away = 1 - home
    assert setup.node.find(record.key.fingerprint) == away
    name = setup.node.targets[away].segments()[0].identity.name
    setup.disks[away].flip(name, 8 * (2 * 4096 + 1))  # its payload is damaged at rest
    setup.put(record)  # a repair, to its home
    assert setup.node.find(record.key.fingerprint) == home
    assert setup.read(record) == record.payload
    assert setup.node.drop(record.key)
    assert setup.node.find(record.key.fingerprint) is None


def test_the_clock_may_jump_and_nothing_expires_too_soon_or_never():
    setup = Setup()
    setup.put(RECORDS[0])
    setup.clock.unix += 100 * HOUR
    setup.upkeep()
    assert setup.read(RECORDS[0]) == RECORDS[0].payload
    setup.clock.unix -= 1000 * HOUR
    setup.clock.wait(HOUR)
    setup.upkeep()
    setup.clock.wait(23 * HOUR - 1)
    setup.upkeep()
    assert setup.node.find(RECORDS[0].key.fingerprint) is not None
    setup.clock.wait(HOUR + 1)
    setup.upkeep()
    setup.clock.wait(24 * HOUR)
    setup.upkeep()
    with pytest.raises(ExtentAbsent):
        setup.read(RECORDS[0])


def test_nodes_with_equal_budgets_refuse_the_same_stripes():
    refused = []
    for shard in range(3):
        setup = Setup(budget_bytes=1 * MIB)
        numbers = []
        for i in range(200):
            record = make_record(i, shard=shard, block_class=BlockClass.SUB_AGENT)
            try:
                setup.put(record)
            except NodeRefused:
                numbers.append(i)
        refused.append(numbers)
    assert refused[0]
    assert refused[0] == refused[1] == refused[2]


def test_copies_and_footers_count_against_the_budget():
    setup = Setup(budget_bytes=100 * MIB)
    setup.put(*RECORDS)
    before = setup.node.wear_level
    assert before == pytest.approx(1 - 400 * 8 * KIB / (100 * MIB), abs=1e-3)
    setup.clock.wait(HOUR)
    setup.upkeep()
    written = setup.node.written_bytes
    assert written > 400 * 8 * KIB


@pytest.mark.parametrize("damage", ["key", "size", "header"])
def test_a_record_that_is_not_what_its_request_says_is_refused(damage: str):
    setup = Setup()
    record = RECORDS[0]
    key, whole = record.key, bytearray(record.whole)
    if damage == "key":
        key = RECORDS[1].key
    elif damage == "size":
        whole += b"x"
    else:
        whole[60] ^= 1
    with pytest.raises(BadFrame):
        setup.node.put(key, memoryview(whole))
    assert setup.node.written_bytes == 0


def test_listing_goes_on_where_it_stopped_though_segments_vanish():
    setup = Setup(num_targets=2)
    setup.put(*RECORDS[:100])
    first = setup.node.list_headers(0, 30, 1 << 30)
    assert len(first.headers) == 30
    setup.clock.wait(2 * HOUR)
    setup.upkeep()
    setup.put(*RECORDS[100:120])
    setup.clock.wait(23 * HOUR)
    setup.upkeep()  # the first hour's segments expire
    rest = setup.node.list_headers(first.next_cursor, 1000, 1 << 30)
    assert rest.next_cursor == 0
    digests = {parse_header(header).extent.digest for header in rest.headers}
    assert digests <= {record.key.digest for record in RECORDS[:120]}
    assert {record.key.digest for record in RECORDS[100:120]} <= digests | {
        parse_header(header).extent.digest for header in first.headers
    }
