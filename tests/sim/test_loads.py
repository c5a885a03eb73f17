"""The KV pool in virtual time: what is hit, what waits for it, and what happens when it does not come."""

from __future__ import annotations

import pytest

from millpond.config.sim_params import SimCostParams, SimRankParams
from millpond.control.group_scheduler import GroupRole
from millpond.control.kv_loads import MAX_RETRIES
from millpond.core.hashing import HashChain
from millpond.core.ids import RequestId
from millpond.core.request import FinishReason, StateRestore
from millpond.core.units import BLOCK_TOKENS, MILLISECOND_NS, SECOND_NS
from millpond.sim.cluster import Cluster, ClusterShape
from millpond.sim.kv_node import LoadFaults
from millpond.sim.workload import Arrival, Session

SPLIT = ClusterShape().groups
MIXED = (("m0", GroupRole.MIXED, 2),)
TURNS = ((700, 40), (200, 40), (33, 90), (256, 7))


def talk(num_sessions=3, turns=TURNS, policy=StateRestore.REPLAY):
    return [Session(i * 100 * MILLISECOND_NS, turns, 0.5, policy) for i in range(num_sessions)]


def run(sessions, groups=SPLIT, rank=None, **more):
    """Run to the end; nothing may be left over, and every turn has all its tokens."""
    cluster = Cluster(ClusterShape(groups=groups, rank=rank or SimRankParams(), **more))
    cluster.add_sessions(sessions)
    assert cluster.run()
    assert cluster.settle(), cluster.leftovers()
    assert all(s.reason is FinishReason.LENGTH for s in cluster.streams)
    assert all(len(s.token_times_ns) == s.spec.sampling.max_tokens for s in cluster.streams)
    assert len(cluster.streams) == sum(len(session.turns) for session in sessions)
    return cluster


def ideal(turns):
    """Full blocks of all that was said before. The newest token of it was sampled and not computed."""
    said, hits = 0, []
    for num_new, num_output in turns:
        hits.append(max(0, said - 1) // BLOCK_TOKENS * BLOCK_TOKENS)
        said += num_new + num_output
    return hits


def hits(cluster, number=0):
    """Of the turns of one session."""
    return [s.num_cached_tokens for s in cluster.streams if s.spec.request_id.startswith(f"s{number}-")]


@pytest.mark.parametrize("groups", [SPLIT, MIXED], ids=["1p1d", "mixed"])
@pytest.mark.parametrize("has_state", [False, True])
@pytest.mark.parametrize("policy", list(StateRestore))
def test_every_turn_hits_all_but_the_tail_of_those_before(groups, has_state, policy):
    cluster = run(talk(policy=policy), groups, SimRankParams(has_state=has_state))
    assert hits(cluster) == hits(cluster, 2) == ideal(TURNS)
    assert cluster.kv_node.num_broken == cluster.kv_node.num_refused == 0


def test_without_a_pool_nothing_is_hit():
    cluster = run(talk(), rank=SimRankParams(can_load=False))
    assert sum(hits(cluster)) == cluster.kv_node.pool.num_blocks == 0


def test_a_hit_saves_the_time_of_its_tokens():
    cold, warm = (run(talk(1), rank=SimRankParams(can_load=can)).streams[1] for can in (False, True))
    saved_ns = (cold.token_times_ns[0] - cold.submitted_ns) - (warm.token_times_ns[0] - warm.submitted_ns)
    costs = SimCostParams()
    num_steps_less = 2  # of 256 tokens each
    computed_ns = warm.num_cached_tokens * costs.prefill_token_ns + num_steps_less * costs.prefill_step_ns
    assert computed_ns - 10 * MILLISECOND_NS < saved_ns <= computed_ns


@pytest.mark.parametrize("bytes_per_s", [10**6, 10**7, 10**12])
def test_a_step_takes_as_long_as_what_it_computes_or_what_it_waits_for(bytes_per_s):
    costs = SimCostParams(load_bytes_per_s=bytes_per_s)
    turn = run(talk(1, ((700, 40), (60, 5))), costs=costs).streams[1]
    load_ns = turn.num_cached_tokens * costs.kv_bytes_per_token * SECOND_NS // bytes_per_s
    num_computed = turn.spec.num_prompt_tokens - turn.num_cached_tokens
    compute_ns = num_computed * costs.prefill_token_ns + costs.prefill_step_ns
    waited_ns = turn.token_times_ns[0] - turn.submitted_ns
    assert 0 <= waited_ns - max(load_ns, compute_ns) < 10 * MILLISECOND_NS


def test_requests_of_one_prefix_share_it():
    cluster = Cluster(ClusterShape())
    cluster.add([Arrival(i * 5 * SECOND_NS, 1100, 4, piece_ids=(1, 2, 3 + i)) for i in range(3)])
    assert cluster.run()
    assert [s.num_cached_tokens for s in cluster.streams] == [0, 1024, 1024]


@pytest.mark.parametrize(("has_state", "policy"), [(False, "exact"), (True, "exact"), (True, "replay")])
@pytest.mark.parametrize(
    "faults", [LoadFaults(refuse_ratio=1.0), LoadFaults(break_ratio=1.0), LoadFaults(0.3, 0.5, 1.0)]
)
def test_whatever_goes_wrong_with_loads_every_turn_ends_with_its_text(has_state, policy, faults):
    sessions = talk(4, policy=StateRestore(policy))
    cluster = run(sessions, MIXED, SimRankParams(has_state=has_state), load_faults=faults)
    if faults.refuse_ratio == 1.0:
        assert sum(hits(cluster)) == 0
        assert 12 < cluster.kv_node.num_refused <= 12 * (1 + MAX_RETRIES)
    if faults.break_ratio == 1.0:
        assert cluster.kv_node.num_broken >= 8
        num_hit = sum(stream.num_cached_tokens for stream in cluster.streams)
        assert num_hit < 4 * sum(ideal(TURNS))
        assert num_hit > 0 or policy == "exact"


@pytest.mark.parametrize("groups", [SPLIT, MIXED], ids=["1p1d", "mixed"])
@pytest.mark.parametrize("policy", list(StateRestore))
@pytest.mark.parametrize("turn", [1, 2, 3])
def test_after_one_replay_everything_of_the_session_is_flagged_and_nothing_before(groups, policy, turn):
    """A turn finds no state. Those after it find theirs, and build upon what it left all the same."""
    turns = (*TURNS, (300, 200))
    cluster = Cluster(ClusterShape(groups=groups, rank=SimRankParams(has_state=True)))
    cluster.add_sessions(talk(1, turns, policy))
    pool = cluster.kv_node.pool
    assert cluster.kernel.run(lambda: len(cluster.streams) == turn + 1, 100 * SECOND_NS)
    pool.forget_states()
    assert cluster.run()
    assert cluster.settle(), cluster.leftovers()
    last = cluster.streams[-1].spec
    chain = HashChain(pool.identity(policy).root)
    chain.extend(last.prompt_ids)
    flags = [bool(pool.approximate([digest], -1)) for digest in chain.digests]
    num_exact = ideal(turns)[turn] // BLOCK_TOKENS if policy is StateRestore.REPLAY else len(flags)
    assert flags == [False] * num_exact + [True] * (len(flags) - num_exact)
    num_more = (last.num_prompt_tokens + 200 - 1) // BLOCK_TOKENS - len(flags)
    assert pool.num_approximate == (len(flags) + num_more - num_exact if policy is StateRestore.REPLAY else 0)


def test_cancel_at_every_moment_of_a_load_frees_everything_within_a_second():
    """The second turn is cancelled at each millisecond of its way, from the match into decode."""
    costs = SimCostParams(load_bytes_per_s=10**8, prefill_token_ns=100_000)
    num_open = set()
    for moment_ms in range(0, 240, 3):
        cluster = Cluster(ClusterShape(costs=costs))
        cluster.add_sessions([Session(SECOND_NS, ((700, 3), (100, 60)))])
        assert cluster.kernel.run(lambda c=cluster: len(c.streams) == 2, 10 * SECOND_NS)
        cluster.kernel.run(lambda: False, cluster.kernel.now_ns + moment_ms * MILLISECOND_NS)
        num_open.add(cluster.kv_node.num_open)
        cluster.cancel(RequestId("s0-1"))
        assert cluster.settle(seconds=1.0), (moment_ms, cluster.leftovers())
    assert num_open == {0, 1}


@pytest.mark.parametrize("moment_ms", range(0, 240, 20))
def test_a_node_daemon_that_dies_with_loads_open_costs_time_only(moment_ms):
    costs = SimCostParams(load_bytes_per_s=10**8, prefill_token_ns=100_000)
    cluster = Cluster(ClusterShape(costs=costs))
    cluster.add_sessions(talk(4))
    cluster.kernel.run(lambda: any("-1" in s.spec.request_id for s in cluster.streams), 60 * SECOND_NS)
    cluster.kernel.run(lambda: False, cluster.kernel.now_ns + moment_ms * MILLISECOND_NS)
    cluster.kill_node_daemons(down_ns=300 * MILLISECOND_NS, lost_ratio=0.5)
    assert cluster.run()
    assert cluster.settle(), cluster.leftovers()
    assert all(s.reason is FinishReason.LENGTH for s in cluster.streams)
    assert len(cluster.streams) == 16
    assert sum(gateway.num_resubmitted for gateway in cluster.gateways.values()) == 0
