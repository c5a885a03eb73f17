"""Decisions of the prefill side of handoffs. No I/O, no clock, no threads.

    state       rows_ready, finish   Ready        Done        Reject, lost, stalled
    (none)      ignore               ignore       ignore      ignore
    OPENING     note                 STREAMING    failed      failed
    STREAMING   queue pieces         ignore       failed      failed
    FINISHING   ignore               ignore       sent        failed

`start` makes OPENING; `close` ends any state. The shell's writer thread asks `next_work` what to put on a
connection: pieces leave as soon as their rows are written, and Finish follows the last of them.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from enum import Enum
from typing import TypeAlias

from millpond.core.errors import DataError, InvariantBroken
from millpond.core.events import HandoffClosed, HandoffFailed, HandoffSent
from millpond.core.ids import BlockId, RequestId, SlotId
from millpond.core.plan import HandoffClose, HandoffSend
from millpond.core.units import num_blocks_for
from millpond.serve.transfer.frames import MAX_WHY_CHARS, Abort, Done, Finish, Frame, Open, Ready, Reject
from millpond.serve.transfer.protocol import CLOSED_BY_SENDER, Action, Key, Pieces, Touches


class _State(Enum):
    OPENING = "opening"
    STREAMING = "streaming"
    FINISHING = "finishing"


@dataclass(slots=True)
class _Outbound:
    key: Key
    order: HandoffSend
    lane: _Lane
    handle: int
    since_ns: int
    """Last time the peer moved, or got something to move."""
    num_queued: list[int]
    """Blocks that were queued so far, by row."""
    state: _State = _State.OPENING
    is_announced: bool = False
    is_runnable: bool = False
    """Stands in its lane's queue."""
    ready: deque[tuple[int, int, int]] = field(default_factory=deque[tuple[int, int, int]])
    """(row, begin, end): blocks whose row is written and not yet taken."""
    first_token_id: int | None = None
    is_approximate: bool = False


@dataclass(slots=True)
class _Lane:
    """What waits to be put on one connection."""

    connection: int
    control: deque[Open | Abort] = field(default_factory=deque[Open | Abort])
    runnable: deque[_Outbound] = field(default_factory=deque[_Outbound])


@dataclass(frozen=True, slots=True)
class Reading:
    """Permission to read these pieces from the engine; give it back with `end_reading`."""

    key: Key
    handle: int
    row: int
    begin: int
    """Block index of the first piece."""
    block_ids: tuple[BlockId, ...]
    """One piece each; empty for the state piece."""
    slot: SlotId


Work: TypeAlias = Reading | Open | Abort | Finish


class SendSide:
    """State of all requests that one rank sends.

    Args:
        pieces: Cut of the rank's layout.
        lease_ns: Longest wait for Ready.
        stall_ns: Longest wait for the peer once it has something to take or to confirm.
    """

    def __init__(self, pieces: Pieces, *, lease_ns: int, stall_ns: int) -> None:
        self._pieces = pieces
        self._lease_ns = lease_ns
        self._stall_ns = stall_ns
        self._outbound: dict[Key, _Outbound] = {}
        self._by_handle: dict[int, _Outbound] = {}
        self._lanes: dict[int, _Lane] = {}
        self._next_handle = 1
        self._touches = Touches()
        self.num_sent = 0
        self.num_failed = 0

    @property
    def num_open(self) -> int:
        """Requests that have not ended."""
        return len(self._outbound)

    def open_attempts(self) -> dict[RequestId, int]:
        """Attempt of each request that has not ended."""
        return dict(self._outbound.keys())  # they are pairs

    def start(self, now_ns: int, order: HandoffSend, connection: int) -> list[Action]:
        """Announce a request on a connection."""
        key = (order.request_id, order.attempt)
        if key in self._outbound:
            return []
        if len(order.block_table) < num_blocks_for(order.num_tokens):
            raise InvariantBroken(f"{key}: {len(order.block_table)} blocks for {order.num_tokens} tokens")
        lane = self._lanes.setdefault(connection, _Lane(connection))
        outbound = _Outbound(key, order, lane, self._next_handle, now_ns, [0] * self._pieces.num_rows)
        self._next_handle += 1
        self._outbound[key] = self._by_handle[outbound.handle] = outbound
        lane.control.append(Open(outbound.handle, order.attempt, order.num_tokens, order.request_id))
        return []

    def rows_ready(self, now_ns: int, key: Key, row: int, num_blocks: int) -> None:
        """Row `row` of the first `num_blocks` blocks is written and will not change."""
        outbound = self._outbound.get(key)
        if outbound is None or outbound.first_token_id is not None:
            return
        self._queue(now_ns, outbound, row, min(num_blocks, num_blocks_for(outbound.order.num_tokens)))
        self._run(outbound)

    def finish(self, now_ns: int, key: Key, first_token_id: int, *, is_approximate: bool = False) -> None:
        """Everything is written, the state too, and the first token is known."""
        outbound = self._outbound.get(key)
        if outbound is None or outbound.first_token_id is not None:
            return
        for row in range(self._pieces.num_rows):
            self._queue(now_ns, outbound, row, num_blocks_for(outbound.order.num_tokens))
        if self._pieces.has_state:
            outbound.ready.append((self._pieces.state_row, 0, 1))
        outbound.first_token_id = first_token_id
        outbound.is_approximate = is_approximate
        outbound.since_ns = now_ns
        self._run(outbound)

    def close(self, close: HandoffClose) -> list[Action]:
        """The scheduler wants its blocks back. Always answered by one `HandoffClosed`."""
        key = (close.request_id, close.attempt)
        outbound = self._outbound.get(key)
        if outbound is not None:
            self._give_up(outbound, CLOSED_BY_SENDER)
        return self._touches.post(HandoffClosed(*key))

    def next_work(self, now_ns: int, connection: int, max_pieces: int) -> Work | None:
        """What to put on the connection next: control first, then pieces of the requests in turn.

        Args:
            max_pieces: Room for pieces, >= 0.
        """
        lane = self._lanes.get(connection)
        if lane is None:
            return None
        if lane.control:
            frame = lane.control.popleft()
            if isinstance(frame, Open) and frame.handle in self._by_handle:
                self._by_handle[frame.handle].is_announced = True
            return frame
        for _ in range(len(lane.runnable)):
            outbound = lane.runnable.popleft()
            if outbound.ready and max_pieces == 0:
                lane.runnable.append(outbound)
                continue
            outbound.is_runnable = False
            outbound.since_ns = now_ns
            if not outbound.ready:
                return self._finish_frame(outbound)
            reading = self._take(outbound, max_pieces)
            self._run(outbound)
            return reading
        return None

    def end_reading(self, reading: Reading) -> list[Action]:
        """The pieces were copied; no thread touches the blocks now."""
        return self._touches.end(reading.key)

    def on_frame(self, now_ns: int, connection: int, frame: Frame) -> list[Action]:
        """React to a frame of the receiver, except `Free`.

        Raises:
            DataError: A frame that receivers never send; drop the connection.
        """
        if not isinstance(frame, Ready | Done | Reject):
            raise DataError(f"unexpected {type(frame).__name__}", code="handoff.unexpected")
        outbound = self._by_handle.get(frame.handle)
        if outbound is None or outbound.lane.connection != connection:
            return []
        match frame:
            case Ready():
                if outbound.state is _State.OPENING:
                    outbound.state = _State.STREAMING
                    outbound.since_ns = now_ns
                    self._run(outbound)
                return []
            case Done():
                if outbound.state is not _State.FINISHING:
                    return self._fail(outbound, "confirmed before it was finished")
                self._forget(outbound)
                self.num_sent += 1
                return self._touches.post(HandoffSent(*outbound.key))
            case Reject():
                return self._fail(outbound, f"receiver: {frame.why}")

    def on_disconnect(self, connection: int, why: str) -> list[Action]:
        """A connection is gone, and with it every request it carried."""
        actions: list[Action] = []
        lane = self._lanes.pop(connection, None)
        for outbound in [held for held in self._outbound.values() if held.lane is lane]:
            actions += self._fail(outbound, why)
        return actions

    def fail_all(self, why: str) -> list[Action]:
        """Nothing will move any more."""
        return [action for outbound in list(self._outbound.values()) for action in self._fail(outbound, why)]

    def tick(self, now_ns: int) -> list[Action]:
        """End what has waited too long for its peer."""
        actions: list[Action] = []
        for outbound in list(self._outbound.values()):
            waits_for_peer = outbound.state is not _State.STREAMING or bool(outbound.ready)
            limit_ns = self._lease_ns if outbound.state is _State.OPENING else self._stall_ns
            if waits_for_peer and now_ns - outbound.since_ns > limit_ns:
                actions += self._fail(outbound, f"{outbound.state.value} for too long")
        return actions

    def _queue(self, now_ns: int, outbound: _Outbound, row: int, num_blocks: int) -> None:
        begin = outbound.num_queued[row]
        if num_blocks > begin:
            if not outbound.ready and outbound.state is _State.STREAMING:
                outbound.since_ns = now_ns  # the peer was not waited for until now
            outbound.ready.append((row, begin, num_blocks))
            outbound.num_queued[row] = num_blocks

    def _run(self, outbound: _Outbound) -> None:
        has_work = bool(outbound.ready) or outbound.first_token_id is not None
        if outbound.state is _State.STREAMING and has_work and not outbound.is_runnable:
            outbound.is_runnable = True
            outbound.lane.runnable.append(outbound)

    def _take(self, outbound: _Outbound, max_pieces: int) -> Reading:
        row, begin, end = outbound.ready.popleft()
        if end - begin > max_pieces:
            outbound.ready.appendleft((row, begin + max_pieces, end))
            end = begin + max_pieces
        is_state = row == self._pieces.state_row
        self._touches.begin(outbound.key)
        block_ids = () if is_state else outbound.order.block_table[begin:end]
        return Reading(outbound.key, outbound.handle, row, begin, block_ids, outbound.order.slot)

    def _finish_frame(self, outbound: _Outbound) -> Finish:
        if outbound.first_token_id is None:
            raise InvariantBroken(f"{outbound.key} was queued without work")
        outbound.state = _State.FINISHING
        num_pieces = self._pieces.count(outbound.order.num_tokens)
        return Finish(outbound.handle, num_pieces, outbound.first_token_id, outbound.is_approximate)

    def _forget(self, outbound: _Outbound) -> None:
        del self._outbound[outbound.key]
        del self._by_handle[outbound.handle]
        if outbound.is_runnable:
            outbound.lane.runnable.remove(outbound)

    def _give_up(self, outbound: _Outbound, why: str) -> None:
        """Tell the receiver, unless it never heard of the request."""
        self._forget(outbound)
        lane = outbound.lane
        if outbound.is_announced:
            lane.control.append(Abort(outbound.handle, why[:MAX_WHY_CHARS]))
        else:
            lane.control = deque(frame for frame in lane.control if frame.handle != outbound.handle)

    def _fail(self, outbound: _Outbound, why: str) -> list[Action]:
        self._give_up(outbound, why)
        self.num_failed += 1
        return self._touches.post(HandoffFailed(*outbound.key, why=why))
