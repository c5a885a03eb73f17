"""Blocks of one rank: who owns which, and the free order."""

from __future__ import annotations

from collections import deque

from millpond.core.errors import InvariantBroken
from millpond.core.ids import BlockId


class BlockPool:
    """Fixed number of blocks with adjacent ids; 0 is the null block and in no pool.

    Every block is free or has exactly one owner. Free order is first freed, first handed out, so that a
    late reader of a freed block is found out as rarely as possible by chance and always by its checksum.
    """

    def __init__(self, num_blocks: int, first: int = 1) -> None:
        self.num_blocks = num_blocks
        self._free: deque[BlockId] = deque(BlockId(first + i) for i in range(num_blocks))
        self._owner_by_block: dict[BlockId, object] = {}

    @property
    def num_free(self) -> int:
        """Blocks nobody owns."""
        return len(self._free)

    def take(self, num_blocks: int, owner: object) -> list[BlockId]:
        """Hand out blocks.

        Raises:
            InvariantBroken: More than are free; callers ask `KvAllocator.fits` first.
        """
        if num_blocks > len(self._free):
            raise InvariantBroken(f"{num_blocks} blocks asked for, {len(self._free)} free")
        blocks = [self._free.popleft() for _ in range(num_blocks)]
        for block in blocks:
            self._owner_by_block[block] = owner
        return blocks

    def give_back(self, blocks: list[BlockId], owner: object) -> None:
        """Return blocks that `owner` owns.

        Raises:
            InvariantBroken: A block is free already or belongs to somebody else.
        """
        for block in blocks:
            if self._owner_by_block.get(block) != owner:
                raise InvariantBroken(
                    f"block {block} returned by {owner}, owned by {self._owner_by_block.get(block)}"
                )
        for block in blocks:
            del self._owner_by_block[block]
            self._free.append(block)

    def check(self) -> list[str]:
        """Return violated laws: free + owned = total, nothing twice."""
        problems: list[str] = []
        if len(self._free) + len(self._owner_by_block) != self.num_blocks:
            problems.append(
                f"{len(self._free)} free + {len(self._owner_by_block)} owned != {self.num_blocks} blocks"
            )
        if len(set(self._free)) != len(self._free):
            problems.append("a block is twice on the free list")
        if not self._owner_by_block.keys().isdisjoint(self._free):
            problems.append("a block is free and owned")
        return problems
