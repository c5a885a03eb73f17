"""`DramBlocks`: which blocks a host has in memory, and which of them may leave.

A block that the disks do not have stays. Any other leaves when the room is needed: first the directory stops
naming its slot, then the slot's generation ends, so that whoever still holds the old pointer reads nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum

from millpond.core.errors import ChecksumMismatch, InvariantBroken, StaleEpoch
from millpond.policies.dram_evict import EvictionOrder
from millpond.store.dram_arena import DramArena, SlotRef
from millpond.store.dram_directory import DramDirectory, DramPlace
from millpond.store.stripe import Block


@dataclass(slots=True)
class DramCounts:
    """Blocks since the start."""

    put: int = 0
    read: int = 0
    spilled: int = 0
    """Written to the pool, those written again in a longer extent included."""
    evicted: int = 0
    refused: int = 0
    """No room: everything here waits to be written."""
    given_up: int = 0
    """Not written because the tenant may not, or damaged: gone when they leave the memory."""
    failed_spills: int = 0
    """Tries."""
    damaged: int = 0


class Admission(Enum):
    """What became of a block that came."""

    TAKEN = "taken"
    HERE = "here"
    """It was in memory already."""
    FULL = "full"
    """Nothing may leave."""


@dataclass(slots=True, eq=False)
class _Held:
    ref: SlotRef
    is_dirty: bool
    """Not on disk: may not leave."""
    is_writing: bool = False
    """On its way to the disks: its slot is being read."""


class DramBlocks:
    """See module. One thread at a time, but for `read` and `in`.

    Args:
        arena: Of this host.
        order: Of the blocks that may leave.
        directory: Of all hosts.
        host: Our name in it.
    """

    def __init__(self, arena: DramArena, order: EvictionOrder, directory: DramDirectory, host: str) -> None:
        self.arena = arena
        self.counts = DramCounts()
        self._order = order
        self._directory = directory
        self._host = host
        self._held: dict[bytes, _Held] = {}

    def __len__(self) -> int:
        """Blocks in memory."""
        return len(self._held)

    def __contains__(self, block_hash: bytes) -> bool:
        return block_hash in self._held

    @property
    def num_dirty(self) -> int:
        """Blocks that are not on disk."""
        return sum(held.is_dirty for held in self._held.values())

    @property
    def can_evict(self) -> bool:
        """Whether a block may leave."""
        return len(self._order) > 0

    def admit(self, block_hash: bytes, block: Block, *, is_dirty: bool) -> Admission:
        """Take a block in, in the place of another if need be."""
        if block_hash in self._held:
            self._order.touch(block_hash)
            return Admission.HERE
        if not self.arena.num_free and not self._evict_one():
            return Admission.FULL
        ref = self.arena.put(block_hash, block)
        if ref is None:
            raise InvariantBroken("a slot was freed and is not free")
        self._held[block_hash] = _Held(ref, is_dirty)
        self.counts.put += 1
        if not is_dirty:
            self._order.insert(block_hash)
        self._directory.publish([(block_hash, self._place(ref))])
        return Admission.TAKEN

    def touch(self, block_hash: bytes) -> None:
        """Count a use."""
        self._order.touch(block_hash)

    def read(self, block_hash: bytes, out: Block) -> bool:
        """Copy a block out, whatever happens meanwhile; whether it was here.

        Raises:
            ChecksumMismatch: It is damaged; see `drop_damaged`.
        """
        for _ in range(2):  # it may have left and come back while it was copied
            held = self._held.get(block_hash)
            if held is None:
                return False
            try:
                self.arena.read(held.ref, block_hash, out)
            except StaleEpoch:
                continue
            self.counts.read += 1
            return True
        return False

    def drop_damaged(self, block_hash: bytes, out: Block) -> None:
        """Drop a block that was found to be damaged, unless it is another by now or is being written."""
        held = self._held.get(block_hash)
        if held is None or held.is_writing:
            return
        try:
            self.arena.read(held.ref, block_hash, out)
        except ChecksumMismatch:
            self._drop(block_hash)

    def begin_write(self, block_hash: bytes) -> Block | None:
        """A block to be written, which now stays until `end_write`; None if it is not here or damaged."""
        held = self._held.get(block_hash)
        if held is None:
            return None
        if not self.arena.is_intact(held.ref):
            self._drop(block_hash)
            return None
        self._order.discard(block_hash)
        held.is_writing = True
        return self.arena.view(held.ref.slot)

    def end_write(self, block_hash: bytes, *, may_leave: bool) -> bool:
        """The writing of a block is over; whether it was dirty and is not any more.

        Args:
            block_hash: Its name; nothing happens if it is not here.
            may_leave: It is on disk, or never will be.
        """
        held = self._held.get(block_hash)
        if held is None:
            return False
        is_settled = held.is_dirty and may_leave
        if is_settled or (held.is_writing and not held.is_dirty):
            self._order.insert(block_hash)
        held.is_dirty &= not may_leave
        held.is_writing = False
        return is_settled

    def close(self) -> None:
        """Leave the directory and give the memory back."""
        self._directory.leave(self._host, self.arena.epoch)
        self._held.clear()
        self.arena.close()

    def check(self) -> None:
        """Check that free and held slots are all slots, and that all held blocks are dirty or may leave.

        Raises:
            InvariantBroken: They do not.
        """
        self.arena.check([held.ref for held in self._held.values()])
        if self.num_dirty + len(self._order) != len(self._held):
            raise InvariantBroken(
                f"{len(self._held)} blocks: {self.num_dirty} dirty, {len(self._order)} may leave"
            )

    def dirty(self) -> Iterator[bytes]:
        """Blocks that are not on disk."""
        return (block_hash for block_hash, held in self._held.items() if held.is_dirty)

    def _evict_one(self) -> bool:
        block_hash = self._order.pop()
        if block_hash is None:
            return False
        self._remove(block_hash)
        self.counts.evicted += 1
        return True

    def _drop(self, block_hash: bytes) -> None:
        self.counts.damaged += 1
        self._order.discard(block_hash)
        self._remove(block_hash)

    def _remove(self, block_hash: bytes) -> None:
        held = self._held.pop(block_hash)
        # First nobody is sent here any more, then the slot may have another block.
        self._directory.swap(block_hash, self._place(held.ref), None)
        self.arena.free(held.ref)

    def _place(self, ref: SlotRef) -> DramPlace:
        return DramPlace(self._host, self.arena.epoch, ref)
