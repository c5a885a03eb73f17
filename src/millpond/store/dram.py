"""`DramLevel`: the memory in front of the disks (issue 4 slice 7, kvstore 2.9, 2.10).

New blocks come here first. Small additions of a session wait until they make a whole extent
(`policies.spill`) and are then written to the pool. What the disks have stays as a copy until the room is
needed (`policies.dram_evict`): an extent is published before the first of its blocks may leave.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

import structlog

from millpond.control.extent_write import WriteEnd
from millpond.core.errors import ChecksumMismatch, InvariantBroken, MillpondError, QuotaExceeded
from millpond.core.hashing import BLOCK_HASH_BYTES
from millpond.policies.dram_evict import make_order
from millpond.policies.spill import SpillParams, Tail, TailBook, first_to_write
from millpond.store.chain import BlockChain
from millpond.store.clock import Clock, SystemClock
from millpond.store.dram_arena import DramArena
from millpond.store.dram_blocks import Admission, DramBlocks, DramCounts
from millpond.store.dram_directory import DramDirectory
from millpond.store.extent_put import PutResult
from millpond.store.stripe import Block

log = structlog.get_logger(__name__)

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
class DramParams:
    """One host's DRAM level."""

    evict: str = "lru"
    """Eviction order: `lru`, or `s3fifo` for a level that is small against what is read."""
    spill: SpillParams = field(default_factory=SpillParams)
    """How long blocks wait for others before they are written."""


@dataclass(frozen=True, slots=True)
class _Origin:
    """What a tail is written as."""

    chain: BlockChain
    lineage: int
    expiry_class: int


class DramLevel:
    """See module. Thread-safe; owns the arena.

    It has no thread of its own: whoever owns it calls `spill_due` about once a second.

    Args:
        arena: Made by us.
        host: Name of this host in the directory; it must have joined with the arena's epoch.
        directory: Of all hosts' memory.
        window: E of the layout.
        write: Writes extents to the pool.
        params: Parameters.
        clock: For idle sessions.
    """

    def __init__(
        self,
        arena: DramArena,
        *,
        host: str,
        directory: DramDirectory,
        window: int,
        write: WriteExtents,
        params: DramParams | None = None,
        clock: Clock | None = None,
    ) -> None:
        params = params or DramParams()
        self._window = window
        self._write = write
        self._clock = clock or SystemClock()
        self._blocks = DramBlocks(arena, make_order(params.evict, arena.num_slots), directory, host)
        self._tails = TailBook(window, params.spill)
        self._origins: dict[bytes, _Origin] = {}
        """By tip of a tail; its chain may be longer."""
        self._lock = threading.Lock()
        self._spilling = threading.Lock()
        """One spill at a time: two could have blocks in common."""

    @property
    def arena(self) -> DramArena:
        """The memory."""
        return self._blocks.arena

    @property
    def counts(self) -> DramCounts:
        """What happened since the start."""
        return self._blocks.counts

    @property
    def num_blocks(self) -> int:
        """Blocks in memory."""
        return len(self._blocks)

    @property
    def num_waiting(self) -> int:
        """Blocks that are not on disk."""
        with self._lock:
            return self._blocks.num_dirty

    def put(
        self,
        chain: BlockChain,
        first_block: int,
        blocks: Sequence[Block],
        *,
        deadline_ns: int,
        lineage: int = 0,
        expiry_class: int = 0,
    ) -> int:
        """Take new blocks, making room by eviction and, if that is not enough, by writing what waits.

        Args:
            chain: Has at least the blocks put.
            first_block: Index in the chain of the first one.
            blocks: Each `[block bytes]`, uint8.
            deadline_ns: For the writing.
            lineage: 1: computed downstream of an approximate replay.
            expiry_class: `policies.retention.BlockClass`.

        Returns:
            How many leading ones are in memory now. The others found no room.
        """
        origin = _Origin(chain, lineage, expiry_class)
        for index, block in enumerate(blocks, first_block):
            while self._admit(origin, index, block) is Admission.FULL:
                if not self._spill_for_room(deadline_ns):
                    num_done = index - first_block
                    self.counts.refused += len(blocks) - num_done
                    return num_done
        return len(blocks)

    def keep(self, chain: BlockChain, first_block: int, blocks: Sequence[Block]) -> None:
        """Keep copies of blocks that were read from the pool, as far as eviction makes room for them."""
        for offset in range(len(blocks) - 1, -1, -1):  # tail first: it is to leave first
            block_hash = chain.digests[first_block + offset][:BLOCK_HASH_BYTES]
            with self._lock:
                self._blocks.admit(block_hash, blocks[offset], is_dirty=False)

    def holds(self, block_hash: bytes) -> bool:
        """Whether a block is in memory now."""
        return block_hash in self._blocks

    def read(self, block_hash: bytes, out: Block) -> bool:
        """Copy a block out; whether it was here, whole and undamaged. `touch` counts the use."""
        try:
            return self._blocks.read(block_hash, out)
        except ChecksumMismatch:
            with self._lock:
                self._blocks.drop_damaged(block_hash, out)
            return False

    def touch(self, chain: BlockChain) -> None:
        """Count a chain as used, tail first, and its session as active."""
        now_ns = self._clock.monotonic_ns()
        with self._lock:
            for digest in reversed(chain.digests):
                self._blocks.touch(digest[:BLOCK_HASH_BYTES])
                self._tails.touch(now_ns, digest)

    def spill_due(self, *, deadline_ns: int) -> int:
        """Write the tails whose time has come; how many blocks are on disk now that were not."""
        with self._spilling:
            with self._lock:
                tails = self._tails.take_due(self._clock.monotonic_ns())
            return self._spill(tails, deadline_ns)

    def spill_all(self, *, deadline_ns: int) -> int:
        """Write all tails, as before the end; how many blocks are on disk now that were not."""
        with self._spilling:
            with self._lock:
                tails = self._tails.take_oldest(self._tails.num_blocks)
            return self._spill(tails, deadline_ns)

    def close(self, *, deadline_ns: int) -> None:
        """Write all tails, leave the directory and give the memory back."""
        self.spill_all(deadline_ns=deadline_ns)
        with self._lock:
            self._blocks.close()

    def check(self) -> None:
        """Check that free and held slots are all slots, and that whatever is not on disk is in a tail.

        Raises:
            InvariantBroken: They are not.
        """
        with self._spilling, self._lock:
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

    def _admit(self, origin: _Origin, index: int, block: Block) -> Admission:
        digest = origin.chain.digests[index]
        with self._lock:
            admission = self._blocks.admit(digest[:BLOCK_HASH_BYTES], block, is_dirty=True)
            if admission is Admission.TAKEN:
                parent = origin.chain.parent(index)
                before = self._origins.get(parent)
                is_alike = before is not None and before.lineage == origin.lineage
                now_ns = self._clock.monotonic_ns()
                if self._tails.add(now_ns, parent if is_alike else b"", index, index + 1, digest):
                    del self._origins[parent]
                self._origins[digest] = origin
            return admission

    def _spill_for_room(self, deadline_ns: int) -> bool:
        """Write the tails that waited longest; whether blocks may leave now."""
        with self._spilling:
            with self._lock:
                if self._blocks.can_evict:
                    return True  # another thread was here meanwhile
                tails = self._tails.take_oldest(self._window)
            self._spill(tails, deadline_ns)
            return self._blocks.can_evict

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
        begin, blocks = self._begin_spill(run, chain, origin.lineage)
        results: list[PutResult] = []
        is_over = not blocks
        try:
            if blocks:
                results = self._write(
                    chain,
                    begin,
                    blocks,
                    deadline_ns=deadline_ns,
                    lineage=origin.lineage,
                    expiry_class=origin.expiry_class,
                )
        except QuotaExceeded as error:
            is_over = True  # it would be refused again: the blocks stay as long as there is room
            log.info("blocks not written", code=error.code, error=error.message)
        except MillpondError as error:
            log.warning("blocks wait longer", code=error.code, error=error.message)
        done = begin
        for result in results:
            if result.result not in _ON_DISK:
                break
            done = result.end
        return self._end_spill(run, chain, begin, done, is_over=is_over or done == len(chain.digests))

    def _begin_spill(self, run: Sequence[Tail], chain: BlockChain, lineage: int) -> tuple[int, list[Block]]:
        """What to write: the run, and what is in memory before it if that makes its first window whole.

        The blocks cannot leave before `_end_spill`.
        """
        begin = len(chain.digests)
        # What is approximate is not merged with what is not.
        first = run[0].begin if lineage else first_to_write(run[0].begin, begin, self._window)
        blocks: list[Block] = []
        with self._lock:
            while begin > first:
                block = self._blocks.begin_write(chain.digests[begin - 1][:BLOCK_HASH_BYTES])
                if block is None:
                    break
                blocks.append(block)
                begin -= 1
        return begin, blocks[::-1]

    def _end_spill(
        self, run: Sequence[Tail], chain: BlockChain, begin: int, done: int, *, is_over: bool
    ) -> int:
        """Blocks `[begin, done)` are on disk: they may leave, as may those that never will be written.

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
            for index in range(len(chain.digests) - 1, min(begin, run[0].begin) - 1, -1):  # tail first
                block_hash = chain.digests[index][:BLOCK_HASH_BYTES]
                if self._blocks.end_write(block_hash, may_leave=index < end):
                    is_done = begin <= index < done
                    num_new += is_done
                    self.counts.given_up += not is_done
            self.counts.spilled += done - begin
            self.counts.failed_spills += bool(waiting)
        return num_new
