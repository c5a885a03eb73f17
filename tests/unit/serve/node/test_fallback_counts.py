"""Whatever a node daemon does without is counted: one thing goes wrong, and exactly its series moves."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from millpond.core.node_messages import SnapshotPut
from millpond.store.metadata.client import MetadataClient
from tests.unit.serve.node.rig import PARAMS, STATEFUL, Daemon, Rig, chain, identity, poll, rig
from tests.unit.store.metadata.shards import TOKEN
from tests.unit.store.pool_cluster import soon

CALM = replace(PARAMS, spill=replace(PARAMS.spill, idle_s=600))
"""Nothing is written by itself."""
FALLBACKS = (
    "loads_refused",
    "loads_shortened",
    "shortened",
    "puts_skipped",
    "leases_expired",
    "blocks_refused",
    "blocks_damaged",
    "blocks_given_up",
    "spills_failed",
    "matches_failed",
    "directory_failed",
    "peer_reads",
    "snapshots_total:refused",
    "snapshots_total:missized",
    "snapshots_total:late",
    "pool_reads_total:lost",
    "pool_reads_total:late",
    "pool_reads_total:cancelled",
    "pool_bad_shards",
)
BEAT = "directory_failed_total:beat"


class Moved:
    """What moves of what a daemon does without."""

    def __init__(self, daemon: Daemon) -> None:
        self._daemon = daemon
        self._before = self._values()

    def __call__(self) -> dict[str, float]:
        values = self._values()
        changes = {name: value - self._before.get(name, 0) for name, value in values.items()}
        return {name: change for name, change in changes.items() if change}

    def _values(self) -> dict[str, float]:
        values = self._daemon.daemon.counts.values(self._daemon.memory)
        short = {name.removeprefix("millpond_node_"): value for name, value in values.items()}
        return {name: value for name, value in short.items() if name.startswith(FALLBACKS)}


@pytest.fixture
def made(tmp_path: Path) -> Iterator[Rig]:
    with rig(tmp_path) as made:
        yield made


@pytest.fixture
def alone(made: Rig) -> Daemon:
    """A daemon whose metadata nobody answers for."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
    return replace(made, metadata=(address,)).start(params=CALM)


def without_beats(moved: dict[str, float]) -> dict[str, float]:
    """They fail all the time where there is no metadata."""
    return {name: change for name, change in moved.items() if name != BEAT}


@pytest.mark.parametrize(("num_put", "num_asked", "reason"), [(3, 5, "absent"), (56, 56, "no_room")])
def test_a_load_that_is_accepted_for_less_than_was_asked_for(
    made: Rig, num_put: int, num_asked: int, reason: str
):
    daemon = made.start(pool=False, params=CALM)
    rank = made.rank(daemon)
    rank.put(chain(num_put))
    poll(lambda: daemon.daemon.counts.puts == num_put, "puts")
    moved = Moved(daemon)
    assert rank.read(num_asked) == min(num_put, 48)
    assert moved() == {"loads_shortened_total": 1, f"shortened_total:{reason}": 1}
    assert not daemon.daemon.counts.refused


def test_blocks_that_are_given_up(made: Rig):
    daemon = made.start(params=CALM)
    poll(lambda: daemon.memory.pool.is_open, "the pool")
    rank = made.rank(daemon)
    rank.put(chain(4))
    poll(lambda: daemon.daemon.counts.puts == 4, "puts")
    client = MetadataClient(made.metadata, name="operator", token=TOKEN)
    client.set_quota(chain(4).tenant, write_mib_s=1e-6, deadline_ns=soon())
    client.close()
    moved = Moved(daemon)
    daemon.memory.level.spill_all(deadline_ns=soon(30))
    assert moved() == {"blocks_given_up_total": 4}


def test_a_directory_that_is_not_told(alone: Daemon):
    moved = Moved(alone)
    poll(moved, "a sign of life that fails")
    assert set(moved()) == {BEAT}


def test_metadata_that_does_not_answer(alone: Daemon):
    moved = Moved(alone)
    assert alone.memory.loader.begin(chain(2), b"", deadline_ns=time.monotonic_ns()) is None
    assert without_beats(moved()) == {"directory_failed_total:find": 1, "matches_failed_total": 1}


def test_a_block_that_has_left_the_memory_of_its_host(made: Rig):
    one, two = made.start("h0", params=CALM), made.start("h1", params=CALM)
    poll(lambda: two.memory.pool.is_open, "the pool")
    made.rank(one).put(chain(1))
    poll(lambda: one.daemon.counts.puts == 1, "a put")
    loader = two.memory.loader
    found: list[object] = []

    def is_known() -> bool:
        load = loader.begin(chain(1), b"", deadline_ns=soon())
        if load is not None:
            found.append(load)
        return load is not None

    poll(is_known, "the directory hears of it")
    (load,) = found
    one.memory.arena.view(0)[99] ^= 16
    theirs, ours = Moved(one), Moved(two)
    assert loader.run(load, deadline_ns=soon()).num_blocks == 0  # type: ignore[arg-type]
    loader.release(load)  # type: ignore[arg-type]
    assert theirs() == {"peer_reads_stale_total": 1}
    assert ours() == {"peer_reads_failed_total": 1}


def test_a_snapshot_of_another_size(made: Rig):
    daemon = made.start(pool=False, layout=STATEFUL, params=CALM)
    of = chain(2)
    moved = Moved(daemon)
    daemon.memory.snapshots.put(SnapshotPut(identity(of), of.digests[-1], 256, b"short", b""))
    assert moved() == {"snapshots_total:missized": 1}
    assert daemon.memory.snapshots.num_held == 0


def test_disks_with_damage(made: Rig):
    daemon = made.start()
    rank = made.rank(daemon)
    rank.put(chain(8))
    poll(lambda: daemon.daemon.counts.puts == 8, "puts")
    poll(lambda: daemon.memory.level.num_waiting == 0, "everything is on disk", 30)
    daemon.end()
    again = made.start(params=CALM)
    poll(lambda: again.memory.pool.is_open, "the pool")
    rank.wait_up(again)
    damaged = [peer for peer in made.peers.values() if peer.records][:2]
    for peer in made.peers.values():  # what is damaged comes first, and is not too much
        peer.faults.flip_payload = peer in damaged
        peer.faults.delay_s = 0.0 if peer in damaged else 0.05
    moved = Moved(again)
    poll(lambda: rank.read(8) == 8, "eight blocks")
    assert moved()["pool_bad_shards_total"] > 0
    reads, values = again.memory.pool.reads, again.daemon.counts.values(again.memory)
    assert values["millpond_node_pool_reads_total:decodable"] == reads.ends[0] > 0
    for name, value in (
        ("bad_shards_total", reads.bad_shards),
        ("hedges_total", reads.hedges),
        ("hedges_refused_total", reads.hedges_refused),
        ("narrow_reads_total", reads.narrow_reads),
        ("losers_total", reads.losers),
        ("needed_bytes_total", reads.needed_bytes),
        ("asked_bytes_total", reads.asked_bytes),
    ):
        assert values[f"millpond_node_pool_{name}"] == value
