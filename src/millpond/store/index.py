"""`BlockIndex`: block hash -> extent, with longest-prefix match (kvstore 1.10, 2.12).

Open addressing in 64 tables of 8-byte entries, and one 64-byte record per extent. Both lie in lazily touched
memory that is reserved once, so growing a table moves one sixty-fourth of the entries and never the rest.

An entry keeps 45 bits of the block's hash; a record keeps the whole digest of its last block. So a look-up
that ends an extent is exact, one inside an extent is wrong once in millions of absent blocks at worst. The
index is a hint (design section 5): readers prove every block by the hashes in the record they read.
"""

from __future__ import annotations

import mmap
import struct
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from millpond.core.errors import InvariantBroken, OverloadError
from millpond.core.extents import ExtentId, StripeId, TenantId
from millpond.core.hashing import BLOCK_HASH_BYTES
from millpond.store import index_kernels as kernels
from millpond.store.index_kernels import LIVE, LOW32, Words

NUM_TABLES = 64
MAX_EXTENTS = (1 << 25) - 1
"""Extents of one index: an entry names its extent with 25 bits."""
_FIRST_CAPACITY = 1024
_RECORD_WORDS = 8
_RECORD = struct.Struct("<32sQ4xI4xHH5xBH")
"""Of `_pack`: digest, nonce, group, epoch, missing, blocks, flags."""
_APPROXIMATE = 2

_T = TypeVar("_T", bound=np.generic)


@dataclass(frozen=True, slots=True)
class ExtentEntry:
    """What the index knows of one extent."""

    extent: ExtentId
    stripe: StripeId
    first_block: int
    """Index in the chain of its first block."""
    missing: int
    """Bit j: shard j was not acknowledged."""
    approximate: bool
    """Lineage: computed downstream of an approximate replay."""
    tenant: TenantId
    access_hour: int
    """Hours, u16, of the last match. Never older than that of any block behind it in the chain."""
    num_kib: int
    """Logical size."""


@dataclass(frozen=True, slots=True)
class Insertion:
    """What became of an `insert`."""

    slot: int
    superseded: tuple[ExtentEntry, ...]


class BlockIndex:
    """The extents of one metadata shard, in memory. One thread.

    Attributes:
        num_extents: Live extents.
        num_blocks: Entries of the tables: blocks of live extents, and of dead ones until `sweep`.
    """

    def __init__(self, max_blocks: int = 1 << 28) -> None:
        """Reserve, but not use, the memory.

        Args:
            max_blocks: Bound of entries. Reserves 10 bytes of address space each, touches none.
        """
        per_table = max(int(max_blocks / NUM_TABLES * 1.25), _FIRST_CAPACITY)
        self._tables = _reserve((NUM_TABLES, per_table), np.uint64)
        self._capacity = np.full(NUM_TABLES, _FIRST_CAPACITY, np.int64)
        self._used = np.zeros(NUM_TABLES, np.int64)
        self._max_extents = min(MAX_EXTENTS, max(max_blocks, 1024))
        self._records = _reserve((self._max_extents, _RECORD_WORDS), np.uint64)
        self._covered = _reserve((self._max_extents,), np.uint8)
        self._num_slots = 0
        self._free: list[int] = []
        self._dead: list[int] = []
        self._sweeping: list[int] = []
        """Dead slots of the pass that is going on, which has done tables `[0, _swept)`."""
        self._swept = 0
        self._found = np.zeros((0, 2), np.int64)
        self.num_extents = 0

    @property
    def num_blocks(self) -> int:
        """Entries in use."""
        return int(self._used.sum())

    def match(self, hashes: bytes, window: int, hour: int) -> tuple[int, npt.NDArray[np.int64]]:
        """Find the longest prefix of a chain, and mark what was found as used in this hour.

        Args:
            hashes: 16 bytes per block, in order.
            window: E of the layout: where extents usually end. A hint for speed only.
            hour: u16.

        Returns:
            Blocks of the prefix, and [num_extents, 2] (slot, index in the chain of the extent's first
            block), valid until the next call. Each extent serves from where the one before ends.
        """
        chain = np.frombuffer(hashes, np.uint64)
        if len(self._found) < len(chain):
            self._found = np.zeros((len(chain), 2), np.int64)
        num_blocks, count = kernels.match(
            self._tables, self._capacity, self._records, chain, window, hour, self._found
        )
        return int(num_blocks), self._found[:count]

    def insert(self, entry: ExtentEntry, hashes: bytes) -> Insertion:
        """Add an extent; blocks that a longer one holds keep pointing there.

        Args:
            entry: What to remember.
            hashes: 16 bytes per block of the extent, in order; the last are the digest's first.

        Returns:
            Its slot, -1 if every block is held by an extent that is at least as long (first writer wins);
            and the extents that it made useless, which are gone.

        Raises:
            OverloadError: The index is full.
        """
        chain = np.frombuffer(hashes, np.uint64).reshape(-1, 2)
        num_blocks = entry.extent.num_blocks
        if len(chain) != num_blocks or entry.extent.digest[:BLOCK_HASH_BYTES] != hashes[-BLOCK_HASH_BYTES:]:
            raise InvariantBroken(
                f"{len(chain)} block hashes do not end in the digest of {num_blocks} blocks"
            )
        if not kernels.make_room(self._tables, self._capacity, self._used, chain):
            raise OverloadError(
                f"the block index is full: {self.num_blocks} blocks; start more metadata shards",
                code="pool.index_full",
                retry_after_s=60,
            )
        slot = self._take_slot()
        _pack(entry, self._records[slot])
        self._covered[slot] = 0
        lost = np.zeros(num_blocks, np.int64)
        taken, num_lost = kernels.assign(
            self._tables,
            self._capacity,
            self._used,
            self._records,
            self._covered,
            chain,
            np.int64(slot),
            lost,
        )
        if not taken:
            self._records[slot, 7] = 0
            self._free.append(slot)
            return Insertion(-1, ())
        superseded = tuple(self.entry(other) for other in lost[:num_lost].tolist())
        for other in lost[:num_lost].tolist():  # no entry names them: reusable at once
            self._records[other, 7] = 0
            self._free.append(other)
        self.num_extents += 1 - len(superseded)
        return Insertion(slot, superseded)

    def entry(self, slot: int) -> ExtentEntry:
        """What `insert` was given for this slot."""
        return _unpack(self._records[slot])

    def location_fields(self, slots: npt.NDArray[np.int64]) -> list[tuple[Any, ...]]:
        """Of each slot, the first fields of a message `Location`, in order."""
        rows = _RECORD.iter_unpack(self._records[slots].tobytes())
        return [
            (digest, num_blocks, epoch, group, nonce, missing, flags >> 1 & 1)
            for digest, nonce, group, epoch, missing, num_blocks, flags in rows
        ]

    def find(self, block_hash: bytes) -> int:
        """Slot of the live extent that holds a block, or -1."""
        low, high = np.frombuffer(block_hash, np.uint64)
        slot = int(kernels.find(self._tables, self._capacity, low, high))
        return slot if slot >= 0 and self._is_live(slot) else -1

    def remove(self, slot: int) -> None:
        """Forget an extent. No `match` returns it any more; `sweep` gives its memory back."""
        if not self._is_live(slot):
            return
        self._records[slot, 7] &= ~np.uint64(LIVE << 48)
        self._covered[slot] = 0
        self._dead.append(slot)
        self.num_extents -= 1

    def sweep(self) -> int:
        """Take out all entries of removed extents and reuse their slots. Returns the entries removed."""
        removed = self.sweep_tables(NUM_TABLES)  # ends the pass that is going on, if there is one
        return removed + self.sweep_tables(NUM_TABLES)

    def sweep_tables(self, num_tables: int) -> int:
        """Go on with `sweep` for so many of the 64 tables, which takes a fraction of its time."""
        if not self._sweeping:
            self._sweeping, self._dead = self._dead, []
        if not self._sweeping:
            return 0
        removed = 0
        end = min(self._swept + num_tables, NUM_TABLES)
        for table in range(self._swept, end):
            removed += int(
                kernels.sweep(self._tables, self._capacity, self._used, self._records, np.int64(table))
            )
        self._swept = end % NUM_TABLES
        if not self._swept:
            self._free += self._sweeping
            self._sweeping = []
        return removed

    def slots_before(self, hour: int, max_age_hours: int) -> npt.NDArray[np.int64]:
        """Slots of the live extents last matched more than `max_age_hours` before `hour`."""
        words = self._records[: self._num_slots, 7]
        age = (np.uint64(hour) - words) & np.uint64(0xFFFF)
        return np.flatnonzero(self._live_mask() & (age > np.uint64(max_age_hours)))

    def slots_of(self, tenant: TenantId) -> npt.NDArray[np.int64]:
        """Slots of the live extents that a tenant is charged for."""
        tenants = self._records[: self._num_slots, 6] & LOW32
        return np.flatnonzero(self._live_mask() & (tenants == np.uint64(tenant)))

    def slots(self) -> npt.NDArray[np.int64]:
        """Slots of all live extents, ascending."""
        return np.flatnonzero(self._live_mask())

    def save(self) -> dict[str, npt.NDArray[Any]]:
        """The index as arrays, for a checkpoint. Sweeps first."""
        self.sweep()
        used = [self._tables[table, : self._capacity[table]] for table in range(NUM_TABLES)]
        return {
            "capacity": self._capacity.copy(),
            "entries": np.concatenate(used),
            "records": self._records[: self._num_slots].copy(),
            "covered": self._covered[: self._num_slots].copy(),
        }

    @classmethod
    def restore(cls, arrays: dict[str, npt.NDArray[Any]], max_blocks: int = 1 << 28) -> BlockIndex:
        """Make the index that `save` wrote.

        Raises:
            OverloadError: It does not fit into `max_blocks`.
        """
        index = cls(max_blocks)
        capacity, entries = arrays["capacity"].astype(np.int64), arrays["entries"]
        if capacity.max() > index._tables.shape[1] or len(arrays["records"]) > index._max_extents:
            raise OverloadError(
                f"the saved index has more than {max_blocks} blocks", code="pool.index_full", retry_after_s=60
            )
        begin = 0
        for table in range(NUM_TABLES):
            size = int(capacity[table])
            index._tables[table, :size] = entries[begin : begin + size]
            index._used[table] = np.count_nonzero(index._tables[table, :size])
            begin += size
        index._capacity[:] = capacity
        index._num_slots = len(arrays["records"])
        index._records[: index._num_slots] = arrays["records"]
        index._covered[: index._num_slots] = arrays["covered"]
        live = index._live_mask()
        index.num_extents = int(np.count_nonzero(live))
        index._free = np.flatnonzero(~live).tolist()
        return index

    def _live_mask(self) -> npt.NDArray[np.bool_]:
        return (self._records[: self._num_slots, 7] >> np.uint64(48)) & np.uint64(LIVE) != 0

    def _is_live(self, slot: int) -> bool:
        return bool(int(self._records[slot, 7]) >> 48 & LIVE)

    def _take_slot(self) -> int:
        if not self._free and self._num_slots == self._max_extents:
            self.sweep()
        if self._free:
            return self._free.pop()
        if self._num_slots == self._max_extents:
            raise OverloadError(
                f"the block index is full: {self._max_extents} extents; start more metadata shards",
                code="pool.index_full",
                retry_after_s=60,
            )
        self._num_slots += 1
        return self._num_slots - 1


def warm_up() -> None:
    """Compile or load what a first request would otherwise wait for."""
    index = BlockIndex(1024)
    hashes = bytes(range(32))
    entry = ExtentEntry(
        ExtentId(hashes[16:] + bytes(16), 2), StripeId(0, 0, 0), 0, 0, False, TenantId(0), 0, 0
    )
    index.remove(index.insert(entry, hashes).slot)
    index.match(hashes, 1, 0)
    index.sweep()


def _reserve(shape: tuple[int, ...], dtype: type[_T]) -> npt.NDArray[_T]:
    """Zeroed memory that costs nothing before it is touched."""
    num_bytes = int(np.prod(shape)) * np.dtype(dtype).itemsize
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0)
    memory = mmap.mmap(-1, num_bytes, flags=flags)
    return np.frombuffer(memory, dtype).reshape(shape)


def _pack(entry: ExtentEntry, words: Words) -> None:
    flags = LIVE | (_APPROXIMATE if entry.approximate else 0)
    words[:4] = np.frombuffer(entry.extent.digest, np.uint64)
    words[4] = entry.stripe.nonce
    words[5] = entry.first_block | entry.stripe.group << 32
    words[6] = entry.tenant | entry.stripe.epoch << 32 | entry.missing << 48
    words[7] = (
        entry.access_hour | min(entry.num_kib, 0xFFFFFF) << 16 | entry.extent.num_blocks << 40 | flags << 48
    )


def _unpack(words: Words) -> ExtentEntry:
    nonce, place, owner, rest = (int(word) for word in words[4:])
    return ExtentEntry(
        extent=ExtentId(words[:4].tobytes(), rest >> 40 & 0xFF),
        stripe=StripeId(epoch=owner >> 32 & 0xFFFF, group=place >> 32, nonce=nonce),
        first_block=place & 0xFFFFFFFF,
        missing=owner >> 48,
        approximate=bool(rest >> 48 & _APPROXIMATE),
        tenant=TenantId(owner & 0xFFFFFFFF),
        access_hour=rest & 0xFFFF,
        num_kib=rest >> 16 & 0xFFFFFF,
    )
