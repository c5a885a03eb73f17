"""When blocks that only the DRAM level has are written to the disks (interfaces A.3, kvstore 2.9).

What a session added since its last write is a *tail*: consecutive blocks of one chain inside one window. A
tail waits, so that many small turns become one extent, until its window is full, its session was idle for a
while, memory is needed, or the level ends.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, replace

from millpond.core.units import SECOND_NS


@dataclass(frozen=True, slots=True)
class SpillParams:
    """How long tails wait."""

    idle_s: float = 30.0
    """A tail whose session did nothing for so long is written."""
    retry_s: float = 5.0
    """A tail that could not be written waits so long before the next try."""


@dataclass(frozen=True, slots=True)
class Tail:
    """Blocks of one chain that are not on disk."""

    tip: bytes
    """Digest of its last block: its name."""
    begin: int
    """Index in the chain of its first block."""
    end: int
    due_ns: int
    """When it is written at the latest."""

    @property
    def num_blocks(self) -> int:
        """Blocks that it has."""
        return self.end - self.begin


class TailBook:
    """All tails of a level, least recently used first.

    Args:
        window: E: blocks of a full extent.
        params: How long they wait.
    """

    def __init__(self, window: int, params: SpillParams) -> None:
        self._window = window
        self._params = params
        self._tails: OrderedDict[bytes, Tail] = OrderedDict()

    def __len__(self) -> int:
        """Tails that wait."""
        return len(self._tails)

    def __contains__(self, tip: bytes) -> bool:
        return tip in self._tails

    @property
    def num_blocks(self) -> int:
        """Blocks that wait."""
        return sum(tail.num_blocks for tail in self._tails.values())

    def add(self, now_ns: int, parent: bytes, begin: int, end: int, tip: bytes) -> bool:
        """Blocks `[begin, end)` of a chain, inside one window, came.

        Args:
            now_ns: Time.
            parent: Digest before block `begin`; a tail that ends with it grows.
            begin: Index in the chain.
            end: One past the last.
            tip: Digest of the last block.

        Returns:
            Whether a tail grew: `parent` names none any more.
        """
        grown = self._tails.pop(parent, None) if begin % self._window else None
        due_ns = now_ns if end % self._window == 0 else self._idle_ns(now_ns)
        self._insert(Tail(tip, grown.begin if grown else begin, end, due_ns))
        return grown is not None

    def all(self) -> list[Tail]:
        """The tails that wait."""
        return list(self._tails.values())

    def touch(self, now_ns: int, tip: bytes) -> None:
        """The session whose tail ends with `tip` is active; nothing happens if there is none."""
        tail = self._tails.get(tip)
        if tail is not None and tail.end % self._window:
            self._tails[tip] = replace(tail, due_ns=self._idle_ns(now_ns))
            self._tails.move_to_end(tip)

    def take_due(self, now_ns: int) -> list[Tail]:
        """Take out the tails whose time has come, least recently used first."""
        due = [tail for tail in self._tails.values() if tail.due_ns <= now_ns]
        for tail in due:
            del self._tails[tail.tip]
        return due

    def take_oldest(self, num_blocks: int) -> list[Tail]:
        """Take out tails, least recently used first, of together at least so many blocks if there are."""
        taken: list[Tail] = []
        while self._tails and num_blocks > 0:
            _, tail = self._tails.popitem(last=False)
            taken.append(tail)
            num_blocks -= tail.num_blocks
        return taken

    def give_back(self, now_ns: int, tail: Tail) -> None:
        """A tail that was taken could not be written; it waits again."""
        self._insert(replace(tail, due_ns=now_ns + int(self._params.retry_s * SECOND_NS)))

    def _insert(self, tail: Tail) -> None:
        """Add a tail; one with the same tip (its block was lost and came again) becomes part of it."""
        other = self._tails.pop(tail.tip, tail)
        self._tails[tail.tip] = replace(tail, begin=min(tail.begin, other.begin))

    def _idle_ns(self, now_ns: int) -> int:
        return now_ns + int(self._params.idle_s * SECOND_NS)


def first_to_write(begin: int, end: int, window: int) -> int:
    """From which block on a run of new blocks `[begin, end)` is written.

    Blocks before it that are on disk already are written once more if that makes a whole window one extent,
    and only then: so a block is written twice at most, and a full window is read with one request a node.
    """
    start = begin // window * window
    return start if end >= start + window else begin
