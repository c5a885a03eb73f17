"""`HeldBlock`: what a host's memory knows of one block, and what it counts of all."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from millpond.store.dram_arena import SlotRef


@dataclass(slots=True)
class DramCounts:
    """Blocks since the start."""

    put: int = 0
    """Taken in, by whatever way."""
    read: int = 0
    spilled: int = 0
    """Written to the pool, those written again in a longer extent included."""
    evicted: int = 0
    refused: int = 0
    """No room: everything here waits to be written or is held by loads."""
    given_up: int = 0
    """Not written because the tenant may not: gone when they leave the memory."""
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
class HeldBlock:
    """A block in a slot, or one that is to come."""

    name: bytes
    """Its 16-byte hash."""
    ref: SlotRef
    is_whole: bool = False
    is_dirty: bool = False
    """Not on disk: may not leave."""
    is_writing: bool = False
    """On its way to the disks: its slot is being read."""
    lineage: int = 0
    """1: computed downstream of an approximate replay. Of a block that is to come: 1 if it may be."""
    num_pins: int = 0
    """Loads that hold it."""
    num_rows: int = 0
    """Leading rows that a load which still holds it may have been told: their bytes do not change."""
