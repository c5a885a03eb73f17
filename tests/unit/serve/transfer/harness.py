"""A memory that is nothing but bytes, a place for events, and a connected pair of ranks."""

from __future__ import annotations

import queue
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from millpond.config.transfer_params import TransferParams
from millpond.core.events import RankReport
from millpond.core.ids import BlockId, DpRank, GroupId, RankRef, RequestId, SlotId
from millpond.core.kv_layout import KvLayout, KvPart, KvRow, StatePart
from millpond.core.plan import HandoffClose, HandoffReceive, HandoffSend, RankPlan
from millpond.core.ports import LayerObserver
from millpond.core.units import SECOND_NS, num_blocks_for
from millpond.serve.transfer.protocol import HandoffEvent
from millpond.serve.transfer.receiver import HandoffReceiver
from millpond.serve.transfer.sender import HandoffSender

TOKEN = b"t" * 32
DEADLINE_S = 30


class BytesEngine:
    """An `Engine` at the edge: three rows of different sizes and a state slot, filled from a seed."""

    vocab_size = 100
    max_model_len = 10_000

    def __init__(
        self, seed: int, *, row_bytes: int = 4000, num_blocks: int = 64, num_slots: int = 16
    ) -> None:
        self.layout = KvLayout(
            rows=tuple(
                KvRow(layer, (KvPart("k", row_bytes * (layer + 1), "bf16"), KvPart("v", 40, "bf16")))
                for layer in range(3)
            ),
            state=(StatePart(0, "window", 1000, True),),
        )
        self.num_blocks = num_blocks
        self.num_slots = num_slots
        chance = np.random.default_rng(seed)
        self.rows = [
            chance.integers(0, 256, (num_blocks + 1, row.num_bytes), np.uint8) for row in self.layout.rows
        ]
        self.state = chance.integers(0, 256, (num_slots, self.layout.state_bytes), np.uint8)

    def execute(self, plan: RankPlan, observer: LayerObserver | None = None) -> RankReport:
        raise NotImplementedError

    def read_row(self, block: BlockId, row: int) -> memoryview:
        return memoryview(self.rows[row][block])

    def write_row(self, block: BlockId, row: int, data: memoryview) -> None:
        self.rows[row][block] = np.frombuffer(data, np.uint8)

    def write_rows(
        self, blocks: Sequence[BlockId], row: int, source: memoryview, items: Sequence[int]
    ) -> None:
        self.rows[row][list(blocks)] = np.asarray(source)[list(items)]

    def read_state(self, slot: SlotId) -> memoryview:
        return memoryview(self.state[slot])

    def write_state(self, slot: SlotId, data: memoryview) -> None:
        self.state[slot] = np.frombuffer(data, np.uint8)

    def forget(self, request_id: RequestId) -> None:
        raise NotImplementedError


class Posted:
    """Events as the scheduler would get them."""

    def __init__(self) -> None:
        self._events: queue.Queue[HandoffEvent] = queue.Queue()

    def __call__(self, event: HandoffEvent) -> None:
        self._events.put(event)

    def next(self) -> HandoffEvent:
        """The next event; fails after the deadline."""
        return self._events.get(timeout=DEADLINE_S)

    def take(self, num_events: int) -> list[HandoffEvent]:
        return [self.next() for _ in range(num_events)]

    def is_empty(self) -> bool:
        return self._events.empty()


class Pair:
    """A prefill and a decode rank, connected, with orders for both."""

    def __init__(self, folder: Path, kind: str, params: TransferParams, token: bytes = TOKEN) -> None:
        self.folder = folder
        self.params = replace(params, shm_dir=str(folder / "shm"))
        (folder / "shm").mkdir(exist_ok=True)
        self.source = BytesEngine(1)
        self.target = BytesEngine(2)
        self.sender_posts = Posted()
        self.receiver_posts = Posted()
        listen_on = f"unix:{folder}/d0" if kind == "unix" else "tcp:127.0.0.1:0"
        self.receiver = HandoffReceiver(self.target, listen_on, TOKEN, self.params, self.receiver_posts)
        self.sender = HandoffSender(self.source, token, self.params, self.sender_posts)

    def send_order(
        self,
        request_id: str = "r",
        attempt: int = 0,
        num_tokens: int = 300,
        first_block: int = 1,
        slot: int = 0,
    ) -> HandoffSend:
        num_blocks = num_blocks_for(num_tokens)
        return HandoffSend(
            RequestId(request_id),
            attempt,
            DpRank(0),
            RankRef(GroupId("d0"), DpRank(0)),
            self.receiver.address,
            num_tokens,
            tuple(BlockId(first_block + i) for i in range(num_blocks)),
            SlotId(slot),
        )

    def receive_order(
        self,
        request_id: str = "r",
        attempt: int = 0,
        num_tokens: int = 300,
        first_block: int = 21,
        slot: int = 5,
    ) -> HandoffReceive:
        # descending, so that equal block ids on both sides cannot hide a mistake
        num_blocks = num_blocks_for(num_tokens)
        table = tuple(BlockId(first_block + i) for i in reversed(range(num_blocks)))
        return HandoffReceive(RequestId(request_id), attempt, DpRank(0), num_tokens, table, SlotId(slot))

    def assert_equal_bytes(self, send: HandoffSend, receive: HandoffReceive) -> None:
        for ours, theirs in zip(send.block_table, receive.block_table, strict=True):
            for row in range(len(self.source.layout.rows)):
                assert bytes(self.source.read_row(ours, row)) == bytes(self.target.read_row(theirs, row))
        assert bytes(self.source.read_state(send.slot)) == bytes(self.target.read_state(receive.slot))

    def stop(self) -> None:
        self.sender.stop()
        self.receiver.stop()


def close_of(order: HandoffSend | HandoffReceive) -> HandoffClose:
    return HandoffClose(order.request_id, order.attempt, order.rank)


def until(condition: Callable[[], object], deadline_s: float = DEADLINE_S) -> None:
    """Poll until the condition holds."""
    end_ns = time.monotonic_ns() + int(deadline_s * SECOND_NS)
    while not condition():
        assert time.monotonic_ns() < end_ns, "not in time"
        time.sleep(0.002)
