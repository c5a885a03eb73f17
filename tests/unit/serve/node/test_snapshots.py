"""Window states: kept on their host, found by others, and none is better than a wrong one."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from millpond.core.node_messages import SnapshotPut
from tests.unit.serve.node.rig import (
    PARAMS,
    STATE_BYTES,
    STATEFUL,
    Daemon,
    Rank,
    Rig,
    chain,
    identity,
    poll,
    rig,
)


@pytest.fixture
def made(tmp_path: Path) -> Iterator[Rig]:
    with rig(tmp_path) as made:
        yield made


def state(number: int) -> bytes:
    return bytes([number]) * STATE_BYTES


def keep(rank: Rank, daemon: Daemon, at: int, number: int, *, replaces: int = 0, num_held: int) -> None:
    of = chain(at)
    old = chain(replaces).digests[-1] if replaces else b""
    rank.client.snapshot(SnapshotPut(identity(of), of.digests[-1], at * 128, state(number), old))
    poll(lambda: daemon.memory.snapshots.num_held == num_held, f"{num_held} snapshots")


def load_state(rank: Rank, num_blocks: int) -> tuple[int, bytes]:
    request = rank.order(num_blocks, wants_state=True)
    answer = rank.answer(request)
    load = rank.finish(request)
    assert load.state_position == answer.state_position
    rank.client.end(request, 0)
    return load.state_position, load.state


def start(made: Rig, host: str = "h0", **options: object) -> tuple[Daemon, Rank]:
    daemon = made.start(host, layout=STATEFUL, **options)  # type: ignore[arg-type]
    return daemon, made.rank(daemon, layout=STATEFUL)


def test_a_load_brings_the_last_state_at_or_before_its_end(made: Rig):
    daemon, rank = start(made)
    rank.put(chain(10))
    keep(rank, daemon, 4, 4, num_held=1)
    keep(rank, daemon, 7, 7, num_held=2)
    assert load_state(rank, 10) == (7 * 128, state(7))
    assert load_state(rank, 7) == (7 * 128, state(7))
    assert load_state(rank, 6) == (4 * 128, state(4))
    assert load_state(rank, 3) == (-1, b"")
    assert (daemon.daemon.counts.states_found, daemon.daemon.counts.states_missed) == (3, 1)
    daemon.check()


def test_where_blocks_or_state_are_approximate_the_load_says_so_on_every_host(made: Rig):
    """An exact state among exact blocks, an approximate one among them, and approximate blocks."""
    one, first = start(made)
    _, second = start(made, "h1")
    of = chain(10)
    first.put(of, end=6)
    first.put(of, 6, is_approximate=True)
    keep(first, one, 3, 3, num_held=1)
    flagged = SnapshotPut(identity(of), of.digests[4], 5 * 128, state(5), is_approximate=True)
    first.client.snapshot(flagged)
    poll(lambda: one.memory.snapshots.num_held == 2, "the other state")

    def answers(rank: Rank) -> list[tuple[int, int, bool]]:
        told: list[tuple[int, int, bool]] = []
        for num_blocks in (4, 6, 10):
            request = rank.order(num_blocks, wants_state=True)
            answer = rank.answer(request)
            rank.finish(request)
            rank.client.end(request, 0)
            told.append((answer.num_tokens, answer.state_position, answer.is_approximate))
        return told

    right = [(512, 384, False), (768, 640, True), (1280, 640, True)]
    assert answers(first) == right
    poll(lambda: answers(second) == right, "what the other host has, which is known once it is here")


def test_a_newer_state_of_a_sequence_takes_the_place_of_the_older(made: Rig):
    daemon, rank = start(made)
    rank.put(chain(10))
    keep(rank, daemon, 4, 4, num_held=1)
    keep(rank, daemon, 5, 5, replaces=4, num_held=1)
    poll(lambda: daemon.memory.snapshots.counts.replaced == 1, "replaced")
    assert load_state(rank, 4) == (-1, b"")
    assert load_state(rank, 10) == (5 * 128, state(5))


def test_a_state_of_another_size_is_not_kept(made: Rig):
    daemon, rank = start(made)
    rank.put(chain(4))
    of = chain(4)
    rank.client.snapshot(SnapshotPut(identity(of), of.digests[-1], 512, b"short"))
    assert load_state(rank, 4) == (-1, b"")
    assert daemon.memory.snapshots.num_held == 0


def test_memory_and_time_of_states_are_limited(made: Rig):
    params = replace(PARAMS, snapshot_ttl_s=0.5)
    daemon, rank = start(made, snapshots=3, params=params)
    rank.put(chain(10))
    for at in range(1, 7):
        keep(rank, daemon, at, at, num_held=min(at, 3))
    poll(lambda: daemon.memory.snapshots.counts.evicted == 3, "evicted")
    assert load_state(rank, 10) == (6 * 128, state(6))
    daemon.check()


def test_a_host_fetches_the_state_that_another_one_has(made: Rig):
    one, first = start(made)
    two, second = start(made, "h1")
    first.put(chain(10))
    second.put(chain(10))
    keep(first, one, 7, 7, num_held=1)
    keep(second, two, 4, 4, num_held=1)
    poll(lambda: load_state(second, 10) == (7 * 128, state(7)), "the state of the other host")
    assert load_state(first, 10) == (7 * 128, state(7))
    assert two.memory.snapshots.fetches.fetched >= 1
    assert load_state(second, 5) == (4 * 128, state(4))


def test_a_host_that_is_gone_has_no_states(made: Rig):
    one, first = start(made)
    two, second = start(made, "h1")
    first.put(chain(10))
    second.put(chain(10))
    keep(first, one, 7, 7, num_held=1)
    poll(lambda: load_state(second, 10) == (7 * 128, state(7)), "the state of the other host")
    for server in one.memory._servers:  # as if its process had ended
        assert server.stop(10)
    assert load_state(second, 10) == (-1, b"")
    assert two.memory.snapshots.fetches.late == 1
    two.check()
