"""`SlotSink`: copies rows that the pool delivers into the slots of a load, and never a row twice."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from millpond.store.dram_arena import DramArena
from millpond.store.extent_get import GetEnd, RowsReady
from millpond.store.held_block import HeldBlock
from millpond.store.stripe import Block, copy_rows_out


class SlotSink:
    """See module.

    Args:
        arena: Has the slots.
        wanted: Blocks to fill, by index in the chain. What they have of rows is not written again.
        tell: (indices, leading rows that these blocks have now).
    """

    def __init__(
        self,
        arena: DramArena,
        wanted: Mapping[int, HeldBlock],
        tell: Callable[[Sequence[int], int], None],
    ) -> None:
        self._arena = arena
        self._wanted = wanted
        self._tell = tell
        self._spare = np.empty(0, np.uint8)
        """Takes the rows that nobody wants."""

    def on_rows(self, ready: RowsReady) -> None:
        """See `RowSink`."""
        blocks = [self._wanted.get(ready.begin_block + offset) for offset in range(ready.num_blocks)]
        begin = ready.begin_row
        # Row by row up to where the last block that has some of these rows ends, then the rest at once: an
        # earlier get that was cancelled may have cut its rows elsewhere.
        have = [held.num_rows for held in blocks if held is not None and held.num_rows < ready.end_row]
        for row in range(begin, max(have, default=begin)):
            self._copy(ready, row, row + 1, blocks)
            begin = row + 1
        if begin < ready.end_row:
            self._copy(ready, begin, ready.end_row, blocks)
        told = [index for index, held in enumerate(blocks, ready.begin_block) if held is not None]
        self._tell(told, ready.end_row)

    def on_shortened(self, num_blocks: int, reason: GetEnd) -> None:
        """See `RowSink`."""

    def _copy(self, ready: RowsReady, begin: int, end: int, blocks: Sequence[HeldBlock | None]) -> None:
        targets = [
            self._spare_block() if held is None or held.num_rows > begin else self._arena.view(held.ref.slot)
            for held in blocks
        ]
        copy_rows_out(ready.shape, ready.buffer, begin, end, targets)

    def _spare_block(self) -> Block:
        if not self._spare.nbytes:
            self._spare = np.empty(self._arena.block_bytes, np.uint8)
        return self._spare
