"""`DramArena`: slots of one block each in one file of the host's shared memory (interfaces A.6).

    page 0       magic, format, layout fingerprint, host epoch, sizes
    table        per slot: generation u64, checksum u64, block hash 16 B, state u32,
                 lineage u32
    lanes        per lane: number u32, then one counter u32 per row of the layout
    slots        one full block each, at multiples of 4 KiB

Whoever has the file mapped may read a slot without asking: the generation before and after the copy says
whether the slot still held the block, and the checksum whether the bytes are those that were written. The
generation ends before a slot is used again, so a pointer that outlived its block never reads another.

A slot that is being filled is *reserved*: only who was given it knows which of its rows can be read, for
example from the lane of its load. It becomes readable for everybody when it is *sealed*.
"""

from __future__ import annotations

import mmap
import os
import struct
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path

import numpy as np

from millpond.core.errors import ChecksumMismatch, ConfigError, DataError, InvariantBroken, StaleEpoch
from millpond.core.hashing import BLOCK_HASH_BYTES
from millpond.core.kv_layout import KvLayout
from millpond.core.units import KIB, align_up
from millpond.store.codec.checksum import checksum
from millpond.store.stripe import Block

MAGIC = b"MPDA"
FORMAT = 2
MAX_SLOTS = 0xFFFFFFFF
NUM_LANES = 64
"""Loads that can be counted at once."""
_LANE_NUMBERS = 1 << 32
_PAGE_BYTES = 4 * KIB
_HEADER = struct.Struct("<4sHH32sQIQQIIQ")
"""Magic, format, 0, layout fingerprint, host epoch, slots, block bytes, slot bytes, lanes, rows, begin of
the slots."""
_ENTRY = np.dtype(
    [
        ("generation", "<u8"),
        ("checksum", "<u8"),
        ("hash", f"V{BLOCK_HASH_BYTES}"),
        ("state", "<u4"),
        ("lineage", "<u4"),
    ]
)
_NO_NAME = bytes(BLOCK_HASH_BYTES)


class SlotState(IntEnum):
    """Whose a slot is."""

    FREE = 0
    RESERVED = 1
    """Being filled."""
    SEALED = 2
    """Holds a whole block."""


@dataclass(frozen=True, slots=True)
class SlotRef:
    """A block in a slot, as long as the slot has this generation."""

    slot: int
    generation: int


class DramArena:
    """The mapped file. Its maker owns slots and lanes; others read, and fill slots that they were given.

    One thread at a time takes and frees slots and lanes; any thread of any process reads.
    """

    def __init__(self, memory: mmap.mmap, path: Path, *, is_owner: bool) -> None:
        """Use `create` or `attach`.

        Raises:
            DataError: The memory is no arena.
        """
        try:
            fields = _HEADER.unpack_from(memory)
        except struct.error as error:
            raise DataError(f"{path} is too short for an arena", code="dram.arena") from error
        magic, found, _, self.fingerprint, self.epoch, self.num_slots, self.block_bytes = fields[:7]
        stride, num_lanes, self.num_rows, begin = fields[7:]
        if (magic, found) != (MAGIC, FORMAT) or len(memory) < begin + self.num_slots * stride:
            raise DataError(f"{path} is no arena of this version", code="dram.arena")
        self.path = path
        self._is_owner = is_owner
        self._memory = memory
        self._table = np.frombuffer(memory, _ENTRY, self.num_slots, _PAGE_BYTES)
        lanes_begin = _PAGE_BYTES + align_up(self._table.nbytes, _PAGE_BYTES)
        lanes = np.frombuffer(memory, "<u4", num_lanes * (1 + self.num_rows), lanes_begin)
        self._lanes = lanes.reshape(num_lanes, 1 + self.num_rows)
        self._slots = np.frombuffer(memory, np.uint8, self.num_slots * stride, begin).reshape(-1, stride)
        # First freed, first used: whoever still writes into a slot that was taken from it has time to stop.
        self._free = deque(range(self.num_slots if is_owner else 0))
        self._free_lanes = deque(range(1, 1 + num_lanes) if is_owner else ())

    @classmethod
    def create(cls, path: Path, num_bytes: int, layout: KvLayout, epoch: int) -> DramArena:
        """Make the file and touch every page of it.

        Args:
            path: In a file system of memory; a file of an earlier life is replaced.
            num_bytes: What it may take, header and tables included.
            layout: Of the blocks.
            epoch: Host epoch, larger than that of any earlier life.

        Raises:
            ConfigError: Not even one slot fits, or the memory cannot be had.
        """
        num_rows = len(layout.rows)
        stride = align_up(layout.block_bytes, _PAGE_BYTES)
        lane_bytes = align_up(NUM_LANES * (1 + num_rows) * 4, _PAGE_BYTES)
        num_slots = max(0, num_bytes - 2 * _PAGE_BYTES - lane_bytes) // (stride + _ENTRY.itemsize)
        if not 0 < num_slots <= MAX_SLOTS:
            raise ConfigError(
                f"{num_bytes} bytes of DRAM hold {num_slots} blocks of {layout.block_bytes} bytes"
            )
        begin = _PAGE_BYTES + align_up(num_slots * _ENTRY.itemsize, _PAGE_BYTES) + lane_bytes
        size = begin + num_slots * stride
        sizes = (num_slots, layout.block_bytes, stride, NUM_LANES, num_rows, begin)
        header = _HEADER.pack(MAGIC, FORMAT, 0, layout.fingerprint, epoch, *sizes)
        try:
            path.unlink(missing_ok=True)
            file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
            try:
                os.posix_fallocate(file, 0, size)  # fails here, and not with SIGBUS at the first use
                memory = mmap.mmap(file, size)
            finally:
                os.close(file)
        except OSError as error:
            path.unlink(missing_ok=True)
            raise ConfigError(f"{size} bytes of DRAM at {path}: {error.strerror}") from error
        memory[: len(header)] = header
        np.frombuffer(memory, np.uint8)[::_PAGE_BYTES] |= np.uint8(0)
        return cls(memory, path, is_owner=True)

    @classmethod
    def attach(cls, path: Path, *, writable: bool = False) -> DramArena:
        """Map the arena of another process to read it, or to fill slots that its owner lends.

        Raises:
            DataError: It is no arena.
        """
        try:
            file = os.open(path, os.O_RDWR if writable else os.O_RDONLY)
            try:
                protection = mmap.PROT_READ | mmap.PROT_WRITE if writable else mmap.PROT_READ
                memory = mmap.mmap(file, 0, prot=protection)
            finally:
                os.close(file)
        except (OSError, ValueError) as error:
            raise DataError(f"no arena at {path}: {error}", code="dram.arena") from error
        return cls(memory, path, is_owner=False)

    @property
    def num_free(self) -> int:
        """Slots without a block. For the owner."""
        return len(self._free)

    @property
    def num_free_lanes(self) -> int:
        """Lanes of no load. For the owner."""
        return len(self._free_lanes)

    # --- for everybody ----------------------------------------------------------------------------

    def view(self, slot: int) -> Block:
        """The bytes of a slot, `[block bytes]`. For its owner, and for who was given it."""
        return self._slots[slot, : self.block_bytes]

    @property
    def slots(self) -> Block:
        """The bytes of all slots, `[slots, block bytes]`, for copies of a row of many blocks at once."""
        return self._slots[:, : self.block_bytes]

    def is_filling_or_holds(self, ref: SlotRef, block_hash: bytes) -> bool:
        """Whether the slot still is this block's, sealed or being filled.

        If it is before and after a copy of rows that were said to be in place, the copy is the block's.
        """
        if not 0 <= ref.slot < self.num_slots:
            return False
        entry = self._table[ref.slot]
        return int(entry["generation"]) == ref.generation and entry["hash"].tobytes() == block_hash

    def rows_ready(self, lane: int, row: int) -> int:
        """How many leading blocks of a load have this row in its slot; grows until the lane is given back.

        0 if the lane is another load's by now.
        """
        counters = self._lanes[lane % len(self._lanes)]
        count = int(counters[1 + row])
        return count if int(counters[0]) == lane else 0

    def read(self, ref: SlotRef, block_hash: bytes, out: Block) -> int:
        """Copy a sealed block out and prove it.

        Args:
            ref: Where it was when somebody looked.
            block_hash: Its name.
            out: `[block bytes]`.

        Returns:
            Its checksum.

        Raises:
            StaleEpoch: The slot holds another block by now; `out` is garbage.
            ChecksumMismatch: The bytes are not those that were written.
        """
        if not self._is_sealed(ref, block_hash):
            raise StaleEpoch("the slot holds another block", code="dram.stale")
        expected = int(self._table[ref.slot]["checksum"])
        out[:] = self.view(ref.slot)
        if not self._is_sealed(ref, block_hash):
            raise StaleEpoch("the slot was reused while it was read", code="dram.stale")
        found = checksum(out.data)
        if found != expected:
            raise ChecksumMismatch("a block in memory has changed", code="dram.checksum")
        return found

    def lineage(self, ref: SlotRef) -> int:
        """Of the block in a sealed slot, as told to `seal`. To be asked before what proves the slot."""
        return int(self._table[ref.slot]["lineage"]) if 0 <= ref.slot < self.num_slots else 0

    def close(self) -> None:
        """Unmap; the owner removes the file too. Views must not be used any more."""
        if self._is_owner:
            self.path.unlink(missing_ok=True)
        self._table = np.empty(0, _ENTRY)
        self._lanes = np.empty((0, 1), np.uint32)
        self._slots = np.empty((0, 1), np.uint8)
        try:
            self._memory.close()
        except BufferError:
            return  # a view is still held somewhere: the pages go with it

    # --- for the owner ----------------------------------------------------------------------------

    def reserve(self, block_hash: bytes = _NO_NAME) -> SlotRef | None:
        """Take a free slot to be filled; None if there is none.

        Args:
            block_hash: What will be in it, if that is known.
        """
        if not self._free:
            return None
        slot = self._free.popleft()
        entry = self._table[slot]
        entry["hash"] = np.void(block_hash)
        entry["state"] = SlotState.RESERVED
        return SlotRef(slot, int(entry["generation"]))

    def seal(self, ref: SlotRef, block_hash: bytes, content: int, lineage: int = 0) -> None:
        """The bytes of a reserved slot are complete.

        Args:
            ref: The slot.
            block_hash: Its block.
            content: `checksum` of its bytes.
            lineage: 1: computed downstream of an approximate replay.

        Raises:
            InvariantBroken: It is not reserved.
        """
        entry = self._owned(ref, SlotState.RESERVED)
        entry["checksum"] = content
        entry["lineage"] = lineage
        entry["hash"] = np.void(block_hash)
        entry["state"] = SlotState.SEALED

    def unseal(self, ref: SlotRef) -> None:
        """The bytes of a sealed slot are damaged: they are to be filled in again.

        Raises:
            InvariantBroken: It is not sealed.
        """
        self._owned(ref, SlotState.SEALED)["state"] = SlotState.RESERVED

    def is_intact(self, ref: SlotRef) -> bool:
        """Whether the bytes of a sealed slot are those that were sealed."""
        return checksum(self.view(ref.slot).data) == int(self._table[ref.slot]["checksum"])

    def free(self, ref: SlotRef) -> None:
        """End a block: from now on its pointer reads nothing.

        Raises:
            InvariantBroken: It had ended.
        """
        entry = self._table[ref.slot]
        if int(entry["generation"]) != ref.generation or int(entry["state"]) == SlotState.FREE:
            raise InvariantBroken(f"slot {ref.slot} is freed twice")
        entry["generation"] = ref.generation + 1
        entry["state"] = SlotState.FREE
        self._free.append(ref.slot)

    def take_lane(self) -> int | None:
        """A lane with all counters zero; None if there is none."""
        if not self._free_lanes:
            return None
        lane = self._free_lanes.popleft()
        counters = self._lanes[lane % len(self._lanes)]
        counters[1:] = 0
        counters[0] = lane
        return lane

    def count_ready(self, lane: int, counts: Sequence[int] | np.ndarray) -> None:
        """Set the counters of a lane, after the bytes are in place.

        Args:
            lane: Taken before.
            counts: Per row: leading blocks that have it.
        """
        self._lanes[lane % len(self._lanes), 1:] = counts

    def give_back_lane(self, lane: int) -> None:
        """End a lane: from now on its number counts nothing."""
        self._lanes[lane % len(self._lanes), 0] = 0
        self._free_lanes.append((lane + len(self._lanes)) % _LANE_NUMBERS or len(self._lanes))

    def check(self, used: Sequence[SlotRef]) -> None:
        """Check that free and used slots are all slots, once each, with the generations of the table.

        Args:
            used: Slots that the owner has taken.

        Raises:
            InvariantBroken: They are not.
        """
        slots = sorted([*self._free, *(ref.slot for ref in used)])
        if slots != list(range(self.num_slots)):
            raise InvariantBroken(f"{len(self._free)} free + {len(used)} used of {self.num_slots} slots")
        for ref in used:
            if int(self._table[ref.slot]["generation"]) != ref.generation:
                raise InvariantBroken(f"slot {ref.slot} has another generation than its block")
        if any(int(self._table[slot]["state"]) != SlotState.FREE for slot in self._free):
            raise InvariantBroken("a free slot is not marked as free")

    def _is_sealed(self, ref: SlotRef, block_hash: bytes) -> bool:
        return (
            self.is_filling_or_holds(ref, block_hash)
            and int(self._table[ref.slot]["state"]) == SlotState.SEALED
        )

    def _owned(self, ref: SlotRef, state: SlotState) -> np.void:
        entry = self._table[ref.slot]
        if int(entry["generation"]) != ref.generation or int(entry["state"]) != state:
            raise InvariantBroken(f"slot {ref.slot} is not {state.name.lower()}")
        return entry
