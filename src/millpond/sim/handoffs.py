"""The data plane between simulated groups: who sends, who expects, and when the last byte is there."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from millpond.config.sim_params import SimCostParams
from millpond.core.events import HandoffArrived, HandoffClosed, HandoffFailed, HandoffSent
from millpond.core.ids import GroupId, RequestId
from millpond.core.plan import HandoffClose, HandoffFinish, HandoffReceive, HandoffSend
from millpond.core.units import SECOND_NS
from millpond.sim.kernel import Kernel

Key = tuple[RequestId, int, GroupId]
"""(request, attempt, decode group)."""
HandoffEvent = HandoffSent | HandoffArrived | HandoffFailed | HandoffClosed
Deliver = Callable[[HandoffEvent], None]

ORDER = 1_000
LEASE_NS = 30 * SECOND_NS
"""A side whose other half does not come in this time fails."""


@dataclass(slots=True)
class _Half:
    """One side of one handoff: its process, and what it wants to be told."""

    owner: str
    deliver: Deliver
    num_tokens: int = 0
    finish: HandoffFinish | None = None
    """Sending side: known once the last chunk is computed."""


class Handoffs:
    """All handoffs of the cluster.

    After a controller restart two groups may, for a moment, work on the same attempt; each receiver takes
    the first sender that offers it, as its sockets would.
    """

    def __init__(self, kernel: Kernel, costs: SimCostParams) -> None:
        self._kernel = kernel
        self._costs = costs
        self._sending: dict[Key, _Half] = {}
        self._receiving: dict[Key, _Half] = {}
        self.num_arrived = 0
        self.num_failed = 0

    @property
    def num_open(self) -> int:
        """Halves that somebody still holds."""
        return len(self._sending) + len(self._receiving)

    def send(self, owner: str, deliver: Deliver, order: HandoffSend) -> None:
        """The prefill side will stream this sequence."""
        key = (order.request_id, order.attempt, order.to.group)
        half = _Half(owner, deliver, order.num_tokens)
        if key in self._sending:
            self._soon(deliver, HandoffFailed(*key[:2], "somebody else sends it"))
            return
        self._sending[key] = half
        self._expire(self._sending, self._receiving, key, half)

    def receive(self, owner: str, group: GroupId, deliver: Deliver, order: HandoffReceive) -> None:
        """The decode side has memory for this sequence."""
        key = (order.request_id, order.attempt, group)
        half = self._receiving[key] = _Half(owner, deliver, order.num_tokens)
        self._expire(self._receiving, self._sending, key, half)
        self._start(key)

    def finish(self, owner: str, order: HandoffFinish) -> None:
        """The last chunk is computed."""
        for key in _halves(self._sending, owner, order.request_id, order.attempt):
            self._sending[key].finish = order
            self._start(key)

    def close(self, owner: str, deliver: Deliver, order: HandoffClose) -> None:
        """One side wants its blocks back; the other side fails."""
        for mine, other in ((self._sending, self._receiving), (self._receiving, self._sending)):
            for key in _halves(mine, owner, order.request_id, order.attempt):
                del mine[key]
                self._fail(other, key, "closed by the other side")
        self._soon(deliver, HandoffClosed(order.request_id, order.attempt))

    def lose(self, owner: str) -> None:
        """A process died: what it sent or expected fails on the other side."""
        for mine, other in ((self._sending, self._receiving), (self._receiving, self._sending)):
            for key in [key for key, half in mine.items() if half.owner == owner]:
                del mine[key]
                self._fail(other, key, f"{owner} is gone")

    def _start(self, key: Key) -> None:
        """Move the bytes once both sides are there and the last chunk is computed."""
        sender, receiver = self._sending.get(key), self._receiving.get(key)
        if sender is None or receiver is None or sender.finish is None:
            return
        costs = self._costs
        num_bytes = sender.num_tokens * costs.kv_bytes_per_token
        delay_ns = costs.handoff_setup_ns + num_bytes * SECOND_NS // costs.handoff_bytes_per_s
        self._kernel.after(delay_ns, ORDER, lambda: self._arrive(key, sender, receiver))

    def _arrive(self, key: Key, sender: _Half, receiver: _Half) -> None:
        if self._sending.get(key) is not sender or self._receiving.get(key) is not receiver:
            return
        del self._receiving[key]
        self.num_arrived += 1
        finish = sender.finish
        assert finish is not None  # noqa: S101 - `_start` saw it
        receiver.deliver(HandoffArrived(*key[:2], finish.first_token_id, finish.is_approximate))
        self._kernel.after(self._costs.message_ns, ORDER, lambda: self._confirm(key, sender))

    def _confirm(self, key: Key, sender: _Half) -> None:
        if self._sending.get(key) is sender:
            del self._sending[key]
            sender.deliver(HandoffSent(*key[:2]))

    def _expire(self, mine: dict[Key, _Half], other: dict[Key, _Half], key: Key, half: _Half) -> None:
        def check() -> None:
            if mine.get(key) is half and key not in other:
                self._fail(mine, key, "the other side did not come")

        self._kernel.after(LEASE_NS, ORDER, check)

    def _fail(self, side: dict[Key, _Half], key: Key, why: str) -> None:
        half = side.pop(key, None)
        if half is not None:
            self.num_failed += 1
            self._soon(half.deliver, HandoffFailed(*key[:2], why))

    def _soon(self, deliver: Deliver, event: HandoffEvent) -> None:
        self._kernel.after(self._costs.message_ns, ORDER, lambda: deliver(event))


def _halves(side: dict[Key, _Half], owner: str, request_id: RequestId, attempt: int) -> list[Key]:
    return [key for key, half in side.items() if half.owner == owner and key[:2] == (request_id, attempt)]
