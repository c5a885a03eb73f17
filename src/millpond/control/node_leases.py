"""`NodeLeases`: what the ranks of a host hold at its node daemon, and until when (interfaces A.6).

    load       waiting -> starting -> running -> done        ended: it goes back, at each point
    put slot   lent -> taken back by a put                   ended: it goes back

Everything that a rank holds hangs on one lease, which ends when the rank says hello anew, when its process
ends, or when nothing was heard of it for a while. Only slots that it may write into stay its as long as its
process exists: whoever was frozen may wake up in the midst of a copy.
"""

from __future__ import annotations

from bisect import insort
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import Enum

from millpond.core.errors import InvariantBroken
from millpond.core.node_messages import Load, NodeHello, Slot
from millpond.core.units import SECOND_NS

PATIENCE_NS = 2 * SECOND_NS
"""For room in a memory full of what the disks have not taken yet."""


class LoadStage(Enum):
    """Where a load is."""

    WAITING = "waiting"
    """In the queue; holds nothing."""
    STARTING = "starting"
    """Slots are being found for it."""
    RUNNING = "running"
    DONE = "done"
    """Its slots are pinned until the rank ends it."""


@dataclass(slots=True, eq=False)
class HeldLoad:
    """One load of one rank."""

    peer: str
    order: Load
    turn: int
    """Its place in the order in which all loads came."""
    stage: LoadStage = LoadStage.WAITING
    is_ended: bool = False
    """The rank needs it no more, but a thread still works on it."""
    takes_slots: bool = True
    """Of a load that is starting: whether it may take new slots. If not, only what is in memory already."""
    takes_less: bool = False
    """Of a load that is starting: where there are no new slots it takes the leading blocks that need none."""
    full_ns: int | None = None
    """When it was the head of the queue and found no room for the first time."""


@dataclass(frozen=True, slots=True)
class Freed:
    """What nobody holds any more. The caller stops what runs, and gives the rest back."""

    loads: tuple[HeldLoad, ...] = ()
    """In the stage that they were in; those that are starting or running are reported again by `finish`."""
    slots: tuple[Slot, ...] = ()
    peers: tuple[str, ...] = ()
    """Whose leases ended."""


@dataclass(slots=True)
class _Lease:
    incarnation: int
    pid: int
    num_put_slots: int
    heard_ns: int
    loads: dict[int, HeldLoad] = field(default_factory=dict[int, HeldLoad])
    lent: dict[int, int] = field(default_factory=dict[int, int])
    """Slot -> generation."""
    last_number: int = 0
    is_lapsed: bool = False
    """Silent for too long; only its put slots are left."""


class NodeLeases:
    """See module.

    Args:
        lease_ns: After so long a silence a lease ends.
        patience_ns: The head of the queue waits so long for room before it takes less.
    """

    def __init__(self, lease_ns: int, patience_ns: int = PATIENCE_NS) -> None:
        self._lease_ns = lease_ns
        self._patience_ns = patience_ns
        self._leases: dict[str, _Lease] = {}
        self._orphans: dict[int, dict[int, int]] = {}
        """Put slots of processes that are no peer's any more but may exist: pid -> slot -> generation."""
        self._num_asked = 0
        self._queue: list[HeldLoad] = []
        """In the order of their turns."""
        self._untried: deque[HeldLoad] = deque()
        """While there is no room: loads behind the head that are to look at what is in memory. Some may have
        left the queue."""
        self._starting: HeldLoad | None = None
        self._ended: set[HeldLoad] = set()
        """Ended loads that a thread still works on."""
        self._has_room = True

    # --- peers -------------------------------------------------------------------------------

    def hello(self, now_ns: int, peer: str, hello: NodeHello) -> Freed | None:
        """A rank introduces itself; what it held in an earlier life, or before it lost us, is freed.

        Returns:
            None if it is an older life than the one that is known: it is to be ignored.
        """
        old = self._leases.get(peer)
        if old is not None and hello.incarnation <= old.incarnation:
            return None
        freed = Freed()
        if old is not None:
            # One and the same process says hello again only when it writes into no slot any more.
            freed = self._end(peer, keeps_slots=old.pid not in (0, hello.pid))
        self._leases[peer] = _Lease(hello.incarnation, hello.pid, hello.num_put_slots, now_ns)
        return freed

    def heard(self, now_ns: int, peer: str) -> bool:
        """A rank said something; whether it has a lease."""
        lease = self._leases.get(peer)
        if lease is None or lease.is_lapsed:
            return False
        lease.heard_ns = now_ns
        return True

    def incarnation(self, peer: str) -> int:
        """Of a rank's hello; 0 if it has no lease."""
        lease = self._leases.get(peer)
        return 0 if lease is None or lease.is_lapsed else lease.incarnation

    def peers(self) -> tuple[str, ...]:
        """Ranks that have a lease."""
        return tuple(peer for peer, lease in self._leases.items() if not lease.is_lapsed)

    def expire(self, now_ns: int) -> Freed:
        """End the leases of ranks that were silent for too long."""
        silent = [
            peer
            for peer, lease in self._leases.items()
            if not lease.is_lapsed and now_ns - lease.heard_ns > self._lease_ns
        ]
        return _join(self._lapse(peer) for peer in silent)

    def died(self, pid: int) -> Freed:
        """A process has ended: nothing is its any more."""
        dead = [peer for peer, lease in self._leases.items() if lease.pid == pid]
        freed = _join(self._end(peer, keeps_slots=False) for peer in dead)
        orphans = self._orphans.pop(pid, {})
        return Freed(freed.loads, (*freed.slots, *orphans.items()), freed.peers)

    # --- loads -------------------------------------------------------------------------------

    def ask(self, peer: str, order: Load) -> HeldLoad | None:
        """A rank asks for a load, which joins the queue; None if it is ignored, for it came before."""
        lease = self._leases.get(peer)
        if lease is None or lease.is_lapsed or order.number <= lease.last_number:
            return None
        lease.last_number = order.number
        self._num_asked += 1
        load = lease.loads[order.number] = HeldLoad(peer, order, self._num_asked)
        self._queue.append(load)
        if not self._has_room:
            self._untried.append(load)
        return load

    def start(self, now_ns: int) -> HeldLoad | None:
        """The load that is to find its slots now, and how (`takes_slots`, `takes_less`). One at a time.

        It is the head of the queue. While that finds no room, those behind it have their turns between its
        tries, but take no new slot: of these it is not to be starved.
        """
        if self._starting is not None:
            return None
        load = self._next()
        if load is None:
            return None
        load.takes_slots = self._has_room
        load.takes_less = (
            load.takes_slots and load.full_ns is not None and now_ns - load.full_ns >= self._patience_ns
        )
        self._queue.remove(load)
        load.stage = LoadStage.STARTING
        self._starting = load
        return load

    def started(self, load: HeldLoad) -> bool:
        """A load has its slots; whether it is still needed. If so it runs, if not it is to be released."""
        self._end_start(load)
        load.stage = LoadStage.RUNNING
        return not self._forget_ended(load)

    def no_room(self, now_ns: int, load: HeldLoad) -> None:
        """A load found no slots: it waits in its place. If that is the head of the queue, for `room`."""
        self._end_start(load)
        load.stage = LoadStage.WAITING
        if self._forget_ended(load):
            return
        insort(self._queue, load, key=lambda one: one.turn)
        if not load.takes_slots:
            return
        self._has_room = False
        if load.full_ns is None:
            load.full_ns = now_ns
        if not self._untried:  # otherwise a head that tries often would keep the last from their turns
            self._untried.extend(self._queue[1:])

    def room(self) -> None:
        """Something was given back: the head of the queue may try again."""
        self._has_room = True

    def refuse(self, load: HeldLoad) -> bool:
        """A load got nothing and is over; whether its rank still waits for it."""
        if load is self._starting:
            self._starting = None
        if self._forget_ended(load):
            return False
        del self._leases[load.peer].loads[load.order.number]
        return True

    def finish(self, load: HeldLoad) -> bool:
        """A load has run; whether its rank still holds it. If not it is to be released."""
        if load.stage is not LoadStage.RUNNING:
            raise InvariantBroken(f"a load that is {load.stage.value} has run")
        load.stage = LoadStage.DONE
        return not self._forget_ended(load)

    def cancel(self, peer: str, number: int) -> Freed:
        """A rank needs a load no more."""
        lease = self._leases.get(peer)
        load = lease.loads.pop(number, None) if lease is not None else None
        if load is None:
            return Freed()
        self._end_loads((load,))
        return Freed((load,))

    def late(self, now_ns: int) -> tuple[HeldLoad, ...]:
        """Loads that waited until their deadline. They leave the queue; each is then to be refused."""
        late = tuple(load for load in self._queue if load.order.deadline_ns <= now_ns)
        for load in late:
            self._queue.remove(load)
        return late

    @property
    def has_room(self) -> bool:
        """Whether the queue moves on."""
        return self._has_room

    @property
    def num_waiting(self) -> int:
        """Loads in the queue."""
        return len(self._queue)

    # --- put slots ---------------------------------------------------------------------------

    def num_wanted(self, peer: str, max_lent: int) -> int:
        """Put slots that a rank lacks.

        Args:
            peer: The rank.
            max_lent: To all ranks together; each gets at least one.
        """
        lease = self._leases.get(peer)
        if lease is None or lease.is_lapsed:
            return 0
        share = max(1, max_lent // len(self.peers()))
        return max(0, min(lease.num_put_slots, share) - len(lease.lent))

    def lend(self, peer: str, incarnation: int, slots: Sequence[Slot]) -> bool:
        """Slots become a rank's; if not, because its life is another by now, they stay the caller's."""
        lease = self._leases.get(peer)
        if lease is None or lease.is_lapsed or lease.incarnation != incarnation:
            return False
        lease.lent.update(slots)
        return True

    def take_back(self, peer: str, slots: Iterable[Slot]) -> tuple[Slot, ...]:
        """A rank hands slots over: those of them that were its, which are the caller's from now on."""
        lease = self._leases.get(peer)
        if lease is None:
            return ()
        taken: list[Slot] = []
        for slot, generation in slots:
            if lease.lent.get(slot) == generation:
                del lease.lent[slot]
                taken.append((slot, generation))
        return tuple(taken)

    # --- laws --------------------------------------------------------------------------------

    def num_lent(self) -> int:
        """Put slots that are not the daemon's now."""
        leased = sum(len(lease.lent) for lease in self._leases.values())
        return leased + sum(map(len, self._orphans.values()))

    def loads(self) -> tuple[HeldLoad, ...]:
        """Every load that is not over."""
        return (*(load for lease in self._leases.values() for load in lease.loads.values()), *self._ended)

    def check(self) -> list[str]:
        """Return violated laws: each load and each slot has one owner, and the queue is what waits."""
        problems: list[str] = []
        lent = [slot for lease in self._leases.values() for slot in lease.lent]
        lent += [slot for slots in self._orphans.values() for slot in slots]
        if len(set(lent)) < len(lent):
            problems.append("a put slot is lent twice")
        loads = self.loads()
        if len(set(loads)) < len(loads):
            problems.append("a load is held twice")
        waiting = [load for load in loads if load.stage is LoadStage.WAITING]
        if set(waiting) != set(self._queue) or len(self._queue) != len(set(self._queue)):
            problems.append(f"{len(waiting)} loads wait, {len(self._queue)} are in the queue")
        starting = [load for load in loads if load.stage is LoadStage.STARTING]
        if starting != ([] if self._starting is None else [self._starting]):
            problems.append(f"{len(starting)} loads are starting")
        problems += [f"an ended load is {load.stage.value}" for load in self._ended if not load.is_ended]
        problems += [
            f"{peer} is silent and holds loads"
            for peer, lease in self._leases.items()
            if lease.is_lapsed and lease.loads
        ]
        return problems

    # --- inside ------------------------------------------------------------------------------

    def _next(self) -> HeldLoad | None:
        if self._has_room:
            return self._queue[0] if self._queue else None
        while self._untried:
            load = self._untried.popleft()
            if load in self._queue:
                return load
        return None

    def _end_start(self, load: HeldLoad) -> None:
        if load is not self._starting:
            raise InvariantBroken(f"a load that is {load.stage.value} was started")
        self._starting = None

    def _forget_ended(self, load: HeldLoad) -> bool:
        self._ended.discard(load)
        return load.is_ended

    def _end_loads(self, loads: Iterable[HeldLoad]) -> None:
        for load in loads:
            load.is_ended = True
            if load.stage is LoadStage.WAITING:
                self._queue.remove(load)
            elif load.stage is not LoadStage.DONE:
                self._ended.add(load)

    def _lapse(self, peer: str) -> Freed:
        """A rank is silent; its put slots stay its if its process may exist."""
        lease = self._leases[peer]
        if not lease.pid:
            return self._end(peer, keeps_slots=False)
        loads = tuple(lease.loads.values())
        lease.loads.clear()
        lease.is_lapsed = True
        self._end_loads(loads)
        return Freed(loads, (), (peer,))

    def _end(self, peer: str, *, keeps_slots: bool) -> Freed:
        lease = self._leases.pop(peer)
        loads = tuple(lease.loads.values())
        self._end_loads(loads)
        slots: tuple[Slot, ...] = ()
        if keeps_slots:
            self._orphans.setdefault(lease.pid, {}).update(lease.lent)
        else:
            slots = tuple(lease.lent.items())
        return Freed(loads, slots, (peer,))


def _join(parts: Iterable[Freed]) -> Freed:
    parts = tuple(parts)
    return Freed(
        tuple(load for part in parts for load in part.loads),
        tuple(slot for part in parts for slot in part.slots),
        tuple(peer for part in parts for peer in part.peers),
    )
