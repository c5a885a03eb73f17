"""The rows of one step, and where each finds the KV it may see.

A step runs spans: consecutive tokens of one sequence each, a prompt chunk or a token with its drafts. Index
arrays are made once per step and serve every layer. Places in rings and blocks follow from positions in the
sequence, so a chunk may begin and end anywhere and a rejected draft is simply overwritten.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import numpy.typing as npt
import torch

from millpond.core.shapes import ModelShape
from millpond.core.units import BLOCK_TOKENS

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Span:
    """Tokens [begin, end) of one sequence; tokens below `begin` are already in the caches."""

    token_ids: npt.NDArray[np.int32]
    """Known tokens of the sequence, at least `end`."""
    begin: int
    end: int
    block_table: Sequence[int]
    slot: int
    window_begin: int = 0
    """Windows of the encoder layers hold nothing below this position (encoder-side replay)."""
    write_begin: int = 0
    """Block KV of tokens below this position exists and is not written again."""
    keep_begin: int = 0
    """Decoder layers run, and hold windows, from this position on (decoder-side replay)."""

    @property
    def num_rows(self) -> int:
        """Tokens of the span."""
        return self.end - self.begin


def _ranges(starts: Ints, counts: Ints) -> Ints:
    """Concatenate start ... start + count - 1 of every item."""
    ends = counts.cumsum()
    return np.arange(ends[-1] if len(ends) else 0) + np.repeat(starts - (ends - counts), counts)


@dataclass(frozen=True, slots=True)
class WindowIndex:
    """Sliding windows: which ring rows a layer reads and writes. Same for all layers of one half.

    A layer's window buffer is its history (ring rows from before the step) followed by the step's own rows.
    """

    read_slots: torch.Tensor
    read_rows: torch.Tensor
    """[history]: slot and ring row of each history row."""
    index: torch.Tensor
    """[rows, window]: position in the buffer of each token of the window, oldest first; -1 for none."""
    write_from: torch.Tensor
    write_slots: torch.Tensor
    write_rows: torch.Tensor
    """[written]: which of the step's rows go to which slot and ring row."""


@dataclass(frozen=True, slots=True)
class EntryIndex:
    """Compressed entries of one ratio: where they lie and which are made in this step."""

    per_block: int
    counts: tuple[int, ...]
    """Entries of each span's sequence once the step is done."""
    offsets: tuple[int, ...]
    """Where each span's entries begin among all."""
    blocks: torch.Tensor
    """[blocks]: those of all spans, one after the other; entry i is in block i // per_block of them."""
    new: torch.Tensor
    """[new]: index among all entries of those that this step completes."""
    new_positions: torch.Tensor
    """[new]: position of each new entry's first token."""
    members: torch.Tensor
    """[new, ratio]: its tokens: the step's rows, after `state_slots` rows of earlier steps."""
    state_slots: torch.Tensor
    state_rows: torch.Tensor
    """[carried]: slot and row of the (kv, score) rows that incomplete groups left behind."""
    keep_from: torch.Tensor
    keep_slots: torch.Tensor
    keep_rows: torch.Tensor
    """[kept]: which of the step's (kv, score) rows go to which slot and row."""

    def locate(self, entries: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Block, and place inside it, of entries given by their index among all."""
        return self.blocks[entries // self.per_block], entries % self.per_block


@dataclass(frozen=True)
class Rows:
    """Rows of one half of the model (encoder or decoder layers) in one step."""

    spans: tuple[Span, ...]
    shape: ModelShape
    device: torch.device

    def _on_device(self, values: Ints) -> torch.Tensor:
        return torch.from_numpy(np.ascontiguousarray(values, dtype=np.int64)).to(self.device)

    @cached_property
    def counts(self) -> Ints:
        """Rows of each span."""
        return np.array([span.num_rows for span in self.spans], dtype=np.int64)

    @cached_property
    def row_begins(self) -> Ints:
        """First row of each span."""
        return self.counts.cumsum() - self.counts

    @property
    def num_rows(self) -> int:
        """Rows of all spans."""
        return int(self.counts.sum())

    @cached_property
    def host_positions(self) -> Ints:
        """Position of each row in its sequence."""
        return _ranges(np.array([span.begin for span in self.spans], dtype=np.int64), self.counts)

    @cached_property
    def positions(self) -> torch.Tensor:
        """Position of each row in its sequence."""
        return self._on_device(self.host_positions)

    @cached_property
    def sequences(self) -> torch.Tensor:
        """[rows]: span of each row."""
        return self._on_device(np.repeat(np.arange(len(self.spans)), self.counts))

    @cached_property
    def window(self) -> WindowIndex:
        """Windows of these rows."""
        window, ring = self.shape.window, self.shape.ring_rows
        begins = np.array([span.begin for span in self.spans], dtype=np.int64)
        floors = np.array([span.window_begin for span in self.spans], dtype=np.int64)
        slots = np.array([span.slot for span in self.spans], dtype=np.int64)
        first = np.minimum(np.maximum(begins - (window - 1), floors), begins)
        num_history = begins - first
        history_at = num_history.cumsum() - num_history
        total = int(num_history.sum())
        per_row = np.repeat(np.arange(len(self.spans)), self.counts)
        seen = self.host_positions[:, None] + np.arange(-window + 1, 1)
        own = seen - begins[per_row, None] + total + self.row_begins[per_row, None]
        old = seen - first[per_row, None] + history_at[per_row, None]
        index = np.where(seen >= begins[per_row, None], own, old)
        index[seen < np.maximum(floors, 0)[per_row, None]] = -1
        num_written = np.minimum(self.counts, ring)
        written = _ranges(self.row_begins + self.counts - num_written, num_written)
        return WindowIndex(
            read_slots=self._on_device(np.repeat(slots, num_history)),
            read_rows=self._on_device(_ranges(first, num_history) % ring),
            index=self._on_device(index),
            write_from=self._on_device(written),
            write_slots=self._on_device(np.repeat(slots, num_written)),
            write_rows=self._on_device(self.host_positions[written] % ring),
        )

    def entries(self, ratio: int) -> EntryIndex:
        """Compressed entries of these rows' sequences, made from these rows."""
        counts = np.array([span.end // ratio for span in self.spans], dtype=np.int64)
        per_block = BLOCK_TOKENS // ratio
        num_blocks = -(-counts // per_block)
        offsets = (num_blocks.cumsum() - num_blocks) * per_block
        # an entry is new if its last token is in this step and its block KV does not exist yet
        starts = np.array([max(span.begin, span.write_begin) // ratio for span in self.spans], dtype=np.int64)
        starts = np.minimum(starts, counts)
        num_new = counts - starts
        new = _ranges(offsets + starts, num_new)
        span_of_new = np.repeat(np.arange(len(self.spans)), num_new)
        numbers = _ranges(starts, num_new)
        begins = np.array([span.begin for span in self.spans], dtype=np.int64)
        slots = np.array([span.slot for span in self.spans], dtype=np.int64)
        has_carry = (begins % ratio != 0) & (num_new > 0) & (starts * ratio < begins)
        carries = np.flatnonzero(has_carry)
        carry_at = has_carry.cumsum() - 1
        tokens = numbers[:, None] * ratio + np.arange(ratio)
        rows = tokens - begins[span_of_new, None] + self.row_begins[span_of_new, None] + len(carries)
        members = np.where(tokens >= begins[span_of_new, None], rows, carry_at[span_of_new, None])
        num_held = self.shape.compressor_rows(ratio)
        num_kept = np.minimum(self.counts, num_held)
        kept = _ranges(self.row_begins + self.counts - num_kept, num_kept)
        tables = [
            np.asarray(span.block_table[:count], dtype=np.int64)
            for span, count in zip(self.spans, num_blocks.tolist(), strict=True)
        ]
        return EntryIndex(
            per_block=per_block,
            counts=tuple(counts.tolist()),
            offsets=tuple(offsets.tolist()),
            blocks=self._on_device(np.concatenate(tables)),
            new=self._on_device(new),
            new_positions=self._on_device(numbers * ratio),
            members=self._on_device(members),
            state_slots=self._on_device(slots[carries]),
            state_rows=self._on_device((begins[carries] - 1) % num_held),
            keep_from=self._on_device(kept),
            keep_slots=self._on_device(np.repeat(slots, num_kept)),
            keep_rows=self._on_device(self.host_positions[kept] % num_held),
        )


@dataclass(frozen=True)
class Step:
    """One step: the rows of the encoder layers and those of the decoder layers."""

    encoder: Rows
    decoder: Rows
    kept: torch.Tensor | None
    """[decoder rows]: their places among the encoder's rows; None when all are kept."""


def make_step(spans: Sequence[Span], shape: ModelShape, device: torch.device) -> Step:
    """Index a step's spans, which need not be in any order; no span is empty."""
    encoder = Rows(tuple(spans), shape, device)
    if all(span.keep_begin <= span.begin for span in spans) and all(
        span.window_begin == span.keep_begin for span in spans
    ):
        return Step(encoder, encoder, None)
    kept_spans = tuple(
        replace(
            span,
            begin=min(max(span.begin, span.keep_begin), span.end),
            window_begin=max(span.window_begin, span.keep_begin),
        )
        for span in spans
    )
    decoder = Rows(kept_spans, shape, device)
    kept = [
        np.arange(row + now.begin - span.begin, row + span.num_rows)
        for span, now, row in zip(spans, kept_spans, encoder.row_begins.tolist(), strict=True)
    ]
    return Step(encoder, decoder, torch.from_numpy(np.concatenate(kept)).to(device))
