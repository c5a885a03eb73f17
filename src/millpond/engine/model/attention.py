"""Attention over gathered rows: keys and values are one latent, a learned sink takes part of the weight."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from millpond.engine.model.native import kernels_for
from millpond.engine.model.numerics import curve

_TILE_ITEMS = 1 << 18
"""Gathered numbers per tile: keeps a tile's KV in the cache of one core."""
_LEAST = -1e30


@dataclass(frozen=True, slots=True)
class KvPart:
    """Rows that queries may see."""

    rows: torch.Tensor
    """[n, dim], float32."""
    index: torch.Tensor
    """[queries, k]: which rows each query sees; -1 for none."""


def attend(
    query: torch.Tensor, parts: Sequence[KvPart], sink: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    """Softmax attention of each query over the rows of all its parts.

    Args:
        query: [queries, heads, dim].
        parts: What each query sees; at least one has rows.
        sink: [heads], float32: a logit that enters the denominator only.
        dtype: Of the result.

    Returns:
        [queries, heads, dim]; zero where a query sees nothing.

    Guarantees:
        A query's bits depend on its own numbers and the widths of the parts only.
    """
    count, heads, dim = query.shape
    parts = [part for part in parts if len(part.rows)]
    kernels = kernels_for(query)
    if kernels is not None:
        return kernels.attend(query, [(part.rows, part.index) for part in parts], sink)
    width = sum(part.index.shape[1] for part in parts)
    tile = max(1, _TILE_ITEMS // (width * dim))
    out = torch.empty(count, heads, dim, dtype=dtype, device=query.device)
    for begin in range(0, count, tile):
        end = min(begin + tile, count)
        out[begin:end] = _attend_tile(query[begin:end].float(), parts, sink, begin, end)
    return out


def _attend_tile(
    query: torch.Tensor, parts: Sequence[KvPart], sink: torch.Tensor, begin: int, end: int
) -> torch.Tensor:
    gathered, scores = [], []
    for part in parts:
        index = part.index[begin:end]
        rows = part.rows.index_select(0, index.clamp_min(0).flatten()).unflatten(0, index.shape)
        gathered.append(rows)
        score = torch.bmm(query, rows.transpose(1, 2)) * query.shape[-1] ** -0.5
        scores.append(score.masked_fill_((index < 0)[:, None], -torch.inf))
    top = torch.stack([score.amax(-1) for score in scores]).amax(0).clamp_min(_LEAST)[..., None]
    weights = [(score - top).exp_() for score in scores]
    total = torch.stack([weight.sum(-1) for weight in weights]).sum(0) + curve(torch.exp, sink - top[..., 0])
    mixed = torch.stack([torch.bmm(weight, rows) for weight, rows in zip(weights, gathered, strict=True)])
    return mixed.sum(0) / total[..., None]
