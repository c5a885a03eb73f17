"""What both sides of a handoff share: the pieces of a request, and who may touch its blocks.

A request's KV is cut into pieces: one row of one block each, and the state slot as one more. Each piece
carries a checksum over its bytes and its identity, so bytes that belong elsewhere do not verify.

Both sides are state machines without I/O that return actions. One rule binds them (`Touches`): an event
that tells the scheduler that it may free blocks is posted only when no thread is reading or writing them.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import TypeAlias

import xxhash

from millpond.core.events import HandoffArrived, HandoffClosed, HandoffFailed, HandoffSent
from millpond.core.ids import RequestId
from millpond.core.kv_layout import KvLayout
from millpond.core.units import num_blocks_for
from millpond.serve.transfer.frames import Frame

HandoffEvent: TypeAlias = HandoffSent | HandoffArrived | HandoffFailed | HandoffClosed
Key: TypeAlias = tuple[RequestId, int]
"""(request, attempt)."""

CLOSED_BY_SENDER = "closed by the sender"
"""Why of an abort that is no fault: the sequence ended on the prefill side, or its client left."""

_IDENTITY = struct.Struct("<IIII")


def checksum(handle: int, block_index: int, row: int, payload: memoryview) -> int:
    """xxh3_64 of a piece's bytes, seeded with its identity."""
    identity = _IDENTITY.pack(handle, block_index, row, len(payload))
    return xxhash.xxh3_64_intdigest(payload, seed=xxhash.xxh3_64_intdigest(identity))


class Pieces:
    """Sizes and numbers of the pieces of one layout."""

    def __init__(self, layout: KvLayout) -> None:
        self.fingerprint = layout.fingerprint
        self.num_rows = len(layout.rows)
        self.state_row = self.num_rows
        """Row number that stands for the state slot."""
        self._has_state = layout.state_bytes > 0
        self._bytes_by_row = (*(row.num_bytes for row in layout.rows), layout.state_bytes)
        self.max_bytes = max(self._bytes_by_row)
        """Bytes of the largest piece."""

    def count(self, num_tokens: int) -> int:
        """Pieces of a sequence of `num_tokens` tokens."""
        return num_blocks_for(num_tokens) * self.num_rows + self._has_state

    def position(self, num_tokens: int, block_index: int, row: int, num_bytes: int) -> int | None:
        """Number of a piece, 0 ... count - 1, or None if there is no such piece of that size."""
        num_blocks = num_blocks_for(num_tokens)
        if row > self.state_row or num_bytes != self._bytes_by_row[row]:
            return None
        if row == self.state_row:
            return num_blocks * self.num_rows if self._has_state and block_index == 0 else None
        return block_index * self.num_rows + row if block_index < num_blocks else None

    @property
    def has_state(self) -> bool:
        """Whether there is a state piece."""
        return self._has_state


@dataclass(frozen=True, slots=True)
class Transmit:
    """Send this frame on that connection."""

    connection: int
    frame: Frame


@dataclass(frozen=True, slots=True)
class Post:
    """Tell the scheduler."""

    event: HandoffEvent


Action: TypeAlias = Transmit | Post


class Touches:
    """Holds back a request's events while a thread reads or writes its blocks."""

    def __init__(self) -> None:
        self._num_threads: dict[Key, int] = {}
        self._held: dict[Key, list[Action]] = {}

    def begin(self, key: Key) -> None:
        """A thread starts to touch the request's blocks."""
        self._num_threads[key] = self._num_threads.get(key, 0) + 1

    def end(self, key: Key) -> list[Action]:
        """It stopped; returns what was held back if it was the last."""
        self._num_threads[key] -= 1
        if self._num_threads[key]:
            return []
        del self._num_threads[key]
        return self._held.pop(key, [])

    def post(self, event: HandoffEvent) -> list[Action]:
        """Post an event now, or after the last `end` of its request."""
        key = (event.request_id, event.attempt)
        if key not in self._num_threads:
            return [Post(event)]
        self._held.setdefault(key, []).append(Post(event))
        return []
