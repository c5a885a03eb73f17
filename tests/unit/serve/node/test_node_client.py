"""A rank's line to its node daemon when that is late, silent, gone, or another one."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from millpond.core.errors import InvariantBroken
from millpond.core.events import Loaded
from millpond.core.ids import RequestId
from millpond.core.node_messages import (
    Load,
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
from millpond.serve.node.client import NodeClient
from millpond.serve.rpc import Router, wait_any
from millpond.store.dram_arena import DramArena
from tests.unit.serve.node.rig import Rank, Rig, chain, identity, poll, rig
from tests.unit.store.pool_cluster import LAYOUT, bytes_of


@pytest.fixture
def made(tmp_path: Path) -> Iterator[Rig]:
    with rig(tmp_path) as made:
        yield made


class FakeDaemon:
    """A daemon that says what a test wants; its arena is real."""

    def __init__(self, made: Rig, epoch: int = 1) -> None:
        self.arena = DramArena.create(made.folder / f"fake-{epoch}.arena", 1 << 20, LAYOUT, epoch)
        made.stack.callback(self.arena.close)
        self.router = Router(made.network, f"ipc://{made.folder / f'fake-{epoch}.sock'}")
        made.stack.callback(self.router.close)
        self.received: list[object] = []
        events: list[object] = []
        client = NodeClient(
            made.network, self.router.endpoint, "p0-0", 10, LAYOUT, 4, events.append, lease_s=1.0
        )
        made.stack.callback(client.stop)
        self.rank = Rank(client, events)

    def take(self) -> None:
        wait_any((self.router,), 0.01)
        while (received := self.router.recv()) is not None:
            self.received.append(received[1])

    def expect(self, kind: type) -> object:
        def found() -> list[object]:
            self.take()
            return [message for message in self.received if isinstance(message, kind)]

        poll(found, f"a {kind.__name__}")
        message = found()[0]
        self.received.remove(message)
        return message

    def send(self, message: object) -> None:
        assert self.router.send("p0-0", message)

    def lane(self, *counts: int) -> int:
        """A new lane; of its rows so many blocks are ready."""
        lane = self.arena.take_lane()
        assert lane is not None
        self.count(lane, *counts)
        return lane

    def count(self, lane: int, *counts: int) -> None:
        self.arena.count_ready(lane, [*counts, *[0] * (len(LAYOUT.rows) - len(counts))])

    def accept(self, request: RequestId, lane: int, **more: object) -> Load:
        """Answer the order of a load of three blocks."""
        order = self.expect(Load)
        assert isinstance(order, Load)
        message = LoadAccepted(request, 0, lane, ((0, 0),) * 3, number=order.number)
        self.send(replace(message, **more))
        return order

    def welcome(self) -> int:
        """Answer hellos until the client has a lease; returns its incarnation."""
        incarnations: list[int] = []

        def is_up() -> bool:
            self.take()
            for hello in [message for message in self.received if isinstance(message, NodeHello)]:
                self.received.remove(hello)
                incarnations.append(hello.incarnation)
                self.send(NodeWelcome(str(self.arena.path), self.arena.epoch, hello.incarnation))
            return bool(incarnations) and self.rank.client.epoch == self.arena.epoch

        poll(is_up, "a lease")
        return incarnations[-1]

    def lend(self, *slots: tuple[int, int]) -> int:
        """Give a lease and slots; returns its incarnation."""
        incarnation = self.welcome()
        self.send(PutSlots(slots, incarnation))
        poll(lambda: self.rank.client.num_free_slots == len(slots), "slots")
        return incarnation


def test_without_a_daemon_a_load_is_refused_at_once(made: Rig):
    events: list[object] = []
    client = NodeClient(
        made.network, f"ipc://{made.folder / 'nobody.sock'}", "p0-0", 1, LAYOUT, 4, events.append
    )
    rank = Rank(client, events)
    begin = time.monotonic()
    assert rank.answer(rank.order(3, deadline_s=100)).num_tokens == 0
    assert time.monotonic() - begin < 10
    assert client.take_slot() is None
    assert client.load_counts.refused == {"no_daemon": 1}
    client.stop()


def test_a_daemon_that_does_not_answer_counts_as_nothing_at_the_deadline(made: Rig):
    fake = FakeDaemon(made)
    fake.welcome()
    request = fake.rank.order(3, deadline_s=0.3)
    order = fake.expect(Load)
    assert isinstance(order, Load)
    assert fake.rank.answer(request) == Loaded(request, 0, 0, refused="deadline")
    cancel = fake.expect(LoadCancel)
    assert isinstance(cancel, LoadCancel)
    assert cancel.number == order.number
    fake.send(LoadAccepted(request, 0, 1, ((0, 0),), number=order.number))  # too late
    load = fake.rank.client.load_of(request, 0)
    assert load is not None
    assert load.num_blocks == 0
    assert fake.rank.client.load_counts.refused == {"deadline": 1}
    assert len(fake.rank.events) == 1


def test_answers_to_a_load_that_was_ended_are_not_those_to_the_next_of_the_same_request(made: Rig):
    fake = FakeDaemon(made)
    fake.welcome()
    request = fake.rank.order(3)
    first = fake.expect(Load)
    assert isinstance(first, Load)
    fake.rank.client.end(request, 0)
    fake.rank.num_requests -= 1
    assert fake.rank.order(3) == request
    second = fake.expect(Load)
    assert isinstance(second, Load)
    fake.send(LoadAccepted(request, 0, 1, ((0, 0),) * 3, number=first.number))
    fake.send(LoadDone(request, 0, 3, number=first.number))
    fake.send(LoadAccepted(request, 0, fake.lane(2), ((0, 0),) * 2, number=second.number))
    assert fake.rank.answer(request).num_tokens == 2 * 128
    load = fake.rank.client.load_of(request, 0)
    assert load is not None
    assert load.num_blocks is None


def test_nothing_is_promised_of_an_accepted_load_before_its_first_row_is_there(made: Rig):
    fake = FakeDaemon(made)
    fake.welcome()
    lane = fake.lane(2)
    request = fake.rank.order(3)
    fake.accept(request, lane, state_position=256, state=b"s", is_approximate=True)
    load = fake.rank.client.load_of(request, 0)
    assert load is not None
    poll(lambda: load.is_held, "it is accepted")
    for _ in range(2):  # when the second one is answered, the client has looked at all loads since
        other = fake.rank.order(1)
        order = fake.expect(Load)
        assert isinstance(order, Load)
        fake.send(LoadRefused(other, 0, "absent", order.number))
        fake.rank.answer(other)
    assert all(event.request_id != request for event in fake.rank.events if isinstance(event, Loaded))
    fake.count(lane, 3)
    assert fake.rank.answer(request) == Loaded(request, 0, 3 * 128, 256, is_approximate=True)
    assert load.num_blocks is None


def test_a_load_that_ends_before_its_first_row_brings_what_came(made: Rig):
    fake = FakeDaemon(made)
    fake.welcome()
    request = fake.rank.order(3)
    order = fake.accept(request, fake.lane(1, 1, 1, 1), state_position=256, state=b"s")
    fake.send(LoadDone(request, 0, 1, ("late",), number=order.number))
    assert fake.rank.answer(request) == Loaded(request, 0, 128)


def test_an_accepted_load_is_answered_at_its_deadline_with_what_came(made: Rig):
    fake = FakeDaemon(made)
    fake.welcome()
    request = fake.rank.order(3, deadline_s=0.3)
    fake.accept(request, fake.lane(2, 2, 2, 1))
    assert fake.rank.answer(request) == Loaded(request, 0, 128)
    load = fake.rank.client.load_of(request, 0)
    assert load is not None
    assert (load.is_held, load.num_blocks) == (True, 1)
    assert fake.rank.client.load_counts.refused == {}  # the daemon counts it


def test_a_silent_daemon_voids_what_it_gave(made: Rig):
    fake = FakeDaemon(made)
    incarnation = fake.welcome()
    fake.send(PutSlots(((1, 0), (2, 0)), incarnation))
    request = fake.rank.order(3)
    order = fake.expect(Load)
    assert isinstance(order, Load)
    fake.send(LoadAccepted(request, 0, fake.lane(3), ((0, 0),) * 3, number=order.number))
    assert fake.rank.answer(request).num_tokens == 3 * 128
    load = fake.rank.client.load_of(request, 0)
    assert load is not None
    assert load.is_held
    poll(lambda: fake.rank.client.epoch == 0, "the lease is over", 10)
    assert load.num_blocks == 0
    assert load.num_valid(0, 3) == 0
    assert fake.rank.client.take_slot() is None
    assert fake.rank.client.load_counts.voided == 1
    assert len(fake.rank.events) == 1
    assert fake.welcome() > incarnation


def test_slots_of_an_earlier_lease_are_not_used(made: Rig):
    fake = FakeDaemon(made)
    incarnation = fake.welcome()
    fake.send(PutSlots(((1, 0),), incarnation - 1))
    fake.send(PutSlots(((2, 0),), incarnation))
    poll(lambda: fake.rank.client.num_free_slots, "a slot")
    slot = fake.rank.client.take_slot()
    assert slot is not None
    assert slot.slot == 2
    aside = fake.rank.client.take_slot()
    assert aside is not None
    assert aside.is_spare


def test_a_lost_daemon_is_not_greeted_before_the_last_copy_has_ended(made: Rig):
    fake = FakeDaemon(made)
    fake.lend((1, 0))
    slot = fake.rank.client.take_slot()
    assert slot is not None
    poll(lambda: fake.rank.client.epoch == 0, "the lease is over", 10)
    fake.take()
    assert not any(isinstance(message, NodeHello) for message in fake.received)
    of = chain(1)
    fake.rank.client.put(fake.rank.order(1), 0, identity(of), 0, of.digests, [slot])
    fake.welcome()
    assert not any(isinstance(message, Put) for message in fake.received)
    assert fake.rank.client.put_counts.lost == 1


def test_a_late_welcome_to_a_lease_that_is_over_does_not_bring_it_back(made: Rig):
    """It comes while the last copy goes on; the daemon, which noticed nothing, goes on answering."""
    fake = FakeDaemon(made)
    incarnation = fake.welcome()
    fake.send(PutSlots(((1, 0),), incarnation))
    client = fake.rank.client
    poll(lambda: client.num_free_slots, "a slot")
    slot = client.take_slot()
    assert slot is not None
    poll(lambda: client.epoch == 0, "the lease is over", 10)
    old = NodeWelcome(str(fake.arena.path), fake.arena.epoch, incarnation)
    fake.send(old)
    fake.rank.client.snapshot(SnapshotPut(identity(chain(1)), b"", 128, b""))  # after the welcome
    poll(lambda: client.counts.snapshots + client.counts.snapshots_lost == 1, "the welcome was heard")
    client.put(RequestId("put"), 0, identity(chain(1)), 0, chain(1).digests, [slot])
    fake.received.clear()

    def is_greeted() -> bool:
        fake.take()
        if any(isinstance(message, NodePing) for message in fake.received):
            fake.received.clear()
            fake.send(old)
        return any(isinstance(message, NodeHello) for message in fake.received)

    poll(is_greeted, "a new lease is asked for", 10)
    incarnation = fake.welcome()
    fake.send(PutSlots(((2, 0),), incarnation))
    poll(lambda: client.num_free_slots == 1, "slots come again")


def test_an_arena_of_another_layout_is_not_used(made: Rig):
    fake = FakeDaemon(made)
    other = DramArena.create(made.folder / "other.arena", 1 << 20, _other_layout(), 1)
    made.stack.callback(other.close)
    hello = fake.expect(NodeHello)
    assert isinstance(hello, NodeHello)
    fake.send(NodeWelcome(str(other.path), 1, hello.incarnation))
    fake.send(PutSlots(((1, 0),), hello.incarnation))
    request = fake.rank.order(3)
    assert fake.rank.answer(request).num_tokens == 0
    assert fake.rank.client.take_slot() is None


def test_a_slot_that_was_given_away_is_seen_after_the_copy(made: Rig):
    fake = FakeDaemon(made)
    fake.welcome()
    of = chain(3)
    refs = [fake.arena.reserve(digest[:16]) for digest in of.digests]
    assert None not in refs
    for ref, digest in zip(refs, of.digests, strict=True):
        fake.arena.view(ref.slot)[:] = bytes_of(digest)
    lane = fake.arena.take_lane()
    fake.arena.count_ready(lane, [3, 3, 2, 0])
    request = fake.rank.order(3)
    order = fake.expect(Load)
    assert isinstance(order, Load)
    slots = tuple((ref.slot, ref.generation) for ref in refs)
    fake.send(LoadAccepted(request, 0, lane, slots, number=order.number))
    fake.rank.answer(request)
    load = fake.rank.client.load_of(request, 0)
    assert load is not None
    assert [load.rows_ready(row) for row in range(4)] == [3, 3, 2, 0]
    assert load.num_valid(0, 3) == 3
    fake.arena.free(refs[1])
    assert load.num_valid(0, 3) == 1
    assert load.num_valid(2, 3) == 1
    fake.arena.give_back_lane(lane)
    assert load.rows_ready(0) == 0


def test_rows_of_a_refused_load_are_not_read(made: Rig):
    fake = FakeDaemon(made)
    request = fake.rank.order(3)
    fake.rank.answer(request)
    load = fake.rank.client.load_of(request, 0)
    assert load is not None
    assert (load.rows_ready(0), load.num_valid(0, 3), load.is_held) == (0, 0, False)
    with pytest.raises(InvariantBroken):
        load.row_memory(0)


def test_a_new_daemon_serves_where_the_old_one_left(made: Rig):
    daemon = made.start()
    rank = made.rank(daemon)
    rank.put(chain(8))
    poll(lambda: daemon.daemon.counts.puts == 8, "puts")
    held = rank.finish(rank.order(8))
    assert held.num_valid(0, 8) == 8
    daemon.end()
    again = made.start()
    rank.wait_up(again, num_slots=8)
    assert held.num_blocks == 0
    assert rank.read(8) in {0, 8}  # the pool may not be open yet
    rank.put(chain(3, 900_000), request="again")
    poll(lambda: rank.read(3, 900_000) == 3, "what was put into the new one")
    again.check()


def test_a_slot_that_comes_back_after_its_lease_is_not_taken_again(made: Rig):
    fake = FakeDaemon(made)
    incarnation = fake.lend((1, 0), (2, 0))
    client = fake.rank.client
    slot = client.take_slot()
    assert slot is not None
    client.give_back(slot)
    assert client.take_slot() == slot
    poll(lambda: client.epoch == 0, "the lease is over", 10)
    client.give_back(slot)
    assert client.num_free_slots == 0
    assert fake.welcome() > incarnation


def test_blocks_without_a_slot_wait_aside_in_their_order(made: Rig):
    """One slot is lent at a time; a sequence's end comes after its blocks, and those of others too."""
    fake = FakeDaemon(made)
    incarnation = fake.lend((0, 0))
    client, of = fake.rank.client, chain(4)
    fake.rank.put(of, 0, 2)
    fake.rank.put(of, 2, 3)
    client.close_put(RequestId("put"), 0)
    fake.rank.put(chain(1, 900_000), request="other")
    assert client.num_aside == 3
    for number in range(4):
        owner = chain(1, 900_000) if number == 3 else of
        put = fake.expect(Put)
        assert isinstance(put, Put)
        assert (put.first_block, put.slots) == (number % 3, ((number, 0),))
        assert fake.arena.view(number).tobytes() == bytes_of(owner.digests[number % 3]).tobytes()
        assert not any(isinstance(message, Put) for message in fake.received)
        fake.send(PutSlots(((number + 1, 0),), incarnation))
        if number == 2:
            fake.expect(PutClose)
    poll(lambda: client.num_free_slots == 1, "the last slot is kept")
    assert client.num_aside == 0
    assert (client.put_counts.puts, client.put_counts.aside, client.put_counts.lost) == (4, 3, 0)


def test_there_is_an_end_to_what_is_written_aside(made: Rig):
    fake = FakeDaemon(made)
    client = fake.rank.client
    assert client.take_slot() is None  # no lease yet
    fake.lend((0, 0))
    taken = [client.take_slot() for _ in range(6)]
    assert [slot is not None and slot.is_spare for slot in taken] == [False, True, True, True, True, False]
    assert taken[-1] is None
    for slot in taken[:-1]:
        assert slot is not None
        client.give_back(slot)
    assert (client.num_aside, client.num_free_slots) == (0, 1)


def test_what_waits_aside_is_lost_and_counted_with_its_lease(made: Rig):
    fake = FakeDaemon(made)
    incarnation = fake.lend((0, 0))
    client, of = fake.rank.client, chain(4)
    fake.rank.put(of, 0, 3)
    late = client.take_slot()
    assert late is not None
    assert late.is_spare
    poll(lambda: client.epoch == 0, "the lease is over", 10)
    incarnation = fake.welcome()
    fake.send(PutSlots(((5, 0),), incarnation))
    client.put(RequestId("put"), 0, identity(of), 3, of.digests, [late])
    poll(lambda: client.put_counts.lost == 3, "two that waited, and one that came late")
    assert client.num_aside == 0
    fake.take()
    assert [m.slots for m in fake.received if isinstance(m, Put)] == [((0, 0),)]


def _other_layout():
    from millpond.core.kv_layout import uniform_layout

    return uniform_layout(num_layers=2, kv_bytes_per_token=16, dtype="bf16")
