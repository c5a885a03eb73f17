import hashlib
from collections import Counter
from itertools import combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from millpond.core.errors import InvalidRequest
from millpond.core.pool_map import PoolMap, StorageNodeInfo
from millpond.policies.stripe_placement import (
    add_epoch,
    make_epoch,
    plan_rebuild_reads,
    report_placement,
    retire_epochs,
)
from millpond.policies.stripe_placement.designs import develop, known_design, transversal_design
from millpond.policies.stripe_placement.difference_families import BASE_BLOCKS

EMPTY = PoolMap(version=0, nodes=(), epochs=(), metadata=())
EXACT = {12: 12, 13: 11, 15: 22, 16: 44, 17: 33, 19: 22, 23: 6, 24: 11, 25: 11, 45: 3, 133: 1}


def nodes_of(num_nodes, num_racks=1, weight=lambda i: 1):
    return [
        StorageNodeInfo(
            f"s{i:03}", f"host{i}:7000", f"r{i % num_racks:02}" if num_racks > 1 else "", weight(i)
        )
        for i in range(num_nodes)
    ]


def pair_counts(groups):
    return Counter(pair for group in groups for pair in combinations(sorted(group), 2))


def spread(groups, num_points):
    pairs = pair_counts(groups)
    counts = [pairs[pair] for pair in combinations(range(num_points), 2)]
    return max(counts) - min(counts)


def digest(epoch):
    return hashlib.sha256(repr((epoch.points, epoch.groups)).encode()).hexdigest()[:16]


@pytest.mark.parametrize(("num_points", "pairs"), EXACT.items())
def test_exact_designs_are_exact(num_points, pairs):
    groups = known_design(num_points)
    assert all(len(set(group)) == 12 and set(group) <= set(range(num_points)) for group in groups)
    counts = pair_counts(groups)
    assert len(counts) == num_points * (num_points - 1) // 2
    assert set(counts.values()) == {pairs}


def test_every_triple_of_24_nodes_meets_equally_often():
    triples = Counter(t for group in known_design(24) for t in combinations(sorted(group), 3))
    assert len(triples) == 24 * 23 * 22 // 6
    assert set(triples.values()) == {5}


def test_every_number_of_nodes_has_a_table():
    assert set(BASE_BLOCKS) | set(EXACT) == set(range(12, 151))


@pytest.mark.parametrize("num_points", sorted(BASE_BLOCKS))
def test_searched_base_blocks_spread_shards_roles_and_pairs(num_points):
    blocks = BASE_BLOCKS[num_points]
    assert len(blocks) <= 4
    assert all(sorted(set(block)) == list(block) and len(block) == 12 for block in blocks)
    # Differences say it all: developing adds every element to them.
    differences = Counter((a - b) % num_points for block in blocks for a in block for b in block if a != b)
    counts = [differences[d] for d in range(1, num_points)]
    assert max(counts) - min(counts) <= (1 if num_points <= 64 and num_points != 34 else 2)


@pytest.mark.parametrize("num_points", [14, 31, 64, 100, 128])
def test_developed_tables_use_every_node_in_every_role_equally(num_points):
    groups = known_design(num_points)
    assert groups == develop(BASE_BLOCKS[num_points], (num_points,))
    roles = Counter((point, role) for group in groups for role, point in enumerate(group))
    assert len(roles) == 12 * num_points
    assert len(set(roles.values())) == 1
    assert spread(groups, num_points) <= 2


@pytest.mark.parametrize("num_nodes", [*range(13, 129, 5), 24, 45, 50, 64, 113, 127, 138, 144, 150])
def test_rebuild_reads_are_level_with_one_survivor_skipped(num_nodes):
    epoch = make_epoch(0, nodes_of(num_nodes), 10, 2)
    plan = plan_rebuild_reads(epoch, "s003")
    reads = Counter()
    for group, cycle in plan.sources.items():
        lost = [shard for shard, point in enumerate(epoch.groups[group]) if epoch.points[point] == "s003"]
        for ordinal in range(2 * len(cycle)):
            shards = plan.shards(group, ordinal)
            assert len(set(shards)) == 10
            assert not set(shards) & set(lost)
            reads.update(epoch.points[epoch.groups[group][shard]] for shard in shards)
    touched = {g for g, points in enumerate(epoch.groups) if "s003" in {epoch.points[p] for p in points}}
    assert touched == set(plan.sources)
    assert not plan.unreadable
    assert max(reads.values()) / (sum(reads.values()) / (num_nodes - 1)) <= 1.1


def test_golden_tables():
    """A table that changes makes every stored stripe unreadable for new clients."""
    found = {
        "24": digest(make_epoch(0, nodes_of(24), 10, 2)),
        "40": digest(make_epoch(0, nodes_of(40), 10, 2)),
        "132 in 12": digest(make_epoch(0, nodes_of(132, 12), 10, 2)),
        "30 in 5": digest(make_epoch(0, nodes_of(30, 5), 10, 2)),
        "14 weighted": digest(make_epoch(0, nodes_of(14, 1, lambda i: 1 + i % 2), 10, 2)),
        "9 at 4+2": digest(make_epoch(0, nodes_of(9), 4, 2)),
        "3 shared": digest(make_epoch(0, nodes_of(3), 10, 2, allow_shared=True)),
    }
    assert found == GOLDEN
    first = make_epoch(0, nodes_of(23), 10, 2).groups[1]
    assert first == (1, 6, 8, 11, 12, 15, 16, 18, 20, 21, 22, 0)


GOLDEN = {
    "24": "51902422a95dfd05",
    "40": "53ef972568ff13f0",
    "132 in 12": "a8103adf4113823f",
    "30 in 5": "ad28895028966a30",
    "14 weighted": "19fb630704ac310e",
    "9 at 4+2": "ef9fdf9aeac20dcc",
    "3 shared": "0f8b5a2cb470ed72",
}


@pytest.mark.parametrize("per_rack", [11, 13])
def test_twelve_racks_get_one_shard_each(per_rack):
    epoch = make_epoch(0, nodes_of(12 * per_rack, 12), 10, 2)
    assert epoch.groups == transversal_design(per_rack)
    rack = {node.node: node.rack for node in nodes_of(12 * per_rack, 12)}
    report = report_placement(epoch, rack)
    assert report.max_shards_per_rack == 1
    assert report.groups_per_pair == (0, 1)
    assert report.shards_per_point == (per_rack, per_rack)
    for (a, b), count in pair_counts(epoch.groups).items():
        assert count == 1
        assert rack[epoch.points[a]] != rack[epoch.points[b]]


@settings(max_examples=15, deadline=None)
@given(data=st.data())
def test_no_group_breaks_the_limits(data):
    k, m = data.draw(st.integers(2, 10)), data.draw(st.integers(1, 4))
    num_nodes = data.draw(st.integers(k + m, k + m + 12))
    num_racks = data.draw(st.integers(1, num_nodes))
    weights = data.draw(st.lists(st.integers(1, 3), min_size=num_nodes, max_size=num_nodes))
    nodes = nodes_of(num_nodes, num_racks, weights.__getitem__)
    epoch = make_epoch(5, nodes, k, m)
    assert epoch == make_epoch(5, nodes[::-1], k, m)
    rack = {node.node: node.rack for node in nodes}
    per_rack = -(-(k + m) // num_racks)
    for group in epoch.groups:
        names = [epoch.points[point] for point in group]
        assert len(set(names)) == len(names) == k + m
        assert max(Counter(rack[name] for name in names).values()) <= per_rack
    assert {epoch.points[point] for group in epoch.groups for point in group} == {n.node for n in nodes}


def test_capacity_decides_how_many_shards_a_node_gets():
    nodes = nodes_of(20, 1, lambda i: 4 if i < 4 else 2)
    epoch = make_epoch(0, nodes, 10, 2)
    shards = Counter(epoch.points[point] for group in epoch.groups for point in group)
    assert len(epoch.points) == 24
    large, small = shards["s000"], shards["s019"]
    assert large == pytest.approx(2 * small, rel=0.1)


def test_fewer_nodes_than_shards_are_refused_unless_allowed():
    with pytest.raises(InvalidRequest, match="3 storage nodes for 10"):
        make_epoch(0, nodes_of(3), 10, 2)
    epoch = make_epoch(0, nodes_of(3), 10, 2, allow_shared=True)
    for group in epoch.groups:
        assert set(Counter(epoch.points[point] for point in group).values()) == {4}
    assert make_epoch(0, nodes_of(6), 4, 2).k == 4


def test_a_group_that_loses_too_much_with_one_node_cannot_be_rebuilt():
    epoch = make_epoch(0, nodes_of(3), 10, 2, allow_shared=True)
    plan = plan_rebuild_reads(epoch, "s001")
    assert not plan.sources
    assert plan.unreadable == tuple(range(len(epoch.groups)))


@pytest.mark.parametrize(
    "nodes",
    [
        [],
        [*nodes_of(12), nodes_of(1)[0]],
        nodes_of(12, 1, lambda i: 0),
        nodes_of(12, 1, lambda i: 99 + i),
    ],
)
def test_impossible_nodes_are_refused(nodes):
    with pytest.raises(InvalidRequest):
        make_epoch(0, nodes, 10, 2)


def test_join_and_leave_add_epochs_and_old_ones_stay_readable():
    pool = add_epoch(EMPTY, nodes_of(13), 10, 2)
    first = pool.epochs[0]
    pool = add_epoch(pool, nodes_of(14), 10, 2)
    assert pool.epochs[0] is first
    pool = add_epoch(pool, nodes_of(14)[1:], 10, 2)
    assert [epoch.epoch for epoch in pool.epochs] == [0, 1, 2]
    assert pool.version == 3
    # The node that left is still known: older epochs name it.
    assert [node.node for node in pool.nodes] == [node.node for node in nodes_of(14)]
    assert "s000" not in pool.epochs[-1].points
    pool = add_epoch(pool, nodes_of(14)[1:], 10, 2)
    with pytest.raises(InvalidRequest, match="expire"):
        add_epoch(pool, nodes_of(14), 10, 2)
    pool = retire_epochs(pool, oldest_live=2)
    assert [epoch.epoch for epoch in pool.epochs] == [2, 3]
    assert "s000" not in {node.node for node in pool.nodes}
    assert retire_epochs(pool, oldest_live=2) is pool
    assert len(retire_epochs(pool, oldest_live=99).epochs) == 1
    assert add_epoch(pool, nodes_of(14), 10, 2).epochs[-1].epoch == 4


def test_a_name_stays_with_its_machine():
    pool = add_epoch(EMPTY, nodes_of(13), 10, 2)
    moved = [StorageNodeInfo("s000", "elsewhere:1"), *nodes_of(13)[1:]]
    with pytest.raises(InvalidRequest, match="another name"):
        add_epoch(pool, moved, 10, 2)
