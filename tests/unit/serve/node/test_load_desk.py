"""Loads of ranks where memory is short or threads are busy: who waits, for what, and who does not."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from millpond.control.node_leases import PATIENCE_NS
from millpond.core.errors import MillpondError
from millpond.core.ids import RequestId
from millpond.core.node_messages import LoadAccepted, LoadCancel, LoadDone, NodeHello, NodeWelcome
from millpond.store.chain import BlockChain, Hit
from millpond.store.net.messages import Location, Matched
from tests.unit.serve.node.rig import PARAMS, Daemon, RawPeer, Rig, chain, poll, rig
from tests.unit.store.pool_cluster import LAYOUT

LIMIT_S = 20.0
"""Ten times what may be noticed."""
MORE = chain(5, 100_000)


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


def test_a_load_waits_for_the_whole_of_what_another_one_holds(made: Rig):
    """Memory is not full of what cannot leave: what is here is not taken instead of all."""
    daemon = made.start(num_slots=64, params=replace(PARAMS, lease_s=600))
    rank = made.rank(daemon)
    for num_blocks, first_id in ((48, 0), (40, 100_000)):
        rank.put(chain(num_blocks, first_id), request=f"p{first_id}")
    poll(lambda: daemon.memory.level.num_waiting == 0, "all is on the disks")
    peer = raw(made, daemon)
    peer.load(chain(40, 100_000), 1, deadline_s=60)
    assert peer.expect(LoadDone, LIMIT_S).num_blocks == 40
    peer.load(chain(48), 2, deadline_s=60)
    begin_ns = time.monotonic_ns()
    poll(lambda: time.monotonic_ns() - begin_ns > 1.5 * PATIENCE_NS, "it has waited for long")
    assert daemon.daemon.leases.num_waiting == 1
    peer.send(LoadCancel(RequestId("raw1"), 0, 1))
    assert peer.expect(LoadDone, LIMIT_S).num_blocks == 48
    assert not daemon.daemon.counts.shortened
    daemon.check()


def test_a_load_that_finds_no_room_goes_on_with_what_is_in_memory(made: Rig, full: Daemon):
    peer = raw(made, full)
    peer.load(chain(41), 1, located=hint(41), deadline_s=60)
    accepted = peer.expect(LoadAccepted, LIMIT_S)
    assert (accepted.number, len(accepted.slots)) == (1, 40)
    assert full.daemon.counts.shortened_by == {"no_room": 1}
    assert peer.expect(LoadDone, LIMIT_S).num_blocks == 40
    assert full.daemon.counts.shortened == 1
    full.check()


# --- threads -------------------------------------------------------------------------------------


def located_of(daemon: Daemon, of: BlockChain) -> bytes:
    """Where a chain lies on the disks, once the metadata says it; it may be slow."""
    found: list[Hit] = []

    def is_found() -> bool:
        with suppress(MillpondError):
            found.append(daemon.memory.pool.match(of))
        return bool(found) and found[-1].num_blocks == len(of.digests)

    poll(is_found, "what is on the disks")
    parts = found[-1].extents
    extents, begins = tuple(part.location for part in parts), tuple(part.begin for part in parts)
    return msgspec.msgpack.encode(Matched(len(of.digests), extents, begins))


@pytest.fixture
def busy(made: Rig) -> Iterator[tuple[Daemon, RawPeer, bytes]]:
    """Every loader thread has a load of two blocks from disks that say nothing. Where `MORE` lies on them."""
    before = made.start()
    rank = made.rank(before)
    for number in range(4):
        rank.put(chain(2, 10_000 * number), request=f"p{number}")
    rank.put(MORE, request="more")
    poll(lambda: before.daemon.counts.puts == 13, "puts")
    poll(lambda: before.memory.level.num_waiting == 0, "everything is on disk", 30)
    before.end()
    params = replace(PARAMS, lease_s=600, spill=replace(PARAMS.spill, idle_s=600))
    daemon = made.start(params=params)
    poll(lambda: daemon.memory.pool.is_open, "the pool")
    chains = {chain(2, 10_000 * number) for number in range(4)} | {MORE}
    located = {of: located_of(daemon, of) for of in chains}
    for peer in made.peers.values():
        peer.faults.is_silent = True
    peer = raw(made, daemon)
    for number in range(4):
        of = chain(2, 10_000 * number)
        peer.load(of, 1 + number, located=located[of], deadline_s=60)
        assert len(peer.expect(LoadAccepted).slots) == 2
    yield daemon, peer, located[MORE]
    for silent in made.peers.values():
        silent.faults.is_silent = False
    daemon.check()


def test_a_load_that_is_in_memory_does_not_wait_for_reads(made: Rig, busy: tuple[Daemon, RawPeer, bytes]):
    daemon, peer, _ = busy
    made.rank(daemon).put(chain(7, 200_000))
    poll(lambda: daemon.daemon.counts.puts == 7, "puts")
    peer.load(chain(7, 200_000), 5, deadline_s=60)
    done = peer.expect(LoadDone, LIMIT_S)
    assert (done.number, done.num_blocks) == (5, 7)


def test_a_cancelled_load_that_has_not_begun_to_run_gives_its_slots_back(busy: tuple[Daemon, RawPeer, bytes]):
    daemon, peer, located = busy
    level = daemon.memory.level
    order = peer.load(MORE, 5, located=located, deadline_s=60)
    assert len(peer.expect(LoadAccepted).slots) == 5
    assert level.blocks.num_pinned == 13
    peer.send(LoadCancel(order.request_id, 0, order.number))
    poll(lambda: level.blocks.num_pinned == 8, "its slots are given back", LIMIT_S)
    daemon.check()
