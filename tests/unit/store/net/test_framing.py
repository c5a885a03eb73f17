"""Frames: what arrives is what was sent, or a typed error; nothing is allocated for a lying length."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from millpond.core.errors import (
    BadFrame,
    DataError,
    DeadlineExceeded,
    MillpondError,
    TransferFailed,
    Unauthorized,
    WireVersionMismatch,
)
from millpond.store.net.framing import HEAD, MAGIC, VERSION, FrameLimits, FrameSocket, greet, welcome
from millpond.store.net.messages import KINDS, Done, Failed, Hello, NodeStatusQuery, ReadShard, ShardData
from tests.unit.store.net.peers import within

LIMITS = FrameLimits(max_body_bytes=1000, max_payload_bytes=1 << 20, max_frame_s=1)
DONE = next(number for number, kind in KINDS.items() if kind is Done)


class Pair:
    def __init__(self) -> None:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            self.near = socket.create_connection(listener.getsockname())
            self.far, _ = listener.accept()
        self.frames = FrameSocket(self.near, LIMITS)

    def close(self) -> None:
        self.near.close()
        self.far.close()


@pytest.fixture
def pair() -> Iterator[Pair]:
    pair = Pair()
    yield pair
    pair.close()


def frame(
    kind: int = DONE,
    body: bytes = msgspec.msgpack.encode(Done(1)),
    *,
    magic: bytes = MAGIC,
    version: int = VERSION,
    body_bytes: int | None = None,
    payload_bytes: int = 0,
) -> bytes:
    body_bytes = len(body) if body_bytes is None else body_bytes
    return HEAD.pack(magic, version, kind, 7, body_bytes, payload_bytes) + body


def test_a_frame_with_its_payload_arrives_in_its_places(pair: Pair):
    far = FrameSocket(pair.far, LIMITS)
    pieces = [bytes([i]) * (i * 7) for i in range(256)]
    message = ShardData(header_bytes=5, generation=1 << 60)
    sender = threading.Thread(
        target=far.send, args=(1 << 63, message, pieces), kwargs={"deadline_ns": within(10)}
    )
    sender.start()
    head = pair.frames.receive(within(10))
    whole = b"".join(pieces)
    assert (head.request, head.message, head.payload_bytes) == (1 << 63, message, len(whole))
    first, second = bytearray(1000), bytearray(len(whole) - 1000)
    pair.frames.receive_into(memoryview(first), within(10))
    pair.frames.receive_into(memoryview(second), within(10))
    sender.join(10)
    assert bytes(first + second) == whole


def test_many_small_buffers_go_out_as_one_frame(pair: Pair):
    far = FrameSocket(pair.far, LIMITS)
    far.send(1, Done(2), [b"", *[b"ab"] * 1200, b""], deadline_ns=within(10))
    head = pair.frames.receive(within(10))
    assert head.payload_bytes == 2400
    pair.frames.skip(2400, within(10))
    far.send(2, Done(3), deadline_ns=within(10))
    assert pair.frames.receive(within(10)).request == 2


@pytest.mark.parametrize(
    ("data", "error"),
    [
        (b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", BadFrame),
        (frame(magic=b"MPSU"), BadFrame),
        (frame(version=VERSION + 1), WireVersionMismatch),
        (frame(kind=0), WireVersionMismatch),
        (frame(kind=65535), WireVersionMismatch),
        (frame(body_bytes=LIMITS.max_body_bytes + 1), BadFrame),
        (frame(body_bytes=0xFFFFFFFF), BadFrame),
        (frame(payload_bytes=LIMITS.max_payload_bytes + 1), BadFrame),
        (frame(payload_bytes=0xFFFFFFFF), BadFrame),
        (frame(body=b"\xc1" * 5), BadFrame),
        (frame(body=b""), BadFrame),
        (frame(body=b"\x91" * 900), BadFrame),
        (frame(body=msgspec.msgpack.encode(["one"])), BadFrame),
        (frame(body=msgspec.msgpack.encode({"count": 1})), BadFrame),
    ],
)
def test_what_is_no_frame_is_a_typed_error(pair: Pair, data: bytes, error: type[Exception]):
    pair.far.sendall(data.ljust(HEAD.size, b"\0"))
    with pytest.raises(error):
        pair.frames.receive(within(10))


def receive_all(frames: FrameSocket) -> None:
    while True:
        head = frames.receive(within(10))
        frames.skip(head.payload_bytes, within(10))


@given(st.binary(max_size=200))
def test_any_bytes_are_a_frame_or_a_typed_error(data: bytes):
    pair = Pair()
    try:
        pair.far.sendall(data)
        pair.far.shutdown(socket.SHUT_WR)
        with pytest.raises((DataError, TransferFailed)):
            receive_all(pair.frames)
    finally:
        pair.close()


def test_a_message_of_a_later_version_with_more_fields_is_read(pair: Pair):
    pair.far.sendall(frame(body=msgspec.msgpack.encode([5, "new field"])))
    assert pair.frames.receive(within(10)).message == Done(5)


@pytest.mark.parametrize("cut", [1, HEAD.size - 1, HEAD.size, len(frame()) - 1])
def test_half_a_frame_is_given_up_when_its_time_is_over_or_its_sender_dies(pair: Pair, cut: int):
    pair.far.sendall(frame()[:cut])
    with pytest.raises(DeadlineExceeded):
        pair.frames.receive(None)
    other = Pair()
    other.far.sendall(frame()[:cut])
    other.far.close()
    with pytest.raises(TransferFailed):
        other.frames.receive(None)
    other.close()


def test_a_silent_peer_is_given_up_at_the_deadline(pair: Pair):
    with pytest.raises(DeadlineExceeded):
        pair.frames.receive(within(0.01))


def test_a_peer_that_does_not_read_is_given_up_at_the_deadline(pair: Pair):
    with pytest.raises(DeadlineExceeded):
        pair.frames.send(1, Done(), [bytes(64 << 20)], deadline_ns=within(0.1))


def test_shutdown_wakes_who_waits(pair: Pair):
    ended = threading.Event()

    def receive() -> None:
        with pytest.raises(TransferFailed):
            pair.frames.receive(None)
        ended.set()

    thread = threading.Thread(target=receive)
    thread.start()
    pair.frames.shutdown()
    assert ended.wait(10)
    thread.join(10)


class Greeting:
    """`greet` on one side and `welcome` on the other, with these two."""

    def __init__(self, client: Hello, server: Hello) -> None:
        pair = Pair()
        far = FrameSocket(pair.far, LIMITS)
        self.welcomed: object = None

        def serve() -> None:
            try:
                self.welcomed = welcome(far, server, deadline_ns=within(10))
            except MillpondError as error:
                self.welcomed = error

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            self.greeted: object = greet(pair.frames, client, deadline_ns=within(10))
        except MillpondError as error:
            self.greeted = error
        thread.join(10)
        pair.close()


def test_two_that_fit_know_each_other():
    client, server = Hello(VERSION, "c", "secret"), Hello(VERSION, "s0", "secret", boot=4)
    greeting = Greeting(client, server)
    assert (greeting.greeted, greeting.welcomed) == (server, client)


def test_a_wrong_token_is_refused_on_both_sides():
    greeting = Greeting(Hello(VERSION, "c", "guess"), Hello(VERSION, "s0", "secret"))
    assert isinstance(greeting.greeted, Unauthorized)
    assert isinstance(greeting.welcomed, Unauthorized)


def test_another_version_of_the_messages_is_refused_on_both_sides():
    greeting = Greeting(Hello(VERSION + 1, "c"), Hello(VERSION, "s0"))
    assert isinstance(greeting.greeted, WireVersionMismatch)
    assert isinstance(greeting.welcomed, WireVersionMismatch)


@pytest.mark.parametrize(
    "first", [Done(), NodeStatusQuery(), Failed("io"), ReadShard(b"", 1, 0, 0, 0, 1, 1)], ids=str
)
def test_a_first_frame_that_is_no_hello_is_refused(pair: Pair, first):
    FrameSocket(pair.far, LIMITS).send(1, first, deadline_ns=within(10))
    with pytest.raises(BadFrame):
        welcome(pair.frames, Hello(VERSION, "s0"), deadline_ns=within(10))


def test_a_greeting_with_a_payload_is_refused(pair: Pair):
    FrameSocket(pair.far, LIMITS).send(1, Hello(VERSION, "c"), [b"x"], deadline_ns=within(10))
    with pytest.raises(BadFrame):
        welcome(pair.frames, Hello(VERSION, "s0"), deadline_ns=within(10))


def test_numbers_of_kinds_never_change():
    names = [kind.__name__ for _, kind in sorted(KINDS.items())]
    assert names[:12] == [
        *("Hello", "Failed", "Done", "PutShard", "ReadShard", "ShardData", "CancelRead", "DropShard"),
        *("ListShards", "ShardList", "NodeStatusQuery", "NodeStatus"),
    ]
    assert list(KINDS) == list(range(1, len(names) + 1))
