"""Block memory of one DP rank.

A block is one contiguous range of bytes, its rows in layer order, so that a (block, row) piece can be sent
or received in place. Inside a row: keys [kv head, head dim, 128 tokens], then values [kv head, 128 tokens,
head dim]. Keys lie token-innermost because scores of a block then vectorise over tokens.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from millpond.core.errors import InvariantBroken
from millpond.core.ids import BlockId
from millpond.core.units import BLOCK_TOKENS
from millpond.engine.llama_config import LlamaConfig
from millpond.engine.memory import llama_kv_layout, plan_memory
from millpond.engine.swap.methods import CopyMethod

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


class KvTensors:
    """Keys and values of `num_blocks` blocks; block 0 is the null block and exists but is never used."""

    def __init__(self, config: LlamaConfig, dtype: str, memory_bytes: int, device: torch.device) -> None:
        """Allocate and touch every page, so that no step pays for fresh pages.

        Args:
            config: The decoder.
            dtype: Key of `DTYPES`.
            memory_bytes: Upper limit, null block included.
            device: Where the blocks live.

        Raises:
            ConfigError: Not even one usable block fits.
        """
        self.layout = llama_kv_layout(config, dtype)
        self.num_blocks = plan_memory(self.layout, memory_bytes, max_num_seqs=0).num_blocks
        shape = (self.num_blocks + 1, self.layout.block_bytes)
        self.memory = torch.empty(shape, dtype=torch.uint8, device=device)
        self.memory.zero_()
        # uniform_layout: every row and part has the same size
        self.row_bytes = self.layout.rows[0].num_bytes
        part_bytes = self.row_bytes // 2
        self._typed = self.memory.view(DTYPES[dtype])
        self._heads = (config.num_kv_heads, config.head_dim)
        self._part_items = part_bytes // self._typed.element_size()
        self._host = self.memory.numpy().data.cast("B") if device.type == "cpu" else None

    def keys(self, layer: int) -> torch.Tensor:
        """Keys of a layer, a view [blocks, kv heads, head dim, 128]."""
        begin = 2 * layer * self._part_items
        part = self._typed[:, begin : begin + self._part_items]
        return part.unflatten(1, (*self._heads, BLOCK_TOKENS))

    def values(self, layer: int) -> torch.Tensor:
        """Values of a layer, a view [blocks, kv heads, 128, head dim]."""
        begin = (2 * layer + 1) * self._part_items
        part = self._typed[:, begin : begin + self._part_items]
        return part.unflatten(1, (self._heads[0], BLOCK_TOKENS, self._heads[1]))

    def _range(self, block: BlockId, row: int) -> tuple[int, int]:
        if not 0 < block <= self.num_blocks or not 0 <= row < len(self.layout.rows):
            raise InvariantBroken(f"block {block} row {row} is outside this rank's memory")
        return row * self.row_bytes, (row + 1) * self.row_bytes

    def read_row(self, block: BlockId, row: int) -> memoryview:
        """Bytes of one row; on a CPU the memory itself, elsewhere a copy."""
        begin, end = self._range(block, row)
        if self._host is not None:
            at = block * self.layout.block_bytes
            return self._host[at + begin : at + end].toreadonly()
        return self.memory[block, begin:end].cpu().numpy().data

    def write_row(self, block: BlockId, row: int, data: memoryview) -> None:
        """Replace one row; `data` has exactly `row_bytes` bytes."""
        begin, end = self._range(block, row)
        if data.nbytes != self.row_bytes:
            raise InvariantBroken(f"row of {data.nbytes} bytes, expected {self.row_bytes}")
        if self._host is not None:
            at = block * self.layout.block_bytes
            self._host[at + begin : at + end] = data.cast("B")
        else:
            self.memory[block, begin:end] = torch.frombuffer(bytearray(data), dtype=torch.uint8).to(
                self.memory.device
            )

    def write_rows(
        self,
        blocks: Sequence[BlockId],
        row: int,
        source: memoryview,
        items: Sequence[int],
        method: CopyMethod,
    ) -> None:
        """Replace one row of several blocks; see `core.ports.Engine.write_rows`."""
        if not all(0 < block <= self.num_blocks for block in blocks):
            raise InvariantBroken(f"a block of {list(blocks)} is outside this rank's memory")
        if self._host is None:
            for block, item in zip(blocks, items, strict=True):
                self.write_row(block, row, memoryview(np.asarray(source)[item]))
            return
        begin, end = row * self.row_bytes, (row + 1) * self.row_bytes
        target = self.memory.numpy()[:, begin:end]
        method.copy(np.asarray(source), np.asarray(items, np.int64), target, np.asarray(blocks, np.int64))
