"""Frames on a TCP connection: head, msgpack body, raw payload.

    head     magic "MPST", version u16, kind u16, request id u64, body bytes u32, payload bytes u32
    body     the message's fields as a msgpack array (`store.net.messages`)
    payload  bytes that are never packed: received straight into their place, sent from it

Both sides first send `Hello` and compare version and token. Whatever is no frame ends the connection with a
typed error; both lengths are checked before anything is allocated.
"""

from __future__ import annotations

import hmac
import select
import socket
import struct
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import TypeAlias

import msgspec

from millpond.core.errors import (
    BadFrame,
    DeadlineExceeded,
    TransferFailed,
    Unauthorized,
    WireVersionMismatch,
)
from millpond.core.units import KIB, MIB, MILLISECOND_NS, SECOND_NS, ceil_div
from millpond.store.net.messages import KINDS, Failed, Hello, Message

MAGIC = b"MPST"
VERSION = 1
HEAD = struct.Struct("<4sHHQII")
AHEAD_BYTES = 12 * KIB
"""Read at once when a frame begins: head, body and a short payload come with one system call."""
MAX_VIEWS = 512
"""Buffers of one `sendmsg`; the kernel takes 1,024."""

Bytes: TypeAlias = bytes | bytearray | memoryview

_NUMBER = {kind: number for number, kind in KINDS.items()}
_encoder = msgspec.msgpack.Encoder()


@dataclass(frozen=True, slots=True)
class FrameLimits:
    """What a peer may send in one frame."""

    max_body_bytes: int = 1 * MIB
    max_payload_bytes: int = 16 * MIB
    max_frame_s: int = 10
    """From the first byte of a frame to its last."""


DEFAULT_LIMITS = FrameLimits()


@dataclass(frozen=True, slots=True)
class Head:
    """A frame whose payload has not been read yet."""

    request: int
    message: Message
    payload_bytes: int


class FrameSocket:
    """A connected TCP socket that carries frames. One thread sends at a time, one receives.

    Deadlines are values of `time.monotonic_ns`; None waits until the peer speaks or `shutdown` is called.
    After an error the stream may be out of step: close it.
    """

    def __init__(self, sock: socket.socket, limits: FrameLimits = DEFAULT_LIMITS) -> None:
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._socket = sock
        self._limits = limits
        self._ahead = memoryview(bytearray(AHEAD_BYTES))
        self._unread = self._ahead[:0]
        """Of `_ahead`: what was read and not yet asked for."""
        self._readable = select.poll()
        self._readable.register(sock, select.POLLIN)
        self._writable = select.poll()
        self._writable.register(sock, select.POLLOUT)

    def send(
        self,
        request: int,
        message: Message,
        payload: Sequence[Bytes] = (),
        *,
        deadline_ns: int,
    ) -> None:
        """Send one frame.

        Args:
            request: Id that the answer repeats.
            message: Body.
            payload: Buffers that are sent one after the other without being joined.
            deadline_ns: When the last byte must be in the kernel.

        Raises:
            DeadlineExceeded: The peer does not read; the connection must be closed.
            TransferFailed: The connection broke.
        """
        body = _encoder.encode(message)
        views = [view for buffer in payload if (view := memoryview(buffer).cast("B")).nbytes]
        payload_bytes = sum(view.nbytes for view in views)
        head = HEAD.pack(MAGIC, VERSION, _NUMBER[type(message)], request, len(body), payload_bytes)
        self._send_views([memoryview(head + body), *views], deadline_ns)

    def receive(self, deadline_ns: int | None) -> Head:
        """Wait until a frame begins, and read its head and body.

        The payload must be read next, with `receive_into` or `skip`.

        Raises:
            DeadlineExceeded: None began by `deadline_ns`, or what began took longer than `max_frame_s`.
            TransferFailed: The peer closed or died.
            BadFrame: Not a frame, unknown fields or over the limits.
            WireVersionMismatch: Another version, or an unknown kind.
        """
        self.wait_readable(deadline_ns)
        deadline_ns = self.frame_deadline_ns()
        head = bytearray(HEAD.size)
        self.receive_into(memoryview(head), deadline_ns)
        magic, version, kind, request, body_bytes, payload_bytes = HEAD.unpack(head)
        if magic != MAGIC:
            raise BadFrame("the peer does not speak this protocol", code="store.bad_frame")
        if version != VERSION:
            raise WireVersionMismatch(
                f"the peer speaks version {version}, not {VERSION}", code="store.version"
            )
        if body_bytes > self._limits.max_body_bytes or payload_bytes > self._limits.max_payload_bytes:
            raise BadFrame(
                f"frame of {body_bytes} + {payload_bytes} bytes is too large", code="store.too_large"
            )
        if kind not in KINDS:
            raise WireVersionMismatch(f"unknown message kind {kind}", code="store.unknown_kind")
        body = bytearray(body_bytes)
        self.receive_into(memoryview(body), deadline_ns)
        try:
            message = _decoder(kind).decode(body)
        except (msgspec.DecodeError, RecursionError) as error:
            raise BadFrame(f"unreadable {KINDS[kind].__name__}: {error}", code="store.bad_body") from error
        return Head(request, message, payload_bytes)

    def frame_deadline_ns(self) -> int:
        """When a frame that begins now must be complete."""
        return time.monotonic_ns() + self._limits.max_frame_s * SECOND_NS

    def receive_into(self, view: memoryview, deadline_ns: int | None) -> None:
        """Fill `view` (bytes) from the stream.

        Raises:
            DeadlineExceeded, TransferFailed: As in `receive`.
        """
        while view.nbytes:
            received = self.receive_some(view)
            if received:
                view = view[received:]
            else:
                self.wait_readable(deadline_ns)

    def receive_some(self, view: memoryview) -> int:
        """Bytes that were there and are now at the begin of `view` (not empty); 0 if there were none.

        Raises:
            TransferFailed: The peer closed or died.
        """
        if not self._unread and view.nbytes < AHEAD_BYTES:
            self._unread = self._ahead[: self._receive_now(self._ahead)]
        if self._unread:
            num_bytes = min(view.nbytes, self._unread.nbytes)
            view[:num_bytes] = self._unread[:num_bytes]
            self._unread = self._unread[num_bytes:]
            return num_bytes
        return self._receive_now(view) if view.nbytes >= AHEAD_BYTES else 0

    def wait_readable(self, deadline_ns: int | None) -> None:
        """Wait until `receive_some` has something to give or to raise.

        Raises:
            DeadlineExceeded: It has not.
        """
        if not self._unread:
            self._wait(self._readable, deadline_ns)

    def skip(self, num_bytes: int, deadline_ns: int | None) -> None:
        """Read and forget `num_bytes` of payload.

        Raises:
            DeadlineExceeded, TransferFailed: As in `receive`.
        """
        scratch = memoryview(bytearray(min(num_bytes, 64 * 1024)))
        while num_bytes:
            part = scratch[: min(num_bytes, scratch.nbytes)]
            self.receive_into(part, deadline_ns)
            num_bytes -= part.nbytes

    def shutdown(self) -> None:
        """End the stream both ways and wake whoever waits in it. Any thread may call it."""
        try:
            self._socket.shutdown(socket.SHUT_RDWR)
        except OSError:
            return  # the peer was quicker

    def close(self) -> None:
        """Give the socket back, when no other thread is in a send or receive: its number may be reused."""
        self.shutdown()
        self._socket.close()

    def _receive_now(self, view: memoryview) -> int:
        try:
            received = self._socket.recv_into(view)
        except BlockingIOError:
            return 0
        except OSError as error:
            raise _lost(error) from error
        if not received:
            raise TransferFailed("the peer closed the connection", code="store.peer_lost")
        return received

    def _send_views(self, views: list[memoryview], deadline_ns: int) -> None:
        first = 0
        while first < len(views):
            try:
                sent = self._socket.sendmsg(views[first : first + MAX_VIEWS])
            except BlockingIOError:
                self._wait(self._writable, deadline_ns)
                continue
            except OSError as error:
                raise _lost(error) from error
            while first < len(views) and sent >= views[first].nbytes:
                sent -= views[first].nbytes
                first += 1
            if sent:
                views[first] = views[first][sent:]

    @staticmethod
    def _wait(poll: select.poll, deadline_ns: int | None) -> None:
        timeout_ms = None
        if deadline_ns is not None:
            timeout_ms = max(0, ceil_div(deadline_ns - time.monotonic_ns(), MILLISECOND_NS))
        if not poll.poll(timeout_ms):
            raise DeadlineExceeded("the peer did not get on in time", code="store.deadline")


def greet(frames: FrameSocket, hello: Hello, *, deadline_ns: int) -> Hello:
    """Open a connection as its client.

    Returns:
        The other side's `Hello`.

    Raises:
        WireVersionMismatch, BadFrame: The peer is no node of this version.
        Unauthorized: It refused our token, or its own is wrong.
        DeadlineExceeded, TransferFailed: It did not answer.
    """
    frames.send(0, hello, deadline_ns=deadline_ns)
    answer = _empty_frame(frames, deadline_ns)
    if isinstance(answer, Failed):
        if answer.code == "version":
            raise WireVersionMismatch(answer.detail, code="store.version")
        raise Unauthorized(f"the node refused us: {answer.detail}", code="store.wrong_token")
    return _checked(answer, hello)


def welcome(frames: FrameSocket, hello: Hello, *, deadline_ns: int) -> Hello:
    """Open a connection as its server; a peer that does not fit is told why.

    Returns:
        The other side's `Hello`.

    Raises:
        WireVersionMismatch, BadFrame, Unauthorized: The peer does not fit; close the connection.
        DeadlineExceeded, TransferFailed: It did not say who it is.
    """
    try:
        theirs = _checked(_empty_frame(frames, deadline_ns), hello)
    except (WireVersionMismatch, BadFrame, Unauthorized) as error:
        code = "version" if isinstance(error, WireVersionMismatch) else "bad_request"
        frames.send(0, Failed(code, error.message), deadline_ns=deadline_ns)
        raise
    frames.send(0, hello, deadline_ns=deadline_ns)
    return theirs


def _empty_frame(frames: FrameSocket, deadline_ns: int) -> Message:
    head = frames.receive(deadline_ns)
    if head.payload_bytes:
        raise BadFrame("a greeting has no payload", code="store.bad_frame")
    return head.message


def _checked(message: Message, ours: Hello) -> Hello:
    if not isinstance(message, Hello):
        raise BadFrame("the first frame is no Hello", code="store.no_hello")
    if message.version != ours.version:
        raise WireVersionMismatch(f"messages of version {message.version}", code="store.version")
    if not hmac.compare_digest(message.token.encode(), ours.token.encode()):
        raise Unauthorized("wrong cluster token", code="store.wrong_token")
    return message


@cache
def _decoder(kind: int) -> msgspec.msgpack.Decoder[Message]:
    return msgspec.msgpack.Decoder(KINDS[kind])


def _lost(error: OSError) -> TransferFailed:
    return TransferFailed(f"connection lost: {error.strerror or error}", code="store.peer_lost")
