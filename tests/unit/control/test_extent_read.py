from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from millpond.control.extent_read import (
    CancelShards,
    CodedRead,
    EndRead,
    ExtentReads,
    HealShard,
    ReadAction,
    ReadEnd,
    ShardOutcome,
    StartShards,
)
from millpond.core.errors import InvariantBroken
from millpond.core.extents import NodeId
from millpond.core.units import MILLISECOND_NS, SECOND_NS
from millpond.policies.receive_window import ReceiveWindowParams
from millpond.policies.shard_pick import ShardPickParams

NODES = tuple(NodeId(f"s{index}") for index in range(12))
MS = MILLISECOND_NS
SHARD = 1000
VALID = ShardOutcome.VALID


@dataclass
class Bench:
    """Carries out the actions of one `ExtentReads` and checks the laws on the way."""

    reads: ExtentReads = field(default_factory=lambda: ExtentReads(ShardPickParams(), ReceiveWindowParams()))
    max_in_flight_bytes: int = ReceiveWindowParams().max_in_flight_bytes
    open: set[tuple[int, int]] = field(default_factory=set)
    asked: set[tuple[int, int]] = field(default_factory=set)
    valid: set[tuple[int, int]] = field(default_factory=set)
    ends: dict[int, EndRead] = field(default_factory=dict)
    healed: list[tuple[int, int, ShardOutcome]] = field(default_factory=list)

    def do(self, actions: list[ReadAction]) -> None:
        for action in actions:
            assert action.read_id not in self.ends, "nothing may follow the end of a read"
            match action:
                case StartShards(read, shards):
                    for shard in shards:
                        assert (read, shard) not in self.asked, "a shard is asked for once"
                        self.asked.add((read, shard))
                        self.open.add((read, shard))
                case CancelShards(read, shards):
                    self.open -= {(read, shard) for shard in shards}
                case HealShard(read, shard, outcome):
                    self.healed.append((read, shard, outcome))
                case EndRead(read, _, shards):
                    assert not [key for key in self.open if key[0] == read], "losers are cancelled before"
                    assert {(read, shard) for shard in shards} <= self.valid
                    assert len(set(shards)) == len(shards)
                    self.ends[read] = action
        assert self.reads.in_flight_bytes == SHARD * len(self.open)
        assert len(self.open) <= 1 or self.reads.in_flight_bytes <= self.max_in_flight_bytes

    def begin(self, now_ns: int, read: int, **changes: object) -> None:
        query = {"nodes": NODES, "k": 10, "num_bytes": SHARD, "deadline_ns": now_ns + SECOND_NS, **changes}
        self.do(self.reads.begin(now_ns, read, CodedRead(**query)))

    def answer(self, now_ns: int, read: int, shard: int, outcome: ShardOutcome = VALID) -> None:
        self.open.discard((read, shard))
        if outcome == VALID:
            self.valid.add((read, shard))
        self.do(self.reads.on_shard(now_ns, read, shard, outcome))

    def tick(self, now_ns: int) -> None:
        self.do(self.reads.on_time(now_ns))

    def shards(self, read: int) -> set[int]:
        return {shard for owner, shard in self.asked if owner == read}


def test_eleven_at_once_and_any_ten_decode():
    bench = Bench()
    bench.begin(0, 1)
    assert bench.shards(1) == set(range(11))
    for shard in (10, 9, 8, 7, 6, 5, 4, 3, 2, 1):
        bench.answer(MS, 1, shard)
    assert bench.ends[1] == EndRead(1, ReadEnd.DECODABLE, tuple(range(1, 11)))
    assert bench.reads.counts.losers == 1


def test_the_twelfth_comes_when_the_read_is_late():
    bench = Bench()
    bench.begin(0, 1)
    assert bench.reads.next_time_ns == 10 * MS
    bench.tick(10 * MS - 1)
    assert 11 not in bench.shards(1)
    bench.tick(10 * MS)
    assert 11 in bench.shards(1)
    assert bench.reads.counts.hedges == 1


def test_what_comes_after_the_end_is_ignored():
    bench = Bench()
    bench.begin(0, 1)
    for shard in range(10):
        bench.answer(MS, 1, shard)
    bench.answer(2 * MS, 1, 10)
    bench.do(bench.reads.cancel(2 * MS, 1))
    assert bench.ends[1].shards == tuple(range(10))


@pytest.mark.parametrize("outcome", [ShardOutcome.CORRUPT, ShardOutcome.ABSENT])
def test_a_bad_shard_is_an_erasure_and_is_healed(outcome: ShardOutcome):
    bench = Bench()
    bench.begin(0, 1)
    bench.answer(MS, 1, 3, outcome)
    assert 11 in bench.shards(1), "replaced at once"
    assert bench.healed == [(1, 3, outcome)]
    for shard in (0, 1, 2, 4, 5, 6, 7, 8, 9, 11):
        bench.answer(MS, 1, shard)
    assert bench.ends[1].shards == (0, 1, 2, 4, 5, 6, 7, 8, 9, 11)


def test_a_broken_connection_ejects_but_heals_nothing():
    bench = Bench()
    bench.begin(0, 1)
    bench.answer(MS, 1, 3, ShardOutcome.UNREACHABLE)
    assert not bench.healed
    bench.begin(2 * MS, 2)
    assert bench.shards(2) == set(range(12)) - {3}


def test_ejected_nodes_are_asked_last():
    bench = Bench()
    for shard in (3, 4):
        bench.reads.health.eject(0, NODES[shard])
    bench.begin(0, 1)
    assert bench.shards(1) == set(range(12)) - {4}, "eleven are asked: a slow shard is better than none"
    bench.tick(10 * MS)
    assert bench.shards(1) == set(range(12))


def test_with_three_gone_it_is_lost_at_once():
    bench = Bench()
    bench.begin(0, 1)
    for shard in (0, 1, 2):
        assert not bench.ends
        bench.answer(MS, 1, shard, ShardOutcome.ABSENT)
    assert bench.ends[1].end == ReadEnd.LOST


def test_shards_that_were_not_acknowledged_are_asked_for_last():
    bench = Bench()
    bench.begin(0, 1, missing=1 << 4)
    assert bench.shards(1) == set(range(12)) - {4}
    bench.answer(MS, 1, 0, ShardOutcome.ABSENT)
    assert bench.shards(1) == set(range(12))
    bench.begin(0, 2, missing=0b11)
    assert bench.shards(2) == set(range(2, 12)), (
        "ten are there for sure; one more is asked for only when late"
    )


def test_excluded_shards_are_never_asked_for():
    bench = Bench()
    bench.begin(0, 1, excluded=1 << 4)
    bench.tick(20 * MS)
    assert bench.shards(1) == set(range(12)) - {4}
    bench.begin(0, 2, excluded=0b111)
    assert bench.ends[2] == EndRead(2, ReadEnd.LOST, ())


def test_the_deadline_ends_a_read():
    bench = Bench()
    bench.begin(0, 1)
    for shard in range(9):
        bench.answer(MS, 1, shard)
    bench.tick(SECOND_NS - 1)
    assert not bench.ends
    bench.tick(SECOND_NS)
    assert bench.ends[1] == EndRead(1, ReadEnd.LATE, tuple(range(9)))
    assert bench.reads.next_time_ns is None


def test_busy_nodes_get_ten_and_one_late():
    bench = Bench()
    bench.reads.utilisation = 0.71
    bench.begin(0, 1)
    assert bench.shards(1) == set(range(10))
    bench.tick(10 * MS)
    assert bench.shards(1) == set(range(11))
    assert bench.reads.counts.narrow_reads == 1


def test_the_budget_bounds_wide_reads_and_hedges():
    bench = Bench(
        ExtentReads(ShardPickParams(extra_burst_bytes=2 * SHARD, extra_ratio=0), ReceiveWindowParams())
    )
    for read in range(3):
        bench.begin(0, read)
    bench.tick(30 * MS)
    assert [len(bench.shards(read)) for read in range(3)] == [11, 11, 10]
    assert bench.reads.counts.hedges_refused > 0
    assert bench.reads.counts.extra_ratio == pytest.approx(2 / 30)


def test_the_window_lets_shards_go_one_after_the_other():
    bench = Bench(
        ExtentReads(ShardPickParams(), ReceiveWindowParams(max_in_flight_bytes=4 * SHARD)), 4 * SHARD
    )
    bench.begin(0, 1)
    bench.begin(0, 2)
    while len(bench.ends) < 2:
        assert len(bench.open) <= 4
        bench.answer(MS, *min(bench.open))
    assert {end.end for end in bench.ends.values()} == {ReadEnd.DECODABLE}


def test_paced_reads_are_woken_by_time():
    window = ReceiveWindowParams(paced_bytes_per_s=SHARD * 1000)
    bench = Bench(ExtentReads(ShardPickParams(), window))
    bench.begin(0, 1)
    times = []
    while len(bench.asked) < 11:
        times.append(bench.reads.next_time_ns)
        bench.tick(times[-1])
    assert times == [MS * step for step in range(1, 11)]


def test_a_stripe_without_parity_needs_every_shard():
    bench = Bench()
    bench.begin(0, 1, nodes=NODES[:3], k=3)
    for shard in range(3):
        bench.answer(MS, 1, shard)
    assert bench.ends[1].end == ReadEnd.DECODABLE
    bench.begin(0, 2, nodes=NODES[:3], k=3)
    bench.answer(MS, 2, 0, ShardOutcome.ABSENT)
    assert bench.ends[2].end == ReadEnd.LOST


def test_an_id_in_use_is_our_own_mistake():
    bench = Bench()
    bench.begin(0, 1)
    with pytest.raises(InvariantBroken):
        bench.begin(0, 1)


@settings(max_examples=50)
@given(st.data())
def test_any_history_ends_every_read_once_and_leaves_nothing_in_flight(data: st.DataObject):
    limit = data.draw(st.sampled_from([1, 5, 1000])) * SHARD
    window = ReceiveWindowParams(
        max_in_flight_bytes=limit, paced_bytes_per_s=data.draw(st.sampled_from([0, 10**8]))
    )
    bench = Bench(ExtentReads(ShardPickParams(), window), limit)
    now_ns, num_reads = 0, 0
    k = data.draw(st.integers(1, 8))
    m = data.draw(st.integers(0, 4))
    bad: dict[int, set[int]] = {}
    for _ in range(data.draw(st.integers(1, 80))):
        now_ns += data.draw(st.integers(0, 5 * MS))
        match data.draw(st.sampled_from(["begin", "answer", "answer", "answer", "tick", "cancel"])):
            case "begin":
                every = st.integers(0, (1 << (k + m)) - 1)
                missing = data.draw(every) & data.draw(every)
                excluded = data.draw(every) & data.draw(every)
                deadline_ns = now_ns + data.draw(st.integers(1, 100 * MS))
                bad[num_reads] = {shard for shard in range(k + m) if excluded >> shard & 1}
                nodes = NODES[: k + m]
                bench.begin(
                    now_ns,
                    num_reads,
                    nodes=nodes,
                    k=k,
                    missing=missing,
                    excluded=excluded,
                    deadline_ns=deadline_ns,
                )
                num_reads += 1
            case "answer" if bench.open:
                read, shard = data.draw(st.sampled_from(sorted(bench.open)))
                outcome = data.draw(st.sampled_from([VALID, VALID, VALID, *ShardOutcome]))
                if outcome != VALID:
                    bad[read].add(shard)
                bench.answer(now_ns, read, shard, outcome)
            case "cancel" if num_reads:
                bench.do(bench.reads.cancel(now_ns, data.draw(st.integers(0, num_reads - 1))))
            case _:
                bench.tick(now_ns)
    while (due_ns := bench.reads.next_time_ns) is not None:
        assert due_ns <= now_ns + SECOND_NS
        now_ns = max(now_ns, due_ns)
        bench.tick(now_ns)
    assert set(bench.ends) == set(range(num_reads))
    assert bench.reads.num_reads == 0
    assert bench.reads.in_flight_bytes == 0
    for read, end in bench.ends.items():
        can_decode = k + m - len(bad[read]) >= k
        assert (end.end == ReadEnd.DECODABLE) == (len(end.shards) == k)
        assert end.end != ReadEnd.LOST or not can_decode
    assert sum(bench.reads.counts.ends) == num_reads
