"""Leases of a node daemon: whatever ranks say, in whatever order, each load and slot has one owner."""

from __future__ import annotations

from dataclasses import dataclass

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from millpond.control.node_leases import Freed, HeldLoad, LoadStage, NodeLeases
from millpond.core.ids import RequestId
from millpond.core.node_messages import Load, NodeHello, Slot
from millpond.core.request import KvIdentity

LEASE_NS = 10
PATIENCE_NS = 6
PEERS = st.sampled_from(["a", "b", "c"])
KV = KvIdentity(bytes(32), 0)


@dataclass
class Process:
    """One rank's process."""

    pid: int
    incarnation: int
    heard_ns: int
    number: int = 0


class Leases(RuleBasedStateMachine):
    """Plays daemon and ranks: 12 slots, of which loads take one each."""

    def __init__(self) -> None:
        super().__init__()
        self.leases = NodeLeases(LEASE_NS, PATIENCE_NS)
        self.now_ns = 0
        self.next_pid = 1
        self.processes: dict[str, Process] = {}
        self.alive: dict[int, str] = {}
        """Processes that were never seen to end."""
        self.free: list[Slot] = [(index, 0) for index in range(12)]
        self.lent: set[Slot] = set()
        self.starting: HeldLoad | None = None
        self.running: list[HeldLoad] = []
        self.done: list[HeldLoad] = []
        self.expected: list[HeldLoad] = []
        """Loads that wait, in the order in which they are to start."""
        self.has_room = True
        self.full_ns: dict[HeldLoad, int] = {}
        """When a load found no room as the head of the queue."""

    # --- what the daemon does with what is freed ---

    def give_back(self, freed: Freed) -> None:
        for slot in freed.slots:
            self.lent.remove(slot)
            self.free.append((slot[0], slot[1] + 1))
        for load in freed.loads:
            assert load.is_ended
            if load.stage is LoadStage.DONE:
                self.done.remove(load)
                self.room()
            elif load.stage is LoadStage.WAITING:
                self.expected.remove(load)

    # --- ranks ---

    @rule(peer=PEERS, is_new=st.booleans(), skips=st.integers(-1, 2), wanted=st.integers(0, 3))
    def hello(self, peer: str, is_new: bool, skips: int, wanted: int) -> None:
        old = self.processes.get(peer)
        incarnation = (old.incarnation if old else 5) + skips
        is_new = is_new or old is None or old.pid not in self.alive
        pid = self.next_pid if is_new or old is None else old.pid
        freed = self.leases.hello(self.now_ns, peer, NodeHello(incarnation, b"", wanted, pid))
        known = self.leases.incarnation(peer)
        if freed is None:
            assert old is not None
            assert incarnation <= old.incarnation
            return
        assert known == incarnation
        self.next_pid += 1
        self.alive[pid] = peer
        self.processes[peer] = Process(pid, incarnation, self.now_ns)
        self.give_back(freed)

    @rule(peer=PEERS)
    def ping(self, peer: str) -> None:
        if self.leases.heard(self.now_ns, peer):
            self.processes[peer].heard_ns = self.now_ns

    @rule(peer=PEERS, is_replay=st.booleans(), deadline=st.integers(0, 30))
    def ask(self, peer: str, is_replay: bool, deadline: int) -> None:
        process = self.processes.get(peer)
        if process is None:
            assert self.leases.ask(peer, self.order(1, deadline)) is None
            return
        number = process.number if is_replay else process.number + 1
        load = self.leases.ask(peer, self.order(number, deadline))
        if load is None:
            assert is_replay or not self.leases.incarnation(peer)
        else:
            process.number = number
            self.expected.append(load)

    def order(self, number: int, deadline: int) -> Load:
        return Load(RequestId("r"), 0, KV, b"", b"", self.now_ns + deadline, number=number)

    @rule(peer=PEERS, back=st.integers(0, 4))
    def cancel(self, peer: str, back: int) -> None:
        process = self.processes.get(peer)
        self.give_back(self.leases.cancel(peer, (process.number if process else 1) - back))

    @rule(peer=PEERS, count=st.integers(1, 3), is_forged=st.booleans())
    def put(self, peer: str, count: int, is_forged: bool) -> None:
        wanted = [(slot, generation + is_forged) for slot, generation in sorted(self.lent)[:count]]
        for slot in self.leases.take_back(peer, wanted):
            assert not is_forged
            self.lent.remove(slot)
            self.free.append((slot[0], slot[1] + 1))

    @rule(data=st.data())
    @precondition(lambda self: self.alive)
    def die(self, data: st.DataObject) -> None:
        pid = data.draw(st.sampled_from(sorted(self.alive)))
        del self.alive[pid]
        self.give_back(self.leases.died(pid))

    # --- the daemon ---

    @rule(ns=st.integers(1, 8))
    def pass_time(self, ns: int) -> None:
        self.now_ns += ns
        silent = {
            peer for peer in self.leases.peers() if self.now_ns - self.processes[peer].heard_ns > LEASE_NS
        }
        freed = self.leases.expire(self.now_ns)
        assert set(freed.peers) == silent
        self.give_back(freed)
        for load in self.leases.late(self.now_ns):
            assert load.order.deadline_ns <= self.now_ns
            self.expected.remove(load)
            assert self.leases.refuse(load)

    @rule(peer=PEERS, is_late=st.booleans(), max_lent=st.integers(1, 12))
    def lend(self, peer: str, is_late: bool, max_lent: int) -> None:
        count = self.leases.num_wanted(peer, max_lent)
        assert count <= max(1, max_lent // max(1, len(self.leases.peers())))
        slots = [self.free.pop() for _ in range(min(count, len(self.free)))]
        if self.leases.lend(peer, self.leases.incarnation(peer) - is_late, slots):
            assert not is_late
            self.lent.update(slots)
        else:
            self.free += slots

    @rule()
    @precondition(lambda self: self.starting is None)
    def start(self) -> None:
        load = self.starting = self.leases.start(self.now_ns)
        if load is None:
            assert not self.has_room or not self.expected
            return
        assert load in self.expected
        assert load.takes_slots == self.has_room
        assert load.takes_slots == (load is self.expected[0])
        waited = self.now_ns - self.full_ns.get(load, self.now_ns)
        assert load.takes_less == (load.takes_slots and waited >= PATIENCE_NS)
        self.expected.remove(load)

    @rule(end=st.sampled_from(["started", "no_room", "no_room", "absent"]))
    @precondition(lambda self: self.starting is not None)
    def end_start(self, end: str) -> None:
        load = self.starting
        assert load is not None
        self.starting = None
        if end == "no_room":
            self.leases.no_room(self.now_ns, load)
            if not load.is_ended:
                self.expected = sorted([*self.expected, load], key=lambda one: one.turn)
                if load.takes_slots:
                    assert self.expected[0] is load
                    self.full_ns.setdefault(load, self.now_ns)
                    self.has_room = False
        elif end == "absent":
            assert self.leases.refuse(load) == (not load.is_ended)
        elif self.leases.started(load):
            assert not load.is_ended
            self.running.append(load)
        else:
            assert load.is_ended

    @rule()
    def room(self) -> None:
        self.leases.room()
        self.has_room = True

    @rule()
    @precondition(lambda self: self.starting is None and not self.has_room)
    def try_all(self) -> None:
        """After the head has tried in vain all behind it have a turn, and only one."""
        self.try_behind()
        self.room()
        self.start()
        if self.starting is not None:
            self.end_start("no_room")
            assert self.try_behind() == self.expected[1:]

    def try_behind(self) -> list[HeldLoad]:
        tried: list[HeldLoad] = []
        while (load := self.leases.start(self.now_ns)) is not None:
            assert not load.takes_slots
            self.leases.no_room(self.now_ns, load)
            tried.append(load)
        return tried

    @rule(data=st.data())
    @precondition(lambda self: self.running)
    def finish(self, data: st.DataObject) -> None:
        load = data.draw(st.sampled_from(self.running))
        self.running.remove(load)
        if self.leases.finish(load):
            self.done.append(load)
        else:
            assert load.is_ended

    @invariant()
    def holds(self) -> None:
        assert self.leases.check() == []
        assert self.leases.num_lent() == len(self.lent)
        assert self.leases.num_waiting == len(self.expected)
        held = {*self.expected, *self.running, *self.done}
        if self.starting is not None:
            held.add(self.starting)
        assert set(self.leases.loads()) == held

    def teardown(self) -> None:
        for pid in list(self.alive):
            self.give_back(self.leases.died(pid))
        if self.starting is not None:
            assert not self.leases.started(self.starting)
        for load in self.running:
            assert not self.leases.finish(load)
        assert not self.leases.loads()
        assert not self.leases.num_lent()
        assert len(self.free) == 12


Leases.TestCase.settings = settings(max_examples=80, stateful_step_count=50)
TestNodeLeases = Leases.TestCase
