"""`DramLevel`: the memory in front of the disks (issue 4 slice 7, kvstore 2.9, 2.10).

New blocks come here first. Small additions of a session wait until they make a whole extent
(`policies.spill`) and are then written to the pool. What the disks have stays as a copy until the room is
needed (`policies.dram_evict`): an extent is published before the first of its blocks may leave.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field

from millpond.core.errors import ChecksumMismatch
from millpond.core.hashing import BLOCK_HASH_BYTES
from millpond.policies.dram_evict import make_order
from millpond.policies.spill import SpillParams
from millpond.store.chain import BlockChain
from millpond.store.clock import Clock, SystemClock
from millpond.store.codec.checksum import checksum
from millpond.store.dram_arena import DramArena, SlotRef
from millpond.store.dram_blocks import DramBlocks
from millpond.store.dram_directory import Directory
from millpond.store.dram_spill import Origin, Spiller, WriteExtents
from millpond.store.held_block import Admission, DramCounts
from millpond.store.stripe import Block


@dataclass(frozen=True, slots=True)
class DramParams:
    """One host's DRAM level."""

    evict: str = "lru"
    """Eviction order: `lru`, or `s3fifo` for a level that is small against what is read."""
    spill: SpillParams = field(default_factory=SpillParams)
    """How long blocks wait for others before they are written."""
    max_pinned_ratio: float = 0.75
    """Share of the memory that loads may hold, so that new blocks find room."""


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
        directory: Directory,
        window: int,
        write: WriteExtents,
        params: DramParams | None = None,
        clock: Clock | None = None,
    ) -> None:
        params = params or DramParams()
        max_pinned = max(1, int(arena.num_slots * params.max_pinned_ratio))
        self.host = host
        self.lock = threading.Lock()
        """Guards `blocks`."""
        self.blocks = DramBlocks(
            arena, make_order(params.evict, arena.num_slots), directory, host, max_pinned
        )
        """For `TieredLoader`, which holds some of them."""
        self._spiller = Spiller(
            self.blocks,
            self.lock,
            window=window,
            write=write,
            params=params.spill,
            clock=clock or SystemClock(),
        )

    @property
    def arena(self) -> DramArena:
        """The memory."""
        return self.blocks.arena

    @property
    def counts(self) -> DramCounts:
        """What happened since the start."""
        return self.blocks.counts

    @property
    def num_blocks(self) -> int:
        """Blocks in memory."""
        with self.lock:
            return len(self.blocks)

    @property
    def num_waiting(self) -> int:
        """Blocks that are not on disk."""
        with self.lock:
            return self.blocks.num_dirty

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
        """Copy new blocks in, making room by eviction and, if that is not enough, by writing what waits.

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
        origin = Origin(chain, lineage, expiry_class)
        for index, block in enumerate(blocks, first_block):
            while self._admit(origin, index, block) is Admission.FULL:
                if not self.make_room(1, deadline_ns=deadline_ns):
                    num_done = index - first_block
                    with self.lock:
                        self.counts.refused += len(blocks) - num_done
                    return num_done
        return len(blocks)

    def take_slots(self, count: int) -> list[SlotRef]:
        """Lend slots that a rank writes new blocks into: at most `count`, as many as can be had at once.

        Each loan ends with `put_slots` or `give_back_slots`.
        """
        with self.lock:
            return self.blocks.lend(count)

    def give_back_slots(self, refs: Sequence[SlotRef]) -> None:
        """End loans; what was written is nothing.

        Raises:
            InvariantBroken: One was not lent.
        """
        with self.lock:
            for ref in refs:
                self.blocks.take_back(ref)

    def put_slots(
        self,
        chain: BlockChain,
        first_block: int,
        refs: Sequence[SlotRef],
        *,
        lineage: int = 0,
        expiry_class: int = 0,
    ) -> int:
        """Take new blocks in from where they are: slots that were lent. No byte is copied.

        Args:
            chain: Has at least the blocks put.
            first_block: Index in the chain of the first one.
            refs: Where the blocks lie, in order. All these loans end.
            lineage: 1: computed downstream of an approximate replay.
            expiry_class: `policies.retention.BlockClass`.

        Returns:
            How many were not in memory before.

        Raises:
            InvariantBroken: One was not lent.
        """
        origin = Origin(chain, lineage, expiry_class)
        num_new = 0
        for index, ref in enumerate(refs, first_block):
            name = chain.digests[index][:BLOCK_HASH_BYTES]
            content = checksum(self.arena.view(ref.slot).data)
            with self.lock:
                admission = self.blocks.admit_lent(name, ref, content, is_dirty=True, lineage=lineage)
                if admission is Admission.TAKEN:
                    self._spiller.add(origin, index)
                    num_new += 1
        return num_new

    def make_room(self, num_slots: int, *, deadline_ns: int) -> bool:
        """Write what waited longest to the pool, if need be; whether so many slots can be had now."""
        return self._spiller.make_room(num_slots, deadline_ns=deadline_ns)

    def read(self, block_hash: bytes, out: Block) -> bool:
        """Copy a block out; whether it was here, whole and undamaged. `touch` counts the use."""
        try:
            return self.blocks.read(block_hash, out)
        except ChecksumMismatch:
            with self.lock:
                self.blocks.drop_damaged(block_hash, out)
            return False

    def touch(self, chain: BlockChain) -> None:
        """Count a chain as used, tail first, and its session as active."""
        with self.lock:
            for digest in reversed(chain.digests):
                self.blocks.touch(digest[:BLOCK_HASH_BYTES])
                self._spiller.touch(digest)

    def spill_due(self, *, deadline_ns: int) -> int:
        """Write the tails whose time has come; how many blocks are on disk now that were not."""
        return self._spiller.write_due(deadline_ns=deadline_ns)

    def spill_all(self, *, deadline_ns: int) -> int:
        """Write all tails, as before the end; how many blocks are on disk now that were not."""
        return self._spiller.write_all(deadline_ns=deadline_ns)

    def close(self, *, deadline_ns: int) -> None:
        """Write all tails, leave the directory, give the memory back. Loads and loans have ended before."""
        self.spill_all(deadline_ns=deadline_ns)
        with self.lock:
            self.blocks.close()

    def check(self) -> None:
        """Check that free, held and lent slots are all slots, and that what is not on disk is in a tail.

        Raises:
            InvariantBroken: They are not.
        """
        self._spiller.check()

    def _admit(self, origin: Origin, index: int, block: Block) -> Admission:
        name = origin.chain.digests[index][:BLOCK_HASH_BYTES]
        content = checksum(block.data)
        with self.lock:
            admission = self.blocks.admit(name, block, content, is_dirty=True, lineage=origin.lineage)
            if admission is Admission.TAKEN:
                self._spiller.add(origin, index)
            return admission
