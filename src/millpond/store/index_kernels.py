"""Native loops of `BlockIndex` over its tables and records.

An entry of a table: 39 bits of the hash, and slot + 1 above them; 0 where there is none. The table is chosen
by six bits of the hash's first half, the place in it by the second.
"""

from __future__ import annotations

from typing import TypeAlias

import numba
import numpy as np
import numpy.typing as npt

HASH_BITS = np.uint64(39)
HASH_MASK = np.uint64((1 << 39) - 1)
TABLE_SHIFT = np.uint64(58)
HOME_SHIFT = np.uint64(7)
LOW32 = np.uint64(0xFFFFFFFF)
_32 = np.uint64(32)
MAX_LOAD = 0.8
GROWTH = 1.125
"""Small steps keep the tables full: at most 11.3 bytes per block."""
LIVE = 1
"""Flag of a record."""

Words: TypeAlias = npt.NDArray[np.uint64]


@numba.njit(cache=True, inline="always")
def _home(bits: np.uint64, capacity: np.int64) -> np.int64:
    return np.int64((((bits >> HOME_SHIFT) & LOW32) * np.uint64(capacity)) >> _32)


@numba.njit(cache=True)
def find(tables: Words, capacity: npt.NDArray[np.int64], low: np.uint64, high: np.uint64) -> np.int64:
    """Slot of the extent that holds a block, or -1."""
    table = np.int64(low >> TABLE_SHIFT)
    size = capacity[table]
    bits = high & HASH_MASK
    at = _home(bits, size)
    while True:
        entry = tables[table, at]
        if entry == 0:
            return np.int64(-1)
        if entry & HASH_MASK == bits:
            return np.int64(entry >> HASH_BITS) - 1
        at = np.int64(at + 1 if at + 1 < size else 0)


@numba.njit(cache=True)
def _place(tables: Words, capacity: npt.NDArray[np.int64], table: np.int64, entry: np.uint64) -> None:
    size = capacity[table]
    at = _home(entry & HASH_MASK, size)
    while tables[table, at] != 0:
        at = np.int64(at + 1 if at + 1 < size else 0)
    tables[table, at] = entry


@numba.njit(cache=True)
def _grow(tables: Words, capacity: npt.NDArray[np.int64], table: np.int64, new_capacity: np.int64) -> None:
    old = tables[table, : capacity[table]].copy()
    tables[table, : capacity[table]] = 0
    capacity[table] = new_capacity
    for entry in old:
        if entry != 0:
            _place(tables, capacity, table, entry)


@numba.njit(cache=True)
def make_room(
    tables: Words, capacity: npt.NDArray[np.int64], used: npt.NDArray[np.int64], hashes: Words
) -> bool:
    """Grow the tables that an insert of these blocks could overfill; False if one is at its bound."""
    bound = np.int64(tables.shape[1])
    for index in range(hashes.shape[0]):
        table = np.int64(hashes[index, 0] >> TABLE_SHIFT)
        while used[table] + hashes.shape[0] > capacity[table] * MAX_LOAD:
            wanted = min(np.int64(capacity[table] * GROWTH) + 1, bound)
            if wanted == capacity[table]:
                return False
            _grow(tables, capacity, table, wanted)
    return True


@numba.njit(cache=True)
def _remove(tables: Words, capacity: npt.NDArray[np.int64], table: np.int64, hole: np.int64) -> None:
    """Empty one place and close the gap, so that no probe stops too early."""
    size = capacity[table]
    at = hole
    while True:
        at = np.int64(at + 1 if at + 1 < size else 0)
        entry = tables[table, at]
        if entry == 0:
            break
        home = _home(entry & HASH_MASK, size)
        distance = at - home if at >= home else at - home + size
        gap = at - hole if at >= hole else at - hole + size
        if distance >= gap:
            tables[table, hole] = entry
            hole = at
    tables[table, hole] = 0


@numba.njit(cache=True)
def assign(
    tables: Words,
    capacity: npt.NDArray[np.int64],
    used: npt.NDArray[np.int64],
    records: Words,
    covered: npt.NDArray[np.uint8],
    hashes: Words,
    slot: np.int64,
    superseded: npt.NDArray[np.int64],
) -> tuple[np.int64, np.int64]:
    """Point the blocks of extent `slot` at it, except where a longer extent holds them already.

    Returns how many blocks point at it now (`covered` counts them per extent), and how many extents lost
    their last block by it: their slots are written to `superseded`.
    """
    num_superseded = np.int64(0)
    num_blocks = np.int64(hashes.shape[0])
    taken = np.int64(0)
    for index in range(num_blocks):
        low, high = hashes[index, 0], hashes[index, 1]
        table = np.int64(low >> TABLE_SHIFT)
        size = capacity[table]
        bits = high & HASH_MASK
        at = _home(bits, size)
        while tables[table, at] != 0 and tables[table, at] & HASH_MASK != bits:
            at = np.int64(at + 1 if at + 1 < size else 0)
        entry = tables[table, at]
        if entry == 0:
            used[table] += 1
        else:
            other = np.int64(entry >> HASH_BITS) - 1
            if np.int64(records[other, 7] >> np.uint64(40)) & 0xFF >= num_blocks and covered[other] > 0:
                continue
            if covered[other] > 0:
                covered[other] -= 1
                if covered[other] == 0:
                    superseded[num_superseded] = other
                    num_superseded += 1
        tables[table, at] = (np.uint64(slot + 1) << HASH_BITS) | bits
        covered[slot] += 1
        taken += 1
    return taken, num_superseded


@numba.njit(cache=True)
def _reach(
    tables: Words,
    capacity: npt.NDArray[np.int64],
    records: Words,
    hashes: Words,
    slot: np.int64,
    position: np.int64,
    end: np.int64,
) -> np.int64:
    """How far extent `slot`, which holds block `position` and ends before block `end`, holds the chain."""
    reach = min(end, np.int64(hashes.shape[0] // 2))
    if reach == end:
        whole = records[slot, 0] == hashes[2 * end - 2] and records[slot, 1] == hashes[2 * end - 1]
    else:
        whole = find(tables, capacity, hashes[2 * reach - 2], hashes[2 * reach - 1]) == slot
    if whole:
        return reach
    # The chain leaves this extent half way (or only shares the 45 bits): go on block by block.
    at = position + 1
    while at < reach - 1 and find(tables, capacity, hashes[2 * at], hashes[2 * at + 1]) == slot:
        at += 1
    return at


@numba.njit(cache=True)
def match(
    tables: Words,
    capacity: npt.NDArray[np.int64],
    records: Words,
    hashes: Words,
    window: int,
    hour: int,
    found: npt.NDArray[np.int64],
) -> tuple[np.int64, np.int64]:
    """Longest prefix. `found[i]` = (slot, first block) of each extent, in order of the chain."""
    num_blocks = np.int64(hashes.shape[0] // 2)
    # Most chains are full windows: ask for all their last blocks first, so that the misses overlap.
    num_windows = (num_blocks + window - 1) // window
    for index in range(num_windows):
        last = min((index + 1) * window, num_blocks) - 1
        found[num_blocks + index, 0] = find(tables, capacity, hashes[2 * last], hashes[2 * last + 1])
    position = np.int64(0)
    count = np.int64(0)
    while position < num_blocks:
        index = position // window
        slot = found[num_blocks + index, 0]
        begin, end = np.int64(-1), np.int64(-1)
        if slot >= 0:
            begin = np.int64(records[slot, 5] & LOW32)
            end = begin + (np.int64(records[slot, 7] >> np.uint64(40)) & 0xFF)
        if not begin <= position < end:
            slot = find(tables, capacity, hashes[2 * position], hashes[2 * position + 1])
            if slot < 0:
                break
            begin = np.int64(records[slot, 5] & LOW32)
            end = begin + (np.int64(records[slot, 7] >> np.uint64(40)) & 0xFF)
            if not begin <= position < end:
                break
        word = records[slot, 7]
        if (word >> np.uint64(48)) & np.uint64(LIVE) == 0:
            break
        reach = _reach(tables, capacity, records, hashes, slot, position, end)
        found[count, 0] = slot
        found[count, 1] = begin
        count += 1
        records[slot, 7] = (word & ~np.uint64(0xFFFF)) | np.uint64(hour)
        position = reach
    return position, count


@numba.njit(cache=True)
def sweep(
    tables: Words,
    capacity: npt.NDArray[np.int64],
    used: npt.NDArray[np.int64],
    records: Words,
    table: np.int64,
) -> np.int64:
    """Take the entries of dead extents out of one table; returns how many."""
    removed = np.int64(0)
    at = np.int64(0)
    while at < capacity[table]:
        entry = tables[table, at]
        if entry != 0:
            slot = np.int64(entry >> HASH_BITS) - 1
            if (records[slot, 7] >> np.uint64(48)) & np.uint64(LIVE) == 0:
                _remove(tables, capacity, table, at)
                removed += 1
                continue
        at += 1
    used[table] -= removed
    return removed
