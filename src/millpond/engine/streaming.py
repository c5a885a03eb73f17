"""Sequences that the block memory cannot hold: they live in home blocks, and pass through it layer by layer.

    before layer l   row l of the blocks with earlier tokens   home -> staging
    layer l          reads and writes staging
    after layer l    row l of the blocks that it wrote         staging -> home

So home is right whenever no step runs; rows are swapped in and handed off there as of any other block. The
copies run in the engine's thread: on a CPU a step of 256 tokens after 60 blocks spends one fiftieth of its
time on them. A device would want them one layer ahead, beside the computation, and twice the staging.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from millpond.core.ids import BlockId
from millpond.core.units import BLOCK_TOKENS, num_blocks_for
from millpond.engine.kv_tensors import KvTensors
from millpond.engine.swap.methods import CopyMethod


class StreamedSpan:
    """Tokens `[begin, end)` of a streamed sequence, in one step.

    Args:
        kv: Block memory and home blocks.
        method: How rows are copied.
        table: The step's table of this span, [blocks], int32; changed before each layer.
        blocks: Home blocks of the sequence.
        staging: Its blocks with a place for one row of each home block.
        begin: First token.
        end: One past the last.
    """

    def __init__(
        self,
        kv: KvTensors,
        method: CopyMethod,
        table: torch.Tensor,
        blocks: Sequence[BlockId],
        staging: Sequence[BlockId],
        begin: int,
        end: int,
    ) -> None:
        num_blocks, num_rows = num_blocks_for(end), len(kv.layout.rows)
        places = kv.first_rows(staging)[:, None] + np.arange(num_rows)
        self._places = places.reshape(-1)[:num_blocks]
        self._blocks = np.asarray(blocks[:num_blocks], np.int64)
        self._kv, self._method, self._table = kv, method, table[:num_blocks]
        self._num_before = num_blocks_for(begin)
        self._first_written = begin // BLOCK_TOKENS

    def bring(self, layer: int) -> None:
        """Make room for a layer's rows: those of earlier tokens are there afterwards."""
        count = self._num_before
        self._kv.fetch(self._blocks[:count], layer, self._places[:count], self._method)
        # A table says where row 0 lies, and layers add their own number to it.
        self._table.copy_(torch.from_numpy(self._places - layer))

    def take(self, layer: int) -> None:
        """Take home what the layer wrote."""
        first = self._first_written
        self._kv.keep(self._places[first:], self._blocks[first:], layer, self._method)
