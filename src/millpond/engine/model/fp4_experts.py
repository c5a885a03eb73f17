"""Routed experts kept as FP4: a quarter of the bytes of bf16 to read in every step, and the same results.

A scaled E2M1 number fits bf16, so what the kernels widen in registers is what they would read as bf16.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch

from millpond.core.errors import InvariantBroken
from millpond.engine.model.formats import dequantise_fp4_weight
from millpond.engine.native import load_kernels

_GROUP = 32
"""Columns that share a scale."""
_ORDER = (2, 2, 2, 4)
"""Columns 16u + 8p + 4h + d of a group: byte 8u + 2d + p holds them, h = 0 in its low nibble (`load_fp4`)."""


@lru_cache(maxsize=1)
def _scaled_values() -> torch.Tensor:
    """Bytes [256, 32]: for each exponent the low bytes of its 16 values as bf16, then the high ones."""
    codes = torch.arange(16, dtype=torch.uint8).expand(256, -1)
    exponents = torch.arange(256, dtype=torch.uint8)[:, None]
    values = dequantise_fp4_weight(codes, exponents)[:, 0::2].bfloat16()
    return values.contiguous().view(torch.uint8).unflatten(-1, (16, 2)).movedim(-1, 1).flatten(1)


@dataclass(frozen=True, slots=True)
class Fp4Experts:
    """One weight of every expert."""

    codes: torch.Tensor
    """[experts, out, in / 2], uint8, in the kernels' order."""
    exponents: torch.Tensor
    """[experts, out, in / 32], uint8."""

    @classmethod
    def pack(cls, stored: Sequence[Sequence[tuple[torch.Tensor, torch.Tensor]]]) -> Fp4Experts | None:
        """Take codes [out, in / 2] and exponents as stored, for each expert one or several below each other.

        Returns:
            None where the kernels cannot serve.
        """
        values, scales = stored[0][0]
        is_whole = 2 * values.shape[1] == _GROUP * scales.shape[1]
        if values.device.type != "cpu" or not is_whole or load_kernels(torch.bfloat16) is None:
            return None
        num_rows = sum(len(part) for part, _ in stored[0])
        codes = torch.empty(len(stored), num_rows, values.shape[1], dtype=torch.uint8)
        exponents = torch.empty(len(stored), num_rows, scales.shape[1], dtype=torch.uint8)
        for expert, parts in enumerate(stored):
            codes[expert] = _reorder(torch.cat([part.view(torch.uint8) for part, _ in parts]))
            exponents[expert] = torch.cat([part.view(torch.uint8) for _, part in parts])
        return cls(codes, exponents)

    def __len__(self) -> int:
        return len(self.codes)

    def __getitem__(self, expert: int) -> torch.Tensor:
        """Float32 weight [out, in] of one expert."""
        return dequantise_fp4_weight(_restore(self.codes[expert]), self.exponents[expert])

    def multiply(self, rows: torch.Tensor, loads: torch.Tensor) -> torch.Tensor:
        """Multiply float32 rows, `loads` [experts] of them by each expert's weight: float32 [n, out].

        Guarantees:
            The bits that `dense.multiply_by_expert` gives with the weight as bf16.
        """
        kernels = load_kernels(torch.bfloat16)
        if kernels is None:
            raise InvariantBroken("weights are packed for kernels that are gone")
        rows = rows.contiguous()
        experts, out_width, num_bytes = self.codes.shape
        out = torch.empty(len(rows), out_width)
        kernels.mp_linear_experts_fp4(
            rows.data_ptr(),
            self.codes.data_ptr(),
            self.exponents.data_ptr(),
            _scaled_values().data_ptr(),
            loads.data_ptr(),
            experts,
            2 * num_bytes,
            out_width,
            out.data_ptr(),
        )
        return out


def _reorder(stored: torch.Tensor) -> torch.Tensor:
    """Codes as stored [..., bytes], column 2i in byte i's low nibble, brought to the kernels' order."""
    columns = torch.stack([stored & 15, stored >> 4], dim=-1).flatten(-2).unflatten(-1, (-1, *_ORDER))
    low, high = columns.unbind(-2)  # [..., group, u, p, d]
    return (low | high << 4).transpose(-1, -2).reshape(stored.shape)


def _restore(codes: torch.Tensor) -> torch.Tensor:
    """Undo `_reorder`."""
    groups = codes.unflatten(-1, (-1, 2, 4, 2)).transpose(-1, -2)
    columns = torch.stack([groups & 15, groups >> 4], dim=-2).flatten(-5)
    return columns[..., 0::2] | columns[..., 1::2] << 4
