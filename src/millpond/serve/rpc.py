"""Control messages between processes: four small wrappers around ZeroMQ sockets.

    Router  binds     many peers by identity      controller
    Dealer  connects  one peer, both ways         leaders, gateways
    Pull    binds     receives from many          gateway (tokens)
    Push    connects  sends to one                leaders (tokens)

No call blocks. `send` returns False when the message cannot be queued now, and counts it; `recv` returns
None when there is nothing. A thread waits in `wait_any`, a coroutine in `recv_async`. What a peer sends
is decoded by `config.wire` or counted, logged and dropped.
"""

from __future__ import annotations

import asyncio
import errno
import math
import socket as std_socket
import threading
from collections import deque
from dataclasses import dataclass
from types import TracebackType
from typing import Generic, Protocol, Self, TypeVar

import structlog
import zmq
from zmq.utils.monitor import recv_monitor_message

from millpond.config import wire
from millpond.core.errors import DataError
from millpond.serve.network import Network

MAX_QUEUED_MESSAGES = 10_000
"""High-water mark per peer and direction."""
RECONNECT_MS = 50
MAX_RECONNECT_MS = 500
HEARTBEAT_MS = 2_000
"""TCP only: a peer whose host vanished is noticed after `HEARTBEAT_TIMEOUT_MS`."""
HEARTBEAT_TIMEOUT_MS = 10_000

log = structlog.get_logger(__name__)
Received = TypeVar("Received")


@dataclass(frozen=True, slots=True)
class Connected:
    """Not a message: `Dealer.recv` returns it whenever a connection to the peer has come up.

    Introduce yourself (again) now: the peer may be a new process.
    """


class _Channel(Generic[Received]):
    """What the four have in common: limits, counters, and both ways of waiting."""

    def __init__(self, network: Network, kind: int, endpoint: str, max_bytes: int) -> None:
        self.endpoint = endpoint
        self.num_garbage = 0
        """Messages received and dropped because they made no sense."""
        self.num_unsent = 0
        """Messages not sent because the peer was unreachable or its queue full."""
        self._network = network
        self._max_bytes = max_bytes
        self._socket: zmq.Socket[bytes] = network.context.socket(kind)
        self._socket.linger = 0
        self._socket.sndhwm = self._socket.rcvhwm = MAX_QUEUED_MESSAGES
        self._socket.maxmsgsize = max_bytes
        if endpoint.startswith("tcp://"):
            self._socket.heartbeat_ivl = HEARTBEAT_MS
            self._socket.heartbeat_timeout = HEARTBEAT_TIMEOUT_MS
        self._loop: asyncio.AbstractEventLoop | None = None
        self._readable = asyncio.Event()

    def poll_items(self) -> tuple[zmq.Socket[bytes], ...]:
        """What `wait_any` watches for this channel."""
        return (self._socket,)

    def recv(self) -> Received | None:
        """Take the next message, or None if none has arrived. Never blocks."""
        while True:
            try:
                frames = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return None
            try:
                return self._read(frames)
            except DataError as error:
                self.num_garbage += 1
                if _is_power_of_two(self.num_garbage):
                    log.warning(
                        "rpc.message_dropped",
                        endpoint=self.endpoint,
                        why=error.message,
                        num_dropped=self.num_garbage,
                    )

    async def recv_async(self) -> Received:
        """Take the next message, waiting for it. Cancelling loses nothing; the deadline is the caller's."""
        while True:
            received = self.recv()
            if received is not None:
                return received
            if self._loop is None:
                self._loop = asyncio.get_running_loop()
                for item in self.poll_items():
                    self._loop.add_reader(_descriptor(item), self._note_readable)
            self._readable.clear()
            self._note_readable()
            await self._readable.wait()

    def close(self, linger_s: float = 0.0) -> None:
        """Close; what is still queued is dropped. May be called twice.

        Args:
            linger_s: The network may take so long to send it, after this; its own end waits for that.
        """
        if self._loop is not None and not self._socket.closed:
            for item in self.poll_items():
                self._loop.remove_reader(_descriptor(item))
        self._socket.close(linger=int(linger_s * 1000))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _read(self, frames: list[bytes]) -> Received:
        """Make what `recv` returns of one message's frames; DataError if it makes no sense."""
        raise NotImplementedError

    def _write(self, address: tuple[bytes, ...], message: object) -> bool:
        data = wire.encode(message)
        if len(data) > self._max_bytes:
            raise DataError(
                f"message of {len(data)} bytes, the limit is {self._max_bytes}", code="wire.too_large"
            )
        try:
            self._socket.send_multipart((*address, data), zmq.NOBLOCK)
            is_sent = True
        except zmq.ZMQError as error:
            if error.errno not in (errno.EAGAIN, errno.EHOSTUNREACH):
                raise
            self.num_unsent += 1
            is_sent = False
        if self._loop is not None:
            # Sending also takes note of arrivals, and the descriptor signals each arrival once only.
            self._note_readable()
        return is_sent

    def _note_readable(self) -> None:
        # A descriptor stays readable until its EVENTS is read, so this reads all of them.
        for item in self.poll_items():
            if _has_input(item):
                self._readable.set()


class Router(_Channel[tuple[str, object]]):
    """Binding side of the star: receives (identity, message) and sends to an identity."""

    def __init__(self, network: Network, endpoint: str, max_bytes: int = wire.MAX_MESSAGE_BYTES) -> None:
        super().__init__(network, zmq.ROUTER, endpoint, max_bytes)
        self._socket.router_mandatory = True
        self._socket.router_handover = True  # a restarted peer takes its name back from its dead connection
        try:
            self.endpoint = network.bind(self._socket, endpoint)
        except BaseException:
            self.close()
            raise

    def send(self, peer: str, message: object) -> bool:
        """Send to the peer of that identity; False if it is not connected or its queue is full."""
        return self._write((peer.encode(),), message)

    def _read(self, frames: list[bytes]) -> tuple[str, object]:
        if len(frames) != 2 or frames[0].startswith(b"\0"):  # ZeroMQ's own names start with zero
            raise DataError("a peer without a name, or not one frame", code="wire.malformed")
        try:
            peer = frames[0].decode()
        except UnicodeDecodeError as error:
            raise DataError("the peer's name is not UTF-8", code="wire.malformed") from error
        return peer, wire.decode(frames[1], self._max_bytes)


class Dealer(_Channel[object]):
    """Connecting side of the star. Reconnects by itself and reports each connection as `Connected`.

    While there is no connection, `send` returns False: nothing is kept for a later, different peer.
    """

    def __init__(
        self, network: Network, endpoint: str, identity: str, max_bytes: int = wire.MAX_MESSAGE_BYTES
    ) -> None:
        super().__init__(network, zmq.DEALER, endpoint, max_bytes)
        self._socket.identity = identity.encode()
        self._socket.immediate = True
        self._socket.reconnect_ivl = RECONNECT_MS
        self._socket.reconnect_ivl_max = MAX_RECONNECT_MS
        self._monitor: zmq.Socket[bytes] = self._socket.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED)
        try:
            network.connect(self._socket, endpoint)
        except BaseException:
            self.close()
            raise

    def poll_items(self) -> tuple[zmq.Socket[bytes], ...]:
        """What `wait_any` watches for this channel."""
        return (self._socket, self._monitor)

    def recv(self) -> object | None:
        """Take the next message or `Connected`, or None if there is neither. Never blocks."""
        if _has_input(self._monitor):
            recv_monitor_message(self._monitor, zmq.NOBLOCK)
            self._socket.getsockopt(zmq.EVENTS)  # lets the socket take the new connection into use
            return Connected()
        return super().recv()

    def send(self, message: object) -> bool:
        """Send to the peer; False if it is not connected or its queue is full."""
        return self._write((), message)

    def close(self, linger_s: float = 0.0) -> None:
        """As the base class."""
        if not self._socket.closed:
            super().close(linger_s)
            self._monitor.close(linger=0)

    def _read(self, frames: list[bytes]) -> object:
        return _read_single(frames, self._max_bytes)


class Pull(_Channel[object]):
    """Receives from any number of `Push`."""

    def __init__(self, network: Network, endpoint: str, max_bytes: int = wire.MAX_MESSAGE_BYTES) -> None:
        super().__init__(network, zmq.PULL, endpoint, max_bytes)
        try:
            self.endpoint = network.bind(self._socket, endpoint)
        except BaseException:
            self.close()
            raise

    def _read(self, frames: list[bytes]) -> object:
        return _read_single(frames, self._max_bytes)


class Push(_Channel[object]):
    """Sends to one `Pull`. Unlike `Dealer` it keeps messages while the connection is being made."""

    def __init__(self, network: Network, endpoint: str, max_bytes: int = wire.MAX_MESSAGE_BYTES) -> None:
        super().__init__(network, zmq.PUSH, endpoint, max_bytes)
        self._socket.reconnect_ivl = RECONNECT_MS
        self._socket.reconnect_ivl_max = MAX_RECONNECT_MS
        try:
            network.connect(self._socket, endpoint)
        except BaseException:
            self.close()
            raise

    def send(self, message: object) -> bool:
        """Send; False if the queue is full."""
        return self._write((), message)


class Wakeup:
    """Events from other threads into a loop that waits in `wait_any`."""

    def __init__(self) -> None:
        self._events: deque[object] = deque()
        self._lock = threading.Lock()
        self._reader, self._writer = std_socket.socketpair()
        self._reader.setblocking(False)
        self._writer.setblocking(False)
        self._is_signalled = False
        self._is_closed = False

    def poll_items(self) -> tuple[int, ...]:
        """What `wait_any` watches for this channel."""
        return (self._reader.fileno(),)

    def post(self, event: object) -> None:
        """Queue an event and wake the loop. Any thread; after `close` it has no effect."""
        with self._lock:
            if self._is_closed:
                return
            self._events.append(event)
            if not self._is_signalled:
                self._writer.send(b"\0")
                self._is_signalled = True

    def take(self) -> list[object]:
        """All events posted so far, in order. The loop's thread only."""
        with self._lock:
            if self._is_signalled:
                self._reader.recv(1)
                self._is_signalled = False
            events = list(self._events)
            self._events.clear()
        return events

    def close(self) -> None:
        """Close; later events are dropped."""
        with self._lock:
            self._is_closed = True
            self._reader.close()
            self._writer.close()


class Source(Protocol):
    """Anything that `wait_any` can wait for."""

    def poll_items(self) -> tuple[zmq.Socket[bytes] | int, ...]:
        """Sockets and file descriptors to watch for input."""
        ...


def wait_any(sources: tuple[Source, ...], timeout_s: float) -> bool:
    """Block until one of the sources has something, or for `timeout_s`.

    Afterwards take from every source until it says None (or an empty list).

    Returns:
        Whether something is there.
    """
    poller = zmq.Poller()
    for source in sources:
        for item in source.poll_items():
            poller.register(item, zmq.POLLIN)
    return bool(poller.poll(math.ceil(timeout_s * 1000)))


def _read_single(frames: list[bytes], max_bytes: int) -> object:
    if len(frames) != 1:
        raise DataError(f"message of {len(frames)} frames", code="wire.malformed")
    return wire.decode(frames[0], max_bytes)


def _descriptor(socket: zmq.Socket[bytes]) -> int:
    return int(socket.getsockopt(zmq.FD))


def _has_input(socket: zmq.Socket[bytes]) -> bool:
    return bool(int(socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN)


def _is_power_of_two(number: int) -> bool:
    return number & (number - 1) == 0
