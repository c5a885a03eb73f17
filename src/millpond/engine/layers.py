"""What runs a decoder's layers: the port that `torch_layers` and `native` implement, and its input."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch


@dataclass(frozen=True, slots=True)
class RowSpan:
    """Adjacent rows of a step that are adjacent tokens of one sequence."""

    begin: int
    """First row."""
    end: int
    position: int
    """Position of the first row's token."""


@dataclass(frozen=True, slots=True, eq=False)
class StepRows:
    """The tokens of one step. A row is one token; all tensors live on the engine's device."""

    spans: tuple[RowSpan, ...]
    """One per sequence, without gaps; the index of a span is the index of its block table."""
    positions: torch.Tensor
    """[rows], int32."""
    sequences: torch.Tensor
    """[rows], int32: index of the row's span."""
    tables: torch.Tensor
    """[spans, blocks], int32: where row 0 of each block lies, counted in rows of the whole block memory; row
    l is l further. Padded with the null block."""

    @property
    def num_positions(self) -> int:
        """One more than the largest position."""
        return max((span.position + span.end - span.begin for span in self.spans), default=0)


class DecoderLayers(Protocol):
    """Runs layers and the head. Writes the KV of every row before any row attends."""

    def run(self, hidden: torch.Tensor, rows: StepRows, begin: int, end: int) -> None:
        """Pass hidden states through layers `[begin, end)`.

        Args:
            hidden: [rows, hidden], float32, contiguous; replaced in place.
            rows: What the rows are. Earlier tokens of their sequences are in the blocks already.
            begin: First layer.
            end: One past the last layer.
        """
        ...

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Apply the final norm and the head.

        Args:
            hidden: [rows, hidden], float32, contiguous.

        Returns:
            [rows, vocab], float32, valid until the next call.
        """
        ...
