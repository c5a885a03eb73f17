"""A client's connection: answers find their requests, buffers are safe, and no wait is without an end."""

from __future__ import annotations

import queue
import socket
import threading
from collections.abc import Callable

import pytest

from millpond.core.errors import (
    BadFrame,
    ChecksumMismatch,
    DeadlineExceeded,
    ExtentAbsent,
    NodeRefused,
    QuotaExceeded,
    StaleEpoch,
    TransferFailed,
    Unauthorized,
    WireVersionMismatch,
)
from millpond.store.net.connection import Connection, error_of
from millpond.store.net.framing import HEAD, MAGIC, VERSION, FrameLimits, FrameSocket, Head, welcome
from millpond.store.net.messages import KINDS, CancelRead, Done, DropShard, Failed, Hello, NodeStatusQuery
from tests.unit.store.net.peers import peer, within

TOKEN = "secret"


def node(serve: Callable[[FrameSocket], None]) -> Callable[[socket.socket], None]:
    """A peer that greets, then does `serve` until its client is gone."""

    def handle(sock: socket.socket) -> None:
        frames = FrameSocket(sock)
        try:
            welcome(frames, Hello(VERSION, "s0", TOKEN), deadline_ns=within(10))
            serve(frames)
        except (TransferFailed, Unauthorized):
            return

    return handle


def connect(address: str, token: str = TOKEN, **limits: int) -> Connection:
    return Connection(
        address, name="c", token=token, deadline_ns=within(10), limits=FrameLimits(max_frame_s=1, **limits)
    )


def receive(frames: FrameSocket) -> Head:
    head = frames.receive(within(10))
    frames.skip(head.payload_bytes, within(10))
    return head


def echo(frames: FrameSocket) -> None:
    """Answer each request with its own id as payload."""
    while True:
        head = receive(frames)
        if isinstance(head.message, CancelRead):
            continue
        frames.send(head.request, Done(head.request), [b"%d" % head.request], deadline_ns=within(10))


def stay_silent(frames: FrameSocket) -> None:
    while True:
        receive(frames)


def test_a_call_gets_its_answer():
    with peer(node(echo)) as address, connect(address) as connection:
        assert connection.peer.name == "s0"
        for _ in range(3):
            answer = connection.call(NodeStatusQuery(), [b"x" * 100_000], deadline_ns=within(10))
            assert bytes(answer.payload) == b"%d" % answer.message.count
        assert connection.num_in_flight == 0


def test_answers_in_any_order_find_their_calls():
    def backwards(frames: FrameSocket) -> None:
        requests = [receive(frames).request for _ in range(50)]
        for request in reversed(requests):
            frames.send(request, Done(request), deadline_ns=within(10))
        receive(frames)

    done: queue.SimpleQueue[int] = queue.SimpleQueue()
    with peer(node(backwards)) as address, connect(address) as connection:
        calls = [
            connection.start(
                NodeStatusQuery(), deadline_ns=within(10), on_done=lambda call: done.put(call.request)
            )
            for _ in range(50)
        ]
        assert all(call.wait(within(10)) for call in calls)
        assert [call.result().message for call in calls] == [Done(call.request) for call in calls]
        assert [done.get(timeout=10) for _ in calls] == [call.request for call in reversed(calls)]


def test_calls_from_many_threads_do_not_mix():
    def ask(connection: Connection, failures: list[object]) -> None:
        for _ in range(100):
            answer = connection.call(NodeStatusQuery(), [b"p" * 1000], deadline_ns=within(20))
            if bytes(answer.payload) != b"%d" % answer.message.count:
                failures.append(answer)

    failures: list[object] = []
    with peer(node(echo)) as address, connect(address) as connection:
        threads = [threading.Thread(target=ask, args=(connection, failures)) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
    assert failures == []


def test_a_payload_lands_in_several_places():
    def answer(frames: FrameSocket) -> None:
        frames.send(receive(frames).request, Done(7), [b"abcdefgh"], deadline_ns=within(10))
        receive(frames)

    first, second = bytearray(3), bytearray(5)
    seen = []

    def landing(message, payload_bytes):
        seen.append((message, payload_bytes))
        return [memoryview(first), memoryview(second)]

    with peer(node(answer)) as address, connect(address) as connection:
        got = connection.call(NodeStatusQuery(), deadline_ns=within(10), landing=landing)
    assert (bytes(first), bytes(second), bytes(got.payload)) == (b"abc", b"defgh", b"")
    assert seen == [(Done(7), 8)]


def test_a_landing_may_refuse_and_the_connection_goes_on():
    def landing(message, payload_bytes):
        raise ChecksumMismatch("not what was asked", code="test")

    with peer(node(echo)) as address, connect(address) as connection:
        with pytest.raises(ChecksumMismatch):
            connection.call(NodeStatusQuery(), deadline_ns=within(10), landing=landing)
        assert connection.call(NodeStatusQuery(), deadline_ns=within(10)).message == Done(2)


def test_a_buffer_is_never_written_after_its_call_was_cancelled():
    gate = threading.Event()
    half_out = threading.Event()

    def slow(frames: FrameSocket) -> None:
        request = receive(frames).request
        body = b"\x91\x07"
        head = HEAD.pack(MAGIC, VERSION, next(n for n, k in KINDS.items() if k is Done), request, 2, 10)
        raw = frames._socket
        raw.sendall(head + body + b"AAAAA")
        half_out.set()
        assert gate.wait(10)
        raw.sendall(b"BBBBB")
        echo(frames)

    buffer = bytearray(10)
    with peer(node(slow)) as address, connect(address) as connection:
        call = connection.start(
            NodeStatusQuery(), deadline_ns=within(10), landing=lambda *_: [memoryview(buffer)]
        )
        assert half_out.wait(10)
        connection.cancel(call)
        buffer[:] = b"mine now.."
        gate.set()
        later = connection.call(NodeStatusQuery(), deadline_ns=within(10))
        assert later.message.count >= 2
        assert buffer == b"mine now.."
        with pytest.raises(DeadlineExceeded):
            call.result()


def test_a_cancelled_call_is_told_to_the_peer():
    told: queue.SimpleQueue[object] = queue.SimpleQueue()

    def note(frames: FrameSocket) -> None:
        while True:
            told.put(receive(frames).message)

    with peer(node(note)) as address, connect(address) as connection:
        with pytest.raises(DeadlineExceeded):
            connection.call(NodeStatusQuery(), deadline_ns=within(0.05))
        assert told.get(timeout=10) == NodeStatusQuery()
        assert told.get(timeout=10) == CancelRead(1)


def test_calls_fail_when_the_peer_dies():
    def die(frames: FrameSocket) -> None:
        receive(frames)

    with peer(node(die)) as address, connect(address) as connection:
        with pytest.raises(TransferFailed):
            connection.call(NodeStatusQuery(), deadline_ns=within(10))
        with pytest.raises(TransferFailed):
            connection.start(NodeStatusQuery(), deadline_ns=within(10))
        assert connection.broken


def test_calls_fail_when_the_connection_is_closed():
    with peer(node(stay_silent)) as address:
        connection = connect(address)
        call = connection.start(NodeStatusQuery(), deadline_ns=within(10))
        connection.close()
        with pytest.raises(TransferFailed):
            call.result()


@pytest.mark.parametrize(
    "garbage",
    [
        b"HTTP/1.1 400 Bad Request\r\n\r\n",
        HEAD.pack(MAGIC, VERSION, 3, 99, 1, 0) + b"\x90",  # an answer nobody waits for
        HEAD.pack(MAGIC, VERSION, 3, 1, 1, 0xFFFFFFFF) + b"\x90",
        HEAD.pack(MAGIC, VERSION, 3, 1, 1, 1000) + b"\x90",  # the payload never comes
        HEAD.pack(MAGIC, VERSION, 3, 1, 1, 0)[:20],
    ],
)
def test_calls_fail_when_the_peer_sends_garbage_or_stops_half_way(garbage: bytes):
    def send_it(frames: FrameSocket) -> None:
        receive(frames)
        frames._socket.sendall(garbage)
        receive(frames)

    with peer(node(send_it)) as address, connect(address) as connection:
        with pytest.raises(TransferFailed):
            connection.call(NodeStatusQuery(), deadline_ns=within(10))
        assert connection.broken


def test_a_peer_that_stops_reading_costs_the_deadline_and_the_connection():
    stop = threading.Event()

    def deaf(frames: FrameSocket) -> None:
        stop.wait(20)

    try:
        with peer(node(deaf)) as address, connect(address) as connection:
            with pytest.raises(DeadlineExceeded):
                connection.start(NodeStatusQuery(), [bytes(64 << 20)], deadline_ns=within(0.2))
            with pytest.raises(TransferFailed):
                connection.call(NodeStatusQuery(), deadline_ns=within(10))
            stop.set()
    finally:
        stop.set()


def test_a_wrong_token_a_wrong_peer_and_no_peer_are_typed_errors():
    with peer(node(stay_silent)) as address, pytest.raises(Unauthorized):
        connect(address, token="guess")

    def http(sock: socket.socket) -> None:
        sock.recv(1000)
        sock.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")
        sock.recv(1000)

    with peer(http) as address, pytest.raises(BadFrame):
        connect(address)
    with pytest.raises(TransferFailed):
        connect(address)
    with pytest.raises(TransferFailed):
        connect("no-port")


@pytest.mark.parametrize(
    ("code", "error"),
    [
        ("absent", ExtentAbsent),
        ("full", NodeRefused),
        ("read_only", NodeRefused),
        ("io", NodeRefused),
        ("busy", NodeRefused),
        ("stale", StaleEpoch),
        ("redirect", StaleEpoch),
        ("quota", QuotaExceeded),
        ("deadline", DeadlineExceeded),
        ("bad_request", BadFrame),
        ("version", WireVersionMismatch),
        ("of a later version", NodeRefused),
    ],
)
def test_refusals_become_typed_errors(code: str, error: type[Exception]):
    def refuse(frames: FrameSocket) -> None:
        frames.send(receive(frames).request, Failed(code, "why"), deadline_ns=within(10))
        receive(frames)

    assert type(error_of(Failed(code))) is error
    if code == "absent":
        with peer(node(refuse)) as address, connect(address) as connection, pytest.raises(error, match="why"):
            connection.call(DropShard(b"", 1, 0, 0), deadline_ns=within(10))
