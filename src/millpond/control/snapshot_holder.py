"""Snapshots of state slots on one rank: which buffer holds whose state, and until when.

A snapshot belongs to the sequence that it was made of until that sequence ends, and to this holder after
that: until its time is over, or the buffer that was used longest ago is needed. The bytes lie with the
rank's engine; a plan says when they are copied (`core.plan.StateCopy`).
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from millpond.core.errors import InvariantBroken
from millpond.core.ids import BufferId, RequestId
from millpond.core.units import MIB, SECOND_NS

Key = tuple[str, int]
Name = tuple[RequestId, int]


@dataclass(frozen=True, slots=True)
class SnapshotParams:
    """Snapshots of window state on one rank."""

    memory: int = 64 * MIB
    """Bytes of host memory for them, 0 for none. Models without window state take none."""
    ttl_s: int = 300
    """Seconds that a snapshot is kept after its sequence ended or it was last used, >= 1."""


@dataclass(frozen=True, slots=True)
class SnapshotStats:
    """What happened to snapshots so far."""

    held: int = 0
    """Buffers in use now."""
    kept: int = 0
    used: int = 0
    lost: int = 0
    """Asked for and not there: the prefill began at 0."""
    expired: int = 0
    evicted: int = 0
    """Gave way to a newer one before their time was over."""
    refused: int = 0
    """Not made: every buffer belonged to a sequence that still ran."""


@dataclass(slots=True, eq=False)
class _Snapshot:
    request_id: RequestId
    position: int
    buffer: BufferId
    owner: Key | None
    """Sequence that it was made of; None once the holder has it."""
    is_rolling: bool
    is_written: bool = False
    expires_ns: int = 0
    """Only while the holder has it."""

    @property
    def name(self) -> Name:
        return (self.request_id, self.position)


class SnapshotHolder:
    """Buffers of one rank. `take` one, `commit` it when it is written, `hand_over` when its sequence ends."""

    def __init__(self, num_buffers: int, ttl_s: int) -> None:
        self.num_buffers = num_buffers
        self._ttl_ns = ttl_s * SECOND_NS
        self._now_ns = 0
        self._free: deque[BufferId] = deque(BufferId(i) for i in range(num_buffers))
        self._by_name: dict[Name, _Snapshot] = {}
        self._owned: dict[Key, list[_Snapshot]] = {}
        self._idle: dict[Name, _Snapshot] = {}
        """Those of ended sequences, longest unused first, which is also the order of expiry."""
        self._num_kept = self._num_used = self._num_lost = 0
        self._num_expired = self._num_evicted = self._num_refused = 0

    def pass_time(self, now_ns: int) -> None:
        """Note the time and drop what has expired."""
        self._now_ns = max(self._now_ns, now_ns)
        while self._idle and (oldest := next(iter(self._idle.values()))).expires_ns <= self._now_ns:
            self._drop(oldest)
            self._num_expired += 1

    def take(self, owner: Key, position: int, *, is_rolling: bool) -> BufferId | None:
        """Reserve a buffer for a running sequence's state; it cannot be found before `commit`.

        Args:
            owner: The sequence.
            position: Leading tokens that the state stands for.
            is_rolling: It will replace the sequence's older rolling one.

        Returns:
            None if every buffer belongs to a running sequence.
        """
        name = (RequestId(owner[0]), position)
        twin = self._by_name.get(name)
        if twin is not None:
            if twin.owner == owner:
                raise InvariantBroken(f"the state of {owner} at {position} is kept already")
            self._drop(twin)  # an earlier attempt's
        if not self._free:
            if not self._idle:
                self._num_refused += 1
                return None
            self._drop(next(iter(self._idle.values())))
            self._num_evicted += 1
        snapshot = _Snapshot(*name, self._free.popleft(), owner, is_rolling)
        self._by_name[name] = snapshot
        self._owned.setdefault(owner, []).append(snapshot)
        return snapshot.buffer

    def commit(self, owner: Key, position: int, *, is_written: bool) -> None:
        """Learn whether a buffer that was taken now holds the state; if not, it is given back."""
        snapshot = next((s for s in self._owned.get(owner, ()) if s.position == position), None)
        if snapshot is None or snapshot.is_written:
            raise InvariantBroken(f"no buffer was taken for {owner} at {position}")
        if not is_written:
            self._drop(snapshot)
            return
        snapshot.is_written = True
        self._num_kept += 1
        if snapshot.is_rolling:
            for older in [s for s in self._owned[owner] if s.is_rolling and s is not snapshot]:
                self._drop(older)

    def hand_over(self, owner: Key) -> None:
        """The sequence ended: its snapshots are the holder's from now on."""
        for snapshot in self._owned.pop(owner, ()):
            if not snapshot.is_written:
                raise InvariantBroken(f"{owner} ended while its state at {snapshot.position} was copied")
            snapshot.owner = None
            self._touch(snapshot)

    def use(self, request_id: RequestId, position: int) -> BufferId | None:
        """Return the buffer that holds this state, if there is one. Valid within the plan being made."""
        snapshot = self._by_name.get((request_id, position))
        if snapshot is None or not snapshot.is_written:
            self._num_lost += 1
            return None
        self._num_used += 1
        if snapshot.owner is None:
            self._touch(snapshot)
        return snapshot.buffer

    def stats(self) -> SnapshotStats:
        """Return the counts."""
        return SnapshotStats(
            held=len(self._by_name),
            kept=self._num_kept,
            used=self._num_used,
            lost=self._num_lost,
            expired=self._num_expired,
            evicted=self._num_evicted,
            refused=self._num_refused,
        )

    def check(self) -> list[str]:
        """Return violated laws: free + owned = total, and every snapshot has one owner."""
        owned = [snapshot for line in self._owned.values() for snapshot in line]
        taken = [*owned, *self._idle.values()]
        problems: list[str] = []
        if sorted([*self._free, *(s.buffer for s in taken)]) != list(range(self.num_buffers)):
            problems.append(f"{len(self._free)} free + {len(taken)} owned != {self.num_buffers} buffers")
        if {id(s) for s in taken} != {id(s) for s in self._by_name.values()}:
            problems.append("a snapshot has a name and no owner, or an owner and no name")
        problems += [
            f"snapshot {s.name} belongs to {s.owner}, it is on the line of {key}"
            for key, line in self._owned.items()
            for s in line
            if s.owner != key
        ]
        problems += [f"snapshot {s.name} is idle and owned" for s in self._idle.values() if s.owner]
        expiries = [s.expires_ns for s in self._idle.values()]
        if expiries != sorted(expiries) or (expiries and expiries[0] <= self._now_ns):
            problems.append("an expired snapshot is still held")
        return problems

    def _touch(self, snapshot: _Snapshot) -> None:
        snapshot.expires_ns = self._now_ns + self._ttl_ns
        self._idle.pop(snapshot.name, None)
        self._idle[snapshot.name] = snapshot

    def _drop(self, snapshot: _Snapshot) -> None:
        del self._by_name[snapshot.name]
        if snapshot.owner is None:
            del self._idle[snapshot.name]
        else:
            line = self._owned[snapshot.owner]
            line.remove(snapshot)
            if not line:
                del self._owned[snapshot.owner]
        self._free.append(snapshot.buffer)
