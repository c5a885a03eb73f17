"""Loads of ranks where memory is short or threads are busy: who waits, for what, and who does not."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from millpond.core.node_messages import LoadAccepted, LoadDone, NodeHello, NodeWelcome
from millpond.store.net.messages import Location, Matched
from tests.unit.serve.node.rig import PARAMS, Daemon, RawPeer, Rig, chain, poll, rig
from tests.unit.store.pool_cluster import LAYOUT

LIMIT_S = 10.0
"""Ten times what may be noticed."""


@pytest.fixture
def made(tmp_path: Path) -> Iterator[Rig]:
    with rig(tmp_path) as made:
        yield made


def raw(made: Rig, daemon: Daemon) -> RawPeer:
    """A rank that wants no put slots."""
    peer = RawPeer(made, daemon)
    peer.send(NodeHello(1, LAYOUT.fingerprint, 0, os.getpid()))
    peer.expect(NodeWelcome)
    return peer


def hint(num_blocks: int) -> bytes:
    """Says that so many blocks of a chain are on the disks, in extents of up to 32."""
    begins = tuple(range(0, num_blocks, 32))
    extents = tuple(Location(bytes(32), min(32, num_blocks - begin), 1, 0, 1) for begin in begins)
    return msgspec.msgpack.encode(Matched(num_blocks, extents, begins))


@pytest.fixture
def full(made: Rig) -> Daemon:
    """64 slots: 8 are lent, and the others have blocks that no disk takes."""
    for peer in made.peers.values():
        peer.close()
    daemon = made.start(num_slots=64, params=replace(PARAMS, lease_s=600))
    rank = made.rank(daemon)
    for num_blocks, first_id in ((40, 0), (5, 100_000), (11, 200_000)):
        rank.put(chain(num_blocks, first_id), request=f"p{first_id}")
    poll(lambda: daemon.daemon.counts.puts == 56, "puts")
    poll(lambda: daemon.num_free() == 0, "a full memory")
    return daemon


def test_a_load_that_is_in_memory_does_not_wait_for_one_that_finds_no_room(made: Rig, full: Daemon):
    peer = raw(made, full)
    peer.load(chain(41, 10**6), 1, located=hint(41), deadline_s=60)
    poll(lambda: not full.daemon.leases.has_room, "a load without room")
    peer.load(chain(5, 100_000), 2, deadline_s=60)
    accepted = peer.expect(LoadAccepted, LIMIT_S)
    assert (accepted.number, len(accepted.slots)) == (2, 5)
    assert peer.expect(LoadDone, LIMIT_S).num_blocks == 5
    peer.load(chain(11, 200_000), 3, deadline_s=60)
    assert peer.expect(LoadDone, LIMIT_S).num_blocks == 11
    assert full.daemon.leases.num_waiting == 1, "nothing of it is in memory: it waits for room"
    assert not full.daemon.counts.shortened
    full.check()


def test_a_load_that_finds_no_room_goes_on_with_what_is_in_memory(made: Rig, full: Daemon):
    peer = raw(made, full)
    peer.load(chain(41), 1, located=hint(41), deadline_s=60)
    accepted = peer.expect(LoadAccepted, LIMIT_S)
    assert (accepted.number, len(accepted.slots)) == (1, 40)
    assert full.daemon.counts.shortened_by == {"no_room": 1}
    assert peer.expect(LoadDone, LIMIT_S).num_blocks == 40
    assert full.daemon.counts.shortened == 1
    full.check()
