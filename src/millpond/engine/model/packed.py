"""Weights that stay as they are stored and become floats for the time of one product."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from millpond.engine.model.dense import narrow_exact
from millpond.engine.model.fp4_experts import Fp4Experts


@dataclass(frozen=True, slots=True)
class PackedWeight:
    """A quantised weight, or several one below the other."""

    size: tuple[int, ...]
    """As the model sees it: [out, in], or [groups, out, in]."""
    parts: tuple[tuple[torch.Tensor, torch.Tensor], ...]
    """Values and scales as stored; on a CPU, mapped from the files."""
    dequantise: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    """Values and scales -> float32 [out, in]."""

    def __len__(self) -> int:
        return self.size[0]

    def as_matrix(self) -> torch.Tensor:
        """Return the weight as floats: the same bits each time."""
        parts = [self.dequantise(values, scales) for values, scales in self.parts]
        return narrow_exact(torch.cat(parts) if len(parts) > 1 else parts[0]).view(self.size)


Matrix = torch.Tensor | PackedWeight
"""A weight of a product."""
Experts = torch.Tensor | Fp4Experts | tuple[PackedWeight, ...]
"""A weight of every expert: [experts, out, in]."""


def as_matrix(weight: Matrix) -> torch.Tensor:
    """Return a weight as floats."""
    return weight if isinstance(weight, torch.Tensor) else weight.as_matrix()
