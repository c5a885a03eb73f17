"""`TieredLoad`: one load of a chain: what it holds, what it was told, how far it goes."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
import numpy.typing as npt

from millpond.store.chain import BlockChain, Hit
from millpond.store.dram_arena import SlotRef
from millpond.store.dram_directory import DramPlace
from millpond.store.dram_peers import PeerCall
from millpond.store.extent_get import GetResult, RowOrder, RowSink
from millpond.store.held_block import HeldBlock


class RunningGet(Protocol):
    """`PoolGet`."""

    def run(self) -> GetResult:
        """As `PoolGet.run`."""
        ...

    def cancel(self) -> None:
        """As `PoolGet.cancel`."""
        ...


class LoadPool(Protocol):
    """What loads need of a `Pool`, which may not be there yet."""

    window: int

    def match(self, chain: BlockChain, *, deadline_ns: int | None = None) -> Hit:
        """As `Pool.match`."""
        ...

    def begin_get(self, hit: Hit, sink: RowSink, *, deadline_ns: int, order: RowOrder) -> RunningGet:
        """As `Pool.begin_get`."""
        ...


@dataclass(frozen=True, slots=True)
class LoadResult:
    """How much of a load is true, and from where it came."""

    num_blocks: int
    """Leading blocks of which every row is in its slot."""
    reasons: tuple[str, ...]
    """Why not all; empty if all came. `damaged`, `absent`, `late`, `cancelled`, `lost`, `stale`."""
    from_memory: int
    """Of `num_blocks`: those that were in this host's memory, or that another load brought."""
    from_peers: int
    from_pool: int


class TieredLoad:
    """One load. Its fields are the loader's, but for the properties.

    Args:
        chain: The leading blocks that seem to be had.
        blocks: Their slots.
        lane: Counts their rows.
        hit: What the disks seem to have of them.
        places: Where the blocks are that other hosts seem to have in memory, by index.
    """

    def __init__(
        self,
        chain: BlockChain,
        blocks: Sequence[HeldBlock],
        lane: int,
        hit: Hit,
        places: dict[int, DramPlace],
    ) -> None:
        self.chain = chain
        self.blocks = tuple(blocks)
        self.lane = lane
        self.hit = hit
        self.places = places
        self.told = np.zeros(len(blocks), np.int64)
        """Per block: leading rows that can be read."""
        self.limit = len(blocks)
        """Blocks from here on are not fetched any more."""
        self.reasons: list[str] = []
        self.from_peers: set[int] = set()
        self.from_pool: set[int] = set()
        self.get: RunningGet | None = None
        self.calls: list[tuple[int, PeerCall]] = []
        self.has_matched = False
        """Whether this load has asked the metadata where its chain is on the disks."""
        self.has_asked: set[int] = set()
        """Blocks of which it has asked the directory who has them in memory."""
        self.is_approximate = False
        """Whether some block is downstream of an approximate replay, or may be: not known of what is to come
        from another host's memory."""
        self.is_here = False
        """Whether all of it was in memory when it was begun."""
        self.cut_by = ""
        """Why it has fewer blocks than were asked for: `absent`, `no_room`; empty if it has all."""
        self.is_running = False
        self.is_cancelled = False
        self.is_released = False

    @property
    def num_blocks(self) -> int:
        """Blocks that have a slot, at least one."""
        return len(self.blocks)

    def lineage_to_come(self, index: int) -> int:
        """Of a block that is not in memory: 1 if it may be approximate; 0 only if the disks say so."""
        if index in self.places:
            return 1
        parts = (part for part in self.hit.extents if part.begin <= index < part.end)
        return next((part.location.lineage for part in parts), 1)

    def lineages_on_disk(self) -> dict[int, int]:
        """Of the blocks that the disks seem to have, by index."""
        return {i: part.location.lineage for part in self.hit.extents for i in range(part.begin, part.end)}

    @property
    def slots(self) -> tuple[SlotRef, ...]:
        """Where the blocks are or will be."""
        return tuple(held.ref for held in self.blocks)


def num_had(length: int, here: Collection[int], places: Collection[int], hit: Hit) -> int:
    """Leading blocks that somebody seems to have."""
    return next(
        (
            index
            for index in range(length)
            if index >= hit.num_blocks and index not in here and index not in places
        ),
        length,
    )


def cut_hit(hit: Hit, chain: BlockChain) -> Hit:
    """The part of a hit that lies in the leading blocks of its chain."""
    end = len(chain.digests)
    parts = tuple(
        replace(part, num_blocks=min(part.end, end) - part.begin) for part in hit.extents if part.begin < end
    )
    return Hit(chain, min(hit.num_blocks, end), parts)


def rows_ready(told: npt.NDArray[np.int64], num_rows: int) -> npt.NDArray[np.int64]:
    """Per row: how many leading blocks have it.

    Args:
        told: `[blocks]`, leading rows that each has.
        num_rows: Of the layout.
    """
    in_all_before = np.minimum.accumulate(told)
    return np.searchsorted(-in_all_before, -np.arange(num_rows), side="left")
