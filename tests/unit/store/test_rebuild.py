"""Lost nodes, damaged drives and missing shards on real nodes: rebuild, scrub and read repair."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from millpond.control.extent_read import ShardOutcome
from millpond.core.errors import TransferFailed
from millpond.core.extents import NodeId
from millpond.policies.stripe_placement import add_epoch
from millpond.store.chain import BlockChain
from millpond.store.heal import Healer
from millpond.store.rebuild import Rebuild, RebuildParams, RebuildProgress
from millpond.store.scrub import Scrub, ScrubParams, ScrubProgress
from millpond.store.shard_census import take_census
from tests.unit.store.node_cluster import NodeCluster, node_cluster
from tests.unit.store.pool_cluster import K, M, chain_of, soon

CHAINS = [chain_of(70, first_id=10**6 * index) for index in range(3)]
NUM_STRIPES = 3 * 3
FAST = ScrubParams(share=1.0)
HOUR_S = 3600


@pytest.fixture
def made(tmp_path: Path) -> Iterator[NodeCluster]:
    with node_cluster(tmp_path) as made:
        for chain in CHAINS:
            made.put(chain)
        yield made


def rebuild(made: NodeCluster, node: str | None, **options: object) -> Rebuild:
    return Rebuild(
        made.pool.links,
        made.pool.pool_map,
        NodeId(node) if node else None,
        params=RebuildParams(**{"read_mib_s": 0, **options}),
        unix_s=made.clock.unix_s,
    )


def outcomes(made: NodeCluster, chain: BlockChain) -> list[ShardOutcome]:
    hit = made.pool.match(chain)
    return [one for extent in made.pool.verify(hit, deadline_ns=soon(20)) for one in extent]


def num_missing(made: NodeCluster) -> int:
    return sum(outcome != ShardOutcome.VALID for chain in CHAINS for outcome in outcomes(made, chain))


def test_a_node_that_comes_back_empty_gets_all_its_shards_again(made: NodeCluster) -> None:
    made.nodes[NodeId("s3")].wipe()
    made.wait_up()
    missing = num_missing(made)
    assert missing > 0
    job = rebuild(made, "s3")
    progress = job.run()
    assert (progress.total, progress.rebuilt, progress.done) == (missing, missing, missing)
    assert progress.written_bytes * K == progress.read_bytes
    assert num_missing(made) == 0
    assert NodeId("s3") not in job.reads
    assert rebuild(made, "s3").run() == RebuildProgress(), "nothing is left to do"
    for chain in CHAINS:
        assert made.read(chain)[1].num_blocks == 70


def test_a_rebuild_that_was_killed_is_begun_again_and_ends(
    made: NodeCluster, wait_until: Callable[..., None]
) -> None:
    made.nodes[NodeId("s0")].wipe()
    made.wait_up()
    missing = num_missing(made)
    first = rebuild(made, "s0", num_workers=1, read_mib_s=0.5)  # some seconds a stripe
    thread = threading.Thread(target=first.run)
    thread.start()
    try:
        wait_until(lambda: first.progress.rebuilt > 0, "a stripe is rebuilt", 20)
    finally:
        first.stop()
        thread.join(20)
    assert not thread.is_alive()
    assert 0 < first.progress.rebuilt < missing
    second = rebuild(made, "s0").run()
    assert second.total == missing - first.progress.rebuilt
    assert num_missing(made) == 0


def test_what_was_used_last_is_made_first_and_what_expires_soon_is_left_out(made: NodeCluster) -> None:
    made.nodes[NodeId("s1")].wipe()
    made.wait_up()
    missing = num_missing(made)
    made.clock.now_s += 23 * HOUR_S
    assert made.read(CHAINS[1])[1].num_blocks == 70
    progress = rebuild(made, "s1").run()
    (used,) = {progress.rebuilt}
    assert 0 < used < missing
    assert progress.expiring == missing - used
    assert ShardOutcome.ABSENT not in outcomes(made, CHAINS[1])

    made.nodes[NodeId("s2")].wipe()
    made.wait_up()
    census = take_census(made.pool.links, made.pool.pool_map)
    newest = max(census.stripes.values(), key=lambda found: found.used_s)
    planned = [job.extent for job, _ in rebuild(made, "s2", min_left_s=0)._plan(census)]
    used_s = [census.stripes[key].used_s for extent in planned for key in census.stripes if key[0] == extent]
    assert used_s == sorted(used_s, reverse=True)
    assert newest.used_s == made.clock.now_s


def test_scrubbing_and_rebuilding_do_not_count_as_use(made: NodeCluster) -> None:
    before = {found.extent: found.used_s for found in census_of(made)}
    made.clock.now_s += HOUR_S
    Scrub(made.pool.links, made.pool.pool_map, FAST).run(made.pool.links)
    num_missing(made)
    assert {found.extent: found.used_s for found in census_of(made)} == before


def census_of(made: NodeCluster) -> list:
    return list(take_census(made.pool.links, made.pool.pool_map).stripes.values())


def test_more_than_m_nodes_lost_is_counted_and_nothing_is_made_up(made: NodeCluster) -> None:
    for name in ("s0", "s1", "s2"):
        made.nodes[NodeId(name)].wipe()
    made.wait_up()
    progress = rebuild(made, None).run()
    assert progress.lost > 0
    assert progress.rebuilt + progress.lost == progress.total
    for chain in CHAINS:
        hit, result = made.read(chain)
        assert result.num_blocks <= hit.num_blocks


def test_a_node_that_is_down_cannot_be_rebuilt_and_the_others_can(made: NodeCluster) -> None:
    made.nodes[NodeId("s4")].stop()
    made.nodes[NodeId("s5")].wipe()
    made.wait_up()
    with pytest.raises(TransferFailed, match="s4"):
        rebuild(made, "s4").run()
    progress = rebuild(made, "s5").run()
    assert progress.rebuilt == progress.total > 0


def test_a_scrub_finds_a_flipped_bit_and_heals_it(made: NodeCluster) -> None:
    made.nodes[NodeId("s2")].flip(0.6)
    made.wait_up()
    census = take_census(made.pool.links, made.pool.pool_map)
    num_records = sum(found.present.bit_count() for found in census.stripes.values())
    scrub = Scrub(made.pool.links, made.pool.pool_map, FAST)
    progress = scrub.run(made.pool.links)
    assert (progress.checked, progress.unread, progress.silent_nodes) == (num_records, 0, 0)
    assert (progress.damaged, progress.healed) == (1, 1)
    assert num_missing(made) == 0
    again = Scrub(made.pool.links, made.pool.pool_map, FAST).run([NodeId("s2")])
    assert again.damaged == 0


def test_a_scrub_keeps_to_its_share_and_stops_when_told(
    made: NodeCluster, wait_until: Callable[..., None]
) -> None:
    scrub = Scrub(made.pool.links, made.pool.pool_map, ScrubParams(share=1e-6))
    thread = threading.Thread(target=scrub.run, args=(made.pool.links,))
    thread.start()
    try:
        wait_until(lambda: scrub.progress.checked == 1, "a record is checked", 20)
    finally:
        scrub.stop()
        thread.join(20)
    assert not thread.is_alive()
    assert scrub.progress.checked == 1, "one record keeps it at rest for minutes"


def test_a_node_that_is_down_is_passed_over_by_a_scrub(made: NodeCluster) -> None:
    made.nodes[NodeId("s4")].stop()
    progress = Scrub(made.pool.links, made.pool.pool_map, FAST).run([NodeId("s4")])
    assert progress == ScrubProgress(silent_nodes=1)


def test_a_read_that_misses_a_shard_has_it_put_back(made: NodeCluster) -> None:
    made.nodes[NodeId("s3")].wipe()
    made.wait_up()
    missing = num_missing(made)
    made.reconnect()  # its reads ask every node
    healer = Healer(made.pool)
    for _ in range(20):
        for chain in CHAINS:
            assert made.read(chain)[1].num_blocks == 70
        while healer.run():
            pass
        if not num_missing(made):
            break
    left = num_missing(made)  # a read asks one shard less than there are: it may never have been that one
    assert left < missing
    assert healer.counts.healed >= missing - left
    assert healer.counts.rewritten == healer.counts.lost == 0


def test_a_busy_extent_whose_node_has_left_is_written_anew_in_the_newest_placement(
    made: NodeCluster,
) -> None:
    made.nodes[NodeId("s3")].wipe()
    made.wait_up()
    rest = [info for info in made.metadata.map.nodes if info.node != "s3"]
    made.metadata.map = add_epoch(made.metadata.map, rest, K, M)
    made.reconnect()
    healer = Healer(made.pool)
    chain = CHAINS[0]
    for _ in range(20):
        assert made.read(chain)[1].num_blocks == 70
        while healer.run():
            pass
        if healer.counts.rewritten:
            break
    epochs = {part.location.epoch for part in made.pool.match(chain).extents}
    assert 1 in epochs
    assert healer.counts.rewritten > 0
    assert healer.counts.healed == 0
    assert set(outcomes(made, chain)) <= {ShardOutcome.VALID, ShardOutcome.ABSENT}
    assert {part.location.epoch for part in made.pool.match(CHAINS[1]).extents} == {0}, "nobody reads it"


def test_a_partial_hit_is_not_cut_short_by_healing(made: NodeCluster) -> None:
    made.nodes[NodeId("s3")].wipe()
    made.wait_up()
    rest = [info for info in made.metadata.map.nodes if info.node != "s3"]
    made.metadata.map = add_epoch(made.metadata.map, rest, K, M)
    made.reconnect()
    healer = Healer(made.pool)
    short = replace(CHAINS[0], digests=CHAINS[0].digests[:20])
    for _ in range(10):
        assert made.read(short)[1].num_blocks == 20
        while healer.run():
            pass
    assert made.read(CHAINS[0])[1].num_blocks == 70


def test_the_census_names_silent_nodes_and_counts_what_is_out_of_place(made: NodeCluster) -> None:
    made.nodes[NodeId("s6")].stop()
    census = take_census(made.pool.links, made.pool.pool_map)
    assert census.silent == (NodeId("s6"),)
    assert census.num_misplaced == 0
    assert len(census.stripes) == NUM_STRIPES
    empty = replace(made.pool.pool_map, epochs=())
    assert take_census(made.pool.links, empty).num_misplaced > 0
