"""What the layers of one step share: caches, rotations, published entries and selections."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from millpond.core.shapes import LayerShape
from millpond.engine.model.attention import KvPart
from millpond.engine.model.caches import Caches
from millpond.engine.model.config import V41Config
from millpond.engine.model.numerics import Numerics
from millpond.engine.model.rope import Rotation, rope_frequencies
from millpond.engine.model.step import EntryIndex, Rows, Step

Observe = Callable[[str, torch.Tensor], None]
"""Told the name and value of every intermediate result, for tests and measurements."""


def ignore(name: str, value: torch.Tensor) -> None:
    """Observe nothing."""


@dataclass(frozen=True, slots=True)
class Frequencies:
    """Radians per position of the layers without and with compressed KV."""

    plain: torch.Tensor
    compressed: torch.Tensor


def make_frequencies(config: V41Config, device: torch.device) -> Frequencies:
    """Frequencies of a model."""
    dim = config.shape.rope_dim
    return Frequencies(
        rope_frequencies(config.rope_theta, dim, None).to(device),
        rope_frequencies(config.compress_rope_theta, dim, config.rope_scaling).to(device),
    )


@dataclass
class StepContext:
    """One step on its way through the layers."""

    config: V41Config
    numerics: Numerics
    caches: Caches
    step: Step
    frequencies: Frequencies
    observe: Observe = ignore
    keys: torch.Tensor | None = None
    """Index keys of the newest KV source, float32 [all entries, index dim]."""
    candidates: torch.Tensor | None = None
    """Which entries are candidates [rows, most entries of a span], from the candidate source."""
    selected: KvPart | None = None
    """Compressed KV that the rows chose, from the newest selecting layer."""
    _rotations: dict[tuple[int, bool], Rotation] = field(default_factory=dict)
    _entries: dict[int, EntryIndex] = field(default_factory=dict)

    def rows(self, layer: LayerShape) -> Rows:
        """Rows that a layer computes as queries."""
        is_encoder = layer.layer < self.config.shape.num_encoder_layers
        return self.step.encoder if is_encoder else self.step.decoder

    def rotation(self, rows: Rows, *, is_compressed: bool) -> Rotation:
        """Rotation of rows in layers with or without compressed KV."""
        key = (id(rows), is_compressed)
        if key not in self._rotations:
            frequencies = self.frequencies.compressed if is_compressed else self.frequencies.plain
            self._rotations[key] = Rotation(frequencies, rows.positions)
        return self._rotations[key]

    def entries(self, ratio: int) -> EntryIndex:
        """Compressed entries of the step's sequences."""
        if ratio not in self._entries:
            self._entries[ratio] = self.step.encoder.entries(ratio)
        return self._entries[ratio]
