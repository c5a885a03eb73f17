"""How a model computes: dtype of the stream, quantisers, and whether a row's bits may depend on its batch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.nn import functional

from millpond.core.shapes import KvFormat
from millpond.engine.model.dense import linear_address, multiply, multiply_by_expert, multiply_groups
from millpond.engine.model.formats import (
    Fp4IndexRows,
    Fp4MainRows,
    Fp8Rows,
    Fp32Rows,
    RowFormat,
    round_fp8,
)
from millpond.engine.model.fp4_experts import Fp4Experts
from millpond.engine.model.native import kernels_for
from millpond.engine.model.packed import Experts, Matrix, as_matrix

TILE_ROWS = 64
"""Rows of every product in exact mode."""
_VECTOR_ROWS = 32
"""Numbers that the widest unrolled vector loop takes at a time."""


@dataclass(frozen=True, slots=True)
class Numerics:
    """One way to compute.

    Guarantees:
        With `is_exact`, every product has a fixed number of rows, so a row's bits depend on that row only.
    """

    dtype: torch.dtype
    """Of the stream and of what linears return. Products are summed in float32."""
    is_quantised: bool
    """FP8 inputs of quantised linears and packed KV, as released; without, plain floats for checking."""
    is_exact: bool = False

    @property
    def kv_format(self) -> KvFormat:
        """How cached rows are written."""
        return KvFormat.PACKED if self.is_quantised else KvFormat.FP32

    @property
    def window_rows(self) -> RowFormat:
        """Format of window rows."""
        return Fp8Rows() if self.is_quantised else Fp32Rows()

    @property
    def main_rows(self) -> RowFormat:
        """Format of compressed KV."""
        return Fp4MainRows() if self.is_quantised else Fp32Rows()

    @property
    def index_rows(self) -> RowFormat:
        """Format of index queries and keys."""
        return Fp4IndexRows() if self.is_quantised else Fp32Rows()

    def product(self, rows: torch.Tensor, weight: Matrix) -> torch.Tensor:
        """Multiply float32 rows [n, in] by a weight [out, in]; float32 [n, out]."""
        weight = as_matrix(weight)
        native = multiply(rows, weight)
        return self.torch_product(rows, weight) if native is None else native

    def torch_product(self, rows: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """Like `product`, added up in torch's order: where the released code keeps the float32 sums."""
        if not self.is_exact:
            return functional.linear(rows, weight)
        count = len(rows)
        padded = functional.pad(rows, (0, 0, 0, -count % TILE_ROWS))
        tiles = [functional.linear(tile, weight) for tile in padded.split(TILE_ROWS)]
        return torch.cat(tiles)[:count] if tiles else rows.new_empty(0, len(weight))

    def product_by_expert(self, rows: torch.Tensor, weight: Experts, loads: torch.Tensor) -> torch.Tensor:
        """Multiply float32 rows, `loads` [experts] of them by each of weight [experts, out, in]."""
        if isinstance(weight, Fp4Experts):
            return weight.multiply(rows, loads)
        if isinstance(weight, torch.Tensor):
            native = multiply_by_expert(rows, weight, loads)
            if native is not None:
                return native
        parts = zip(rows.split(loads.tolist()), weight, strict=True)
        return torch.cat([self.product(part, own) for part, own in parts if len(part)])

    def grouped_product(self, rows: torch.Tensor, weight: Matrix) -> torch.Tensor:
        """Multiply float32 rows [n, groups, in] by weights [groups, out, in]: [n, groups, out]."""
        weight = as_matrix(weight)
        native = multiply_groups(rows, weight)
        if native is not None:
            return native
        if not self.is_exact:
            return torch.bmm(rows.transpose(0, 1), weight.transpose(1, 2)).transpose(0, 1)
        count = len(rows)
        padded = functional.pad(rows, (0, 0, 0, 0, 0, -count % TILE_ROWS)).transpose(0, 1)
        tiles = [torch.bmm(tile, weight.transpose(1, 2)) for tile in padded.split(TILE_ROWS, dim=1)]
        return torch.cat(tiles, dim=1).transpose(0, 1)[:count]

    def linear(self, rows: torch.Tensor, weight: Matrix) -> torch.Tensor:
        """Plain linear: rows in any dtype, result in the stream's."""
        return self.product(rows.float(), weight).to(self.dtype)

    def quantised_input(self, rows: torch.Tensor) -> torch.Tensor:
        """Round rows as a quantised linear does; float32, so that several linears can share it."""
        if not self.is_quantised:
            return rows.float()
        kernels = kernels_for(rows)
        return round_fp8(rows).float() if kernels is None else kernels.round_fp8(rows)

    def quantised_linear(self, rows: torch.Tensor, weight: Matrix) -> torch.Tensor:
        """Linear with an FP8 or FP4 weight: its input is rounded to FP8 per 32 channels."""
        weight = as_matrix(weight)
        kernels = kernels_for(rows, dtype=self.dtype) if self.is_quantised else None
        linear = None if kernels is None else linear_address(weight)
        if kernels is not None and linear is not None:
            return kernels.quantised_linear(linear, rows, weight)
        return self.product(self.quantised_input(rows), weight).to(self.dtype)


BF16 = Numerics(torch.bfloat16, is_quantised=True)
"""The released numerics."""
FP32 = Numerics(torch.float32, is_quantised=False)
"""No rounding anywhere: the strict check of the mathematics."""
FP32_QUANTISED = Numerics(torch.float32, is_quantised=True)


def curve(function: Callable[[torch.Tensor], torch.Tensor], rows: torch.Tensor) -> torch.Tensor:
    """Apply a transcendental function to each number of rows [n, ...].

    Guarantees:
        A number's result does not depend on its place: whole vectors only, because the remainder of an array
        goes through other code with other last bits.
    """
    count = len(rows)
    if rows.is_contiguous() and rows.numel() % _VECTOR_ROWS == 0:
        return function(rows)
    padded = functional.pad(rows, (*(0, 0) * (rows.dim() - 1), 0, -count % _VECTOR_ROWS))
    return function(padded)[:count]


def rms_norm(rows: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Root-mean-square norm over the last axis, computed in float32, in the dtype of `rows`."""
    kernels = kernels_for(rows)
    if kernels is not None:
        return kernels.rms_norm(rows, weight, eps)
    values = rows.float()
    scale = torch.rsqrt((values * values).mean(-1, keepdim=True) + eps)
    return (values * scale * weight).to(rows.dtype)
