"""Rotary position embedding: frequencies of each variant, and a table of cosines and sines."""

from __future__ import annotations

import math

import torch

from millpond.core.units import align_up
from millpond.engine.llama_config import RopeConfig

_PAGE_POSITIONS = 1024
"""Positions computed at a time: a fixed size, so that no position's bits depend on what else is asked."""


def rope_frequencies(rope: RopeConfig, head_dim: int, max_positions: int) -> tuple[torch.Tensor, float]:
    """Compute the angle per position of each dimension pair.

    Args:
        rope: The variant.
        head_dim: Even.
        max_positions: The model's context length; yarn's original length where the config names none.

    Returns:
        Frequencies [head_dim / 2], float32, radians per position; and the factor on cosine and sine.

    Source:
        RoFormer; position interpolation (linear); Llama 3.1 (llama3); YaRN sections 3.2-3.4.
    """
    powers = rope.theta ** (torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim)
    frequencies = 1.0 / powers
    if rope.kind == "default":
        return frequencies, 1.0
    if rope.kind == "linear":
        return frequencies / rope.factor, 1.0
    if rope.kind == "llama3":
        return _llama3(rope, frequencies), 1.0
    return _yarn(rope, powers, head_dim, rope.original_max_positions or max_positions), _yarn_factor(rope)


def _llama3(rope: RopeConfig, frequencies: torch.Tensor) -> torch.Tensor:
    turns = rope.original_max_positions * frequencies / (2 * math.pi)
    # 0 below low_freq_factor turns over the original context (fully stretched), 1 above high_freq_factor
    keep = ((turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)).clamp(0, 1)
    return (1 - keep) * frequencies / rope.factor + keep * frequencies


def _yarn(rope: RopeConfig, powers: torch.Tensor, head_dim: int, original: int) -> torch.Tensor:
    def dim_of(turns: float) -> float:
        return head_dim * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = dim_of(rope.beta_fast), dim_of(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    if low == high:
        high += 0.001  # a ramp of no width would divide by zero
    ramp = ((torch.arange(head_dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    return 1.0 / (rope.factor * powers) * ramp + 1.0 / powers * (1 - ramp)


def _yarn_factor(rope: RopeConfig) -> float:
    if rope.attention_factor > 0:
        return rope.attention_factor

    def scale(mscale: float) -> float:
        return 0.1 * mscale * math.log(rope.factor) + 1.0 if rope.factor > 1 else 1.0

    if rope.mscale and rope.mscale_all_dim:
        return scale(rope.mscale) / scale(rope.mscale_all_dim)
    return scale(1.0)


class RopeTable:
    """Cosine and sine of every position up to a limit, computed page by page when first needed."""

    def __init__(
        self, frequencies: torch.Tensor, factor: float, max_positions: int, device: torch.device
    ) -> None:
        """Reserve the table.

        Args:
            frequencies: [head_dim / 2], float32, radians per position.
            factor: Multiplies cosine and sine.
            max_positions: Positions are 0 ... max_positions - 1.
            device: Where the table lives.
        """
        size = (align_up(max_positions, _PAGE_POSITIONS), len(frequencies))
        self.cos = torch.empty(size, dtype=torch.float32, device=device)
        self.sin = torch.empty(size, dtype=torch.float32, device=device)
        self._frequencies = frequencies.to(device)
        self._factor = factor
        self._num_filled = 0

    def ensure(self, num_positions: int) -> None:
        """Fill the table for positions [0, num_positions)."""
        while self._num_filled < num_positions:
            begin, end = self._num_filled, self._num_filled + _PAGE_POSITIONS
            positions = torch.arange(begin, end, device=self._frequencies.device, dtype=torch.float32)
            angles = positions[:, None] * self._frequencies
            self.cos[begin:end] = angles.cos() * self._factor
            self.sin[begin:end] = angles.sin() * self._factor
            self._num_filled = end
