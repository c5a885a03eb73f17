"""Rotary positions: pairs of adjacent channels, the last `rope_dim` of a row; YaRN where KV is compressed."""

from __future__ import annotations

import math

import torch

from millpond.engine.model.config import RopeScaling
from millpond.engine.model.native import kernels_for
from millpond.engine.model.numerics import curve


def rope_frequencies(theta: float, rope_dim: int, scaling: RopeScaling | None) -> torch.Tensor:
    """Radians per position of each pair, float32 [rope_dim / 2].

    Source:
        RoFormer; YaRN sections 3.2-3.4, without its factor on magnitudes.
    """
    frequencies = 1.0 / theta ** (torch.arange(0, rope_dim, 2, dtype=torch.float32) / rope_dim)
    if scaling is None:
        return frequencies

    def dim_of(turns: float) -> float:
        return rope_dim * math.log(scaling.original_positions / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low = max(math.floor(dim_of(scaling.beta_fast)), 0)
    high = min(math.ceil(dim_of(scaling.beta_slow)), rope_dim - 1)
    width = high - low or 0.001  # a ramp of no width would divide by zero
    ramp = ((torch.arange(rope_dim // 2, dtype=torch.float32) - low) / width).clamp(0, 1)
    return frequencies / scaling.factor * ramp + frequencies * (1 - ramp)


class Rotation:
    """Cosines and sines of a step's rows, [rows, rope_dim / 2], float32."""

    __slots__ = ("cos", "sin")

    def __init__(self, frequencies: torch.Tensor, positions: torch.Tensor) -> None:
        """Angles are float32 products of position and frequency."""
        angles = positions.float()[:, None] * frequencies
        self.cos, self.sin = curve(torch.cos, angles), curve(torch.sin, angles)

    def apply(self, rows: torch.Tensor) -> torch.Tensor:
        """Rotate the last channels of [rows, width] or [rows, heads, width]."""
        return self._turned(rows, 1)

    def undo(self, rows: torch.Tensor) -> torch.Tensor:
        """Rotate back."""
        return self._turned(rows, -1)

    def _turned(self, rows: torch.Tensor, sign: int) -> torch.Tensor:
        kernels = kernels_for(rows)
        if kernels is not None:
            return kernels.rotate(rows, self.cos, self.sin, sign)
        cos, sin = self.cos, sign * self.sin
        rope_dim = 2 * sin.shape[-1]
        if rows.dim() == 3:
            cos, sin = cos[:, None], sin[:, None]
        real, imaginary = rows[..., -rope_dim:].float().unflatten(-1, (-1, 2)).unbind(-1)
        turned = torch.stack([real * cos - imaginary * sin, real * sin + imaginary * cos], dim=-1)
        return torch.cat([rows[..., :-rope_dim], turned.flatten(-2).to(rows.dtype)], dim=-1)
