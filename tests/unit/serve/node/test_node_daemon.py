"""Ranks, their node daemon and the pool: puts, loads, leases, and what becomes of them when somebody goes."""

from __future__ import annotations

import os
import time
from array import array
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from millpond.core.events import Loaded
from millpond.core.hashing import HashChain
from millpond.core.ids import RequestId
from millpond.core.node_messages import (
    LoadAccepted,
    LoadCancel,
    LoadDone,
    LoadRefused,
    NodeHello,
    NodePing,
    NodeWelcome,
    Put,
    PutClose,
    PutSlots,
    SnapshotPut,
)
from millpond.store.chain import BlockChain
from tests.unit.serve.node.rig import (
    PARAMS,
    Daemon,
    RawPeer,
    Rig,
    chain,
    check_bytes,
    identity,
    living_process,
    poll,
    rig,
)
from tests.unit.store.pool_cluster import LAYOUT, bytes_of

HELLO = NodeHello(1, LAYOUT.fingerprint, 4, os.getpid())


@pytest.fixture
def made(tmp_path: Path) -> Iterator[Rig]:
    with rig(tmp_path) as made:
        yield made


def wait_puts(daemon: Daemon, count: int) -> None:
    poll(lambda: daemon.daemon.counts.puts == count, f"{count} puts")


# --- puts and loads ------------------------------------------------------------------------------


def test_what_a_rank_puts_another_one_loads_from_memory(made: Rig):
    daemon = made.start()
    writer, reader = made.rank(daemon), made.rank(daemon)
    writer.put(chain(10))
    wait_puts(daemon, 10)
    request = reader.order(12)
    assert reader.answer(request) == Loaded(request, 0, 10 * 128)
    load = reader.finish(request)
    assert check_bytes(load, chain(12)) == 10
    daemon.check()
    reader.client.end(request, 0)
    daemon.check()
    assert daemon.daemon.counts.blocks == {"memory": 10, "peers": 0, "pool": 0}


def test_a_restarted_daemon_finds_everything_on_the_disks(made: Rig):
    daemon = made.start()
    rank = made.rank(daemon)
    rank.put(chain(40))
    wait_puts(daemon, 40)
    daemon.end()  # writes what waits
    again = made.start()
    poll(lambda: again.memory.pool.is_open, "the pool")
    rank.wait_up(again)
    assert rank.read(40) == 40
    assert again.daemon.counts.blocks["pool"] == 40
    assert rank.read(40) == 40
    assert again.daemon.counts.blocks["memory"] == 40
    again.check()


def test_chains_that_part_inside_a_window_are_all_found_again(made: Rig):
    daemon = made.start(num_slots=128)
    rank = made.rank(daemon)
    hashes = HashChain(chain(42).root)
    hashes.extend(array("i", [*range(128 * 42), *[7] * 256]))
    fork = BlockChain(chain(42).tenant, hashes.root, tuple(hashes.digests))
    rank.put(chain(42))
    rank.put(fork, 42, 44, request="fork")
    rank.put(chain(55), 42, 55, request="rest")
    wait_puts(daemon, 57)
    daemon.end()
    again = made.start(num_slots=128)
    poll(lambda: again.memory.pool.is_open, "the pool")
    rank.wait_up(again)
    assert rank.read(55) == 55
    again.check()


def test_a_host_loads_from_the_memory_of_another_one(made: Rig):
    params = replace(PARAMS, spill=replace(PARAMS.spill, idle_s=600))
    one, two = made.start("h0", params=params), made.start("h1", params=params)
    made.rank(one).put(chain(20))
    wait_puts(one, 20)
    rank = made.rank(two)
    poll(lambda: rank.read(20) == 20, "twenty blocks")  # the directory hears of them in the background
    assert two.daemon.counts.blocks["peers"] == 20
    two.check()


def test_without_a_pool_the_memory_serves(made: Rig):
    daemon = made.start(pool=False)
    rank = made.rank(daemon)
    assert rank.read(3) == 0
    rank.put(chain(3))
    wait_puts(daemon, 3)
    assert rank.read(3) == 3
    daemon.check()


def test_a_pool_that_comes_late_takes_what_waited(made: Rig):
    for peer in made.peers.values():
        peer.close()
    daemon = made.start()
    rank = made.rank(daemon)
    rank.put(chain(32))
    wait_puts(daemon, 32)
    poll(lambda: daemon.memory.level.counts.failed_spills, "a spill that fails")
    assert rank.read(32) == 32
    for peer in made.peers.values():
        peer.reopen()
    poll(lambda: daemon.memory.level.num_waiting == 0, "everything is on disk", 30)
    daemon.check()


def test_blocks_that_are_known_give_their_slots_back(made: Rig):
    daemon = made.start()
    one, two = made.rank(daemon), made.rank(daemon)
    one.put(chain(6))
    two.put(chain(6))
    poll(lambda: daemon.daemon.counts.puts_known == 6, "six known puts")
    poll(lambda: one.client.num_free_slots == two.client.num_free_slots == 8, "slots")
    daemon.check()


def test_two_ranks_that_load_one_chain_share_its_slots(made: Rig):
    daemon = made.start(num_slots=48)
    one, two = made.rank(daemon), made.rank(daemon)
    one.put(chain(24))
    wait_puts(daemon, 24)
    loads = [(rank, rank.order(24)) for rank in (one, two)]
    slots = {rank.finish(request).slots for rank, request in loads}
    assert len(slots) == 1
    daemon.check()


# --- room ----------------------------------------------------------------------------------------


def test_loads_wait_for_room_in_their_order(made: Rig):
    daemon = made.start(num_slots=40)
    rank = made.rank(daemon)
    chains = [(24, 100_000 * (1 + index)) for index in range(3)]
    for num_blocks, first_id in chains:
        rank.put(chain(num_blocks, first_id), request=f"p{first_id}")
    poll(lambda: daemon.memory.level.num_waiting == 0, "everything is on disk", 30)
    held = rank.order(*chains[0])
    assert check_bytes(rank.finish(held), chain(*chains[0])) == 24
    late = [rank.order(*each) for each in chains[1:]]
    poll(lambda: daemon.daemon.leases.num_waiting == 2, "two loads wait")
    rank.client.end(held, 0)
    assert check_bytes(rank.finish(late[0]), chain(*chains[1])) == 24
    assert all(event.request_id != late[1] for event in rank.events)  # type: ignore[attr-defined]
    rank.client.end(late[0], 0)
    assert check_bytes(rank.finish(late[1]), chain(*chains[2])) == 24
    daemon.check()


def test_a_load_that_finds_no_room_is_refused_at_its_deadline(made: Rig):
    daemon = made.start(num_slots=40)
    rank = made.rank(daemon)
    rank.put(chain(24), request="a")
    rank.put(chain(24, 100_000), request="b")
    poll(lambda: daemon.memory.level.num_waiting == 0, "everything is on disk", 30)
    held = rank.order(24)
    rank.finish(held)
    late = rank.order(24, 100_000, deadline_s=0.5)
    assert rank.answer(late).num_tokens == 0
    assert set(rank.client.load_counts.refused) <= {"no_room", "deadline"}
    rank.client.end(held, 0)
    assert rank.read(24, 100_000) == 24
    daemon.check()


def test_put_slots_come_as_soon_as_there_is_room(made: Rig):
    daemon = made.start(num_slots=16)
    one = made.rank(daemon)
    one.put(chain(12), request="a")
    wait_puts(daemon, 12)
    poll(lambda: daemon.memory.level.num_waiting == 0, "everything is on disk", 30)
    one.put(chain(30, 100_000), request="b")  # evicts
    wait_puts(daemon, 42)
    daemon.check()


def test_what_nobody_has_is_absent(made: Rig):
    daemon = made.start()
    rank = made.rank(daemon)
    request = rank.order(5)
    assert rank.answer(request) == Loaded(request, 0, 0, refused="absent")
    assert daemon.daemon.counts.refused == {"absent": 1}


def test_what_was_put_right_before_the_end_arrives(made: Rig):
    daemon = made.start()
    for number in range(1, 21):
        rank = made.rank(daemon, num_put_slots=1)
        of = chain(1, 1_000_000 * number)
        for _ in range(12):  # states on their way before it keep the line busy
            rank.client.snapshot(SnapshotPut(identity(of), of.digests[0], 128, bytes(1 << 20)))
        rank.put(of, request=f"last {number}")
        rank.client.stop()
        poll(lambda number=number: daemon.daemon.counts.puts == number, f"the last block of rank {number}", 5)
    daemon.check()


# --- leases --------------------------------------------------------------------------------------


def raw(made: Rig, daemon: Daemon, hello: NodeHello = HELLO, name: str = "raw-0") -> RawPeer:
    peer = RawPeer(made, daemon, name)
    peer.send(hello)
    welcome = peer.expect(NodeWelcome)
    assert (welcome.epoch, welcome.incarnation) == (daemon.memory.arena.epoch, hello.incarnation)
    return peer


def fill(made: Rig, daemon: Daemon, num_blocks: int) -> None:
    rank = made.rank(daemon)
    rank.put(chain(num_blocks))
    wait_puts(daemon, num_blocks)
    poll(lambda: rank.client.num_free_slots == 8, "slots")


def test_a_dead_process_gives_everything_back_at_once(made: Rig):
    daemon = made.start()
    fill(made, daemon, 20)
    poll(lambda: daemon.memory.level.num_waiting == 0, "everything is on disk", 30)
    with living_process() as process:
        peer = raw(made, daemon, replace(HELLO, pid=process.pid))
        assert len(peer.expect(PutSlots).slots) == 4
        peer.load(chain(20), 1)
        assert peer.expect(LoadAccepted).number == 1
        peer.expect(LoadDone)
        daemon.check()
        free = daemon.num_free()
        process.kill()
        begin = time.monotonic()
        poll(lambda: daemon.num_free() == free + 24, "everything is given back", 10)
        assert time.monotonic() - begin < 10
    daemon.check()


def test_a_silent_rank_gives_its_loads_back_and_keeps_the_slots_that_it_may_write_into(made: Rig):
    daemon = made.start()
    fill(made, daemon, 20)
    poll(lambda: daemon.memory.level.num_waiting == 0, "everything is on disk", 30)
    with living_process() as process:
        peer = raw(made, daemon, replace(HELLO, pid=process.pid))
        slots = peer.expect(PutSlots).slots
        peer.load(chain(20), 1)
        peer.expect(LoadDone)
        free = daemon.num_free()
        poll(lambda: daemon.num_free() == free + 20, "the load is given back", 10)
        assert daemon.daemon.counts.leases_expired == 1
        daemon.check()
        assert daemon.daemon.leases.num_lent() == len(slots) + 8
        process.kill()
        poll(lambda: daemon.num_free() == free + 24, "the slots are given back", 10)
    daemon.check()


def test_a_rank_that_pings_keeps_its_lease(made: Rig):
    daemon = made.start()
    peer = raw(made, daemon)
    until = time.monotonic() + 2.5 * PARAMS.lease_s
    while time.monotonic() < until:
        peer.send(NodePing())
        peer.expect(NodeWelcome)
        time.sleep(0.1)  # the interval of its pings
    assert daemon.daemon.counts.leases_expired == 0


def test_a_new_life_of_a_rank_gives_back_what_the_old_one_held(made: Rig):
    daemon = made.start()
    fill(made, daemon, 20)
    poll(lambda: daemon.memory.level.num_waiting == 0, "everything is on disk", 30)
    free = daemon.num_free()
    peer = raw(made, daemon)
    peer.expect(PutSlots)
    peer.load(chain(20), 1)
    peer.expect(LoadDone)
    peer.send(replace(HELLO, incarnation=2))
    assert peer.expect(NodeWelcome).incarnation == 2
    assert peer.expect(PutSlots).incarnation == 2
    assert daemon.num_free() == free - 4
    peer.send(HELLO)  # a late one of the old life
    peer.load(chain(20), 1)
    assert peer.expect(LoadAccepted).number == 1
    daemon.check()


def test_a_rank_of_another_layout_gets_nothing(made: Rig):
    daemon = made.start()
    peer = raw(made, daemon, replace(HELLO, layout_fingerprint=bytes(32)))
    peer.load(chain(3), 1)
    assert peer.expect(LoadRefused).reason == "layout"
    peer.send(NodePing())
    peer.expect(NodeWelcome)
    assert peer.received == []
    assert daemon.daemon.leases.num_lent() == 0


def test_a_load_may_be_cancelled_at_any_moment_and_replayed_without_harm(made: Rig):
    daemon = made.start()
    fill(made, daemon, 20)
    poll(lambda: daemon.memory.level.num_waiting == 0, "everything is on disk", 30)
    peer = raw(made, daemon)
    peer.expect(PutSlots)
    free = daemon.num_free()
    for number in range(1, 30):
        order = peer.load(chain(20), number)
        if number % 3 == 1:
            peer.expect(LoadAccepted)
        elif number % 3 == 2:
            peer.expect(LoadDone)
        for _ in range(2):
            peer.send(LoadCancel(order.request_id, 0, number))
            peer.send(order)
    poll(lambda: daemon.num_free() == free, "everything is given back")
    poll(lambda: not daemon.daemon.leases.loads(), "no load is left")
    daemon.check()


def test_messages_without_a_lease_are_ignored(made: Rig):
    daemon = made.start()
    peer = RawPeer(made, daemon)
    peer.load(chain(3), 1)
    peer.send(NodePing())
    peer.send(HELLO)
    assert peer.expect(NodeWelcome).incarnation == 1
    assert not any(isinstance(message, LoadRefused) for message in peer.received)


@pytest.mark.parametrize("fault", ["foreign slot", "no digests", "gap", "wrong root"])
def test_a_put_that_makes_no_sense_is_counted_and_its_slots_go_back(made: Rig, fault: str):
    daemon = made.start()
    free = daemon.num_free()
    peer = raw(made, daemon)
    (slot, *_) = peer.expect(PutSlots).slots
    of = chain(3)
    put = Put(RequestId("p"), 0, identity(of), 0, of.digests[0], (slot,))
    bad = {
        "foreign slot": replace(put, slots=((slot[0], slot[1] + 1),)),
        "no digests": replace(put, digests=b""),
        "gap": replace(put, first_block=2),
        "wrong root": replace(put, kv=replace(put.kv, root=b"short")),
    }
    peer.send(bad[fault])
    poll(lambda: daemon.daemon.counts.puts_skipped == 1, "a skipped put")
    assert daemon.num_free() >= free - 4
    daemon.check()
    daemon.memory.arena.view(slot[0])[:] = bytes_of(of.digests[0])
    if fault == "foreign slot":
        peer.send(put)
        wait_puts(daemon, 1)
    daemon.check()


def test_a_put_that_does_not_go_on_where_the_last_ended_brings_all_digests(made: Rig):
    daemon = made.start()
    rank = made.rank(daemon)
    of = chain(9)
    rank.put(of, 0, 3)
    rank.put(of, 5, 7)
    rank.client.close_put(RequestId("put"), 0)
    rank.put(of, 8, 9)
    wait_puts(daemon, 6)
    assert rank.read(9) == 3
    rank.put(of, 3, 5, request="other")
    wait_puts(daemon, 8)
    assert rank.read(9) == 7
    daemon.check()


def test_a_closed_sequence_is_forgotten(made: Rig):
    daemon = made.start()
    peer = raw(made, daemon)
    slots = peer.expect(PutSlots).slots
    of = chain(3)
    peer.send(Put(RequestId("p"), 0, identity(of), 0, of.digests[0], slots[:1]))
    wait_puts(daemon, 1)
    peer.send(PutClose(RequestId("p"), 0))
    peer.send(Put(RequestId("p"), 0, identity(of), 1, of.digests[1], slots[1:2]))
    poll(lambda: daemon.daemon.counts.puts_skipped == 1, "a put without its chain")
    daemon.check()


def test_a_stopping_daemon_refuses_what_waits_and_keeps_what_was_put(made: Rig):
    daemon = made.start(num_slots=40)
    rank = made.rank(daemon)
    rank.put(chain(24), request="a")
    rank.put(chain(24, 100_000), request="b")
    poll(lambda: daemon.memory.level.num_waiting == 0, "everything is on disk", 30)
    rank.finish(rank.order(24))
    late = rank.order(24, 100_000)
    poll(lambda: daemon.daemon.leases.num_waiting == 1, "a load waits")
    daemon.end()
    assert rank.answer(late).num_tokens == 0
    assert not daemon.memory.arena.path.exists()
