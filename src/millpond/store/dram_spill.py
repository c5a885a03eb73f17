"""`Spiller`: writes what only the memory has to the pool, in the order that `policies.spill` says.

A block may leave the memory once the extent with it is published.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import structlog

from millpond.control.extent_write import WriteEnd
from millpond.core.errors import InvariantBroken, MillpondError, QuotaExceeded
from millpond.core.hashing import BLOCK_HASH_BYTES
from millpond.core.units import SECOND_NS
from millpond.policies.spill import SpillParams, Tail, TailBook, first_to_write
from millpond.store.chain import BlockChain
from millpond.store.clock import Clock
from millpond.store.dram_blocks import DramBlocks
from millpond.store.extent_put import PutResult
from millpond.store.stripe import Block

log = structlog.get_logger(__name__)

_ROOM_SHARE = 4
"""One slot in so many is kept free, or its block on disk."""
_ON_DISK = {WriteEnd.PUBLISHED, WriteEnd.EXISTS, WriteEnd.BEATEN}


class WriteExtents(Protocol):
    """`Pool.put`."""

    def __call__(
        self,
        chain: BlockChain,
        first_block: int,
        blocks: Sequence[Block],
        *,
        deadline_ns: int,
        lineage: int,
        expiry_class: int,
    ) -> list[PutResult]:
        """Write extents; raises what `Pool.put` raises."""
        ...


@dataclass(frozen=True, slots=True)
class Origin:
    """What a tail is written as."""

    chain: BlockChain
    lineage: int
    """1: computed downstream of an approximate replay."""
    expiry_class: int
    """`policies.retention.BlockClass`."""


@dataclass(frozen=True, slots=True)
class _Piece:
    """Blocks that follow each other and are written together."""

    begin: int
    """Index in the chain of the first one."""
    blocks: list[Block]

    @property
    def end(self) -> int:
        return self.begin + len(self.blocks)


class Spiller:
    """See module. Thread-safe; one spill at a time, for two could have blocks in common.

    Args:
        blocks: What is in memory.
        lock: Guards `blocks`. Who calls `add` or `touch` holds it.
        window: E of the layout.
        write: Writes extents to the pool.
        params: How long tails wait.
        clock: For idle sessions.
    """

    def __init__(
        self,
        blocks: DramBlocks,
        lock: threading.Lock,
        *,
        window: int,
        write: WriteExtents,
        params: SpillParams,
        clock: Clock,
    ) -> None:
        self._blocks = blocks
        self._lock = lock
        self._window = window
        self._write = write
        self._clock = clock
        self._tails = TailBook(window, params)
        self._origins: dict[bytes, Origin] = {}
        """By tip of a tail; its chain may be longer."""
        self._spilling = threading.Lock()

    def add(self, origin: Origin, index: int) -> None:
        """Block `index` of a chain came and is not on disk."""
        digest, parent = origin.chain.digests[index], origin.chain.parent(index)
        before = self._origins.get(parent)
        is_alike = before is not None and before.lineage == origin.lineage
        now_ns = self._clock.monotonic_ns()
        if self._tails.add(now_ns, parent if is_alike else b"", index, index + 1, digest):
            del self._origins[parent]
        self._origins[digest] = origin

    def touch(self, digest: bytes) -> None:
        """The session whose tail ends with this digest is active."""
        self._tails.touch(self._clock.monotonic_ns(), digest)

    def write_due(self, *, deadline_ns: int) -> int:
        """Write the tails whose time has come, and others if the room for new blocks gets short.

        Returns:
            How many blocks are on disk now that were not.
        """
        with self._spilling:
            with self._lock:
                tails = self._tails.take_due(self._clock.monotonic_ns())
                num_due = sum(tail.num_blocks for tail in tails)
                min_room = self._blocks.arena.num_slots // _ROOM_SHARE
                tails += self._tails.take_oldest(min_room - self._blocks.num_available - num_due)
            return self._spill(tails, deadline_ns)

    def write_all(self, *, deadline_ns: int) -> int:
        """Write all tails, as before the end; how many blocks are on disk now that were not."""
        with self._spilling:
            with self._lock:
                tails = self._tails.take_oldest(self._tails.num_blocks)
            return self._spill(tails, deadline_ns)

    def make_room(self, num_slots: int, *, deadline_ns: int) -> bool:
        """Write the tails that waited longest if need be; whether so many slots can be had now."""
        wait_s = max(0, deadline_ns - time.monotonic_ns()) / SECOND_NS
        if not self._spilling.acquire(timeout=wait_s):
            return False
        try:
            with self._lock:
                missing = num_slots - self._blocks.num_available
                if missing <= 0:
                    return True  # another thread was here meanwhile
                tails = self._tails.take_oldest(max(missing, self._window))
            self._spill(tails, deadline_ns)
            with self._lock:
                return self._blocks.num_available >= num_slots
        finally:
            self._spilling.release()

    def check(self) -> None:
        """Check that whatever is not on disk is in a tail, besides what `DramBlocks.check` checks.

        Nothing is checked while a spill goes on: nobody may have to wait for the disks here.

        Raises:
            InvariantBroken: It is not.
        """
        if not self._spilling.acquire(blocking=False):
            return
        try:
            with self._lock:
                self._check()
        finally:
            self._spilling.release()

    def _check(self) -> None:
        self._blocks.check()
        tails = self._tails.all()
        if self._origins.keys() != {tail.tip for tail in tails}:
            raise InvariantBroken("origins and tails differ")
        waiting = {
            digest[:BLOCK_HASH_BYTES]
            for tail in tails
            for digest in self._origins[tail.tip].chain.digests[tail.begin : tail.end]
        }
        if not waiting.issuperset(self._blocks.dirty()):
            raise InvariantBroken("a block is neither on disk nor in a tail")

    def _spill(self, tails: Sequence[Tail], deadline_ns: int) -> int:
        """Write tails that were taken from the book."""
        return sum(self._spill_run(run, deadline_ns) for run in self._runs(tails))

    def _runs(self, tails: Sequence[Tail]) -> list[list[Tail]]:
        """Tails that follow each other in one chain and are of one lineage belong into one call."""
        runs: list[list[Tail]] = []
        ends: dict[tuple[bytes, int], list[Tail]] = {}
        for tail in sorted(tails, key=lambda tail: tail.begin):
            origin = self._origins[tail.tip]
            run = ends.pop((origin.chain.parent(tail.begin), origin.lineage), None)
            if run is None:
                run = []
                runs.append(run)
            run.append(tail)
            ends[tail.tip, origin.lineage] = run
        return runs

    def _spill_run(self, run: Sequence[Tail], deadline_ns: int) -> int:
        origin = self._origins[run[-1].tip]
        chain = replace(origin.chain, digests=origin.chain.digests[: run[-1].end])
        done, is_over = 0, False
        pieces = self._begin_spill(run, chain, origin.lineage)
        try:
            for piece in pieces:
                results = self._write(
                    chain,
                    piece.begin,
                    piece.blocks,
                    deadline_ns=deadline_ns,
                    lineage=origin.lineage,
                    expiry_class=origin.expiry_class,
                )
                not_done = (result.begin for result in results if result.result not in _ON_DISK)
                done = next(not_done, piece.end)
                if done < piece.end:
                    break
            else:
                is_over = True
        except QuotaExceeded as error:
            is_over = True  # it would be refused again: the blocks stay as long as there is room
            log.info("blocks not written", code=error.code, error=error.message)
        except MillpondError as error:
            log.warning("blocks wait longer", code=error.code, error=error.message)
        return self._end_spill(run, chain, pieces, done, is_over=is_over)

    def _begin_spill(self, run: Sequence[Tail], chain: BlockChain, lineage: int) -> list[_Piece]:
        """What to write: the run, and what is in memory before it if that makes its first window whole.

        A block that is damaged, or has left, parts the run: it may be on disk, or come again.

        The blocks cannot leave before `_end_spill`.
        """
        begin = run[0].begin
        pieces: list[_Piece] = []
        for index in range(begin, len(chain.digests)):
            block = self._begin_write(chain, index)
            if block is None:
                continue
            if not pieces or pieces[-1].end < index:
                pieces.append(_Piece(index, []))
            pieces[-1].blocks.append(block)
        # What is approximate is not merged with what is not.
        if lineage or not pieces or pieces[0].begin > begin:
            return pieces
        before: list[Block] = []
        for index in range(begin - 1, first_to_write(begin, pieces[0].end, self._window) - 1, -1):
            block = self._begin_write(chain, index, lineage)
            if block is None:
                break
            before.append(block)
        pieces[0] = _Piece(begin - len(before), before[::-1] + pieces[0].blocks)
        return pieces

    def _begin_write(self, chain: BlockChain, index: int, lineage: int | None = None) -> Block | None:
        """A block to be written; None if it is not here, damaged, or of another lineage than asked for."""
        name = chain.digests[index][:BLOCK_HASH_BYTES]
        with self._lock:  # for one block at a time: others wait meanwhile
            if lineage is not None and self._blocks.lineage(name) != lineage:
                return None
            return self._blocks.begin_write(name)

    def _end_spill(
        self, run: Sequence[Tail], chain: BlockChain, pieces: Sequence[_Piece], done: int, *, is_over: bool
    ) -> int:
        """Blocks of the pieces before `done` are on disk: they may leave, as may those that never will be.

        Returns:
            How many of them were not on disk before.
        """
        now_ns = self._clock.monotonic_ns()
        waiting = [] if is_over else [tail for tail in run if tail.end > done]
        end = waiting[0].begin if waiting else len(chain.digests)
        num_new = 0
        with self._lock:
            for tail in run:
                if tail in waiting:
                    self._tails.give_back(now_ns, tail)
                elif tail.tip not in self._tails:  # its last block may have been lost and come again
                    del self._origins[tail.tip]
            for index in (i for piece in reversed(pieces) for i in range(piece.end - 1, piece.begin - 1, -1)):
                # Tail first: it is to leave first.
                if self._blocks.end_write(chain.digests[index][:BLOCK_HASH_BYTES], may_leave=index < end):
                    num_new += index < done
                    self._blocks.counts.given_up += index >= done
                self._blocks.counts.spilled += index < done
            self._blocks.counts.failed_spills += bool(waiting)
        return num_new
