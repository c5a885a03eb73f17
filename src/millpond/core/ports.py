"""Seams between the pure layers and what carries their plans out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from millpond.core.events import RankReport
from millpond.core.ids import BlockId, RequestId, SlotId
from millpond.core.kv_layout import KvLayout
from millpond.core.plan import RankPlan


class LayerObserver(Protocol):
    """Told, during `Engine.execute`, how far the KV of the step's prefill chunks has come."""

    def on_row_ready(self, row: int) -> None:
        """Row `row` (index into `KvLayout.rows`) of every chunk of this step is written.

        Called in ascending order from the engine's thread; must return quickly.
        """
        ...

    def on_row_needed(self, row: int) -> None:
        """Row `row` of the blocks before every chunk of this step is read or written next: return when it is
        there.

        Called in ascending order from the engine's thread, before the layer that owns the row. It may
        return without the row if that will not come: the step's results of that sequence are thrown away.
        """
        ...


class Engine(Protocol):
    """One DP rank's model runner.

    `execute` runs in one thread only. `read_row` / `write_row` and `read_state` / `write_state` may run
    in other threads meanwhile, for blocks that the running step does not write.
    """

    layout: KvLayout
    num_blocks: int
    """Usable blocks; ids are 1 ... num_blocks (0 is the null block)."""
    num_home_blocks: int
    """Blocks in host memory, with the ids that follow. Layers cannot compute on them: rows of sequences that
    live there come and go through `SequenceStart.staging`."""
    num_slots: int
    """State slots; ids are 0 ... num_slots - 1."""
    vocab_size: int
    max_model_len: int
    min_computed_tokens: int
    """Last known tokens that a prefill computes however much is there already, >= 1."""
    max_drafts: int
    """Drafts that it can make and check per row; 0 without a draft head."""
    replay_tokens: int
    """Tokens before the end of a hit that a bounded replay computes; 0 for models without window state."""

    def execute(self, plan: RankPlan, observer: LayerObserver | None = None) -> RankReport:
        """Carry out one step of this rank.

        One `SampledToken` per last chunk and per row, and for each draft that was right, in plan order.

        `restore` and `keep` are the caller's: it moves the bytes with `write_state` and `read_state`.
        """
        ...

    def read_row(self, block: BlockId, row: int) -> memoryview:
        """Bytes of one row of one block, `layout.rows[row].num_bytes` long, without a copy if possible."""
        ...

    def write_row(self, block: BlockId, row: int, data: memoryview) -> None:
        """Replace one row of one block."""
        ...

    def write_rows(
        self, blocks: Sequence[BlockId], row: int, source: memoryview, items: Sequence[int]
    ) -> None:
        """Replace one row of several blocks at once.

        Args:
            blocks: The blocks.
            row: Index into `layout.rows`.
            source: `[items, row bytes]`, uint8, at any distance from each other.
            items: For each block, which of them.
        """
        ...

    def read_state(self, slot: SlotId) -> memoryview:
        """Bytes of one state slot, `layout.state_bytes` long (0 for plain decoders)."""
        ...

    def write_state(self, slot: SlotId, data: memoryview) -> None:
        """Replace one state slot."""
        ...

    def forget(self, request_id: RequestId) -> None:
        """Drop the engine's own record of a sequence; unknown ids are ignored."""
        ...
