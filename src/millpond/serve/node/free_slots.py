"""`FreeSlots`: where a rank may write new blocks: into slots that it was lent, or aside until there are some.

A block that finds no lent slot is written into a spare buffer of the process. As long as one is in use, all
new blocks go aside, so that those of a sequence reach the daemon in their order.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from millpond.store.stripe import Block

SPARE = -1
"""In place of the number of a slot."""


@dataclass(frozen=True, slots=True)
class PutSlot:
    """A free slot of the arena that is this rank's to write one block into, or a spare buffer."""

    slot: int
    """`SPARE`: none."""
    generation: int
    incarnation: int
    """Of the lease that it belongs to."""
    view: Block
    """[block bytes], uint8."""

    @property
    def is_spare(self) -> bool:
        """Whether it is not in the arena."""
        return self.slot == SPARE


class FreeSlots:
    """See module. Thread-safe.

    Args:
        block_bytes: Of a block.
        max_spare: Buffers that may be in use at once.
    """

    def __init__(self, block_bytes: int, max_spare: int) -> None:
        self._block_bytes = block_bytes
        self._max_spare = max_spare
        self._incarnation = 0
        """Of the lease that counts; 0: none does."""
        self._lock = threading.Lock()
        self._free: deque[PutSlot] = deque()
        self._num_in_hand = self._num_spare = 0

    def __len__(self) -> int:
        """Lent slots that could be taken."""
        return len(self._free)

    @property
    def num_in_hand(self) -> int:
        """Lent slots that somebody may be writing into."""
        return self._num_in_hand

    @property
    def num_spare(self) -> int:
        """Spare buffers in use."""
        return self._num_spare

    def extend(self, incarnation: int, slots: Iterable[PutSlot]) -> None:
        """More slots of a lease have come."""
        with self._lock:
            self._incarnation = incarnation
            self._free.extend(slots)

    def take(self) -> PutSlot | None:
        """Where to write the next block, in hand until it comes back; None if there is no room."""
        with self._lock:
            if self._free and not self._num_spare:
                self._num_in_hand += 1
                return self._free.popleft()
            if not self._incarnation or self._num_spare == self._max_spare:
                return None
            self._num_spare += 1
            incarnation = self._incarnation
        return PutSlot(SPARE, 0, incarnation, np.empty(self._block_bytes, np.uint8))

    def take_lent(self) -> PutSlot | None:
        """A slot for what is in a spare buffer; None if there is none."""
        with self._lock:
            if not self._free:
                return None
            self._num_in_hand += 1
            return self._free.popleft()

    def give_back(self, slot: PutSlot) -> None:
        """A slot was not filled: it is the next to be taken, if its lease still counts."""
        if slot.is_spare:
            self.let_go((slot,))
            return
        with self._lock:
            self._num_in_hand -= 1
            if slot.incarnation == self._incarnation:
                self._free.appendleft(slot)

    def let_go(self, slots: Iterable[PutSlot]) -> None:
        """Nobody here writes into these slots any more, nor needs these buffers."""
        num_spare = num_lent = 0
        for slot in slots:
            num_spare += slot.is_spare
            num_lent += not slot.is_spare
        with self._lock:
            self._num_spare -= num_spare
            self._num_in_hand -= num_lent

    def clear(self) -> None:
        """The lease is over. Those in hand stay so until they come back."""
        with self._lock:
            self._incarnation = 0
            self._free.clear()
