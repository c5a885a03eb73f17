"""Both sides of the handoff against every order of words, losses, repetitions, lies and closings.

A world without sockets: two sides, a channel each way whose frames may be delayed against each other,
repeated, dropped and spoiled, and memories whose every piece says whose it is.
"""

from __future__ import annotations

import struct
from collections import Counter
from dataclasses import dataclass, field, replace
from typing import TypeAlias

from hypothesis import given, settings
from hypothesis import strategies as st

from millpond.core.events import HandoffArrived, HandoffClosed, HandoffFailed, HandoffSent
from millpond.core.ids import BlockId, DpRank, GroupId, RankRef, RequestId, SlotId
from millpond.core.kv_layout import KvLayout, KvPart, KvRow, StatePart
from millpond.core.plan import HandoffClose, HandoffReceive, HandoffSend
from millpond.core.units import num_blocks_for
from millpond.serve.transfer.frames import INLINE, Frame, Piece
from millpond.serve.transfer.protocol import Action, HandoffEvent, Key, Pieces, Post, Transmit, checksum
from millpond.serve.transfer.receive_side import ReceiveSide, Target
from millpond.serve.transfer.send_side import Reading, SendSide

LAYOUT = KvLayout(
    rows=(KvRow(0, (KvPart("k", 32, "u8"),)), KvRow(2, (KvPart("k", 64, "u8"),))),
    state=(StatePart(0, "window", 32, True),),
)
PIECES = Pieces(LAYOUT)
STATE_ROW = 2
SIZES = (32, 64, 32)
NUM_TOKENS = 300
NUM_BLOCKS = num_blocks_for(NUM_TOKENS)
FAR_NS = 10**15
NUM_REQUESTS = 3
Word: TypeAlias = tuple[str, int, int]


def bytes_of(key: Key, index: int, row: int) -> bytes:
    """What the prefill side computed for a piece."""
    mark = struct.pack("<8sIII", key[0].encode(), key[1], index, row)
    return (mark * 4)[: SIZES[row]]


def key_of(i: int) -> Key:
    """Keys 0 and 1 are two attempts of one request."""
    return (RequestId("r"), i) if i < 2 else (RequestId(f"q{i}"), 0)


def send_order(key: Key, i: int) -> HandoffSend:
    to = RankRef(GroupId("d"), DpRank(0))
    table = tuple(BlockId(1 + i * NUM_BLOCKS + k) for k in range(NUM_BLOCKS))
    return HandoffSend(key[0], key[1], DpRank(0), to, "", NUM_TOKENS, table, SlotId(i))


def receive_order(key: Key, i: int) -> HandoffReceive:
    table = tuple(BlockId(1 + i * NUM_BLOCKS + k) for k in range(NUM_BLOCKS))
    return HandoffReceive(key[0], key[1], DpRank(0), NUM_TOKENS, table, SlotId(i))


@dataclass
class World:
    """The two sides and all that lies between them."""

    sender: SendSide = field(default_factory=lambda: SendSide(PIECES, lease_ns=10**9, stall_ns=10**9))
    receiver: ReceiveSide = field(
        default_factory=lambda: ReceiveSide(PIECES, lease_ns=10**9, gap_ns=10**9, max_offers=2)
    )
    connection: int = 0
    to_receiver: list[Frame] = field(default_factory=list)
    to_sender: list[Frame] = field(default_factory=list)
    reading: Reading | None = None
    writing: tuple[Target, bytes] | None = None
    memory: dict[tuple[Key, int, int], bytes] = field(default_factory=dict)
    """Decode side: (key, block index, row)."""
    started: set[Key] = field(default_factory=set)
    expected: set[Key] = field(default_factory=set)
    sent_events: list[HandoffEvent] = field(default_factory=list)
    received_events: list[HandoffEvent] = field(default_factory=list)
    num_events_before: dict[Key, int] = field(default_factory=dict)
    """Events of the receiver when it began to expect a request."""
    num_sender_closes: Counter[Key] = field(default_factory=Counter)
    num_receiver_closes: Counter[Key] = field(default_factory=Counter)
    history: list[Frame] = field(default_factory=list)
    """Everything that was ever put on the channel to the receiver."""

    # --- what the shells do ---

    def carry_out(self, actions: list[Action], events: list[HandoffEvent]) -> None:
        for action in actions:
            match action:
                case Post(event):
                    self.check_nobody_touches(event)
                    events.append(event)
                case Transmit(connection, frame):
                    if connection == self.connection:
                        self.to_sender.append(frame)

    def check_nobody_touches(self, event: HandoffEvent) -> None:
        """The rule: whoever hears an event may free the blocks at once."""
        key = (event.request_id, event.attempt)
        if isinstance(event, HandoffSent):
            assert self.reading is None or self.reading.key != key

    def send_one(self) -> None:
        if self.reading is not None:
            return
        work = self.sender.next_work(0, self.connection, 2)
        if isinstance(work, Reading):
            self.reading = work
        elif work is not None:
            self.put(work)

    def end_reading(self) -> None:
        reading, self.reading = self.reading, None
        if reading is None:
            return
        indices = range(reading.begin, reading.begin + max(1, len(reading.block_ids)))
        for index in indices:
            payload = memoryview(bytes_of(reading.key, index, reading.row))
            digest = checksum(reading.handle, index, reading.row, payload)
            self.put(Piece(reading.handle, index, reading.row, len(payload), INLINE, digest, payload))
        self.carry_out(self.sender.end_reading(reading), self.sent_events)

    def put(self, frame: Frame) -> None:
        self.to_receiver.append(frame)
        self.history.append(frame)

    def receive_one(self, position: int) -> None:
        if not self.to_receiver or self.writing is not None:
            return
        frame = self.to_receiver.pop(position % len(self.to_receiver))
        if not isinstance(frame, Piece):
            self.carry_out(self.receiver.on_frame(0, self.connection, frame), self.received_events)
            return
        target = self.receiver.begin_piece(0, self.connection, frame)
        if isinstance(target, Target):
            self.writing = (target, bytes(frame.payload))
        else:
            self.carry_out(target, self.received_events)

    def end_writing(self) -> None:
        writing, self.writing = self.writing, None
        if writing is None:
            return
        target, payload = writing
        piece = target.piece
        key = (target.order.request_id, target.order.attempt)
        assert not self.is_over(key), "a write into blocks that were given back"
        is_valid = checksum(piece.handle, piece.block_index, piece.row, memoryview(payload)) == piece.checksum
        if is_valid:
            self.memory[key, piece.block_index, piece.row] = payload
        self.carry_out(self.receiver.end_piece(target, is_valid=is_valid), self.received_events)

    def is_over(self, key: Key) -> bool:
        later = self.received_events[self.num_events_before[key] :]
        return any((event.request_id, event.attempt) == key for event in later)

    def lose_connection(self) -> None:
        self.end_reading()  # the writing thread itself notices the loss, after its copy
        self.end_writing()
        self.to_receiver.clear()
        self.to_sender.clear()
        old, self.connection = self.connection, self.connection + 1
        self.carry_out(self.sender.on_disconnect(old, "lost"), self.sent_events)
        self.carry_out(self.receiver.on_disconnect(old, "lost"), self.received_events)

    # --- the words of the fuzzer ---

    def do(self, word: Word) -> None:
        name, i, position = word
        key = key_of(i)
        match name:
            case "start" if key not in self.started:
                self.started.add(key)
                self.carry_out(self.sender.start(0, send_order(key, i), self.connection), self.sent_events)
            case "expect" if key not in self.expected:
                self.expected.add(key)
                self.num_events_before[key] = len(self.received_events)
                self.carry_out(self.receiver.expect(0, receive_order(key, i)), self.received_events)
            case "rows":
                self.sender.rows_ready(0, key, position % 2, position % (NUM_BLOCKS + 2))
            case "finish":
                self.sender.finish(0, key, 40 + i)
            case "close sender":
                self.num_sender_closes[key] += 1
                self.carry_out(self.sender.close(HandoffClose(*key, DpRank(0))), self.sent_events)
            case "close receiver":
                self.num_receiver_closes[key] += 1
                self.carry_out(self.receiver.close(HandoffClose(*key, DpRank(0))), self.received_events)
            case "send":
                self.send_one()
            case "read":
                self.end_reading()
            case "receive":
                self.receive_one(0)
            case "write":
                self.end_writing()
            case "answer" if self.to_sender:
                frame = self.to_sender.pop(0)
                self.carry_out(self.sender.on_frame(0, self.connection, frame), self.sent_events)
            case "lose":
                self.lose_connection()
            case _:
                self.lie(name, position)

    def lie(self, name: str, position: int) -> None:
        """What no connection does, but a broken or hostile peer might."""
        match name:
            case "receive out of order":
                self.receive_one(position)
            case "repeat" if self.history:
                self.to_receiver.append(self.history[position % len(self.history)])
            case "repeat answer" if self.to_sender:
                self.to_sender.append(self.to_sender[position % len(self.to_sender)])
            case "drop" if self.to_receiver:
                self.to_receiver.pop(position % len(self.to_receiver))
            case "spoil" | "misplace" if self.to_receiver:
                where = position % len(self.to_receiver)
                frame = self.to_receiver[where]
                if isinstance(frame, Piece):
                    self.to_receiver[where] = (spoil if name == "spoil" else misplace)(frame, position)
            case _:
                pass

    def settle(self) -> None:
        """Let everything in flight arrive in order, then let all leases run out."""
        for _ in range(200):
            for name in ("send", "read", "receive", "write", "answer"):
                self.do((name, 0, 0))
        self.carry_out(self.sender.tick(FAR_NS), self.sent_events)
        self.carry_out(self.receiver.tick(FAR_NS), self.received_events)
        self.lose_connection()

    def check(self) -> None:
        """The laws."""
        for i in range(NUM_REQUESTS):
            key = key_of(i)
            sent = [event for event in self.sent_events if (event.request_id, event.attempt) == key]
            received = [event for event in self.received_events if (event.request_id, event.attempt) == key]
            check_endings(sent, HandoffSent, key in self.started, self.num_sender_closes[key])
            check_endings(received, HandoffArrived, key in self.expected, self.num_receiver_closes[key])
            arrived = [event for event in received if isinstance(event, HandoffArrived)]
            if arrived:
                assert arrived[0].first_token_id == 40 + i
                for position in range(PIECES.count(NUM_TOKENS)):
                    index, row = divmod(position, 2) if position < 2 * NUM_BLOCKS else (0, STATE_ROW)
                    assert self.memory[key, index, row] == bytes_of(key, index, row)
            if any(isinstance(event, HandoffSent) for event in sent):
                assert arrived
        assert self.sender.num_open == 0
        assert (self.receiver.num_expected, self.receiver.num_offered) == (0, 0)


def spoil(piece: Piece, position: int) -> Piece:
    payload = bytearray(piece.payload)
    payload[position % len(payload)] ^= 1 << position % 8
    return replace(piece, payload=memoryview(payload))


def misplace(piece: Piece, position: int) -> Piece:
    return replace(piece, block_index=position % 5, handle=piece.handle + position % 2)


def check_endings(
    events: list[HandoffEvent], success: type[HandoffEvent], was_asked: bool, num_closes: int
) -> None:
    """One ending for each request that was asked for, none for others, one answer to each close."""
    endings = [event for event in events if isinstance(event, success | HandoffFailed)]
    closed = [event for event in events if isinstance(event, HandoffClosed)]
    assert len(endings) + len(closed) == len(events)
    assert len(closed) == num_closes
    assert len(endings) <= was_asked
    if was_asked and not num_closes:
        assert len(endings) == 1


MOVES = ("send", "read", "receive", "write", "answer")
ORDERLY = ("start", "expect", "rows", "finish") * 4 + MOVES * 16
CLOSES = ("close sender", "close receiver", "lose")
LIES = ("receive out of order", "repeat", "repeat answer", "drop", "spoil", "misplace")


def scripts(names: tuple[str, ...]) -> st.SearchStrategy[list[Word]]:
    """A hundred words or more, two bytes each: short scripts get nowhere."""
    return st.binary(min_size=200, max_size=400).map(
        lambda data: [
            (names[first % len(names)], second % NUM_REQUESTS, second // NUM_REQUESTS)
            for first, second in zip(data[::2], data[1::2], strict=False)
        ]
    )


def run(script: list[Word]) -> World:
    world = World()
    for word in script:
        world.do(word)
    world.settle()
    world.check()
    return world


@settings(max_examples=150)
@given(script=scripts(ORDERLY))
def test_without_faults_all_that_both_sides_want_arrives(script: list[Word]) -> None:
    world = run(script)
    arrived = {
        (event.request_id, event.attempt)
        for event in world.received_events
        if isinstance(event, HandoffArrived)
    }
    for i in range(NUM_REQUESTS):
        names = [name for name, j, _ in script if j == i]
        # at most two requests may be announced unexpected, and a finish before its start means nothing
        if "start" in names and "expect" in names[: names.index("start")]:
            assert (key_of(i) in arrived) == ("finish" in names[names.index("start") :])


@settings(max_examples=250)
@given(script=scripts(ORDERLY + CLOSES))
def test_bug_14_any_order_of_closing_and_finishing_ends_each_request_once(script: list[Word]) -> None:
    run(script)


@settings(max_examples=350)
@given(script=scripts(ORDERLY + LIES + CLOSES))
def test_bug_13_no_lie_of_the_channel_becomes_a_sequence(script: list[Word]) -> None:
    run(script)
