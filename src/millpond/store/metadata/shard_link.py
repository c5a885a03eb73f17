"""`ShardLink`: questions to one metadata shard, each answered before the next on its connection.

The caller's thread sends and receives itself; so many connections are open as callers ask at once. That saves
the two changes of thread that a receiver thread costs, which would be most of the time of a match.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections import deque
from dataclasses import dataclass

from millpond.core.errors import BadFrame, TransferFailed
from millpond.core.units import MILLISECOND_NS, SECOND_NS
from millpond.store.net.connection import connect
from millpond.store.net.framing import VERSION, FrameSocket, greet
from millpond.store.net.messages import Hello, Message


@dataclass(frozen=True, slots=True)
class ShardLinkParams:
    """Connections to metadata shards."""

    connect_s: float = 1.0
    """How long a shard may take to accept and greet."""
    redial_ms: int = 50
    """After a failed try, all calls fail at once for so long."""
    max_idle: int = 8
    """Connections that are kept open."""


class ShardLink:
    """See module. Thread-safe."""

    def __init__(self, address: str, *, name: str, token: str, params: ShardLinkParams) -> None:
        self.address = address
        self._hello = Hello(VERSION, name, token)
        self._params = params
        self._idle: deque[FrameSocket] = deque()
        self._ids = itertools.count(1)
        self._lock = threading.Lock()
        self._next_dial_ns = 0
        self._is_closed = False

    def ask(self, message: Message, payload: bytes = b"", *, deadline_ns: int) -> tuple[Message, bytes]:
        """Ask and wait for the answer, whatever it is, and its payload.

        A question that meets a connection that the shard has closed is asked again on a new one.

        Raises:
            TransferFailed, DeadlineExceeded: No answer.
            DataError: No metadata shard of ours answers there.
            Unauthorized: It refuses our token.
        """
        while (frames := self._take_idle()) is not None:
            try:
                return self._ask(frames, message, payload, deadline_ns)
            except TransferFailed:
                continue
        return self._ask(self._dial(deadline_ns), message, payload, deadline_ns)

    def close(self) -> None:
        """Close the connections; those in use are closed when their answer has come."""
        with self._lock:
            self._is_closed = True
            idle = list(self._idle)
            self._idle.clear()
        for frames in idle:
            frames.close()

    def _ask(
        self, frames: FrameSocket, message: Message, payload: bytes, deadline_ns: int
    ) -> tuple[Message, bytes]:
        try:
            request = next(self._ids)
            frames.send(request, message, (payload,), deadline_ns=deadline_ns)
            head = frames.receive(deadline_ns)
            if head.request != request:
                raise BadFrame(f"an answer to request {head.request}, not {request}", code="store.bad_frame")
            content = bytearray(head.payload_bytes)
            if content:
                frames.receive_into(memoryview(content), deadline_ns)
        except BaseException:
            frames.close()  # an answer may still come: nobody must take it for another
            raise
        self._give_back(frames)
        return head.message, bytes(content)

    def _take_idle(self) -> FrameSocket | None:
        with self._lock:
            return self._idle.pop() if self._idle else None

    def _give_back(self, frames: FrameSocket) -> None:
        with self._lock:
            if not self._is_closed and len(self._idle) < self._params.max_idle:
                self._idle.append(frames)
                return
        frames.close()

    def _dial(self, deadline_ns: int) -> FrameSocket:
        now_ns = time.monotonic_ns()
        if now_ns < self._next_dial_ns or self._is_closed:
            raise TransferFailed(f"no connection to {self.address}", code="pool.unreachable")
        deadline_ns = min(deadline_ns, now_ns + int(self._params.connect_s * SECOND_NS))
        frames = None
        try:
            frames = FrameSocket(connect(self.address, deadline_ns))
            greet(frames, self._hello, deadline_ns=deadline_ns)
        except BaseException:
            self._next_dial_ns = time.monotonic_ns() + self._params.redial_ms * MILLISECOND_NS
            if frames is not None:
                frames.close()
            raise
        return frames
