"""The whole service in virtual time: the rows of faults that concern control, one test each."""

from __future__ import annotations

import itertools
from collections import Counter
from functools import partial

import pytest

from millpond.config.sim_params import SimRankParams
from millpond.control.group_scheduler import GroupRole
from millpond.core.chance import Chance
from millpond.core.ids import GatewayId, GroupId, RequestId
from millpond.core.request import FinishReason
from millpond.core.units import MILLISECOND_NS, SECOND_NS
from millpond.sim.cluster import CLIENT_ORDER, Cluster, ClusterShape
from millpond.sim.report import summarise
from millpond.sim.sim_leader import SimLeader
from millpond.sim.workload import Arrival, poisson

TWO_EACH = tuple((f"p{i}", GroupRole.PREFILL, 1) for i in range(2)) + tuple(
    (f"d{i}", GroupRole.DECODE, 1) for i in range(2)
)


def finish(cluster):
    """Run to the end; nothing may be left over. Returns the number of each ending."""
    assert cluster.run(), [s.spec.request_id for g in cluster.gateways.values() for s in g.streams.values()]
    assert cluster.settle(), cluster.leftovers()
    return Counter(stream.reason.value for stream in cluster.streams)


def at(cluster, seconds, action, *args):
    cluster.kernel.at(int(seconds * SECOND_NS), CLIENT_ORDER, partial(action, *args))


@pytest.mark.parametrize(
    "groups",
    [
        (("m0", GroupRole.MIXED, 1),),
        (("p0", GroupRole.PREFILL, 1), ("d0", GroupRole.DECODE, 1)),
        (("p0", GroupRole.PREFILL, 2), ("d0", GroupRole.DECODE, 3)),
        (*TWO_EACH, ("m0", GroupRole.MIXED, 2)),
    ],
    ids=["mixed", "1p1d", "2+3 ranks", "all"],
)
def test_every_request_gets_all_its_tokens(groups):
    cluster = Cluster(ClusterShape(groups=groups, num_gateways=2))
    cluster.add(poisson(Chance(1, "arrivals"), 60, 4.0, 200, 30))
    assert finish(cluster) == {"length": 60}
    assert {len(stream.token_times_ns) for stream in cluster.streams} == {30}
    assert all(gateway.num_resubmitted == 0 for gateway in cluster.gateways.values())


def trace_of(shape, seed=5):
    cluster = Cluster(shape, seed)
    cluster.add(poisson(Chance(2, "arrivals"), 40, 6.0, 300, 50))
    at(cluster, 3.0, cluster.kill_group, GroupId("d0"))
    at(cluster, 5.0, cluster.kill_controller)
    finish(cluster)
    return cluster


def test_same_seed_same_run():
    shape = ClusterShape(groups=TWO_EACH, jitter_ns=20 * MILLISECOND_NS, duplicate_ratio=0.1)
    one, two, other = (trace_of(shape, seed) for seed in (5, 5, 6))
    assert [s.token_times_ns for s in one.streams] == [s.token_times_ns for s in two.streams]
    assert one.kernel.num_events == two.kernel.num_events
    assert [s.token_times_ns for s in one.streams] != [s.token_times_ns for s in other.streams]


@pytest.mark.parametrize(
    "groups", [(("m0", GroupRole.MIXED, 1),), ClusterShape().groups], ids=["mixed", "1p1d"]
)
def test_plans_of_several_steps_change_no_result(groups):
    runs = []
    for is_spanning in (False, True):
        shape = ClusterShape(groups=groups, is_spanning=is_spanning, rank=SimRankParams(num_blocks=12))
        cluster = Cluster(shape)
        cluster.add(poisson(Chance(2, "arrivals"), 40, 1.0, 300, 200))
        finish(cluster)
        runs.append(cluster)
    single, several = runs
    assert [s.token_times_ns for s in several.streams] == [s.token_times_ns for s in single.streams]
    assert summarise(several.streams) == summarise(single.streams)
    steps = [sum(leader.num_steps for leader in run.leaders.values()) for run in runs]
    plans = [sum(leader.num_plans for leader in run.leaders.values()) for run in runs]
    assert steps[0] == steps[1]
    assert plans[1] < 0.9 * plans[0]


def test_bug_12_cancel_at_every_moment_of_the_handover_frees_everything_within_a_second():
    """One request is cancelled at each millisecond of its way, from submission into decode."""
    phases = set()
    for moment_ms in range(0, 420, 3):
        cluster = Cluster(ClusterShape())
        cluster.add([Arrival(SECOND_NS, 250, 60)])
        cluster.kernel.run(lambda: False, SECOND_NS + moment_ms * MILLISECOND_NS)
        cluster.cancel(RequestId("r0"))
        for leader in cluster.leaders.values():
            phases |= {
                (leader.scheduler.role, state)
                for rank in leader.scheduler._ranks
                for state, line in rank.lines.items()
                if line
            }
        assert cluster.settle(seconds=1.0), (moment_ms, cluster.leftovers())
    names = {(role.value, state.value) for role, state in phases}
    assert {
        ("prefill", "prefill"),
        ("prefill", "sending"),
        ("decode", "receiving"),
        ("decode", "running"),
    } <= names


def test_bug_16_abort_storm_leaves_all_ranks_equal_and_empty():
    groups = (("p0", GroupRole.PREFILL, 3), ("d0", GroupRole.DECODE, 3))
    cluster = Cluster(ClusterShape(groups=groups))
    cluster.add([Arrival(SECOND_NS, 64, 8) for _ in range(1000)])
    for i in range(0, 1000, 2):
        at(cluster, 2.0 + i * 0.0001, cluster.cancel, RequestId(f"r{i}"))
    assert cluster.run()
    assert cluster.settle()
    reasons = Counter(stream.reason.value for stream in cluster.streams)
    assert reasons["length"] + reasons["aborted"] == 1000
    assert reasons["length"] >= 500
    for leader in cluster.leaders.values():
        assert len({(v.num_queued, v.num_seqs, v.free_blocks) for v in leader.scheduler.views()}) == 1


def test_bug_17_memory_full_of_cancelled_handoffs_drains_without_arrivals():
    cluster = Cluster(ClusterShape(rank=SimRankParams(num_blocks=8, num_slots=4)))
    cluster.add([Arrival(SECOND_NS, 250, 400) for _ in range(12)])
    cluster.kernel.run(
        lambda: all(x.scheduler.views()[0].free_blocks <= 2 for x in cluster.leaders.values()), 30 * SECOND_NS
    )
    assert all(x.scheduler.views()[0].free_blocks <= 2 for x in cluster.leaders.values())
    for i in range(12):
        cluster.cancel(RequestId(f"r{i}"))
    assert cluster.settle(seconds=1.0), cluster.leftovers()


def test_bug_21_every_decode_preempted_at_every_step_still_finishes(monkeypatch):
    """Each decode step is followed by the preemption of all that runs; they come back by re-submission."""
    from millpond.control.request_fsm import Signal
    from millpond.core.sequence import SequenceState

    num_preempted = 0
    end_step = SimLeader._end_step

    def preempt_all(leader, plan, done):
        nonlocal num_preempted
        end_step(leader, plan, done)
        for rank in leader.scheduler._ranks:
            for sequence in list(rank.lines[SequenceState.RUNNING].values()):
                rank.end(sequence, Signal.PREEMPT, None, "preempted by the test")
                num_preempted += 1

    monkeypatch.setattr(SimLeader, "_end_step", preempt_all)
    cluster = Cluster(ClusterShape(groups=TWO_EACH))
    cluster.add(poisson(Chance(2, "arrivals"), 12, 5.0, 150, 24))
    assert finish(cluster) == {"length": 12}
    assert {len(stream.token_times_ns) for stream in cluster.streams} == {24}
    assert num_preempted > 12 * 8


def test_memory_too_small_for_all_preempts_and_finishes_without_long_gaps():
    cluster = Cluster(ClusterShape())
    cluster.add([Arrival(i * 100 * MILLISECOND_NS, 300, 400) for i in range(64)])
    assert finish(cluster) == {"length": 64}
    assert cluster.gateways[GatewayId("g0")].num_resubmitted > 0
    gaps = [b - a for s in cluster.streams for a, b in itertools.pairwise(s.token_times_ns)]
    # A preempted stream does not queue behind those that came after it: that took 22 s here.
    assert max(gaps) < 10 * SECOND_NS


@pytest.mark.parametrize("victim", ["p0", "d0", "p1", "d1"])
@pytest.mark.parametrize("moment_s", [1.0, 1.4, 2.5, 4.0])
def test_bug_24_killed_group_with_a_hundred_in_flight(victim, moment_s):
    cluster = Cluster(ClusterShape(groups=TWO_EACH, num_gateways=2, rank=SimRankParams(num_blocks=200)))
    cluster.add([Arrival(SECOND_NS + i * MILLISECOND_NS, 60, 20) for i in range(100)])
    at(cluster, moment_s, cluster.kill_group, GroupId(victim))
    assert finish(cluster) == {"length": 100}
    assert {len(stream.token_times_ns) for stream in cluster.streams} == {20}
    # Each request is lost to this one death at most once.
    assert sum(gateway.num_resubmitted for gateway in cluster.gateways.values()) <= 100


def test_bug_24_death_of_prefill_leaves_running_decodes_alone():
    cluster = Cluster(ClusterShape())
    cluster.add([Arrival(SECOND_NS, 50, 200)])
    stream = None
    cluster.kernel.run(
        lambda: bool(cluster.streams) and len(cluster.streams[0].token_times_ns) > 20, 60 * SECOND_NS
    )
    [stream] = cluster.streams
    cluster.kill_group(GroupId("p0"))
    assert finish(cluster) == {"length": 1}
    assert stream.spec.attempt == 0


@pytest.mark.parametrize("moment_ms", range(900, 2600, 170))
def test_killed_controller_neither_loses_nor_restarts_what_runs(moment_ms):
    cluster = Cluster(ClusterShape(groups=TWO_EACH, restart_ns=300 * MILLISECOND_NS))
    cluster.add([Arrival(SECOND_NS + i * 40 * MILLISECOND_NS, 80, 60) for i in range(20)])
    at(cluster, moment_ms / 1000, cluster.kill_controller)
    assert finish(cluster) == {"length": 20}
    assert {len(stream.token_times_ns) for stream in cluster.streams} == {60}


def test_killed_controller_while_everything_decodes_costs_no_attempt():
    cluster = Cluster(ClusterShape())
    cluster.add([Arrival(SECOND_NS, 50, 300) for _ in range(5)])
    at(cluster, 4.0, cluster.kill_controller)
    assert finish(cluster) == {"length": 5}
    assert [stream.spec.attempt for stream in cluster.streams] == [0] * 5


def test_controller_and_prefill_die_together_while_kv_is_expected():
    """The new controller learns of half a pair only; the other half must not wait for ever."""
    cluster = Cluster(ClusterShape())
    cluster.add([Arrival(SECOND_NS, 2000, 5) for _ in range(4)])
    at(cluster, 2.0, cluster.kill_controller)
    at(cluster, 2.0, cluster.kill_group, GroupId("p0"))
    assert finish(cluster) == {"length": 4}


def test_a_dead_gateway_leaves_nothing_behind():
    cluster = Cluster(ClusterShape(num_gateways=2))
    cluster.add([Arrival(SECOND_NS + i * 50 * MILLISECOND_NS, 100, 50) for i in range(20)])
    at(cluster, 2.2, cluster.kill_gateway, GatewayId("g0"))
    reasons = finish(cluster)
    assert reasons["length"] >= 10
    assert set(reasons) == {"length", "aborted"}
    assert all(s.reason is FinishReason.LENGTH for s in cluster.streams if s.spec.gateway == "g1")


def test_bug_46_burst_of_500_within_one_report_period_spreads_over_groups():
    groups = tuple((f"p{i}", GroupRole.PREFILL, 2) for i in range(2)) + tuple(
        (f"d{i}", GroupRole.DECODE, 2) for i in range(2)
    )
    rank = SimRankParams(num_blocks=600, num_slots=256)
    cluster = Cluster(ClusterShape(groups=groups, rank=rank))
    cluster.add([Arrival(2 * SECOND_NS, 100, 3) for _ in range(500)])
    most = Counter()

    def watch():
        for name, leader in cluster.leaders.items():
            for view in leader.scheduler.views():
                most[name, view.rank] = max(most[name, view.rank], view.num_seqs + view.num_queued)
        return False

    cluster.kernel.run(watch, int(2.2 * SECOND_NS))
    for side in "pd":
        loads = [count for (name, _), count in most.items() if name.startswith(side)]
        assert len(loads) == 4
        assert min(loads) > 0
        assert max(loads) - min(loads) <= 2
    assert finish(cluster) == {"length": 500}
