"""One side is not ours: it lies, stops, repeats itself or goes away. The other side reports and lives on."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from millpond.config.transfer_params import TransferParams
from millpond.core.events import HandoffArrived, HandoffFailed, HandoffSent
from millpond.core.plan import HandoffReceive
from millpond.serve.transfer.frames import (
    INLINE,
    PREFIX,
    Abort,
    Done,
    Finish,
    Frame,
    Free,
    Open,
    Piece,
    Ready,
    Reject,
    encode,
)
from millpond.serve.transfer.handshake import greet_receiver, greet_sender
from millpond.serve.transfer.protocol import Pieces, checksum
from millpond.serve.transfer.ring import Ring
from millpond.serve.transfer.sender import HandoffSender
from millpond.serve.transfer.stream import DataAddress, FrameStream, connect, listen
from tests.unit.serve.transfer.harness import DEADLINE_S, TOKEN, BytesEngine, Pair, Posted, until

NUM_TOKENS = 200
NUM_PIECES = 2 * 3 + 1
ROW_BYTES = 4064
"""Of row 0: keys and values, each rounded up to 32 bytes."""


class RawSender:
    """Speaks the protocol by hand."""

    def __init__(self, pair: Pair, *, token: bytes = TOKEN) -> None:
        self.pieces = Pieces(pair.source.layout)
        self.engine = pair.source
        address = DataAddress.parse(pair.receiver.address)
        self.stream = FrameStream(connect(address), max_payload_bytes=0, stall_s=5.0)
        self.ring: Ring | None = None
        if address.path:
            self.ring = Ring.create(Path(pair.params.shm_dir), 200_000, self.pieces.max_bytes)
        try:
            greet_receiver(self.stream, token, self.pieces.fingerprint, self.ring)
        finally:
            if self.ring is not None:
                self.ring.unlink()
        self.next_slot = 0

    def say(self, *said: Frame) -> None:
        for frame in said:
            self.stream.send(encode(frame))

    def hear(self) -> Frame:
        """The next answer that is not about ring slots."""
        while isinstance(frame := self.stream.wait(DEADLINE_S), Free):
            pass
        return frame

    def pieces_of(self, handle: int) -> list[Piece]:
        """All pieces of a sequence in blocks 1 and 2, slot 3."""
        sources = [
            (index, row, self.engine.read_row(1 + index, row)) for row in range(3) for index in range(2)
        ]
        sources.append((0, 3, self.engine.read_state(3)))
        return [self.piece(handle, index, row, bytes(source)) for index, row, source in sources]

    def piece(self, handle: int, index: int, row: int, payload: bytes) -> Piece:
        view = memoryview(payload)
        digest = checksum(handle, index, row, view)
        if self.ring is None:
            return Piece(handle, index, row, len(view), INLINE, digest, view)
        slot = self.next_slot
        self.next_slot = (slot + 1) % self.ring.num_slots
        self.ring.slot(slot, len(view))[:] = view
        return Piece(handle, index, row, len(view), slot, digest)

    def spoil(self, piece: Piece) -> Piece:
        """Flip one bit of the payload on its way."""
        if self.ring is not None:
            self.ring.slot(piece.slot, piece.num_bytes)[piece.num_bytes // 2] ^= 4
            return piece
        payload = bytearray(piece.payload)
        payload[len(payload) // 2] ^= 4
        return replace(piece, payload=memoryview(payload))

    def close(self) -> None:
        self.stream.cut()
        self.stream.close()


@contextmanager
def raw_sender(pair: Pair) -> Iterator[RawSender]:
    sender = RawSender(pair)
    try:
        yield sender
    finally:
        sender.close()


def expect(pair: Pair, request_id: str = "r", attempt: int = 0) -> HandoffReceive:
    order = pair.receive_order(request_id, attempt, NUM_TOKENS, slot=3)
    pair.receiver.expect(order)
    return order


def failed_why(posts: Posted) -> str:
    event = posts.next()
    assert isinstance(event, HandoffFailed)
    return event.why


def memory_of(engine: BytesEngine) -> bytes:
    return b"".join(rows.tobytes() for rows in engine.rows) + engine.state.tobytes()


def test_a_hand_made_sender_that_behaves_is_served(pair: Pair) -> None:
    order = expect(pair)
    with raw_sender(pair) as sender:
        sender.say(Open(1, 0, NUM_TOKENS, "r"))
        assert sender.hear() == Ready(1)
        sender.say(*sender.pieces_of(1), Finish(1, NUM_PIECES, 9))
        assert sender.hear() == Done(1)
    assert pair.receiver_posts.next() == HandoffArrived(order.request_id, 0, 9)
    pair.assert_equal_bytes(pair.send_order(num_tokens=NUM_TOKENS, slot=3), order)


@pytest.mark.parametrize("position", range(NUM_PIECES))
def test_bug_13_a_flipped_bit_fails_the_request_and_is_not_written(pair: Pair, position: int) -> None:
    expect(pair)
    before = memory_of(pair.target)
    with raw_sender(pair) as sender:
        sender.say(Open(1, 0, NUM_TOKENS, "r"))
        assert sender.hear() == Ready(1)
        pieces = sender.pieces_of(1)
        sender.say(sender.spoil(pieces[position]))
        assert "checksum mismatch" in failed_why(pair.receiver_posts)
        assert isinstance(sender.hear(), Reject)
        sender.say(*sender.pieces_of(1), Finish(1, NUM_PIECES, 9))  # nothing after that counts
        expect(pair, "r", 1)
        sender.say(Open(2, 1, NUM_TOKENS, "r"))
        assert sender.hear() == Ready(2)
    assert "connection lost" in failed_why(pair.receiver_posts)
    assert memory_of(pair.target) == before
    assert pair.receiver.stats().num_mismatches == 1


def test_bug_13_bytes_of_another_place_do_not_verify(pair: Pair) -> None:
    expect(pair)
    with raw_sender(pair) as sender:
        sender.say(Open(1, 0, NUM_TOKENS, "r"))
        assert sender.hear() == Ready(1)
        first, second, *_ = sender.pieces_of(1)
        sender.say(replace(first, block_index=second.block_index))
        assert "checksum mismatch" in failed_why(pair.receiver_posts)


def test_bug_13_a_missing_piece_is_noticed(pair: Pair) -> None:
    expect(pair)
    with raw_sender(pair) as sender:
        sender.say(Open(1, 0, NUM_TOKENS, "r"))
        assert sender.hear() == Ready(1)
        pieces = sender.pieces_of(1)
        sender.say(*pieces[:3], *pieces[4:], Finish(1, NUM_PIECES, 9))
        assert failed_why(pair.receiver_posts) == "6 of 7 pieces arrived"
        assert isinstance(sender.hear(), Reject)


def test_bug_13_a_repeated_piece_does_not_stand_for_a_missing_one(pair: Pair) -> None:
    expect(pair)
    with raw_sender(pair) as sender:
        sender.say(Open(1, 0, NUM_TOKENS, "r"))
        assert sender.hear() == Ready(1)
        pieces = sender.pieces_of(1)
        again = sender.piece(1, pieces[0].block_index, pieces[0].row, bytes(sender.engine.read_row(1, 0)))
        sender.say(*pieces[:-1], again, Finish(1, NUM_PIECES, 9))
        assert failed_why(pair.receiver_posts) == "6 of 7 pieces arrived"


def test_bug_13_order_and_repetition_do_not_matter(pair: Pair) -> None:
    order = expect(pair)
    with raw_sender(pair) as sender:
        sender.say(Open(1, 0, NUM_TOKENS, "r"), Open(1, 0, NUM_TOKENS, "r"))
        assert sender.hear() == Ready(1)
        sender.say(*reversed(sender.pieces_of(1)), sender.pieces_of(1)[0], Finish(1, NUM_PIECES, 9))
        assert sender.hear() == Done(1)
    assert isinstance(pair.receiver_posts.next(), HandoffArrived)
    pair.assert_equal_bytes(pair.send_order(num_tokens=NUM_TOKENS, slot=3), order)


def test_bug_13_a_consumed_handle_cannot_be_used_again(pair: Pair) -> None:
    order = expect(pair)
    with raw_sender(pair) as sender:
        sender.say(Open(1, 0, NUM_TOKENS, "r"))
        assert sender.hear() == Ready(1)
        sender.say(*sender.pieces_of(1), Finish(1, NUM_PIECES, 9))
        assert sender.hear() == Done(1)
        assert isinstance(pair.receiver_posts.next(), HandoffArrived)
        pair.target.write_row(
            order.block_table[0], 0, memoryview(bytes(ROW_BYTES))
        )  # the blocks have a new owner
        before = memory_of(pair.target)
        sender.say(*sender.pieces_of(1), Finish(1, NUM_PIECES, 9), Abort(1, "late"))
        sender.say(Open(1, 0, NUM_TOKENS, "r"), *sender.pieces_of(1), Finish(1, NUM_PIECES, 9))
        until(lambda: pair.receiver.stats().num_discarded == 2 * NUM_PIECES)
        # even a new handle is only an offer: nobody expects that attempt any more
        sender.say(Open(2, 0, NUM_TOKENS, "r"))
        until(lambda: pair.receiver.stats().num_offered == 1)
        assert memory_of(pair.target) == before
        assert pair.receiver_posts.is_empty()


@pytest.mark.parametrize(
    ("block_index", "row", "num_bytes"),
    [
        (2, 0, ROW_BYTES),
        (0, 4, 1000),
        (1, 3, 1000),
        (0, 0, ROW_BYTES + 1),
        (0, 3, 999),
        (2**32 - 1, 2**32 - 1, ROW_BYTES),
    ],
)
def test_a_piece_that_does_not_exist_fails_the_request(
    pair: Pair, block_index: int, row: int, num_bytes: int
) -> None:
    expect(pair)
    with raw_sender(pair) as sender:
        sender.say(Open(1, 0, NUM_TOKENS, "r"))
        assert sender.hear() == Ready(1)
        sender.say(sender.piece(1, block_index, row, bytes(num_bytes)))
        assert "no piece" in failed_why(pair.receiver_posts)
        assert isinstance(sender.hear(), Reject)


def test_pieces_before_ready_are_rejected(pair: Pair) -> None:
    with raw_sender(pair) as sender:
        sender.say(Open(1, 0, NUM_TOKENS, "r"), *sender.pieces_of(1))
        assert isinstance(sender.hear(), Reject)
    assert pair.receiver_posts.is_empty()


def test_a_request_opened_twice_stays_with_the_first(pair: Pair) -> None:
    expect(pair)
    with raw_sender(pair) as first, raw_sender(pair) as second:
        first.say(Open(1, 0, NUM_TOKENS, "r"))
        assert first.hear() == Ready(1)
        second.say(Open(1, 0, NUM_TOKENS, "r"))
        assert second.hear() == Reject(1, "already open")
        second.say(*second.pieces_of(1), Finish(1, NUM_PIECES, 9))
        first.say(*first.pieces_of(1), Finish(1, NUM_PIECES, 9))
        assert first.hear() == Done(1)
    assert isinstance(pair.receiver_posts.next(), HandoffArrived)


BROKEN = {
    "oversize": PREFIX.pack(2**31, 7),
    "oversize control": PREFIX.pack(20_000, 5),
    "unknown kind": PREFIX.pack(0, 99),
    "short body": PREFIX.pack(2, 5) + b"xx",
    "not UTF-8": PREFIX.pack(14, 5) + bytes(12) + b"\xff\xfe",
    "a receiver's word": encode(Ready(1)),
    "a slot that does not exist": encode(Piece(1, 0, 0, ROW_BYTES, 10_000, 0)),
    "payload cut": PREFIX.pack(28 + 10, 7)
    + encode(Piece(1, 0, 0, ROW_BYTES, INLINE, 0, memoryview(b"")))[8:]
    + bytes(10),
}


@pytest.mark.parametrize("broken", BROKEN.values(), ids=BROKEN.keys())
def test_what_is_no_frame_ends_the_connection_and_its_requests_only(pair: Pair, broken: bytes) -> None:
    expect(pair)
    expect(pair, "other")
    with raw_sender(pair) as sender, raw_sender(pair) as neighbour:
        sender.say(Open(1, 0, NUM_TOKENS, "r"))
        assert sender.hear() == Ready(1)
        neighbour.say(Open(1, 0, NUM_TOKENS, "other"))
        assert neighbour.hear() == Ready(1)
        sender.stream.send(broken)
        assert "connection lost" in failed_why(pair.receiver_posts)
        neighbour.say(*neighbour.pieces_of(1), Finish(1, NUM_PIECES, 9))
        assert neighbour.hear() == Done(1)
    assert isinstance(pair.receiver_posts.next(), HandoffArrived)


def test_a_connection_lost_after_any_frame_fails_the_request(pair: Pair) -> None:
    for num_said in range(NUM_PIECES + 2):
        order = expect(pair, f"r{num_said}")
        with raw_sender(pair) as sender:
            sender.say(Open(1, 0, NUM_TOKENS, order.request_id))
            assert sender.hear() == Ready(1)
            said = [*sender.pieces_of(1), Finish(1, NUM_PIECES, 9)]
            sender.say(*said[:num_said])
            if num_said < len(said):  # and half of the next
                following = encode(said[num_said])
                sender.stream.send(following[: len(following) // 2])
        if num_said < len(said):
            assert "connection lost" in failed_why(pair.receiver_posts)
        else:
            assert isinstance(pair.receiver_posts.next(), HandoffArrived)
    stats = pair.receiver.stats()
    assert (stats.num_expected, stats.num_offered) == (0, 0)


def test_a_sender_that_stops_within_a_frame_is_given_up(folder: Path, params: TransferParams) -> None:
    pair = Pair(folder, "tcp", replace(params, stall_s=0.3, lease_s=30.0, gap_s=30.0))
    try:
        expect(pair)
        with raw_sender(pair) as sender:
            sender.say(Open(1, 0, NUM_TOKENS, "r"))
            assert sender.hear() == Ready(1)
            sender.stream.send(encode(sender.pieces_of(1)[0])[:100])
            assert "stopped within a frame" in failed_why(pair.receiver_posts)
    finally:
        pair.stop()


def test_a_sender_that_never_sends_is_given_up(folder: Path, params: TransferParams) -> None:
    pair = Pair(folder, "unix", replace(params, gap_s=0.3, lease_s=30.0))
    try:
        expect(pair)
        with raw_sender(pair) as sender:
            sender.say(Open(1, 0, NUM_TOKENS, "r"))
            assert sender.hear() == Ready(1)
            assert "receiving for too long" in failed_why(pair.receiver_posts)
            assert isinstance(sender.hear(), Reject)
    finally:
        pair.stop()


def test_strangers_do_not_hold_up_members(pair: Pair) -> None:
    address = DataAddress.parse(pair.receiver.address)
    strangers = [connect(address) for _ in range(5)]
    try:
        for stranger in strangers[1:]:
            stranger.sendall(os.urandom(200))
        order = expect(pair)
        with raw_sender(pair) as sender:
            sender.say(Open(1, 0, NUM_TOKENS, order.request_id))
            assert sender.hear() == Ready(1)
    finally:
        for stranger in strangers:
            stranger.close()
    assert isinstance(pair.receiver_posts.next(), HandoffFailed)


# --- receivers that are not ours ----------------------------------------------------------------------


class RawReceiver:
    """Answers a real sender by hand, on one connection."""

    def __init__(self, pair: Pair, listener: socket.socket) -> None:
        self.pieces = Pieces(pair.target.layout)
        connection, _ = listener.accept()
        self.stream = FrameStream(connection, max_payload_bytes=self.pieces.max_bytes, stall_s=5.0)
        self.ring = greet_sender(self.stream, TOKEN, self.pieces.fingerprint, self.pieces.max_bytes)

    def say(self, *said: Frame) -> None:
        for frame in said:
            self.stream.send(encode(frame))

    def hear(self) -> Frame:
        return self.stream.wait(DEADLINE_S)

    def hear_pieces(self) -> Frame:
        """Take and free all pieces; returns the frame that follows them."""
        while isinstance(frame := self.hear(), Piece):
            if self.ring is not None:
                self.say(Free(1))
        return frame

    def close(self) -> None:
        self.stream.cut()
        self.stream.close()


@contextmanager
def raw_receiver(pair: Pair, request_id: str = "r") -> Iterator[RawReceiver]:
    """Start a request towards a hand-made receiver that said Ready."""
    own = DataAddress.parse(pair.receiver.address)
    path = f"{pair.folder}/raw-{request_id}"
    listener, address = listen(replace(own, path=path) if own.path else replace(own, port=0))
    receiver = None
    try:
        pair.sender.start(replace(pair.send_order(request_id), address=str(address)))
        receiver = RawReceiver(pair, listener)
        opened = receiver.hear()
        assert isinstance(opened, Open)
        assert (opened.request_id, opened.attempt, opened.num_tokens) == (request_id, 0, 300)
        receiver.say(Ready(opened.handle))
        yield receiver
    finally:
        listener.close()
        if receiver is not None:
            receiver.close()


def test_a_hand_made_receiver_that_behaves_is_served(pair: Pair) -> None:
    with raw_receiver(pair) as receiver:
        pair.sender.finish("r", 0, 9)
        assert receiver.hear_pieces() == Finish(1, 10, 9)
        assert pair.sender_posts.is_empty()
        receiver.say(Done(1))
        assert isinstance(pair.sender_posts.next(), HandoffSent)
        receiver.say(Done(1), Reject(1, "late"), Ready(1), Done(77))
        until(lambda: pair.sender.stats().num_used_slots == 0)
        assert pair.sender_posts.is_empty()


def test_a_confirmation_before_the_end_is_not_believed(pair: Pair) -> None:
    with raw_receiver(pair) as receiver:
        receiver.say(Done(1))
        assert "confirmed before" in failed_why(pair.sender_posts)
        assert isinstance(receiver.hear(), Abort)


def test_a_receiver_that_is_lost_fails_the_request_at_any_time(pair: Pair) -> None:
    with raw_receiver(pair):
        pass
    assert "connection lost" in failed_why(pair.sender_posts)
    with raw_receiver(pair, "r1") as receiver:
        pair.sender.finish("r1", 0, 9)
        receiver.hear()
    assert "connection lost" in failed_why(pair.sender_posts)
    with raw_receiver(pair, "r2") as receiver:
        pair.sender.finish("r2", 0, 9)
        assert isinstance(receiver.hear_pieces(), Finish)
    assert "connection lost" in failed_why(pair.sender_posts)
    until(lambda: pair.sender.stats().num_connections == 0)


@pytest.mark.parametrize("broken", [encode(Free(1000)), encode(Finish(1, 1, 1)), PREFIX.pack(2**31, 10)])
def test_a_receiver_that_talks_nonsense_is_left(pair: Pair, broken: bytes) -> None:
    with raw_receiver(pair) as receiver:
        receiver.stream.send(broken)
        assert "connection lost" in failed_why(pair.sender_posts)


@pytest.mark.parametrize("kind", ["unix", "tcp"])
def test_bug_18_a_receiver_that_reads_nothing_is_given_up(
    folder: Path, params: TransferParams, kind: str
) -> None:
    pair = Pair(folder, kind, replace(params, stall_s=0.5, lease_s=30.0))
    pair.source = BytesEngine(1, row_bytes=2_000_000, num_blocks=4)
    pair.target = BytesEngine(2, row_bytes=2_000_000, num_blocks=4)
    pair.sender.stop()
    pair.sender = HandoffSender(pair.source, TOKEN, pair.params, pair.sender_posts)
    try:
        with raw_receiver(pair):
            pair.sender.finish("r", 0, 9)
            assert failed_why(pair.sender_posts)
            until(lambda: pair.sender.stats().num_connections == 0)
    finally:
        pair.stop()
