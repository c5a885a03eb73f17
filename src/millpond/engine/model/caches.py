"""The two caches of one DP rank as packed bytes: blocks of compressed KV, and one state slot per sequence."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from millpond.core.errors import InvariantBroken
from millpond.core.kv_layout import PART_ALIGN_BYTES
from millpond.core.shapes import ModelShape, kv_layout
from millpond.core.units import BLOCK_TOKENS, align_up
from millpond.engine.model.formats import Fp32Rows, RowFormat
from millpond.engine.model.numerics import Numerics


@dataclass(frozen=True, slots=True)
class PackedRows:
    """Rows of one kind in memory, addressed by (block or slot, row)."""

    memory: torch.Tensor
    """[blocks or slots, rows, row bytes], uint8; a view."""
    width: int
    row_format: RowFormat

    def read(self, first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
        """Float32 rows [..., width] at (block or slot, row)."""
        return self.row_format.read(self.memory, first, second, self.width)

    def read_before(self, first: torch.Tensor, second: torch.Tensor, data: torch.Tensor) -> torch.Tensor:
        """Float32 rows at (block or slot, row), then encoded rows `data` [n, row bytes]: [..., width]."""
        return self.row_format.read_before(self.memory, first, second, data, self.width)

    def read_all(self, first: torch.Tensor) -> torch.Tensor:
        """Float32 rows of whole blocks, one after the other; unwritten rows may be anything."""
        return self.row_format.read(self.memory, first, None, self.width)

    def write(self, first: torch.Tensor, second: torch.Tensor, data: torch.Tensor) -> None:
        """Store encoded rows [n, row bytes]."""
        self.memory[first, second] = data


class Caches:
    """Memory of blocks and slots; block 0 is the null block and is never used."""

    def __init__(
        self, shape: ModelShape, numerics: Numerics, num_blocks: int, num_slots: int, device: torch.device
    ) -> None:
        """Allocate and touch `num_blocks` usable blocks and `num_slots` slots."""
        self.layout = kv_layout(shape, numerics.kv_format)
        self.blocks = torch.zeros(num_blocks + 1, self.layout.block_bytes, dtype=torch.uint8, device=device)
        self.slots = torch.zeros(num_slots, self.layout.state_bytes, dtype=torch.uint8, device=device)
        self.index_keys: dict[int, PackedRows] = {}
        self.main: dict[int, PackedRows] = {}
        self.windows: dict[int, PackedRows] = {}
        self.drafts: dict[int, PackedRows] = {}
        self.compressors: dict[int, PackedRows] = {}
        self._view_blocks(shape, numerics)
        self._view_slots(shape, numerics)

    def _view_blocks(self, shape: ModelShape, numerics: Numerics) -> None:
        ratios = {source.layer: source.ratio for source in shape.kv_sources}
        at = 0
        for row in self.layout.rows:
            for part in row.parts:
                is_main = part.name == "main"
                view = _rows(self.blocks, at, part.num_bytes, BLOCK_TOKENS // ratios[row.layer])
                if is_main:
                    self.main[row.layer] = PackedRows(view, shape.head_dim, numerics.main_rows)
                else:
                    self.index_keys[row.layer] = PackedRows(view, shape.index_head_dim, numerics.index_rows)
                at += align_up(part.num_bytes, PART_ALIGN_BYTES)

    def _view_slots(self, shape: ModelShape, numerics: Numerics) -> None:
        at = 0
        for part in self.layout.state:
            if part.part == "compressor":
                num_rows = shape.compressor_rows(shape.layers[part.layer].ratio)
                view = _rows(self.slots, at, part.num_bytes, num_rows)
                self.compressors[part.layer] = PackedRows(view, 2 * shape.head_dim, Fp32Rows())
            else:
                rings = self.windows if part.part == "window" else self.drafts
                view = _rows(self.slots, at, part.num_bytes, shape.ring_rows)
                rings[part.layer] = PackedRows(view, shape.head_dim, numerics.window_rows)
            at += part.num_bytes

    def row_bytes(self, block: int, row: int) -> torch.Tensor:
        """Bytes of one row of one block, a view."""
        if not 0 < block < len(self.blocks):
            raise InvariantBroken(f"block {block} row {row} is outside this rank's memory")
        return self.row_memory(row)[block]

    def row_memory(self, row: int) -> torch.Tensor:
        """Bytes of one row of all blocks, a view [blocks, row bytes]."""
        if not 0 <= row < len(self.layout.rows):
            raise InvariantBroken(f"row {row} is outside this rank's memory")
        begin = sum(earlier.num_bytes for earlier in self.layout.rows[:row])
        return self.blocks[:, begin : begin + self.layout.rows[row].num_bytes]

    def slot_bytes(self, slot: int) -> torch.Tensor:
        """Bytes of one state slot, a view."""
        if not 0 <= slot < len(self.slots):
            raise InvariantBroken(f"slot {slot} is outside this rank's memory")
        return self.slots[slot]


def _rows(memory: torch.Tensor, begin: int, num_bytes: int, num_rows: int) -> torch.Tensor:
    return memory[:, begin : begin + num_bytes].unflatten(1, (num_rows, -1))
