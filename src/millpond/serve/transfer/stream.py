"""A blocking socket that carries frames.

The kernel's own timeouts wake each call every `TICK_S`, so that no thread is ever stuck: callers look
around, and a peer that stops in the middle of something is given up after the stall limit.
"""

from __future__ import annotations

import socket
import struct
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from millpond.core.errors import ConfigError, DataError, DeadlineExceeded, TransferFailed
from millpond.core.units import MIB, SECOND_NS
from millpond.serve.keys import check_socket_path, claim_socket_path
from millpond.serve.transfer import frames

TICK_S = 0.25
CONNECT_S = 5.0
BACKLOG = 128
KEEPALIVE_S = 5
"""A TCP peer whose host vanished is noticed after about four of these."""


@dataclass(frozen=True, slots=True)
class DataAddress:
    """Where a receiver listens: `unix:PATH` or `tcp:HOST:PORT`."""

    host: str
    """Host name or address; empty for a unix socket."""
    port: int
    path: str
    """Of the unix socket; empty for TCP."""

    @classmethod
    def parse(cls, text: str) -> DataAddress:
        """Read an address.

        Raises:
            ConfigError: It is not one.
        """
        kind, _, rest = text.partition(":")
        host, _, port = rest.rpartition(":")
        if kind == "unix" and rest:
            return cls("", 0, rest)
        if kind == "tcp" and host and port.isdecimal() and int(port) < 1 << 16:
            return cls(host.strip("[]"), int(port), "")
        raise ConfigError(f"{text!r} is not a data address: unix:PATH or tcp:HOST:PORT")

    def __str__(self) -> str:
        """The text that `parse` reads."""
        return f"unix:{self.path}" if self.path else f"tcp:{self.host}:{self.port}"


def listen(address: DataAddress) -> tuple[socket.socket, DataAddress]:
    """Open a listening socket; port 0 becomes the one the system chose.

    Raises:
        ConfigError: In use, or not private.
    """
    try:
        if address.path:
            claim_socket_path(Path(address.path))
            listener = socket.socket(socket.AF_UNIX)
            listener.bind(address.path)
        else:
            family = socket.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM)[0][0]
            listener = socket.socket(family)
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind((address.host, address.port))
            address = DataAddress(address.host, listener.getsockname()[1], "")
        listener.listen(BACKLOG)
    except OSError as error:
        raise ConfigError(f"cannot listen on {address}: {error.strerror}") from error
    _set_ticks(listener)
    return listener, address


def connect(address: DataAddress) -> socket.socket:
    """Connect to a receiver.

    Raises:
        OSError: It is not there.
        ConfigError: The unix socket is not in a private folder.
    """
    if address.path:
        check_socket_path(Path(address.path))
        connection = socket.socket(socket.AF_UNIX)
        try:
            connection.settimeout(CONNECT_S)
            connection.connect(address.path)
        except OSError:
            connection.close()
            raise
        return connection
    return socket.create_connection((address.host, address.port), CONNECT_S)


class FrameStream:
    """One connection.

    Args:
        connection: Connected socket; the stream owns it.
        max_payload_bytes: Largest inline payload to be received.
        stall_s: Longest pause in the middle of a frame.
    """

    def __init__(self, connection: socket.socket, *, max_payload_bytes: int, stall_s: float) -> None:
        self._socket = connection
        self._socket.settimeout(None)
        _set_ticks(connection)
        if connection.family != socket.AF_UNIX:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, KEEPALIVE_S)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, KEEPALIVE_S)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3)
        self._max_payload_bytes = max_payload_bytes
        self._stall_ns = int(stall_s * SECOND_NS)
        longest = frames.PREFIX.size + frames.MAX_CONTROL_BYTES + max_payload_bytes
        self._buffer = memoryview(bytearray(max(MIB if max_payload_bytes else 0, 2 * longest)))
        self._begin = 0
        """First byte of `_buffer` that no frame has taken."""
        self._end = 0
        """First byte that is free."""
        self._last_read_ns = time.monotonic_ns()
        self._reply_lock = threading.Lock()

    def take(self) -> frames.Frame | None:
        """The next frame that is completely here, or None.

        Raises:
            DataError: What is here is not a frame. The stream cannot be used any more.
        """
        body_begin = self._begin + frames.PREFIX.size
        if body_begin > self._end:
            return None
        num_bytes, kind = frames.PREFIX.unpack_from(self._buffer, self._begin)
        if (
            num_bytes > frames.MAX_CONTROL_BYTES
            and num_bytes > self._max_payload_bytes + frames.PIECE_HEADER_BYTES
        ):
            raise DataError(f"a frame of {num_bytes} bytes", code="handoff.too_large")
        if body_begin + num_bytes > self._end:
            return None
        self._begin = body_begin + num_bytes
        return frames.decode(kind, self._buffer[body_begin : self._begin])

    def fill(self) -> bool:
        """Wait for more bytes, at most `TICK_S`. Payloads handed out before become invalid.

        Returns:
            Whether bytes came.

        Raises:
            TransferFailed: The peer closed.
            DeadlineExceeded: The peer stopped in the middle of a frame.
            OSError: The connection is broken.
        """
        if self._begin == self._end:
            self._begin = self._end = 0
        elif len(self._buffer) - self._begin < len(self._buffer) // 2:
            rest = bytes(self._buffer[self._begin : self._end])
            self._buffer[: len(rest)] = rest
            self._begin, self._end = 0, len(rest)
        try:
            num_bytes = self._socket.recv_into(self._buffer[self._end :])
        except BlockingIOError:
            if self._begin < self._end and time.monotonic_ns() - self._last_read_ns > self._stall_ns:
                raise DeadlineExceeded("the peer stopped within a frame", code="handoff.stalled") from None
            return False
        if num_bytes == 0:
            raise TransferFailed("the peer closed the connection", code="handoff.closed")
        self._end += num_bytes
        self._last_read_ns = time.monotonic_ns()
        return True

    def wait(self, deadline_s: float) -> frames.Frame:
        """The next frame, waiting for it.

        Raises:
            DeadlineExceeded: It did not come in time.
        """
        end_ns = time.monotonic_ns() + int(deadline_s * SECOND_NS)
        while (frame := self.take()) is None:
            if not self.fill() and time.monotonic_ns() > end_ns:
                raise DeadlineExceeded("the peer does not answer", code="handoff.deadline")
        return frame

    def send(self, data: bytes | memoryview, is_stopping: Callable[[], bool] = lambda: False) -> None:
        """Send all of `data`. One thread only.

        Raises:
            DeadlineExceeded: The peer takes nothing.
            TransferFailed: `is_stopping` became true first.
            OSError: The connection is broken.
        """
        rest = memoryview(data)
        last_ns = time.monotonic_ns()
        while rest:
            try:
                rest = rest[self._socket.send(rest, socket.MSG_NOSIGNAL) :]
                last_ns = time.monotonic_ns()
            except BlockingIOError:
                if is_stopping():
                    raise TransferFailed("stopped", code="handoff.stopped") from None
                if time.monotonic_ns() - last_ns > self._stall_ns:
                    raise DeadlineExceeded("the peer takes no data", code="handoff.stalled") from None

    def reply(self, data: bytes) -> None:
        """Send a few bytes without waiting. Any thread.

        A peer that lets so many of them pile up that the socket is full does not read at all, and is cut.
        """
        try:
            with self._reply_lock:
                num_bytes = self._socket.send(data, socket.MSG_NOSIGNAL | socket.MSG_DONTWAIT)
            if num_bytes == len(data):
                return
        except OSError:
            pass  # the reading thread finds out why
        self.cut()

    def cut(self) -> None:
        """End the connection for both directions; whoever waits on it wakes. Any thread."""
        try:
            self._socket.shutdown(socket.SHUT_RDWR)
        except OSError:
            return  # the peer was first

    def close(self) -> None:
        """Close the socket. No other thread may use the stream any more."""
        self._socket.close()


def _set_ticks(connection: socket.socket) -> None:
    tick = struct.pack("@ll", 0, int(TICK_S * 1_000_000))
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, tick)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, tick)
