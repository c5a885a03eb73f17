from __future__ import annotations

import pytest

from millpond.control.extent_read import ReadEnd
from millpond.core.units import GIB
from millpond.policies.receive_window import ReceiveWindowParams
from millpond.policies.shard_pick import ShardPickParams
from millpond.sim.shard_reads import SHARD_BYTES, ReadLoad, ReadsOutcome, run_hedged, run_plain, stripe_nodes

NUM_READS = 3000
WIDE = ReceiveWindowParams(max_in_flight_bytes=GIB)


def hedged(**changes: object) -> ReadsOutcome:
    return run_hedged(ReadLoad(num_reads=NUM_READS, **changes), ShardPickParams(), WIDE)


def test_groups_load_every_node_and_position_equally():
    load = ReadLoad()
    groups = stripe_nodes(load)
    for shard in range(12):
        nodes = [group[shard] for group in groups]
        assert {nodes.count(node) for node in range(24)} == {len(groups) // 24}
    assert all(len(set(group)) == 12 for group in groups)


@pytest.mark.parametrize("rho", [0.2, 0.6])
def test_hedged_reads_cut_the_tail_for_few_bytes(rho: float):
    ours, plain = hedged(rho=rho), run_plain(ReadLoad(num_reads=NUM_READS, rho=rho))
    assert ours.ends[ReadEnd.DECODABLE] == plain.ends[ReadEnd.DECODABLE] == NUM_READS
    assert ours.quantile_ms(0.999) <= 0.2 * plain.quantile_ms(0.999)
    assert ours.quantile_ms(0.5) < plain.quantile_ms(0.5)
    assert ours.extra_ratio <= 0.12


@pytest.mark.parametrize("fault", [{"slow_node": 3}, {"stopped_node": 3}])
def test_one_bad_node_is_hardly_noticed(fault: dict[str, int]):
    ours, healthy = hedged(rho=0.6, **fault), hedged(rho=0.6)  # before and after the node is left out
    assert ours.ends[ReadEnd.DECODABLE] == NUM_READS
    assert ours.quantile_ms(0.99) <= 2 * healthy.quantile_ms(0.99)


def test_equal_seeds_give_equal_runs():
    runs = [run_hedged(ReadLoad(num_reads=300, seed=seed), ShardPickParams(), WIDE) for seed in (1, 1, 2)]
    assert runs[0].latency_ns.tolist() == runs[1].latency_ns.tolist() != runs[2].latency_ns.tolist()


def test_overload_ends_when_the_load_ends():
    burst = hedged(rho=1.2, deadline_s=0.02)
    assert sum(burst.ends) == NUM_READS
    assert burst.ends[ReadEnd.LATE] + burst.ends[ReadEnd.DECODABLE] == NUM_READS
    assert burst.counts.narrow_reads > NUM_READS / 2, "busy nodes are asked for no more than is needed"


def test_a_small_window_finishes_too():
    window = ReceiveWindowParams(max_in_flight_bytes=4 * SHARD_BYTES)
    ours = run_hedged(ReadLoad(num_reads=500, rho=0.01), ShardPickParams(), window)
    assert ours.ends[ReadEnd.DECODABLE] == 500
