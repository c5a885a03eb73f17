"""A connection as a storage node's server sees it, and the requests of it that are not answered yet."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass

from millpond.core.errors import DeadlineExceeded, TransferFailed
from millpond.core.units import MIB, SECOND_NS
from millpond.store.net.framing import DEFAULT_LIMITS, Bytes, FrameLimits, FrameSocket
from millpond.store.net.messages import Message


@dataclass(frozen=True, slots=True)
class ServerParams:
    """Bounds of a server."""

    workers_per_target: int = 2
    """Threads that a target's requests have."""
    max_connections: int = 256
    """More are closed at once."""
    max_buffer_bytes: int = 128 * MIB
    """Records on their way between sockets and disks."""
    max_queued: int = 256
    """Requests that wait for one target."""
    idle_s: int = 600
    """A connection without requests is closed after this time."""
    answer_s: int = 10
    """A peer that does not take an answer for this time is closed."""
    limits: FrameLimits = DEFAULT_LIMITS
    """What a peer may send."""


class Peer:
    """A connection as the server sees it: answers from any thread, requests from its own."""

    def __init__(self, sock: socket.socket, params: ServerParams) -> None:
        self.frames = FrameSocket(sock, params.limits)
        self.jobs: dict[int, Job] = {}
        self._answer_ns = params.answer_s * SECOND_NS
        self._sending = threading.Lock()
        self._closed = False

    def answer(self, request: int, message: Message, payload: Sequence[Bytes] = ()) -> None:
        """Send the answer to a request. A peer that is gone or does not read is closed."""
        with self._sending:
            if self._closed:
                return
            try:
                self.frames.send(request, message, payload, deadline_ns=time.monotonic_ns() + self._answer_ns)
            except (TransferFailed, DeadlineExceeded):
                self.frames.shutdown()

    def close(self) -> None:
        """Close the socket, once nobody sends."""
        self.frames.shutdown()
        with self._sending:
            self._closed = True
            self.frames.close()


@dataclass(slots=True)
class Job:
    """A request that needs a disk."""

    peer: Peer
    request: int
    message: Message
    buffer: bytearray | None = None
    payload_bytes: int = 0
    cancelled: bool = False
