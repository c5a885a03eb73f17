"""Decisions of the decode side of handoffs. No I/O, no clock, no threads.

    state       expect       Open          Piece         Finish                Abort, lost   lease over
    (none)      EXPECTED     OFFERED       discard       ignore                ignore        -
    EXPECTED    ignore       RECEIVING*    (no handle)   (no handle)           (no handle)   failed
    OFFERED     RECEIVING*   reject        reject        reject                gone          reject
    RECEIVING   ignore       reject        write, mark   arrived or failed     failed        failed

`*` answers Ready, or fails if the two sides disagree on the number of tokens. `close` ends any state.
A frame with a handle that is not live (a replay, an old attempt, a closed request) changes nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from millpond.core.errors import DataError, InvariantBroken
from millpond.core.events import HandoffArrived, HandoffClosed, HandoffFailed
from millpond.core.ids import RequestId
from millpond.core.plan import HandoffClose, HandoffReceive
from millpond.core.units import num_blocks_for
from millpond.serve.transfer.frames import (
    MAX_WHY_CHARS,
    Abort,
    Done,
    Finish,
    Frame,
    Open,
    Piece,
    Ready,
    Reject,
)
from millpond.serve.transfer.protocol import Action, HandoffEvent, Key, Pieces, Touches, Transmit


class _State(Enum):
    EXPECTED = "expected"
    OFFERED = "offered"
    RECEIVING = "receiving"


@dataclass(slots=True)
class _Inbound:
    key: Key
    state: _State
    since_ns: int
    """Last time something happened."""
    order: HandoffReceive | None = None
    offer: Open | None = None
    connection: int = -1
    arrived: bytearray | None = None
    """One byte per piece: 1 once it is in place."""
    num_arrived: int = 0


@dataclass(frozen=True, slots=True)
class Target:
    """Permission to write one piece; give it back with `end_piece`."""

    order: HandoffReceive
    piece: Piece
    position: int
    inbound: object


class ReceiveSide:
    """State of all requests that come, or should come, to one rank.

    Args:
        pieces: Cut of the rank's layout.
        lease_ns: Longest wait for the other half of expect + Open.
        gap_ns: Longest pause between two pieces of a request.
        max_offers: Requests announced but not expected, at most.
    """

    def __init__(self, pieces: Pieces, *, lease_ns: int, gap_ns: int, max_offers: int) -> None:
        self._pieces = pieces
        self._lease_ns = lease_ns
        self._gap_ns = gap_ns
        self._max_offers = max_offers
        self._inbound: dict[Key, _Inbound] = {}
        self._by_handle: dict[tuple[int, int], _Inbound] = {}
        """By (connection, handle): OFFERED and RECEIVING."""
        self._last_handle: dict[int, int] = {}
        """By connection."""
        self._touches = Touches()
        self.num_arrived = 0
        self.num_failed = 0
        self.num_mismatches = 0
        """Pieces that did not verify."""
        self.num_discarded = 0
        """Pieces nobody waited for: of closed requests, repeated or replayed."""

    @property
    def num_expected(self) -> int:
        """Requests the scheduler waits for."""
        return sum(inbound.order is not None for inbound in self._inbound.values())

    @property
    def num_offered(self) -> int:
        """Requests announced but not expected."""
        return len(self._inbound) - self.num_expected

    def expect(self, now_ns: int, order: HandoffReceive) -> list[Action]:
        """Blocks and slot are allocated: the request may come."""
        key = (order.request_id, order.attempt)
        if len(order.block_table) < num_blocks_for(order.num_tokens):
            raise InvariantBroken(f"{key}: {len(order.block_table)} blocks for {order.num_tokens} tokens")
        inbound = self._inbound.get(key)
        if inbound is None:
            self._inbound[key] = _Inbound(key, _State.EXPECTED, now_ns, order=order)
            return []
        if inbound.state is not _State.OFFERED:
            return []
        inbound.order = order
        return self._match(now_ns, inbound)

    def close(self, close: HandoffClose) -> list[Action]:
        """The scheduler wants its blocks back. Always answered by one `HandoffClosed`."""
        key = (close.request_id, close.attempt)
        inbound = self._inbound.get(key)
        actions = self._drop(inbound, "closed by the receiver") if inbound is not None else []
        return actions + self._touches.post(HandoffClosed(*key))

    def on_frame(self, now_ns: int, connection: int, frame: Frame) -> list[Action]:
        """React to any frame but `Piece`.

        Raises:
            DataError: A frame that senders never send; drop the connection.
        """
        match frame:
            case Open():
                return self._on_open(now_ns, connection, frame)
            case Finish():
                return self._on_finish(connection, frame)
            case Abort():
                inbound = self._by_handle.get((connection, frame.handle))
                return self._lose(inbound, f"sender: {frame.why}") if inbound is not None else []
            case _:
                raise DataError(f"unexpected {type(frame).__name__}", code="handoff.unexpected")

    def begin_piece(self, now_ns: int, connection: int, piece: Piece) -> Target | list[Action]:
        """Decide about a piece: a target to write it to, or actions after which it is discarded."""
        inbound = self._by_handle.get((connection, piece.handle))
        if inbound is None:
            self.num_discarded += 1
            return []
        if inbound.order is None or inbound.arrived is None:
            return self._fail(inbound, "a piece before Ready")
        inbound.since_ns = now_ns
        position = self._pieces.position(
            inbound.order.num_tokens, piece.block_index, piece.row, piece.num_bytes
        )
        if position is None:
            return self._fail(inbound, f"no piece {piece.block_index}/{piece.row} of {piece.num_bytes} bytes")
        if inbound.arrived[position]:
            self.num_discarded += 1
            return []
        self._touches.begin(inbound.key)
        return Target(inbound.order, piece, position, inbound)

    def end_piece(self, target: Target, *, is_valid: bool) -> list[Action]:
        """The piece is in place, or did not verify and was not written."""
        key = (target.order.request_id, target.order.attempt)
        released = self._touches.end(key)
        inbound = self._inbound.get(key)
        if inbound is not target.inbound or inbound is None or inbound.arrived is None:
            return released  # closed or failed meanwhile
        if not is_valid:
            self.num_mismatches += 1
            where = f"block {target.piece.block_index} row {target.piece.row}"
            return released + self._fail(inbound, f"checksum mismatch in {where}")
        inbound.arrived[target.position] = 1
        inbound.num_arrived += 1
        return released

    def on_disconnect(self, connection: int, why: str) -> list[Action]:
        """A connection is gone, and with it every request it carried."""
        actions: list[Action] = []
        for inbound in [held for (owner, _), held in self._by_handle.items() if owner == connection]:
            actions += self._lose(inbound, why)
        self._last_handle.pop(connection, None)
        return actions

    def fail_all(self, why: str) -> list[Action]:
        """Nothing will move any more."""
        return [action for inbound in list(self._inbound.values()) for action in self._fail(inbound, why)]

    def tick(self, now_ns: int) -> list[Action]:
        """End what has waited too long."""
        actions: list[Action] = []
        for inbound in list(self._inbound.values()):
            limit_ns = self._gap_ns if inbound.state is _State.RECEIVING else self._lease_ns
            if now_ns - inbound.since_ns > limit_ns:
                actions += self._fail(inbound, f"{inbound.state.value} for too long")
        return actions

    def _on_open(self, now_ns: int, connection: int, offer: Open) -> list[Action]:
        if offer.handle <= self._last_handle.get(connection, -1):
            return []  # a replay
        self._last_handle[connection] = offer.handle
        key = (RequestId(offer.request_id), offer.attempt)
        inbound = self._inbound.get(key)
        if inbound is None:
            if self.num_offered >= self._max_offers:
                return [Transmit(connection, Reject(offer.handle, "too many open requests"))]
            inbound = self._inbound[key] = _Inbound(key, _State.OFFERED, now_ns)
        elif inbound.state is not _State.EXPECTED:
            return [Transmit(connection, Reject(offer.handle, "already open"))]
        inbound.offer = offer
        inbound.connection = connection
        self._by_handle[connection, offer.handle] = inbound
        return self._match(now_ns, inbound) if inbound.order is not None else []

    def _match(self, now_ns: int, inbound: _Inbound) -> list[Action]:
        """Both halves are there."""
        offer, order = inbound.offer, inbound.order
        if offer is None or order is None or offer.num_tokens != order.num_tokens:
            return self._fail(inbound, "the two sides disagree on the number of tokens")
        inbound.state = _State.RECEIVING
        inbound.since_ns = now_ns
        inbound.arrived = bytearray(self._pieces.count(order.num_tokens))
        return [Transmit(inbound.connection, Ready(offer.handle))]

    def _on_finish(self, connection: int, frame: Finish) -> list[Action]:
        inbound = self._by_handle.get((connection, frame.handle))
        if inbound is None:
            return []
        if inbound.arrived is None:
            return self._fail(inbound, "finished before Ready")
        if inbound.num_arrived != len(inbound.arrived) or frame.num_pieces != len(inbound.arrived):
            return self._fail(inbound, f"{inbound.num_arrived} of {len(inbound.arrived)} pieces arrived")
        self._forget(inbound)
        self.num_arrived += 1
        arrived = HandoffArrived(*inbound.key, frame.first_token_id, frame.is_approximate)
        return [Transmit(connection, Done(frame.handle)), *self._touches.post(arrived)]

    def _forget(self, inbound: _Inbound) -> None:
        del self._inbound[inbound.key]
        if inbound.offer is not None:
            del self._by_handle[inbound.connection, inbound.offer.handle]

    def _lose(self, inbound: _Inbound, why: str) -> list[Action]:
        """The sender is out: nobody to tell but the scheduler, if it expected the request."""
        self._forget(inbound)
        if inbound.order is None:
            return []
        self.num_failed += 1
        failed: HandoffEvent = HandoffFailed(*inbound.key, why=why)
        return self._touches.post(failed)

    def _drop(self, inbound: _Inbound, why: str) -> list[Action]:
        """Tell the sender only."""
        self._forget(inbound)
        if inbound.offer is None:
            return []
        return [Transmit(inbound.connection, Reject(inbound.offer.handle, why[:MAX_WHY_CHARS]))]

    def _fail(self, inbound: _Inbound, why: str) -> list[Action]:
        """Tell both sides."""
        actions = self._drop(inbound, why)
        if inbound.order is not None:
            self.num_failed += 1
            actions += self._touches.post(HandoffFailed(*inbound.key, why=why))
        return actions
