"""Brings loaded KV from the arena into the engine's blocks, row after row, in a thread of the rank.

    arena slots --(row r of all blocks of a sequence)--> engine blocks --> counters --> who waits for row r

The engine waits at a layer for that layer's row only. The sequence that was ordered first goes first, its
next row before any other, so that rows of the head of the queue are in place before its step begins.

A load may break: the daemon dies, a part never comes, a slot turns out to be another block's. Then the
sequence keeps the leading blocks of which every row can still be had, and the step that waits is told.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Protocol, TypeAlias

from millpond.core.errors import InvariantBroken
from millpond.core.ids import BlockId, RequestId
from millpond.core.plan import SwapIn
from millpond.core.ports import Engine
from millpond.core.units import BLOCK_TOKENS, MICROSECOND_NS, SECOND_NS

Key: TypeAlias = tuple[RequestId, int]
"""(request, attempt)."""
RowsReady: TypeAlias = Callable[[RequestId, int, int, int], None]
"""Told (request, attempt, row, leading blocks whose row is in the engine's memory)."""

MAX_BLOCKS_AT_ONCE = 64
"""Between two batches, about a millisecond each, the order is looked at again, and an end is heard."""
MIN_POLL_NS = 100 * MICROSECOND_NS
MAX_POLL_NS = 1000 * MICROSECOND_NS
"""A counter that does not move is looked at less and less often."""
GRACE_NS = 10 * SECOND_NS
"""The thread answers for a load this long after its deadline, or after its swap-in began if that was later;
then it is taken for stuck."""


class LoadedRows(Protocol):
    """One load of the node daemon, as far as it has come. Any thread."""

    @property
    def slots(self) -> tuple[int, ...]:
        """Of the leading blocks."""
        ...

    @property
    def num_blocks(self) -> int | None:
        """Leading blocks of which all rows came, once no more will; None before."""
        ...

    @property
    def deadline_ns(self) -> int:
        """What has not come by then will not."""
        ...

    def rows_ready(self, row: int) -> int:
        """Leading blocks whose row can be read now."""
        ...

    def row_memory(self, row: int) -> memoryview:
        """`[slots of the arena, row bytes]`."""
        ...

    def num_valid(self, begin: int, end: int) -> int:
        """How many leading blocks of `[begin, end)` still are in their slots: right is what is so before and
        after a copy.
        """
        ...


@dataclass(slots=True)
class _Swap:
    key: Key
    rows: LoadedRows
    blocks: tuple[BlockId, ...]
    num_blocks: int
    """Leading blocks to bring: all, or fewer once the load broke."""
    copied: list[int]
    """Per row: leading blocks that have it."""
    began_ns: int
    """When its blocks were granted: its load may be over for long by then."""
    is_touched: bool = False
    """The thread is writing into its blocks."""

    @property
    def is_broken(self) -> bool:
        return self.num_blocks < len(self.blocks)

    @property
    def row(self) -> int | None:
        """First row that some block lacks."""
        lacking = (row for row, count in enumerate(self.copied) if count < self.num_blocks)
        return next(lacking, None)


@dataclass(frozen=True, slots=True)
class SwapStats:
    """State and counters of one rank."""

    num_open: int
    """Swap-ins that have not been ended."""
    num_rows: int
    """Rows of blocks that were copied."""
    num_bytes: int
    num_broken: int
    """Loads that ended short, or whose bytes were not what they should be."""
    copy_seconds: float
    """CPU time of the copies."""
    wait_seconds: float
    """How long steps waited for rows."""


@dataclass(slots=True)
class _Counters:
    num_rows: int = 0
    num_bytes: int = 0
    num_broken: int = 0
    copy_ns: int = 0
    wait_ns: int = 0


@dataclass(slots=True)
class SwapIns:
    """All swap-ins of one rank, and their thread.

    Args:
        engine: Whose blocks are written.
        on_copied: Called from the thread after each copy, must return at once.
    """

    engine: Engine
    on_copied: RowsReady
    _swaps: dict[Key, _Swap] = field(default_factory=dict[Key, _Swap])
    """In the order in which they are needed."""
    _changed: threading.Condition = field(default_factory=threading.Condition)
    _counters: _Counters = field(default_factory=_Counters)
    _failure: BaseException | None = None
    _is_stopping: bool = False
    _thread: threading.Thread | None = None

    # --- the engine's thread ----------------------------------------------------------------------

    def start(self, order: SwapIn, rows: LoadedRows | None) -> None:
        """Begin to fill the blocks; without rows, the load is gone and so is everything it promised."""
        num_blocks = 0 if rows is None else min(len(order.block_table), len(rows.slots))
        key = (order.request_id, order.attempt)
        with self._changed:
            if key in self._swaps:
                raise InvariantBroken(f"{key} is swapped in twice")
            swap = _Swap(
                key,
                rows or _NoRows(),
                order.block_table,
                num_blocks,
                [0] * len(self.engine.layout.rows),
                time.monotonic_ns(),
            )
            self._counters.num_broken += swap.is_broken
            self._swaps[key] = swap
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="swap-in", daemon=True)
                self._thread.start()
            self._changed.notify_all()

    def wait_for(self, keys: Iterable[Key], row: int) -> list[Key]:
        """Wait until this row of these sequences is in place; returns those that are broken.

        Raises:
            InvariantBroken: The thread is stuck or dead.
        """
        begin_ns = time.monotonic_ns()
        broken: list[Key] = []
        with self._changed:
            for key in keys:
                swap = self._swaps.get(key)
                if swap is None:
                    continue
                self._wait_until(swap, lambda s: s.is_broken or s.copied[row] >= s.num_blocks)
                if swap.is_broken:
                    broken.append(key)
            self._counters.wait_ns += time.monotonic_ns() - begin_ns
        return broken

    def settle(self, key: Key) -> int:
        """Copy what can still be had of a broken one, and end it; returns the leading tokens in place."""
        with self._changed:
            swap = self._swaps.get(key)
            if swap is None:
                return 0
            self._wait_until(swap, lambda s: s.row is None)
        self.end(key)
        return swap.num_blocks * BLOCK_TOKENS

    def end(self, key: Key) -> None:
        """Stop: afterwards no thread touches the blocks. Unknown ones are ignored."""
        with self._changed:
            swap = self._swaps.pop(key, None)
            while swap is not None and swap.is_touched:
                self._changed.wait()

    def stats(self) -> SwapStats:
        """A consistent picture of now."""
        with self._changed:
            now = self._counters
            return SwapStats(
                len(self._swaps),
                now.num_rows,
                now.num_bytes,
                now.num_broken,
                now.copy_ns / SECOND_NS,
                now.wait_ns / SECOND_NS,
            )

    def stop(self) -> None:
        """End all and the thread."""
        with self._changed:
            self._is_stopping = True
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join()

    def _wait_until(self, swap: _Swap, is_enough: Callable[[_Swap], bool]) -> None:
        until_ns = max(swap.rows.deadline_ns, swap.began_ns) + GRACE_NS
        while not is_enough(swap):
            left_ns = until_ns - time.monotonic_ns()
            if self._failure is not None or self._is_stopping or left_ns <= 0:
                raise InvariantBroken(f"the swap-in of {swap.key} is stuck") from self._failure
            self._changed.wait(left_ns / SECOND_NS)

    # --- the swap-in thread -----------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while self._step():
                pass
        except BaseException as error:
            with self._changed:
                self._failure = error  # raised again where the engine waits
                self._changed.notify_all()
            raise

    def _step(self) -> bool:
        """Wait for work and do one batch of it; False to stop."""
        with self._changed:
            work = self._wait_for_work()
            if work is None:
                return False
            swap, row, begin, end = work
            swap.is_touched = True
        begin_ns = time.thread_time_ns()
        num_valid: int | None = None
        try:
            num_valid = self._copy(swap, row, begin, end)
            if num_valid:
                self.on_copied(*swap.key, row, begin + num_valid)
        finally:
            with self._changed:
                swap.is_touched = False
                if num_valid is not None:
                    swap.copied[row] = begin + num_valid
                    self._count(row, num_valid, time.thread_time_ns() - begin_ns)
                    if num_valid < end - begin:
                        self._break(swap, begin + num_valid)
                self._changed.notify_all()
        return True

    def _count(self, row: int, num_blocks: int, copy_ns: int) -> None:
        self._counters.copy_ns += copy_ns
        self._counters.num_rows += num_blocks
        self._counters.num_bytes += num_blocks * self.engine.layout.rows[row].num_bytes

    def _copy(self, swap: _Swap, row: int, begin: int, end: int) -> int:
        """Returns how many of the blocks were copied and are right."""
        end = begin + swap.rows.num_valid(begin, end)
        if end > begin:
            items = swap.rows.slots[begin:end]
            self.engine.write_rows(swap.blocks[begin:end], row, swap.rows.row_memory(row), items)
        return swap.rows.num_valid(begin, end)

    def _wait_for_work(self) -> tuple[_Swap, int, int, int] | None:
        """Holding the lock; None when stopping."""
        poll_ns = MIN_POLL_NS
        while not self._is_stopping:
            is_idle = True
            for swap in self._swaps.values():
                self._shorten(swap)
                row = swap.row
                if row is None:
                    continue
                is_idle = False
                begin = swap.copied[row]
                end = min(swap.rows.rows_ready(row), swap.num_blocks, begin + MAX_BLOCKS_AT_ONCE)
                if end > begin:
                    return swap, row, begin, end
            if self._changed.wait(None if is_idle else poll_ns / SECOND_NS):
                poll_ns = MIN_POLL_NS
            else:
                poll_ns = min(poll_ns * 3 // 2, MAX_POLL_NS)
        return None

    def _shorten(self, swap: _Swap) -> None:
        """Take note of what will not come any more."""
        if swap.row is None:
            return
        num_blocks = swap.rows.num_blocks
        if num_blocks is None and time.monotonic_ns() > swap.rows.deadline_ns:
            num_blocks = min(swap.rows.rows_ready(row) for row in range(len(swap.copied)))
        if num_blocks is not None and num_blocks < swap.num_blocks:
            self._break(swap, num_blocks)

    def _break(self, swap: _Swap, num_blocks: int) -> None:
        self._counters.num_broken += not swap.is_broken
        swap.num_blocks = min(swap.num_blocks, num_blocks)
        self._changed.notify_all()


@dataclass(frozen=True, slots=True)
class _NoRows:
    """Stands for a load that is gone."""

    slots: tuple[int, ...] = ()
    num_blocks: int = 0
    deadline_ns: int = 0

    def rows_ready(self, row: int) -> int:
        return 0

    def row_memory(self, row: int) -> memoryview:
        raise InvariantBroken("nothing is read from a load that is gone")

    def num_valid(self, begin: int, end: int) -> int:
        return 0
