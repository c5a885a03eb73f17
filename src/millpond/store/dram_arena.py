"""`DramArena`: slots of one block each in one file of the host's shared memory (interfaces A.6).

    page 0       magic, format, layout fingerprint, host epoch, number of slots, where the slots begin
    table        per slot: generation u64, checksum u64, block hash 16 B
    slots        one full block each, at multiples of 4 KiB

Whoever has the file mapped may read a slot without asking: the generation before and after the copy says
whether the slot still held the block, and the checksum whether the bytes are those that were written. The
generation ends before a slot is used again, so a pointer that outlived its block never reads another.
"""

from __future__ import annotations

import mmap
import os
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from millpond.core.errors import ChecksumMismatch, ConfigError, DataError, InvariantBroken, StaleEpoch
from millpond.core.hashing import BLOCK_HASH_BYTES
from millpond.core.units import KIB, align_up
from millpond.store.codec.checksum import checksum
from millpond.store.stripe import Block

MAGIC = b"MPDA"
FORMAT = 1
MAX_SLOTS = 0xFFFFFFFF
_PAGE_BYTES = 4 * KIB
_HEADER = struct.Struct("<4sHH32sQIIQQ")
"""Magic, format, 0, layout fingerprint, host epoch, slots, block bytes, slot bytes, begin of the slots."""
_ENTRY = np.dtype([("generation", "<u8"), ("checksum", "<u8"), ("hash", f"V{BLOCK_HASH_BYTES}")])


@dataclass(frozen=True, slots=True)
class SlotRef:
    """A block in a slot, as long as the slot has this generation."""

    slot: int
    generation: int


class DramArena:
    """The mapped file. Its maker owns the slots; others only read.

    One thread at a time takes and frees slots; any thread of any process reads.
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
        magic, found, _, self.fingerprint, self.epoch, self.num_slots, self.block_bytes, stride, begin = (
            fields
        )
        if (magic, found) != (MAGIC, FORMAT) or len(memory) < begin + self.num_slots * stride:
            raise DataError(f"{path} is no arena of this version", code="dram.arena")
        self.path = path
        self._is_owner = is_owner
        self._memory = memory
        self._table = np.frombuffer(memory, _ENTRY, self.num_slots, _PAGE_BYTES)
        self._slots = np.frombuffer(memory, np.uint8, self.num_slots * stride, begin).reshape(-1, stride)
        self._free = list(range(self.num_slots - 1, -1, -1)) if is_owner else []

    @classmethod
    def create(
        cls, path: Path, num_bytes: int, block_bytes: int, fingerprint: bytes, epoch: int
    ) -> DramArena:
        """Make the file and touch every page of it.

        Args:
            path: In a file system of memory; a file of an earlier life is replaced.
            num_bytes: What it may take, header and table included.
            block_bytes: Of one block.
            fingerprint: 32 bytes, of the layout.
            epoch: Host epoch, larger than that of any earlier life.

        Raises:
            ConfigError: Not even one slot fits, or the memory cannot be had.
        """
        stride = align_up(block_bytes, _PAGE_BYTES)
        num_slots = max(0, num_bytes - 2 * _PAGE_BYTES) // (stride + _ENTRY.itemsize)
        if not 0 < num_slots <= MAX_SLOTS:
            raise ConfigError(f"{num_bytes} bytes of DRAM hold {num_slots} blocks of {block_bytes} bytes")
        begin = _PAGE_BYTES + align_up(num_slots * _ENTRY.itemsize, _PAGE_BYTES)
        size = begin + num_slots * stride
        header = _HEADER.pack(MAGIC, FORMAT, 0, fingerprint, epoch, num_slots, block_bytes, stride, begin)
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
    def attach(cls, path: Path) -> DramArena:
        """Map the arena of another process to read it.

        Raises:
            DataError: It is no arena.
        """
        try:
            file = os.open(path, os.O_RDONLY)
            try:
                memory = mmap.mmap(file, 0, prot=mmap.PROT_READ)
            finally:
                os.close(file)
        except (OSError, ValueError) as error:
            raise DataError(f"no arena at {path}: {error}", code="dram.arena") from error
        return cls(memory, path, is_owner=False)

    @property
    def num_free(self) -> int:
        """Slots without a block."""
        return len(self._free)

    def view(self, slot: int) -> Block:
        """The bytes of a slot, `[block bytes]`. For the owner, who knows that it stays."""
        return self._slots[slot, : self.block_bytes]

    def put(self, block_hash: bytes, block: Block) -> SlotRef | None:
        """Copy a block into a free slot; None if there is none."""
        if not self._free:
            return None
        slot = self._free.pop()
        self.view(slot)[:] = block
        entry = self._table[slot]
        entry["checksum"] = checksum(block.data)
        entry["hash"] = np.void(block_hash)
        return SlotRef(slot, int(entry["generation"]))

    def is_intact(self, ref: SlotRef) -> bool:
        """Whether the bytes of a slot are those that were written. For the owner."""
        return checksum(self.view(ref.slot).data) == int(self._table[ref.slot]["checksum"])

    def free(self, ref: SlotRef) -> None:
        """End a block: from now on its pointer reads nothing.

        Raises:
            InvariantBroken: It had ended.
        """
        if int(self._table[ref.slot]["generation"]) != ref.generation:
            raise InvariantBroken(f"slot {ref.slot} is freed twice")
        self._table[ref.slot]["generation"] = ref.generation + 1
        self._free.append(ref.slot)

    def read(self, ref: SlotRef, block_hash: bytes, out: Block) -> int:
        """Copy a block out and prove it.

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
        if not 0 <= ref.slot < self.num_slots:
            raise StaleEpoch(f"no slot {ref.slot}", code="dram.stale")
        entry = self._table[ref.slot]
        wanted = (ref.generation, block_hash)
        if (int(entry["generation"]), entry["hash"].tobytes()) != wanted:
            raise StaleEpoch("the slot holds another block", code="dram.stale")
        expected = int(entry["checksum"])
        out[:] = self.view(ref.slot)
        if (int(entry["generation"]), entry["hash"].tobytes()) != wanted:
            raise StaleEpoch("the slot was reused while it was read", code="dram.stale")
        found = checksum(out.data)
        if found != expected:
            raise ChecksumMismatch("a block in memory has changed", code="dram.checksum")
        return found

    def close(self) -> None:
        """Unmap; the owner removes the file too. Views must not be used any more."""
        if self._is_owner:
            self.path.unlink(missing_ok=True)
        self._table = np.empty(0, _ENTRY)
        self._slots = np.empty((0, 1), np.uint8)
        try:
            self._memory.close()
        except BufferError:
            return  # a view is still held somewhere: the pages go with it

    def check(self, used: Sequence[SlotRef]) -> None:
        """Check that free and used slots are all slots, once each, and the generations those of the table.

        Raises:
            InvariantBroken: They are not.
        """
        slots = sorted([*self._free, *(ref.slot for ref in used)])
        if slots != list(range(self.num_slots)):
            raise InvariantBroken(f"{len(self._free)} free + {len(used)} used of {self.num_slots} slots")
        for ref in used:
            if int(self._table[ref.slot]["generation"]) != ref.generation:
                raise InvariantBroken(f"slot {ref.slot} has another generation than its block")
