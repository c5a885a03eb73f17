"""Block memory of one DP rank.

A block is one contiguous range of bytes, its rows in layer order, so that a (block, row) piece can be sent
or received in place. Inside a row: keys [kv head, head dim, 128 tokens], then values [kv head, 128 tokens,
head dim]. Keys lie token-innermost because scores of a block then vectorise over tokens.

All rows have one size, so the memory is a list of rows too: row r of block b is number b x rows + r. Layers
address it so, which lets any row of it hold any layer of a streamed sequence (`streaming`). Such sequences
live in home blocks: the same bytes in host memory, which layers cannot compute on.
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
from millpond.engine.swap.methods import CopyMethod, Items

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


class KvTensors:
    """Keys and values of `num_blocks` blocks; block 0 is the null block and exists but is never used.

    Attributes:
        keys: [rows of all blocks, kv heads, head dim, 128], a view.
        values: [rows of all blocks, kv heads, 128, head dim], a view.
    """

    def __init__(
        self,
        config: LlamaConfig,
        dtype: str,
        memory_bytes: int,
        device: torch.device,
        home_bytes: int = 0,
    ) -> None:
        """Allocate and touch every page, so that no step pays for fresh pages; home blocks pay at first use.

        Args:
            config: The decoder.
            dtype: Key of `DTYPES`.
            memory_bytes: Upper limit, null block included.
            device: Where the blocks live.
            home_bytes: Upper limit of the home blocks.

        Raises:
            ConfigError: Not even one usable block fits.
        """
        self.layout = llama_kv_layout(config, dtype)
        self.num_blocks = plan_memory(self.layout, memory_bytes, max_num_seqs=0).num_blocks
        self.num_home_blocks = home_bytes // self.layout.block_bytes
        shape = (self.num_blocks + 1, self.layout.block_bytes)
        self.memory = torch.empty(shape, dtype=torch.uint8, device=device)
        self.memory.zero_()
        home = (self.num_home_blocks, self.layout.block_bytes)
        is_pinned = device.type == "cuda" and self.num_home_blocks > 0
        self._home = torch.empty(home, dtype=torch.uint8, pin_memory=is_pinned)
        # uniform_layout: every row and part has the same size
        self.row_bytes = self.layout.rows[0].num_bytes
        self._rows = self.memory.view(-1, self.row_bytes)
        keys, values = self._rows.view(DTYPES[dtype]).chunk(2, dim=1)
        self.keys = keys.unflatten(1, (config.num_kv_heads, config.head_dim, BLOCK_TOKENS))
        self.values = values.unflatten(1, (config.num_kv_heads, BLOCK_TOKENS, config.head_dim))
        self._bytes = self.memory.numpy().reshape(-1).data if device.type == "cpu" else None
        self._home_bytes = self._home.numpy().reshape(-1).data

    def _find(self, block: BlockId, row: int) -> memoryview | None:
        """Memory of one row; None if it is on a device."""
        end = self.num_blocks + self.num_home_blocks
        if not 0 < block <= end or not 0 <= row < len(self.layout.rows):
            raise InvariantBroken(f"block {block} row {row} is outside this rank's memory")
        is_home = block > self.num_blocks
        memory, index = (self._home_bytes, block - self.num_blocks - 1) if is_home else (self._bytes, block)
        at = index * self.layout.block_bytes + row * self.row_bytes
        return None if memory is None else memory[at : at + self.row_bytes]

    def read_row(self, block: BlockId, row: int) -> memoryview:
        """Bytes of one row; on the host the memory itself, elsewhere a copy."""
        found = self._find(block, row)
        if found is not None:
            return found.toreadonly()
        return self._row(block, row).cpu().numpy().data

    def write_row(self, block: BlockId, row: int, data: memoryview) -> None:
        """Replace one row; `data` has exactly `row_bytes` bytes."""
        found = self._find(block, row)
        if data.nbytes != self.row_bytes:
            raise InvariantBroken(f"row of {data.nbytes} bytes, expected {self.row_bytes}")
        if found is not None:
            found[:] = data.cast("B")
        else:
            copy = torch.frombuffer(bytearray(data), dtype=torch.uint8)
            self._row(block, row).copy_(copy)

    def _row(self, block: BlockId, row: int) -> torch.Tensor:
        return self._rows[block * len(self.layout.rows) + row]

    def write_rows(
        self,
        blocks: Sequence[BlockId],
        row: int,
        source: memoryview,
        items: Sequence[int],
        method: CopyMethod,
    ) -> None:
        """Replace one row of several blocks, home blocks or not; see `core.ports.Engine.write_rows`."""
        targets = np.asarray(blocks, np.int64)
        is_home = bool(blocks) and blocks[0] > self.num_blocks
        if is_home:
            targets -= self.num_blocks + 1
        low, high = (0, self.num_home_blocks - 1) if is_home else (1, self.num_blocks)
        if not np.all((low <= targets) & (targets <= high)):
            raise InvariantBroken(f"blocks {list(blocks)} are not all in one memory of this rank")
        if self._bytes is None and not is_home:
            for block, item in zip(blocks, items, strict=True):
                self.write_row(block, row, memoryview(np.asarray(source)[item]))
            return
        begin, end = row * self.row_bytes, (row + 1) * self.row_bytes
        memory = (self._home if is_home else self.memory).numpy()[:, begin:end]
        method.copy(np.asarray(source), np.asarray(items, np.int64), memory, targets)

    # --- rows of streamed sequences ---------------------------------------------------------------

    def first_rows(self, blocks: Sequence[BlockId]) -> Items:
        """Numbers of row 0 of blocks in the whole block memory."""
        return np.asarray(blocks, np.int64) * len(self.layout.rows)

    def fetch(self, blocks: Items, row: int, places: Items, method: CopyMethod) -> None:
        """Copy one row of home blocks to places of the block memory, counted in rows."""
        home = self._row_of_home(row)
        if self._bytes is not None:
            method.copy(home.numpy(), blocks - self.num_blocks - 1, self._rows.numpy(), places)
        else:
            device = self.memory.device
            picked = home[torch.from_numpy(blocks - self.num_blocks - 1)]
            self._rows[torch.from_numpy(places).to(device)] = picked.to(device)

    def keep(self, places: Items, blocks: Items, row: int, method: CopyMethod) -> None:
        """Copy places of the block memory to one row of home blocks: what `fetch` does, the other way."""
        home = self._row_of_home(row)
        if self._bytes is not None:
            method.copy(self._rows.numpy(), places, home.numpy(), blocks - self.num_blocks - 1)
        else:
            picked = self._rows[torch.from_numpy(places).to(self.memory.device)]
            home[torch.from_numpy(blocks - self.num_blocks - 1)] = picked.cpu()

    def _row_of_home(self, row: int) -> torch.Tensor:
        return self._home[:, row * self.row_bytes : (row + 1) * self.row_bytes]
