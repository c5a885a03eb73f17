"""`FreeSlots`: slots that a rank may write new blocks into, and how many it is writing into now."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

from millpond.store.stripe import Block


@dataclass(frozen=True, slots=True)
class PutSlot:
    """A free slot of the arena that is this rank's to write one block into."""

    slot: int
    generation: int
    incarnation: int
    """Of the lease that it belongs to."""
    view: Block
    """[block bytes], uint8."""


class FreeSlots:
    """See module. Thread-safe."""

    def __init__(self) -> None:
        self._incarnation = 0
        """Of the lease that counts; 0: none does."""
        self._lock = threading.Lock()
        self._free: deque[PutSlot] = deque()
        self._num_in_hand = 0

    def __len__(self) -> int:
        """Slots that could be taken."""
        return len(self._free)

    @property
    def num_in_hand(self) -> int:
        """Slots that somebody may be writing into."""
        return self._num_in_hand

    def extend(self, incarnation: int, slots: Iterable[PutSlot]) -> None:
        """More slots of a lease have come."""
        with self._lock:
            self._incarnation = incarnation
            self._free.extend(slots)

    def take(self) -> PutSlot | None:
        """One to write into, in hand until it comes back; None if there is none."""
        with self._lock:
            if not self._free:
                return None
            self._num_in_hand += 1
            return self._free.popleft()

    def give_back(self, slot: PutSlot) -> None:
        """A slot was not filled: it is the next to be taken, if its lease still counts."""
        with self._lock:
            self._num_in_hand -= 1
            if slot.incarnation == self._incarnation:
                self._free.appendleft(slot)

    def let_go(self, count: int) -> None:
        """Slots were filled; nobody here writes into them any more."""
        with self._lock:
            self._num_in_hand -= count

    def clear(self) -> None:
        """The lease is over. Those in hand stay so until they come back."""
        with self._lock:
            self._incarnation = 0
            self._free.clear()
