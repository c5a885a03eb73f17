"""The DRAM level over a pool of real sockets: waiting, writing, leaving, and reading from other hosts."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from millpond.core.errors import (
    ArenaFull,
    ChecksumMismatch,
    ConfigError,
    DataError,
    InvariantBroken,
    QuotaExceeded,
    StaleEpoch,
)
from millpond.store.chain import BlockChain
from millpond.store.codec.checksum import checksum
from millpond.store.dram_arena import NUM_LANES, DramArena, SlotRef
from millpond.store.dram_directory import DramDirectory, DramHost, DramPlace
from millpond.store.net.connection import Connection
from millpond.store.net.messages import NodeStatus, NodeStatusQuery, PeerRead, Reserve
from tests.unit.store.dram_hosts import SLOT_BYTES, Got, Hosts, S, hosts
from tests.unit.store.pool_cluster import (
    LAYOUT,
    blocks_of,
    bytes_of,
    chain_of,
    soon,
)


@pytest.fixture
def made(tmp_path: Path) -> Iterator[Hosts]:
    with hosts(tmp_path) as made:
        yield made


def extents_of(made: Hosts, chain: BlockChain) -> list[tuple[int, int]]:
    hit = made.made.pool.match(chain)
    return [(part.begin, part.num_blocks) for part in hit.extents]


def test_small_turns_wait_and_become_one_extent_when_the_session_is_idle(made: Hosts) -> None:
    host, chain = made.add("h0"), chain_of(10)
    for end in range(1, 11):
        host.put(chain, end - 1, end)
    assert host.level.spill_due(deadline_ns=soon()) == 0
    assert host.level.num_waiting == 10
    assert extents_of(made, chain) == []
    assert host.read(chain) == Got(10, 10, 0, 0)
    host.clock.now_ns += 30 * S
    assert host.level.spill_due(deadline_ns=soon()) == 10
    assert host.level.num_waiting == 0
    assert extents_of(made, chain) == [(0, 10)]


def test_a_full_window_is_written_at_once_and_a_growing_one_replaces_its_parts(made: Hosts) -> None:
    host, chain = made.add("h0", 128), chain_of(66)
    host.put(chain, 0, 34)
    assert host.level.spill_due(deadline_ns=soon()) == 32
    host.clock.now_ns += 30 * S
    assert host.level.spill_due(deadline_ns=soon()) == 2
    assert extents_of(made, chain) == [(0, 32), (32, 2)]
    host.put(chain, 34, 40)
    host.clock.now_ns += 30 * S
    assert host.level.spill_due(deadline_ns=soon()) == 6
    assert extents_of(made, chain) == [(0, 32), (32, 2), (34, 6)]
    host.put(chain, 40, 66)  # the window is full: written again as one extent
    assert host.level.spill_due(deadline_ns=soon()) == 24
    assert extents_of(made, chain) == [(0, 32), (32, 32)]
    assert host.level.counts.spilled == 40 + 32


def test_a_session_that_is_read_is_not_idle(made: Hosts) -> None:
    host, chain = made.add("h0"), chain_of(3)
    host.put(chain)
    host.clock.now_ns += 20 * S
    host.read(chain)
    host.clock.now_ns += 20 * S
    assert host.level.spill_due(deadline_ns=soon()) == 0
    assert host.level.num_waiting == 3


def test_memory_pressure_writes_the_oldest_tail_and_evicts_tails_of_chains_first(made: Hosts) -> None:
    host = made.add("h0", 8)
    first, second = chain_of(4), chain_of(8, first_id=10**6)
    assert host.put(first) == 4
    assert host.put(second) == 8
    assert host.level.counts.evicted == 4
    assert extents_of(made, first) == [(0, 4)]
    assert host.read(first).num_blocks == 4
    assert host.read(second).num_blocks == 8


def test_a_chain_larger_than_the_memory_goes_through_it(made: Hosts) -> None:
    host, chain = made.add("h0", 8), chain_of(50)
    assert host.put(chain) == 50
    assert host.level.make_room(8, deadline_ns=soon())
    result = host.read(chain)
    assert result.num_blocks == 8, "as much as there is room for"
    assert result.from_memory + result.from_pool == 8
    host.level.spill_all(deadline_ns=soon())
    host.level.check()
    assert made.made.pool.match(chain).num_blocks == 50


def test_a_pool_that_refuses_leaves_blocks_waiting_and_refuses_what_does_not_fit(made: Hosts) -> None:
    host, chain = made.add("h0", 8), chain_of(12)
    for peer in made.made.peers.values():
        peer.faults.refuse_puts = True
    assert host.put(chain) == 8
    assert host.level.counts.refused == 4
    assert host.level.num_waiting == 8
    assert host.read(chain).num_blocks == 8
    for peer in made.made.peers.values():
        peer.faults.refuse_puts = False
    assert host.put(chain, 8) == 4
    host.level.spill_all(deadline_ns=soon())
    assert made.made.pool.match(chain).num_blocks == 12


def test_metadata_that_is_down_does_not_lose_what_waits(made: Hosts) -> None:
    host, chain = made.add("h0"), chain_of(5)
    host.put(chain)
    made.made.metadata.is_down = True
    assert host.level.spill_all(deadline_ns=soon()) == 0
    assert host.read(chain) == Got(5, 5, 0, 0)
    made.made.metadata.is_down = False
    host.clock.now_ns += 30 * S
    assert host.level.spill_due(deadline_ns=soon()) == 5


def test_what_another_writer_holds_the_lease_of_waits_until_it_is_there_or_the_lease_is_over(
    made: Hosts,
) -> None:
    """It may die, or be our own last try, and then nobody writes it."""
    host, chain = made.add("h0"), chain_of(5)
    host.put(chain)
    name = chain.extent(0, 5)
    reserve = Reserve(chain.tenant, ((name.digest, name.num_blocks),), (1,), 1)
    made.made.metadata.call(reserve, prefix=chain.hashes, deadline_ns=soon())
    assert host.level.spill_all(deadline_ns=soon()) == 0
    assert host.level.num_waiting == 5
    assert host.level.counts.given_up == 0
    host.level.check()
    made.made.metadata.leases.clear()  # it is over
    host.clock.now_ns += 5 * S
    assert host.level.spill_due(deadline_ns=soon()) == 5
    assert host.level.num_waiting == 0
    assert extents_of(made, chain) == [(0, 5)]


def test_a_tenant_over_its_quota_is_served_from_memory_and_makes_room_for_others(made: Hosts) -> None:
    full = {7}

    def put(chain: BlockChain, *args: object, **options: object) -> list:
        if chain.tenant in full:
            raise QuotaExceeded("full", code="quota")
        return made.made.pool.put(chain, *args, **options)

    host, chain = made.add("h0", 8, write=put), chain_of(6)
    host.put(chain)
    host.level.spill_all(deadline_ns=soon())
    assert host.level.counts.given_up == 6
    assert host.read(chain).num_blocks == 6
    other = chain_of(8, tenant=8, salt=b"other")
    assert host.put(other) == 8
    assert host.read(chain).num_blocks == 0


def test_a_session_that_grows_while_its_tail_is_written_is_written_whole(made: Hosts) -> None:
    chain = chain_of(12)
    later = iter([6, 9, 12])

    def put_meanwhile(chain_: BlockChain, *args: object, **options: object) -> list:
        end = next(later, None)
        if end is not None:
            assert host.put(chain, end - 3, end) == 3
        return made.made.pool.put(chain_, *args, **options)

    host = made.add("h0", write=put_meanwhile)
    host.put(chain, 0, 3)
    for _ in range(4):
        assert host.level.spill_all(deadline_ns=soon()) == 3
        host.level.check()
    assert extents_of(made, chain) == [(0, 3), (3, 3), (6, 3), (9, 3)]


def test_exact_and_approximate_blocks_never_share_an_extent(made: Hosts) -> None:
    host, chain = made.add("h0"), chain_of(6)
    host.put(chain, 0, 3)
    host.level.put(chain, 3, blocks_of(chain, 3), deadline_ns=soon(), lineage=1)
    host.level.spill_all(deadline_ns=soon())
    hit = made.made.pool.match(chain)
    assert [(part.begin, part.num_blocks, part.location.lineage) for part in hit.extents] == [
        (0, 3, 0),
        (3, 3, 1),
    ]


def test_an_exact_tail_that_makes_a_window_full_leaves_approximate_blocks_out(made: Hosts) -> None:
    host, chain = made.add("h0"), chain_of(32)
    host.put(chain, 0, 20, lineage=1)
    host.level.spill_all(deadline_ns=soon())
    host.put(chain)
    host.level.spill_all(deadline_ns=soon())
    host.level.check()
    hit = made.made.pool.match(chain)
    assert [(part.begin, part.end, part.location.lineage) for part in hit.extents] == [
        (0, 20, 1),
        (20, 32, 0),
    ]


def test_sessions_that_part_inside_a_window_are_both_written_whole(made: Hosts) -> None:
    host, chain = made.add("h0"), chain_of(5)
    other = chain_of(5, first_id=10**6)
    fork = replace(chain, digests=(*chain.digests[:3], *other.digests[3:]))
    host.put(chain)
    assert host.level.put(fork, 0, blocks_of(fork), deadline_ns=soon()) == 5
    assert host.level.num_blocks == 7
    host.level.spill_all(deadline_ns=soon())
    host.level.check()
    assert extents_of(made, chain) == [(0, 5)]
    (tail,) = (where for where in made.made.metadata.extents.values() if where.num_blocks == 2)
    assert tail.digest == fork.digests[-1], "what they have in common is written once"


def test_another_host_reads_over_its_socket_and_then_from_disk(made: Hosts) -> None:
    here, there, third = made.add("h0"), made.add("h1"), made.add("h2")
    chain = chain_of(6)
    here.put(chain)
    assert there.read(chain) == Got(6, 0, 6, 0)
    assert there.read(chain) == Got(6, 6, 0, 0), "kept"
    here.level.spill_all(deadline_ns=soon())
    made.directory.leave("h0", 1)
    made.directory.leave("h1", 1)
    assert third.read(chain) == Got(6, 0, 0, 6)
    assert third.read(chain) == Got(6, 6, 0, 0), "kept"


def test_the_disks_and_two_memories_together_make_one_chain(made: Hosts) -> None:
    here, there = made.add("h0"), made.add("h1")
    chain = chain_of(44)
    made.made.put(chain, 0, 32)
    here.put(chain, 32, 40)
    there.put(chain, 40, 44)
    assert there.read(chain) == Got(44, 4, 8, 32)


def test_an_old_pointer_reads_nothing_and_the_disks_are_asked(made: Hosts) -> None:
    here, there = made.add("h0", 4), made.add("h1")
    chain, other = chain_of(4), chain_of(4, first_id=10**6)
    here.put(chain)
    old = made.directory.find(chain.hashes)
    here.put(other)  # pushes the first chain out; its slots have other blocks now
    assert made.directory.find(chain.hashes) == [None] * 4
    made.directory.publish(
        [(digest[:16], place) for digest, place in zip(chain.digests, old, strict=True) if place]
    )
    assert there.read(chain) == Got(4, 0, 0, 4)
    assert here.server.num_stale == 4


def test_the_loss_of_a_host_ends_all_its_places_at_once(made: Hosts) -> None:
    here, there = made.add("h0"), made.add("h1")
    chain = chain_of(5)
    here.put(chain)
    made.directory.leave("h0", epoch=1)
    assert made.directory.find(chain.hashes) == [None] * 5
    assert there.read(chain).num_blocks == 0
    again = made.add("h0", epoch=2)
    assert again.read(chain).num_blocks == 0, "a new life of the host knows nothing of the old"
    made.directory.leave("h0", epoch=1)  # late news of the old life
    again.put(chain)
    assert there.read(chain) == Got(5, 0, 5, 0)


def test_a_host_that_died_without_a_word_costs_hits_and_nothing_else(made: Hosts) -> None:
    here, there = made.add("h0"), made.add("h1")
    chain = chain_of(5)
    here.put(chain)
    here.level.spill_all(deadline_ns=soon())
    assert here.server.stop(5.0)
    assert there.read(chain) == Got(5, 0, 0, 5)


def test_a_bit_that_flips_in_memory_is_never_read_or_written(made: Hosts) -> None:
    here, there = made.add("h0"), made.add("h1")
    chain = chain_of(6)
    here.put(chain)
    (place,) = made.directory.find(chain.hashes_of(3, 4))
    assert place is not None
    here.level.arena.view(place.ref.slot)[77] ^= 4
    assert there.read(chain).num_blocks == 3
    here.level.spill_all(deadline_ns=soon())
    assert here.level.counts.damaged == 1
    assert made.made.pool.match(chain).num_blocks == 3, "up to the hole"
    assert here.read(chain).num_blocks == 3


def test_a_damaged_block_costs_what_waits_behind_it_and_nothing_before(made: Hosts) -> None:
    host, chain = made.add("h0"), chain_of(20)
    host.put(chain)
    (place,) = made.directory.find(chain.hashes_of(15, 16))
    assert place is not None
    host.level.arena.view(place.ref.slot)[77] ^= 4
    assert host.level.spill_all(deadline_ns=soon()) == 19
    host.level.check()
    assert host.level.counts.damaged == 1
    assert host.level.counts.spilled == 19
    assert host.level.num_waiting == 0
    assert made.made.pool.match(chain).num_blocks == 15
    assert host.put(chain, 15, 16) == 1  # it is computed again
    assert host.level.spill_all(deadline_ns=soon()) == 1
    assert made.made.pool.match(chain).num_blocks == 20, "those behind it were written too"


def test_blocks_before_a_damaged_one_wait_if_the_pool_refuses_them(made: Hosts) -> None:
    host, chain = made.add("h0"), chain_of(20)
    host.put(chain)
    (place,) = made.directory.find(chain.hashes_of(15, 16))
    assert place is not None
    host.level.arena.view(place.ref.slot)[77] ^= 4
    for peer in made.made.peers.values():
        peer.faults.refuse_puts = True
    assert host.level.spill_all(deadline_ns=soon()) == 0
    host.level.check()
    assert host.level.num_waiting == 19
    for peer in made.made.peers.values():
        peer.faults.refuse_puts = False
    host.clock.now_ns += 5 * S
    assert host.level.spill_due(deadline_ns=soon()) == 19
    assert made.made.pool.match(chain).num_blocks == 15


def test_readers_of_slots_that_are_reused_meanwhile_never_see_a_mixture(made: Hosts) -> None:
    host = made.add("h0", 13, max_pinned_ratio=0.5)
    chains = [chain_of(6, first_id=10**6 * index) for index in range(4)]
    stop = threading.Event()
    failures: list[AssertionError] = []

    def read() -> None:
        try:
            while not stop.is_set():
                for chain in chains:
                    with suppress(ArenaFull):
                        host.read(chain)
        except AssertionError as error:
            failures.append(error)

    threads = [threading.Thread(target=read) for _ in range(2)]
    for thread in threads:
        thread.start()
    for _ in range(4):
        for chain in chains:
            assert host.put(chain) == 6
    stop.set()
    for thread in threads:
        thread.join()
    assert not failures
    assert host.level.counts.evicted >= 6 * 10


@pytest.mark.parametrize("evict", ["lru", "s3fifo"])
def test_what_is_loaded_never_pushes_out_what_is_not_on_disk(made: Hosts, evict: str) -> None:
    host = made.add("h0", 8, evict=evict)
    chain, other = chain_of(6), chain_of(30, first_id=10**6)
    made.made.put(other)
    host.put(chain)
    made.made.metadata.is_down = True
    assert host.read(chain) == Got(6, 6, 0, 0)
    made.made.metadata.is_down = False
    for peer in made.made.peers.values():
        peer.faults.refuse_puts = True
    assert not host.level.make_room(8, deadline_ns=soon())
    with pytest.raises(ArenaFull):
        host.read(other)
    host.loader.check()
    assert host.level.num_waiting == 6
    for peer in made.made.peers.values():
        peer.faults.refuse_puts = False
    assert host.level.make_room(8, deadline_ns=soon())
    assert host.read(other) == Got(8, 0, 0, 8), "as much as there is room for"
    assert host.read(other) == Got(8, 8, 0, 0)
    assert host.read(chain) == Got(6, 0, 0, 6)


def test_the_arena_is_read_by_path_and_refuses_what_is_none(tmp_path: Path) -> None:
    path = tmp_path / "arena"
    arena = DramArena.create(path, 20 * SLOT_BYTES, LAYOUT, epoch=9)
    chain = chain_of(1)
    block, name = bytes_of(chain.digests[0]), chain.digests[0][:16]
    ref = arena.reserve()
    assert ref is not None
    writer, reader = DramArena.attach(path, writable=True), DramArena.attach(path)
    assert (reader.epoch, reader.fingerprint, reader.num_slots) == (9, LAYOUT.fingerprint, arena.num_slots)
    out = np.zeros(LAYOUT.block_bytes, np.uint8)
    writer.view(ref.slot)[:] = block
    with pytest.raises(StaleEpoch):
        reader.read(ref, name, out)  # not before it is sealed
    arena.seal(ref, name, checksum(block.data))
    assert reader.read(ref, name, out) == checksum(block.data)
    assert np.array_equal(out, block)
    for wrong in (SlotRef(ref.slot, ref.generation + 1), SlotRef(10**6, 0), SlotRef(-1, 0)):
        with pytest.raises(StaleEpoch):
            reader.read(wrong, name, out)
        assert not reader.is_filling_or_holds(wrong, name)
    with pytest.raises(StaleEpoch):
        reader.read(ref, bytes(16), out)
    arena.free(ref)
    assert not reader.is_filling_or_holds(ref, name)
    with pytest.raises(StaleEpoch):
        reader.read(ref, name, out)
    for misuse in (lambda: arena.free(ref), lambda: arena.seal(ref, name, 0), lambda: arena.unseal(ref)):
        with pytest.raises(InvariantBroken):
            misuse()
    ref = arena.reserve(name)
    assert ref is not None
    assert reader.is_filling_or_holds(ref, name)
    arena.view(ref.slot)[:] = block
    arena.seal(ref, name, checksum(block.data))
    arena.view(ref.slot)[0] ^= 1
    with pytest.raises(ChecksumMismatch):
        reader.read(ref, name, out)
    arena.check([ref])
    for other in (writer, reader, arena):
        other.close()
    assert not path.exists()
    path.write_bytes(b"x" * 100)
    with pytest.raises(DataError):
        DramArena.attach(path)
    with pytest.raises(ConfigError):
        DramArena.create(path, 4096, LAYOUT, epoch=1)
    with pytest.raises(ConfigError):
        DramArena.create(path, 1 << 46, LAYOUT, epoch=1)


def test_lanes_count_for_one_load_each(tmp_path: Path) -> None:
    path = tmp_path / "arena"
    arena = DramArena.create(path, 20 * SLOT_BYTES, LAYOUT, epoch=9)
    reader = DramArena.attach(path)
    lanes = [arena.take_lane() for _ in range(NUM_LANES)]
    assert None not in lanes
    assert arena.take_lane() is None
    for lane in lanes:
        arena.count_ready(lane, [lane + row for row in range(arena.num_rows)])
    assert [reader.rows_ready(lane, 2) for lane in lanes] == [lane + 2 for lane in lanes]
    arena.give_back_lane(lanes[5])
    again = arena.take_lane()
    assert again not in lanes
    arena.count_ready(again, [77] * arena.num_rows)
    assert reader.rows_ready(lanes[5], 0) == 0, "the old number counts nothing"
    assert reader.rows_ready(again, 0) == 77
    reader.close()
    arena.close()


def test_the_server_answers_what_is_no_read_and_survives_garbage(made: Hosts) -> None:
    host = made.add("h0")
    with Connection(host.server.address, name="x", token="t", deadline_ns=soon()) as connection:
        assert isinstance(connection.call(NodeStatusQuery(), deadline_ns=soon()).message, NodeStatus)
        for query in (
            PeerRead(1, b"", 0, 0),
            PeerRead(1, b"x" * 1000, -5, 2**63 - 1),
            PeerRead(2, bytes(16), 0, 0),
        ):
            with pytest.raises(StaleEpoch):
                connection.call(query, deadline_ns=soon())
    assert host.server.failure is None


def test_the_directory_compares_before_it_sets() -> None:
    directory = DramDirectory()
    directory.join("a", DramHost("x:1", 1))
    directory.join("b", DramHost("x:2", 1))
    mine, yours = DramPlace("a", 1, SlotRef(0, 0)), DramPlace("b", 1, SlotRef(5, 2))
    name = bytes(16)
    directory.publish([(name, mine)])
    directory.publish([(name, yours)])
    assert directory.find(name) == [mine], "the first stays"
    assert not directory.swap(name, yours, None)
    assert directory.swap(name, mine, yours)
    assert not directory.swap(name, mine, None)
    directory.leave("b", 1)
    directory.publish([(name, mine)])
    assert directory.find(name) == [mine], "a dead place gives way"
    directory.leave("a", 1)
    for index in range(200):
        directory.publish([(index.to_bytes(16, "big"), mine)])
    assert len(directory) <= 2, "the dead are swept while others come"
