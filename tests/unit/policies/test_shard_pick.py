from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from millpond.core.chance import Chance
from millpond.core.extents import NodeId
from millpond.core.units import MILLISECOND_NS, SECOND_NS
from millpond.policies.receive_window import ReceiveWindow, ReceiveWindowParams
from millpond.policies.shard_pick import HedgeBudget, HedgeTimer, LatencyDigest, NodeHealth, ShardPickParams

PARAMS = ShardPickParams()
NODES = tuple(NodeId(f"s{index}") for index in range(12))
SHARD = 180_000
MS = MILLISECOND_NS


def warm_health(now_ns: int = 0) -> NodeHealth:
    """Every node answered in 1 ms often enough for a median."""
    health = NodeHealth(PARAMS)
    for _ in range(LatencyDigest.MIN_SAMPLES):
        for node in NODES:
            health.observe(now_ns, node, SHARD, MS)
    return health


def feed(health: NodeHealth, node: NodeId, latency_ns: int, *, begin_ns: int, num: int, gap_ns: int) -> int:
    for index in range(num):
        begin_ns += gap_ns
        health.observe(begin_ns, node, SHARD, latency_ns)
        if node in health.ejected:
            return index
    return num


@given(st.lists(st.integers(1, 10**10), min_size=LatencyDigest.MIN_SAMPLES, max_size=400), st.floats(0.05, 1))
def test_a_digest_is_at_most_an_eighth_above_the_quantile(samples: list[int], quantile: float):
    digest = LatencyDigest(quantile)
    for sample in samples:
        digest.add(sample)
    assert digest.value_ns is not None
    seen = LatencyDigest.MIN_SAMPLES + (len(samples) - LatencyDigest.MIN_SAMPLES) // 64 * 64
    counted = sorted(samples[:seen])
    exact = next(value for rank, value in enumerate(counted, 1) if rank >= quantile * seen)
    assert exact <= digest.value_ns <= max(exact * 1.125 + 1, 16)


def test_a_digest_forgets_old_samples():
    digest = LatencyDigest(0.5)
    for _ in range(9000):
        digest.add(10 * MS)
    for _ in range(9000):
        digest.add(MS)
    assert digest.value_ns < 2 * MS


def test_healthy_nodes_are_asked_in_shard_order():
    assert list(warm_health().pick_order(SECOND_NS, NODES)) == list(range(12))


def test_a_node_four_times_slow_is_ejected_and_asked_last():
    health = warm_health()
    assert feed(health, NODES[3], 4 * MS, begin_ns=0, num=100, gap_ns=10 * MS) < 100
    order = list(health.pick_order(2 * SECOND_NS, NODES))
    assert order[-1] == 3
    assert sorted(order) == list(range(12))


def test_a_node_that_is_always_the_loser_is_ejected():
    health = warm_health()
    for index in range(100):
        health.lost_race(index * 10 * MS, NODES[3], SHARD, 14 * MS // 10)
    assert health.ejected == {NODES[3]}


def test_one_stall_ejects_nobody():
    health = warm_health()
    health.observe(SECOND_NS, NODES[3], SHARD, 1000 * MS)
    assert not health.ejected


def test_losing_one_race_in_eleven_ejects_nobody():
    health, chance = warm_health(), Chance(1, "losers")
    for step in range(20_000):
        node = NODES[chance.below(12)]
        now_ns = SECOND_NS + step * MS
        if chance.below(11):
            health.observe(now_ns, node, SHARD, MS)
        else:
            health.lost_race(now_ns, node, SHARD, 15 * MS // 10)
    assert not health.ejected


def test_a_probe_readmits_a_node_that_is_quick_again():
    health = warm_health()
    health.eject(0, NODES[3])
    assert list(health.pick_order(5 * SECOND_NS - 1, NODES))[-1] == 3
    assert next(iter(health.pick_order(5 * SECOND_NS, NODES))) == 3, "the probe is among the first"
    assert list(health.pick_order(5 * SECOND_NS, NODES))[-1] == 3, "one probe at a time"
    health.observe(5 * SECOND_NS + MS, NODES[3], SHARD, MS)
    assert not health.ejected
    assert list(health.pick_order(6 * SECOND_NS, NODES)) == list(range(12))


def test_failed_probes_double_the_time_up_to_the_limit():
    health = warm_health()
    now_ns, waits = 0, []
    health.eject(now_ns, NODES[3])
    for _ in range(5):
        begin_ns = now_ns
        while next(iter(health.pick_order(now_ns, NODES))) != 3:
            now_ns += SECOND_NS // 2
        waits.append((now_ns - begin_ns) / SECOND_NS)
        health.lost_race(now_ns, NODES[3], SHARD, MS)
    assert waits == [5, 10, 20, 30, 30]


def test_a_withdrawn_probe_says_nothing():
    health = warm_health()
    health.eject(0, NODES[3])
    for _ in range(2):
        assert next(iter(health.pick_order(6 * SECOND_NS, NODES))) == 3
        health.withdraw(NODES[3])


def test_strikes_in_a_row_eject():
    health = warm_health()
    for node, good_between in ((NODES[1], True), (NODES[2], False)):
        for _ in range(PARAMS.max_strikes):
            health.strike(0, node)
            if good_between:
                health.observe(0, node, SHARD, MS)
    assert health.ejected == {NODES[2]}


def test_slowness_never_ejects_more_than_its_share():
    health = warm_health()
    for step in range(2000):
        for node in NODES[:8]:
            health.lost_race(SECOND_NS + step * MS, node, SHARD, 5 * MS)
    assert len(health.ejected) == 2


@given(st.lists(st.integers(0, 11), unique=True, max_size=12), st.integers(0, 40))
def test_every_order_is_a_permutation(ejected: list[int], now_s: int):
    health = NodeHealth(PARAMS)
    for index in ejected:
        health.eject(0, NODES[index])
    order = list(health.pick_order(now_s * SECOND_NS, NODES))
    assert sorted(order) == list(range(12))
    num_healthy = 12 - len(ejected)
    is_probe_due = bool(ejected) and now_s >= 5
    assert set(order[: num_healthy + is_probe_due]) >= set(range(12)) - set(ejected)


def test_the_hedge_waits_for_the_quantile_of_whole_reads():
    timer = HedgeTimer(PARAMS)
    assert timer.wait_ns(SHARD, 11) == 10 * MS
    for index in range(1000):
        timer.observe(SHARD, 11, MS if index % 25 else 5 * MS)
    assert MS <= timer.wait_ns(SHARD, 11) <= 1.2 * MS
    assert timer.wait_ns(SHARD, 10) == timer.wait_ns(SHARD, 11), "the nearest width until it has its own"
    assert timer.wait_ns(100 * SHARD, 11) == 10 * MS
    for _ in range(1000):
        timer.observe(SHARD, 11, 1000)
    assert timer.wait_ns(SHARD, 11) >= PARAMS.min_hedge_us * 1000


@given(st.lists(st.tuples(st.integers(1, 10**6), st.integers(1, 10**7)), max_size=100))
def test_the_budget_bounds_the_extra_bytes(steps: list[tuple[int, int]]):
    budget, earned, spent = HedgeBudget(PARAMS), 0, 0
    for wanted, needed in steps:
        budget.earn(needed)
        earned += needed
        spent += wanted if budget.spend(wanted) else 0
        assert spent <= PARAMS.extra_ratio * earned + PARAMS.extra_burst_bytes + 1


@given(st.lists(st.integers(1, 5000), min_size=1, max_size=60), st.integers(1, 10_000))
def test_the_window_is_never_exceeded_but_by_a_single_shard(sizes: list[int], limit: int):
    window = ReceiveWindow(ReceiveWindowParams(max_in_flight_bytes=limit))
    in_flight: list[int] = []
    for size in sizes:
        while not window.try_start(0, size):
            assert window.next_start_ns(size) is None
            window.finish(in_flight.pop(0))
        in_flight.append(size)
        assert window.in_flight_bytes == sum(in_flight)
        assert len(in_flight) == 1 or sum(in_flight) <= limit


def test_a_paced_window_spaces_its_shards():
    window = ReceiveWindow(ReceiveWindowParams(paced_bytes_per_s=1_000_000))
    starts, now_ns = [], 0
    for _ in range(5):
        while not window.try_start(now_ns, 1000):
            now_ns = window.next_start_ns(1000)
        starts.append(now_ns)
    assert starts == [0, MS, 2 * MS, 3 * MS, 4 * MS]
