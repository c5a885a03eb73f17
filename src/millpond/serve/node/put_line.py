"""`PutLine`: hands blocks that a rank wrote over to the daemon, in the order in which they were written.

Those that were written aside (`FreeSlots`) wait for lent slots, and all behind them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from millpond.core.ids import RequestId
from millpond.core.node_messages import Put, PutClose
from millpond.core.request import KvIdentity
from millpond.serve.node.free_slots import FreeSlots, PutSlot


@dataclass(frozen=True, slots=True)
class PutOrder:
    """Blocks of one sequence that were written."""

    request_id: RequestId
    attempt: int
    kv: KvIdentity
    first_block: int
    digests: tuple[bytes, ...]
    """Of all blocks up to the last one."""
    slots: tuple[PutSlot, ...]
    is_approximate: bool

    @property
    def key(self) -> tuple[RequestId, int]:
        """Of the sequence."""
        return (self.request_id, self.attempt)


@dataclass(slots=True)
class PutCounts:
    """Since the start."""

    puts: int = 0
    """Blocks handed over."""
    aside: int = 0
    """Of them: those that had waited for a slot."""
    lost: int = 0
    """Blocks written for a daemon that was gone."""


class PutLine:
    """See module. The client's thread only.

    Args:
        slots: Of the rank.
        send: Sends a message, if the daemon lives and knows us. It may call `void`.
    """

    def __init__(self, slots: FreeSlots, send: Callable[[object], bool]) -> None:
        self.counts = PutCounts()
        self._slots = slots
        self._send = send
        self._incarnation = 0
        """Of the lease that counts."""
        self._queue: deque[PutOrder | PutClose] = deque()
        self._told: dict[tuple[RequestId, int], int] = {}
        """Blocks whose digests the daemon knows, by sequence."""

    def extend(self, incarnation: int, slots: Sequence[PutSlot]) -> None:
        """The daemon lends more slots."""
        self._incarnation = incarnation
        self._slots.extend(incarnation, slots)

    def add(self, order: PutOrder | PutClose) -> None:
        """Something is to be handed over, after all that came before."""
        if isinstance(order, PutOrder):
            self._slots.let_go(slot for slot in order.slots if not slot.is_spare)
        self._queue.append(order)

    def hand_over(self) -> None:
        """Hand over what has slots."""
        while self._queue:
            order = self._queue.popleft()
            if isinstance(order, PutClose):
                if self._told.pop((order.request_id, order.attempt), None) is not None:
                    self._send(order)
            elif any(slot.incarnation != self._incarnation for slot in order.slots):
                self._lose(order)
            else:
                filled = self._fill(order)
                rest = replace(
                    order, first_block=order.first_block + len(filled), slots=order.slots[len(filled) :]
                )
                if filled and not self._put(order, filled):
                    self.counts.lost += len(filled)
                    self._lose(rest)
                elif rest.slots:
                    self._queue.appendleft(rest)
                    return  # the daemon lends more when it has taken these in

    def void(self) -> None:
        """The lease is over: what waits is lost."""
        self._incarnation = 0
        self._slots.clear()
        self._told.clear()
        while self._queue:
            order = self._queue.popleft()
            if isinstance(order, PutOrder):
                self._lose(order)

    def _lose(self, order: PutOrder) -> None:
        self.counts.lost += len(order.slots)
        self._slots.let_go(slot for slot in order.slots if slot.is_spare)

    def _fill(self, order: PutOrder) -> list[PutSlot]:
        """Copy what was written aside into lent slots while there are some; returns the leading slots."""
        filled: list[PutSlot] = []
        for slot in order.slots:
            lent = slot
            if slot.is_spare:
                found = self._slots.take_lent()
                if found is None:
                    break
                lent = found
                np.copyto(lent.view, slot.view)
                self._slots.let_go((lent, slot))
                self.counts.aside += 1
            filled.append(lent)
        return filled

    def _put(self, order: PutOrder, slots: Sequence[PutSlot]) -> bool:
        end = order.first_block + len(slots)
        first_told = order.first_block if self._told.get(order.key) == order.first_block else 0
        message = Put(
            request_id=order.request_id,
            attempt=order.attempt,
            kv=order.kv,
            first_block=order.first_block,
            digests=b"".join(order.digests[first_told:end]),
            slots=tuple((slot.slot, slot.generation) for slot in slots),
            is_approximate=order.is_approximate,
        )
        if not self._send(message):
            return False
        self._told[order.key] = end
        self.counts.puts += len(slots)
        return True
