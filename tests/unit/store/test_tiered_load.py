"""Loads over a pool of real sockets: where blocks come from, row by row; shared, damaged, lost, cancelled."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import msgspec
import numpy as np
import pytest

from millpond.core.errors import ArenaFull, InvalidRequest, InvariantBroken, MillpondError
from millpond.core.extents import TenantId
from millpond.store.chain import BlockChain
from millpond.store.codec.checksum import checksum
from millpond.store.dram_arena import NUM_LANES, DramArena
from millpond.store.dram_directory import DramHost
from millpond.store.dram_peers import DramPeers
from millpond.store.load_state import LoadResult, TieredLoad
from millpond.store.net.framing import VERSION, FrameSocket, welcome
from millpond.store.net.messages import Hello, Location, Match, Matched, PeerBlock, PeerRead
from millpond.store.net.node_link import NodeLinkParams
from millpond.store.tiered_load import TieredLoader
from tests.unit.store.dram_hosts import Got, Host, Hosts, hosts, other_chain
from tests.unit.store.pool_cluster import LAYOUT, blocks_of, bytes_of, chain_of, soon

NUM_ROWS = len(LAYOUT.rows)


@pytest.fixture
def made(tmp_path: Path) -> Iterator[Hosts]:
    with hosts(tmp_path) as made:
        yield made


def located_of(made: Hosts, chain: BlockChain) -> bytes:
    query = Match(chain.tenant, chain.domain, 1, 32)
    found = made.made.metadata.call(query, chain.hashes, prefix=chain.hashes, deadline_ns=soon())
    return msgspec.msgpack.encode(found)


class Running:
    """A load that a thread carries out, while its lane is watched as a rank would."""

    def __init__(self, host: Host, load: TieredLoad) -> None:
        self.host = host
        self.load = load
        self.results: list[LoadResult] = []
        self.thread = threading.Thread(target=lambda: self.results.append(host.run(load)))
        self.thread.start()

    def wait_rows(self, row: int, num_blocks: int = 1) -> None:
        wait(lambda: self.host.level.arena.rows_ready(self.load.lane, row) >= num_blocks)

    def result(self) -> LoadResult:
        self.thread.join(30)
        assert not self.thread.is_alive()
        (result,) = self.results
        return result


def wait(is_done: Callable[[], bool]) -> None:
    until_ns = soon(20)
    while not is_done():
        assert time.monotonic_ns() < until_ns
        time.sleep(0.001)


def started(host: Host, chain: BlockChain) -> Running:
    load = host.begin(chain)
    assert load is not None
    return Running(host, load)


def delay(made: Hosts, seconds: float) -> None:
    for peer in made.made.peers.values():
        peer.faults.delay_s = seconds


def flip_a_bit(made: Hosts, host: Host, chain: BlockChain, index: int) -> None:
    (place,) = made.directory.find(chain.hashes_of(index, index + 1))
    assert place is not None
    assert place.host == host.name
    host.level.arena.view(place.ref.slot)[99] ^= 16


# --- where blocks come from -------------------------------------------------------------------------


def test_memory_peers_and_disks_make_one_prefix_in_any_order(made: Hosts) -> None:
    here, there = made.add("h0"), made.add("h1")
    chain = chain_of(50)
    made.made.put(chain, 0, 40)
    here.put(chain, 2, 4)
    there.put(chain, 10, 12)
    here.put(chain, 40, 42)
    there.put(chain, 42, 45)
    here.put(chain, 46, 50)  # behind a hole
    assert here.read(chain) == Got(45, 4, 5, 36)
    assert here.read(chain) == Got(45, 45, 0, 0), "all of it stays in memory"


def is_approximate(host: Host, chain: BlockChain) -> bool:
    """As a load is told when it begins; it is carried out, too."""
    load = host.begin(chain)
    assert load is not None
    assert host.run(load).num_blocks == len(chain.digests)
    host.loader.release(load)
    host.loader.check()
    return load.is_approximate


def test_a_load_with_what_is_downstream_of_a_replay_says_so_wherever_it_is(made: Hosts) -> None:
    here, there = made.add("h0"), made.add("h1")
    chain = chain_of(8)
    exact = replace(chain, digests=chain.digests[:4])
    here.put(chain, 0, 4)
    here.put(chain, 4, 8, lineage=1)
    assert not is_approximate(here, exact)
    assert is_approximate(here, chain)
    assert is_approximate(there, exact), "nobody knows before it is here"
    assert not is_approximate(there, exact)
    assert is_approximate(there, chain)
    assert is_approximate(there, chain), "it came with its lineage"
    here.level.spill_all(deadline_ns=soon())
    third = made.add("h2")
    made.directory.leave("h0", here.level.arena.epoch)
    made.directory.leave("h1", there.level.arena.epoch)
    assert not is_approximate(third, exact)
    assert is_approximate(third, chain)
    assert is_approximate(third, chain)


@pytest.mark.parametrize("is_on_disk", [True, False])
def test_a_load_that_began_as_exact_never_takes_what_is_not(made: Hosts, *, is_on_disk: bool) -> None:
    """One of its blocks is damaged while it goes on; what others have is from downstream of a replay."""
    here, there = made.add("h0"), made.add("h1")
    chain = chain_of(4)
    here.put(chain)
    load = here.begin(chain)
    assert load is not None
    assert not load.is_approximate
    flip_a_bit(made, here, chain, 2)
    if is_on_disk:
        made.made.pool.put(chain, 0, blocks_of(chain), deadline_ns=soon(), lineage=1)
    else:
        name = chain.hashes_of(2, 3)
        (place,) = made.directory.find(name)
        assert place is not None
        assert made.directory.swap(name, place, None)
        there.put(chain, lineage=1)
    assert here.run(load).num_blocks == 2
    here.loader.release(load)
    assert not is_approximate(here, replace(chain, digests=chain.digests[:2]))
    assert is_approximate(here, chain)


def test_the_lane_counts_row_by_row_and_what_it_counts_is_there(made: Hosts) -> None:
    host, chain = made.add("h0"), chain_of(40)
    made.made.put(chain)
    delay(made, 0.05)
    reader = DramArena.attach(host.level.arena.path)
    running = started(host, chain)
    seen: list[tuple[int, ...]] = []
    while running.thread.is_alive():
        counts = tuple(reader.rows_ready(running.load.lane, row) for row in range(NUM_ROWS))
        host.check_load(running.load)
        if not seen or counts != seen[-1]:
            seen.append(counts)
    assert running.result().num_blocks == 40
    assert len(seen) > 3, "rows came one after the other"
    for before, after in pairwise(seen):
        assert all(old <= new for old, new in zip(before, after, strict=True))
    assert all(counts == tuple(sorted(counts, reverse=True)) for counts in seen)
    host.loader.release(running.load)
    reader.close()


def test_a_hint_saves_the_question_and_a_bad_one_costs_it(made: Hosts) -> None:
    host, chain = made.add("h0", 200), chain_of(40)
    made.made.put(chain)
    hint = located_of(made, chain)
    made.made.metadata.is_down = True
    assert host.read(chain, hint) == Got(40, 0, 0, 40)
    made.made.metadata.is_down = False
    matched = msgspec.msgpack.decode(hint, type=Matched)
    first = matched.extents[0]
    bad = [
        b"\xff" * 50,
        hint[:-3],
        msgspec.msgpack.encode([1, 2, 3]),
        b"x" * (2 << 20),
        *(
            msgspec.msgpack.encode(wrong)
            for wrong in (
                msgspec.structs.replace(matched, begins=(0,)),
                msgspec.structs.replace(matched, begins=(-32, 0)),
                msgspec.structs.replace(matched, num_blocks=-1),
                *(
                    msgspec.structs.replace(
                        matched, extents=(msgspec.structs.replace(first, **change), first)
                    )
                    for change in (
                        {"digest": b"short"},
                        {"num_blocks": 10**6},
                        {"num_blocks": 0},
                        {"group": -1},
                        {"dram_host": "h9"},
                    )
                ),
            )
        ),
    ]
    for number, wrong in enumerate(bad, start=1):
        other = other_chain(3, number)
        made.made.put(other)
        assert host.read(other, wrong) == Got(3, 0, 0, 3), number


def test_a_hint_that_lies_gives_no_wrong_byte(made: Hosts) -> None:
    host, chain, other = made.add("h0"), chain_of(4), other_chain(4)
    made.made.put(chain)
    made.made.put(other)
    lie = located_of(made, other)  # another prompt's extent, as if it were ours
    assert host.read(chain_of(4, salt=b"new"), lie) == Got(0)
    (location,) = msgspec.msgpack.decode(located_of(made, chain), type=Matched).extents
    gone = Location(location.digest, 4, location.epoch, location.group, location.nonce + 1)
    assert host.read(chain, msgspec.msgpack.encode(Matched(4, (gone,), (0,)))) == Got(0)
    assert host.read(chain) == Got(4, 0, 0, 4)


def test_another_tenants_extent_is_not_read_whatever_the_hint_says(made: Hosts) -> None:
    host, chain = made.add("h0"), chain_of(6)
    made.made.put(chain)
    thief = replace(chain, tenant=TenantId(8))
    assert host.read(thief) == Got(0)
    assert host.read(thief, located_of(made, chain)) == Got(0)


def test_nothing_is_to_be_had(made: Hosts) -> None:
    host, chain = made.add("h0"), chain_of(3)
    assert host.begin(chain) is None
    made.made.metadata.is_down = True
    assert host.begin(chain) is None
    assert host.loader.num_loads == 0
    twice = replace(chain, digests=chain.digests[:1] * 2)
    with pytest.raises(InvalidRequest):
        host.begin(twice)


# --- what breaks ------------------------------------------------------------------------------------


def test_a_damaged_block_in_memory_comes_from_the_disks_again(made: Hosts) -> None:
    host, chain = made.add("h0"), chain_of(6)
    host.put(chain)
    host.level.spill_all(deadline_ns=soon())
    flip_a_bit(made, host, chain, 3)
    assert host.read(chain) == Got(6, 5, 0, 1)
    assert host.level.counts.damaged == 1
    assert host.read(chain) == Got(6, 6, 0, 0)


def test_a_damaged_block_that_nobody_else_has_ends_the_hit(made: Hosts) -> None:
    host, chain = made.add("h0"), chain_of(6)
    host.put(chain)
    flip_a_bit(made, host, chain, 3)
    load = host.begin(chain)
    assert load is not None
    assert host.run(load) == LoadResult(3, ("absent",), 3, 0, 0)
    host.loader.release(load)
    assert host.put(chain, 3, 4) == 1, "it can be put again"
    assert host.read(chain) == Got(6, 6, 0, 0)


def test_what_one_load_was_told_stays_when_another_finds_damage(made: Hosts) -> None:
    host, chain = made.add("h0"), chain_of(6)
    host.put(chain)
    host.level.spill_all(deadline_ns=soon())
    first, second = host.begin(chain), host.begin(chain)
    assert first is not None
    assert second is not None
    assert host.run(first).num_blocks == 6
    flip_a_bit(made, host, chain, 3)
    before = host.level.arena.view(first.slots[3].slot).copy()
    result = host.run(second)
    assert (result.num_blocks, result.reasons) == (3, ("damaged",))
    assert np.array_equal(host.level.arena.view(first.slots[3].slot), before), "not written again"
    host.loader.check()
    third = host.begin(replace(chain, digests=chain.digests[:3]))
    assert third is not None
    host.level.arena.view(first.slots[1].slot)[5] ^= 1
    result = host.run(third)
    assert (result.num_blocks, result.reasons) == (1, ("damaged",)), "it takes nobody's word"
    for load in (first, second, third):
        host.loader.release(load)
    assert host.read(chain) == Got(6, 4, 0, 2)


def test_a_block_found_damaged_by_the_spill_is_brought_again_for_the_load_that_holds_it(made: Hosts) -> None:
    host, chain = made.add("h0"), chain_of(6)
    made.made.put(chain)
    host.put(chain)
    load = host.begin(chain)
    assert load is not None
    flip_a_bit(made, host, chain, 2)
    host.level.spill_all(deadline_ns=soon())
    assert host.level.counts.damaged == 1
    host.loader.check()
    assert host.run(load) == LoadResult(6, (), 5, 0, 1)
    host.loader.release(load)


def test_a_block_found_damaged_by_the_spill_is_not_brought_again_where_a_load_was_told_of_it(
    made: Hosts,
) -> None:
    host, chain = made.add("h0"), chain_of(6)
    made.made.put(chain)
    host.put(chain)
    first, second = host.begin(chain), host.begin(chain)
    assert first is not None
    assert second is not None
    assert host.run(first).num_blocks == 6
    flip_a_bit(made, host, chain, 2)
    before = host.level.arena.view(first.slots[2].slot).copy()
    host.level.spill_all(deadline_ns=soon())
    result = host.run(second)
    assert (result.num_blocks, result.reasons) == (2, ("damaged",))
    assert np.array_equal(host.level.arena.view(first.slots[2].slot), before)
    for load in (first, second):
        host.loader.release(load)
    assert host.read(chain) == Got(6, 5, 0, 1)


def test_a_peer_with_damage_costs_a_look_at_the_disks(made: Hosts) -> None:
    here, there = made.add("h0"), made.add("h1")
    chain = chain_of(6)
    there.put(chain)
    there.level.spill_all(deadline_ns=soon())
    flip_a_bit(made, there, chain, 1)
    assert here.read(chain) == Got(6, 0, 5, 1)


@contextmanager
def lying_peer(answer: Callable[[PeerRead, bytes], tuple[object, bytes] | None]) -> Iterator[str]:
    """A host that answers reads with whatever `answer` makes of the query; None: it falls silent."""
    listener = socket.create_server(("127.0.0.1", 0))
    streams: list[FrameSocket] = []

    def serve() -> None:
        try:
            while True:
                stream = FrameSocket(listener.accept()[0])
                streams.append(stream)
                welcome(stream, Hello(VERSION, "liar", "t"), deadline_ns=soon())
                while True:
                    head = stream.receive(None)
                    stream.skip(head.payload_bytes, soon())
                    if isinstance(head.message, PeerRead):
                        made = answer(head.message, bytes(LAYOUT.block_bytes))
                        if made is not None:
                            stream.send(head.request, made[0], [made[1]], deadline_ns=soon())
        except (OSError, MillpondError):
            return

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        yield f"127.0.0.1:{listener.getsockname()[1]}"
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()
        for stream in streams:
            stream.shutdown()
        thread.join(10)
        assert not thread.is_alive()


LIES: dict[str, Callable[[PeerRead, bytes], tuple[object, bytes] | None]] = {
    "zeroes": lambda query, zeroes: (PeerBlock(query.block_hash, query.generation, 1), zeroes),
    "another block": lambda query, zeroes: (PeerBlock(bytes(16), query.generation, 0), zeroes),
    "stale bytes": lambda query, zeroes: (
        PeerBlock(query.block_hash, query.generation + 1, checksum(zeroes)),
        zeroes,
    ),
    "half a block": lambda query, zeroes: (PeerBlock(query.block_hash, query.generation, 0), zeroes[:100]),
    "nonsense": lambda query, zeroes: (Hello(VERSION, "x"), b""),
    "nothing": lambda query, zeroes: None,
}


@pytest.mark.parametrize("lie", LIES)
def test_a_peer_that_lies_or_is_silent_is_passed_over(made: Hosts, lie: str) -> None:
    here, there = made.add("h0"), made.add("h1")
    chain = chain_of(5)
    there.put(chain)
    there.level.spill_all(deadline_ns=soon())
    with lying_peer(LIES[lie]) as address:
        made.directory.join("h1", DramHost(address, 1))
        load = here.begin(chain)
        assert load is not None
        result = here.loader.run(load, deadline_ns=soon(2.0))
        here.check_load(load)
        assert result == LoadResult(5, (), 0, 0, 5)
        here.loader.release(load)


def test_a_host_that_hangs_holds_up_its_own_blocks_only(made: Hosts) -> None:
    here, there = made.add("h0"), made.add("h1")
    chain = chain_of(33)
    there.put(chain, 32, 33)
    made.made.put(chain)
    with lying_peer(LIES["nothing"]) as address:
        made.directory.join("h1", DramHost(address, 1))
        load = here.begin(chain)
        assert load is not None
        begin_ns = time.monotonic_ns()
        deadline_ns = soon(40)
        results: list[LoadResult] = []
        thread = threading.Thread(
            target=lambda: results.append(here.loader.run(load, deadline_ns=deadline_ns))
        )
        thread.start()
        wait(lambda: here.level.arena.rows_ready(load.lane, NUM_ROWS - 1) >= 32)
        assert time.monotonic_ns() - begin_ns < 5 * 10**9, "half a second, and not half of 40"
    thread.join(30)  # the host has died by now
    assert results == [LoadResult(33, (), 0, 0, 33)]
    here.check_load(load)
    here.loader.release(load)


def test_a_host_that_does_not_even_greet_holds_up_nothing_for_long(made: Hosts) -> None:
    here, there = made.add("h0", 128), made.add("h1", 128)
    chain = chain_of(40)
    there.put(chain, 0, 8)
    made.made.put(chain)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        made.directory.join("h1", DramHost(f"127.0.0.1:{listener.getsockname()[1]}", 1))
        peers = DramPeers(made.directory, name="h0", token="t", params=NodeLinkParams(connect_s=30))
        loader = TieredLoader(here.level, made.directory, peers, made.made.pool)
        load = loader.begin(chain, b"", deadline_ns=soon())
        assert load is not None
        begin_ns = time.monotonic_ns()
        assert loader.run(load, deadline_ns=soon(40)) == LoadResult(40, (), 0, 0, 40)
        assert time.monotonic_ns() - begin_ns < 5 * 10**9
        here.check_load(load)
        loader.release(load)
    peers.close()


@pytest.mark.parametrize("fault", ["is_down", "is_silent"])
def test_a_new_match_that_fails_takes_nothing_from_a_good_hint(made: Hosts, fault: str) -> None:
    here, there = made.add("h0"), made.add("h1")
    chain = chain_of(33)
    made.made.put(chain, 0, 32)
    hint = located_of(made, chain)
    there.put(chain, 32, 33)
    assert there.server.stop(5.0)  # it died, and its place is still named
    setattr(made.made.metadata, fault, True)
    load = here.begin(chain, hint)
    assert load is not None
    assert load.num_blocks == 33
    begin_ns = time.monotonic_ns()
    result = here.run(load)
    assert (result.num_blocks, result.from_pool) == (32, 32)
    assert time.monotonic_ns() - begin_ns < 5 * 10**9, "half a second, and not the ten of the load"
    here.loader.release(load)
    setattr(made.made.metadata, fault, False)


def test_extents_that_are_lost_half_way_leave_the_prefix(made: Hosts) -> None:
    host, chain = made.add("h0", 128), chain_of(96)
    made.made.put(chain)
    (second,) = (part for part in made.made.pool.match(chain).extents if part.begin == 32)
    for peer in made.made.peers.values():
        peer.records = {key: body for key, body in peer.records.items() if key[0] != second.extent.digest}
    load = host.begin(chain)
    assert load is not None
    assert load.num_blocks == 96
    result = host.run(load)
    assert (result.num_blocks, result.reasons) == (32, ("lost",))
    host.loader.release(load)
    assert made.made.pool.match(chain).num_blocks == 32, "what is lost is forgotten"
    assert host.read(chain) == Got(32, 32, 0, 0)


def test_shards_that_are_zeroes_or_flipped_are_made_again_or_end_the_hit(made: Hosts) -> None:
    host, chain = made.add("h0", 128), chain_of(40)
    made.made.put(chain)
    peers = list(made.made.peers.values())
    peers[0].faults.flip_payload = True
    assert host.read(chain) == Got(40, 0, 0, 40)
    other = other_chain(10)
    made.made.put(other)
    for peer in peers:
        peer.faults.flip_payload = True
    assert host.read(other) == Got(0)


def test_a_load_ends_at_its_deadline_with_what_it_has(made: Hosts) -> None:
    host, chain = made.add("h0"), chain_of(40)
    host.put(chain, 0, 2)
    made.made.put(chain)
    for peer in made.made.peers.values():
        peer.faults.is_silent = True
    load = host.begin(chain)
    assert load is not None
    begin_ns = time.monotonic_ns()
    result = host.loader.run(load, deadline_ns=begin_ns + 300_000_000)
    assert time.monotonic_ns() - begin_ns < 3_000_000_000
    assert (result.num_blocks, result.reasons) == (2, ("late",))
    host.loader.release(load)
    for peer in made.made.peers.values():
        peer.faults.is_silent = False


# --- loads that share blocks ------------------------------------------------------------------------


def test_a_second_load_waits_for_the_blocks_of_the_first_and_adds_its_own(made: Hosts) -> None:
    host, chain = made.add("h0", 128), chain_of(64)
    made.made.put(chain)
    delay(made, 0.05)
    first = started(host, replace(chain, digests=chain.digests[:32]))
    first.wait_rows(0)
    second = started(host, chain)
    assert first.result() == LoadResult(32, (), 0, 0, 32)
    assert second.result() == LoadResult(64, (), 32, 0, 32), "each extent was read once"
    for load in (first.load, second.load):
        host.loader.release(load)


@pytest.mark.parametrize("is_released", [False, True])
def test_if_the_first_load_is_cancelled_the_second_goes_on(made: Hosts, is_released: bool) -> None:
    host, chain = made.add("h0"), chain_of(40)
    made.made.put(chain)
    delay(made, 0.1)
    first = started(host, chain)
    first.wait_rows(0)
    second = started(host, chain)
    if is_released:
        host.loader.release(first.load)
    else:
        host.loader.cancel(first.load)
    result = first.result()
    assert result.num_blocks < 40
    assert result.reasons == ("cancelled",)
    assert second.result().num_blocks == 40
    for load in (first.load, second.load):
        host.loader.release(load)
    delay(made, 0.0)
    assert host.read(chain) == Got(40, 40, 0, 0), "kept"


def test_who_takes_over_asks_other_hosts_too(made: Hosts) -> None:
    host, there = made.add("h0"), made.add("h1")
    chain = chain_of(34)
    made.made.put(chain, 0, 32)
    there.put(chain, 32, 34)  # not on disk
    first, second = host.begin(chain), host.begin(chain)
    assert first is not None
    assert second is not None
    host.loader.release(first)
    assert host.run(second) == LoadResult(34, (), 0, 2, 32)
    host.loader.release(second)


def test_rows_that_were_told_are_not_written_by_who_takes_over(made: Hosts) -> None:
    host, chain = made.add("h0"), chain_of(32)
    made.made.put(chain)
    delay(made, 0.1)
    first = started(host, chain)
    first.wait_rows(0, 32)
    second = host.begin(chain)
    assert second is not None
    host.loader.cancel(first.load)
    first.result()
    count = host.level.arena.rows_ready(second.lane, 0)
    assert count == 32
    view = host.level.arena.view(second.slots[0].slot)
    mark = bytes_of(chain.digests[0])[:64] ^ 255
    view[:64] = mark  # as if row 0 had come from another copy of the extent
    result = host.loader.run(second, deadline_ns=soon())
    assert result.num_blocks == 32
    assert np.array_equal(view[:64], mark)
    assert np.array_equal(view[64:], bytes_of(chain.digests[0])[64:])
    view[:64] ^= 255
    for load in (first.load, second):
        host.loader.release(load)


@pytest.mark.parametrize("num_first", [1, 2])
def test_who_takes_over_brings_the_rest_of_each_row_group_that_is_cut_elsewhere(
    made: Hosts, num_first: int
) -> None:
    """A short extent comes in larger groups of rows than one that is read together with longer ones."""
    host, chain = made.add("h0"), chain_of(32)
    short = replace(chain, digests=chain.digests[:num_first])
    made.made.put(chain, 0, num_first)
    made.made.put(chain, num_first, 32)
    for ref in host.level.take_slots(64):  # as if another tenant had been here
        host.level.arena.view(ref.slot)[:] = 0xA5
        host.level.give_back_slots([ref])
    delay(made, 0.1)
    first = started(host, chain)
    first.wait_rows(0, num_first)
    second = host.begin(short)
    assert second is not None
    host.loader.cancel(first.load)
    first.result()
    assert second.told.max() < NUM_ROWS, "the first load was too quick"
    assert host.run(second) == LoadResult(num_first, (), 0, 0, num_first)
    for load in (first.load, second):
        host.loader.release(load)
    delay(made, 0.0)
    assert host.read(chain).num_blocks == 32
    host.level.check()


def test_a_block_that_was_brought_and_damaged_is_not_brought_again_where_it_was_told(made: Hosts) -> None:
    """The load that brought it is gone; another that holds it was told of it and finds the damage."""
    host, chain = made.add("h0"), chain_of(4)
    made.made.put(chain)
    delay(made, 0.1)
    first = started(host, chain)
    wait(lambda: first.load.get is not None)
    second = host.begin(chain)
    assert second is not None
    assert first.result().num_blocks == 4
    host.loader.release(first.load)
    assert second.told.tolist() == [NUM_ROWS] * 4
    flip_a_bit(made, host, chain, 2)
    before = host.level.arena.view(second.slots[2].slot).copy()
    result = host.loader.run(second, deadline_ns=soon())
    assert (result.num_blocks, result.reasons) == (2, ("damaged",))
    host.loader.check()
    delay(made, 0.0)
    assert host.read(chain) == Got(4, 3, 0, 1)
    assert np.array_equal(host.level.arena.view(second.slots[2].slot), before), "not written again"
    host.loader.release(second)
    assert host.read(chain) == Got(4, 4, 0, 0)


def test_a_load_that_waits_in_vain_ends_at_its_own_deadline(made: Hosts) -> None:
    host, chain = made.add("h0"), chain_of(32)
    made.made.put(chain)
    for peer in made.made.peers.values():
        peer.faults.is_silent = True
    first = started(host, chain)
    wait(lambda: first.load.get is not None)
    second = host.begin(chain)
    assert second is not None
    result = host.loader.run(second, deadline_ns=soon(0.2))
    assert (result.num_blocks, result.reasons) == (0, ("late",))
    host.loader.release(second)
    host.loader.release(first.load)
    assert first.result().num_blocks == 0


def test_loads_in_threads_that_come_and_go_leave_nothing_behind(made: Hosts) -> None:
    host, there = made.add("h0", 48, max_pinned_ratio=0.75), made.add("h1")
    chains = [other_chain(20, number) for number in range(4)]
    for number, chain in enumerate(chains):
        made.made.put(chain, 0, 16)
        there.put(chain, 10 + number, 20)
    failures: list[BaseException] = []
    counts = {"done": 0, "cancelled": 0, "full": 0}

    def work(seed: int) -> None:
        rng = np.random.default_rng(seed)
        try:
            for _ in range(12):
                chain = chains[rng.integers(4)]
                part = replace(chain, digests=chain.digests[: rng.integers(1, 21)])
                try:
                    load = host.begin(part)
                except ArenaFull:
                    counts["full"] += 1
                    continue
                assert load is not None
                running = Running(host, load)
                if rng.integers(3) == 0:
                    time.sleep(rng.random() * 0.01)
                    (host.loader.release if rng.integers(2) else host.loader.cancel)(load)
                    counts["cancelled"] += 1
                    running.result()
                else:
                    assert running.result().num_blocks == len(part.digests)
                    counts["done"] += 1
                host.loader.release(load)
        except BaseException as error:  # noqa: BLE001 - told to the test below
            failures.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not failures
    assert counts["done"] > 0
    assert host.loader.num_loads == 0
    host.loader.check()
    assert host.level.arena.num_free_lanes == NUM_LANES


# --- slots ------------------------------------------------------------------------------------------


def test_blocks_that_ranks_write_into_lent_slots_are_blocks_of_the_level(made: Hosts) -> None:
    host, there = made.add("h0"), made.add("h1")
    chain = chain_of(6)
    refs = host.put_in_slots(chain)
    for ref, digest in zip(refs, chain.digests, strict=True):
        assert host.level.arena.is_filling_or_holds(ref, digest[:16])
    assert host.level.num_waiting == 6
    assert host.read(chain) == Got(6, 6, 0, 0)
    assert there.read(chain) == Got(6, 0, 6, 0)
    host.put_in_slots(chain, 4)  # here already: the slots are free again
    host.loader.check()
    assert host.level.blocks.num_lent == 0
    host.level.spill_all(deadline_ns=soon())
    assert made.made.pool.match(chain).num_blocks == 6


def test_a_lent_slot_is_readable_only_once_it_was_put(made: Hosts) -> None:
    host, chain = made.add("h0", 8), chain_of(1)
    refs = host.level.take_slots(5)
    assert len(refs) == 5
    assert host.level.arena.num_free == 3
    host.level.arena.view(refs[0].slot)[:] = bytes_of(chain.digests[0])
    assert host.read(chain) == Got(0)
    host.level.give_back_slots(refs[1:])
    host.loader.check()
    assert host.level.put_slots(chain, 0, refs[:1]) == 1
    for wrong in (refs[1:2], refs[:1]):
        with pytest.raises(InvariantBroken):
            host.level.put_slots(chain, 0, wrong)
        with pytest.raises(InvariantBroken):
            host.level.give_back_slots(wrong)
    late = host.level.arena.view(refs[1].slot)
    late[:] = 7  # a writer that does not know that its slot was taken back
    assert host.put(chain_of(7, first_id=5 * 10**6)) == 7
    assert host.read(chain_of(7, first_id=5 * 10**6)).num_blocks == 7


def test_slots_are_lent_as_long_as_blocks_may_leave(made: Hosts) -> None:
    host, chain, old = made.add("h0", 8), chain_of(3), other_chain(4)
    host.put(old)
    host.level.spill_all(deadline_ns=soon())
    host.put(chain)
    refs = host.level.take_slots(100)
    assert len(refs) == 5, "one was free, four could leave"
    assert host.level.take_slots(1) == []
    assert host.level.make_room(3, deadline_ns=soon())
    refs += host.level.take_slots(2)
    assert len(refs) == 7
    host.loader.check()
    host.level.give_back_slots(refs)


def test_a_block_that_is_put_while_a_load_brings_it_is_kept_and_the_load_goes_on(made: Hosts) -> None:
    host, chain = made.add("h0"), chain_of(32)
    made.made.put(chain)
    delay(made, 0.1)
    running = started(host, chain)
    running.wait_rows(0)
    host.put_in_slots(chain, 0, 2)
    host.put(chain, 2, 3)
    host.loader.check()
    assert host.level.num_waiting == 3
    assert running.result() == LoadResult(32, (), 0, 0, 32)
    host.loader.check()
    host.loader.release(running.load)
    host.loader.check()
    assert host.read(chain) == Got(32, 32, 0, 0)


def test_what_loads_hold_does_not_leave_and_is_bounded(made: Hosts) -> None:
    host = made.add("h0", 16, max_pinned_ratio=0.75)
    chain, other, more = chain_of(8), other_chain(6), other_chain(9, 2)
    made.made.put(chain)
    made.made.put(other)
    load = host.begin(chain)
    assert load is not None
    host.run(load)
    with pytest.raises(ArenaFull) as refused:
        host.begin(other)
    assert refused.value.code == "dram.pinned"
    again = host.begin(chain)
    assert again is not None, "what is held already takes no room"
    assert host.put(more) == 8 + 1, "new blocks find room, written out one after the other"
    host.check_load(load)
    host.run(again)
    host.loader.check()
    host.loader.release(load)
    with pytest.raises(ArenaFull):
        host.begin(other)
    host.loader.release(again)
    assert host.read(other).num_blocks == 6
    long = other_chain(30, 3)
    made.made.put(long)
    assert host.read(long).num_blocks == 12, "as much of it as loads may hold"


def test_a_load_does_not_wait_for_slots_that_are_lent(made: Hosts) -> None:
    """They come back with a block that is put, or when their rank dies: perhaps never."""
    host, chain = made.add("h0", 16, max_pinned_ratio=0.75), chain_of(30)
    made.made.put(chain)
    refs = host.level.take_slots(7)
    assert len(refs) == 7
    assert host.read(chain).num_blocks == 9
    host.level.give_back_slots(refs)
    assert host.read(chain).num_blocks == 12


def test_there_are_as_many_loads_as_lanes(made: Hosts) -> None:
    host, chain = made.add("h0"), chain_of(2)
    host.put(chain)
    loads = [host.begin(chain) for _ in range(NUM_LANES)]
    with pytest.raises(ArenaFull) as refused:
        host.begin(chain)
    assert refused.value.code == "dram.lanes"
    host.loader.check()
    for load in loads:
        assert load is not None
        host.loader.release(load)
        host.loader.release(load)  # once more costs nothing
    assert host.read(chain).num_blocks == 2


def test_a_load_that_was_released_before_it_ran_does_nothing(made: Hosts) -> None:
    host, chain = made.add("h0"), chain_of(4)
    made.made.put(chain)
    load = host.begin(chain)
    assert load is not None
    host.loader.release(load)
    assert host.loader.run(load, deadline_ns=soon()) == LoadResult(0, ("cancelled",), 0, 0, 0)
    host.loader.check()
    assert host.level.num_blocks == 0
