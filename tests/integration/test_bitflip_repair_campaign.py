"""Bits flip anywhere in the segments of twelve nodes: no wrong byte is read, and everything is healed."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from millpond.control.extent_read import ShardOutcome
from millpond.core.chance import Chance
from millpond.core.extents import NodeId
from millpond.core.pool_map import StorageNodeInfo
from millpond.policies.stripe_placement import add_epoch
from millpond.store.heal import Healer
from millpond.store.rebuild import Rebuild, RebuildParams
from millpond.store.scrub import Scrub, ScrubParams
from tests.unit.store.node_cluster import Node, NodeCluster, node_cluster
from tests.unit.store.pool_cluster import chain_of, soon

NUM_NODES, K, M = 12, 10, 2
NUM_CHAINS = 5
BITS_PER_NODE = 10
SHORT_BITS = 200
RESTART_EVERY = 4
FULL_SPEED = RebuildParams(read_mib_s=0)


@pytest.mark.campaign("bitflip")
def test_campaign_bitflip_in_a_pool_is_healed(tmp_path: Path, num_rounds: int) -> None:
    chance = Chance(1, "pool bitflip")
    num_flipped = num_damaged = 0
    with node_cluster(tmp_path, NUM_NODES) as cluster:
        infos = [StorageNodeInfo(node.name, node.address) for node in cluster.nodes.values()]
        cluster.metadata.map = add_epoch(cluster.metadata.map, infos, K, M)
        cluster.reconnect()
        chains = [chain_of(cluster.pool.window + index, first_id=index * 8192) for index in range(NUM_CHAINS)]
        for chain in chains:
            cluster.put(chain)
        while num_flipped < (num_rounds or SHORT_BITS):
            # Two nodes at a time: each extent can lose so many shards.
            for node in _two_of(list(cluster.nodes.values()), chance):
                restarts = chance.below(RESTART_EVERY) == 0
                if restarts:
                    node.stop()
                _flip(node, chance)
                if restarts:
                    node.start()
                num_flipped += BITS_PER_NODE
            for chain in chains:
                _, result = cluster.read(chain)  # checks every byte
                assert result.num_blocks == len(chain.digests)
            num_damaged += _heal(cluster)
            for chain in chains:
                hit = cluster.pool.match(chain)
                assert hit.num_blocks == len(chain.digests)
                for outcomes in cluster.pool.verify(hit, deadline_ns=soon()):
                    assert set(outcomes) == {ShardOutcome.VALID}
    assert num_damaged


def _two_of(nodes: list[Node], chance: Chance) -> list[Node]:
    first = nodes.pop(chance.below(len(nodes)))
    return [first, nodes[chance.below(len(nodes))]]


def _flip(node: Node, chance: Chance) -> None:
    """Flip bits on disk, behind the node's back."""
    segments = sorted(node.folder.glob("*.seg"))
    for _ in range(BITS_PER_NODE):
        with segments[chance.below(len(segments))].open("r+b", buffering=0) as file:
            position = chance.below(file.seek(0, 2))
            file.seek(position)
            byte = file.read(1)[0] ^ 1 << chance.below(8)
            file.seek(position)
            file.write(bytes([byte]))


def _heal(cluster: NodeCluster) -> int:
    """What reads found, what a scrub finds, what is missing; how many shards were made again."""
    pool = cluster.pool
    healer = Healer(pool)
    while healer.run():
        pass
    num_scrubbed = _scrub(cluster)
    rebuild = Rebuild(pool.links, pool.pool_map, None, params=FULL_SPEED, unix_s=cluster.clock.unix_s)
    rebuild.run()
    assert not rebuild.progress.lost + rebuild.progress.failed
    return healer.counts.healed + num_scrubbed + rebuild.progress.rebuilt


def _scrub(cluster: NodeCluster) -> int:
    """Scrub every record; how many were healed. A node that was restarted may not be reached at once."""
    pool, num_healed, until_ns = cluster.pool, 0, soon(60)
    while True:
        progress = Scrub(pool.links, pool.pool_map, ScrubParams(share=1.0)).run(map(NodeId, cluster.nodes))
        num_healed += progress.healed
        if not progress.silent_nodes + progress.unread:
            return num_healed
        assert time.monotonic_ns() < until_ns, progress
        time.sleep(0.1)  # the interval of a poll with a deadline
