"""Engram: rows of n-gram tables, gated into every copy of the stream before a layer."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from millpond.engine.model.formats import dequantise_fp8
from millpond.engine.model.native import kernels_for
from millpond.engine.model.numerics import Numerics, curve
from millpond.engine.model.packed import Matrix

_DOT_FLOOR = 1e-6


@dataclass(frozen=True, slots=True)
class EngramWeights:
    """One layer's tables and projections."""

    data: torch.Tensor
    """[table rows, width], E4M3 bytes as stored: the tables are the largest tensors of a model."""
    scales: torch.Tensor
    """[table rows, width / 32], E8M0 bytes."""
    kv: Matrix
    """[(copies + 1) * hidden, columns * width], float32: a key for each copy, then the value."""
    query_norm: torch.Tensor
    key_norm: torch.Tensor
    """[copies, hidden], float32."""


def look_up(w: EngramWeights, rows: torch.Tensor) -> torch.Tensor:
    """Concatenated table rows: [n, columns] -> float32 [n, columns * width]."""
    return dequantise_fp8(w.data[rows], w.scales[rows]).flatten(1)


def add_engram(
    stream: torch.Tensor,
    w: EngramWeights,
    rows: torch.Tensor,
    is_text: torch.Tensor | None,
    eps: float,
    numerics: Numerics,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Add the gated value to the stream [n, copies, hidden].

    Args:
        stream: Before the layer.
        w: The layer's Engram.
        rows: [n, columns], int64.
        is_text: [n]; image tokens get nothing. None if all are text.
        eps: Of the norms.
        numerics: How to compute.

    Returns:
        The new stream and the gates [n, copies].
    """
    copies, hidden = stream.shape[1:]
    looked_up = look_up(w, rows).to(numerics.dtype)
    keys_value = numerics.quantised_linear(looked_up, w.kv)
    kernels = kernels_for(stream)
    if kernels is not None:
        return kernels.add_engram(stream, keys_value, w.query_norm * w.key_norm, is_text, eps)
    keys, value = keys_value.float().split([copies * hidden, hidden], dim=-1)
    keys = keys.unflatten(-1, (copies, hidden))
    old = stream.float()
    dot = (old * (w.query_norm * w.key_norm) * keys).sum(-1)
    dot = dot * torch.rsqrt((old * old).mean(-1) + eps) * torch.rsqrt((keys * keys).mean(-1) + eps)
    dot = dot * hidden**-0.5
    gate = curve(torch.sigmoid, dot.sign() * dot.abs().clamp_min(_DOT_FLOOR).sqrt())
    if is_text is not None:
        gate = gate * is_text[:, None]
    return (old + gate[..., None] * value[:, None]).to(stream.dtype), gate
