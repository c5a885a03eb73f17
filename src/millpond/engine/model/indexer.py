"""The indexer: a small attention that chooses which compressed entries a row may see."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.nn import functional

from millpond.engine.model.numerics import Numerics
from millpond.engine.model.packed import Matrix
from millpond.engine.model.rope import Rotation

_TILE_ITEMS = 1 << 18
_KEY_TILE = 128
"""Keys of every product in exact mode."""


@dataclass(frozen=True, slots=True)
class IndexerWeights:
    """Float32 weights of a layer that selects."""

    query: Matrix
    """[heads * index dim, q rank]"""
    head_weights: torch.Tensor
    """[heads, hidden]"""


def index_queries(
    qr: torch.Tensor, w: IndexerWeights, rotation: Rotation, dim: int, numerics: Numerics
) -> torch.Tensor:
    """Queries as the packed keys see them: [rows, heads, dim], float32."""
    query = rotation.apply(numerics.quantised_linear(qr, w.query).unflatten(-1, (-1, dim)))
    return numerics.index_rows.decode(numerics.index_rows.encode(query), dim)


def head_weights(x: torch.Tensor, w: IndexerWeights, dim: int, numerics: Numerics) -> torch.Tensor:
    """Weight of each index head: [rows, heads], in the stream's dtype."""
    heads = len(w.head_weights)
    return numerics.linear(x, w.head_weights) * (dim**-0.5 * heads**-0.5)


def score_entries(
    query: torch.Tensor, weights: torch.Tensor, keys: torch.Tensor, visible: torch.Tensor, numerics: Numerics
) -> torch.Tensor:
    """Score a sequence's entries for some of its rows.

    Args:
        query: [rows, heads, dim], float32.
        weights: [rows, heads].
        keys: [entries, dim], float32.
        visible: [rows]: entries that each row may see; the others score -inf.
        numerics: How to compute; products and their sum over heads are rounded to its dtype.

    Returns:
        [rows, entries], in the stream's dtype.
    """
    rows, heads, _ = query.shape
    tile = max(1, _TILE_ITEMS // (heads * max(1, len(keys))))
    scores = torch.empty(rows, len(keys), dtype=numerics.dtype, device=query.device)
    for begin in range(0, rows, tile):
        part = slice(begin, begin + tile)
        products = _products(query[part].flatten(0, 1), keys, numerics).to(numerics.dtype)
        products = products.unflatten(0, (-1, heads)).relu_()
        scores[part] = (products * weights[part, :, None]).sum(1)
    places = torch.arange(len(keys), device=query.device)
    return scores.masked_fill_(places >= visible[:, None], -torch.inf)


def score_single_rows(
    query: torch.Tensor,
    weights: torch.Tensor,
    keys: torch.Tensor,
    offsets: Sequence[int],
    visible: torch.Tensor,
    width: int,
    numerics: Numerics,
) -> torch.Tensor:
    """Like `score_entries` for one row of each of many sequences at once.

    Args:
        query: [rows, heads, dim].
        weights: [rows, heads].
        keys: [all entries, dim].
        offsets: Where each row's entries begin.
        visible: [rows].
        width: Most entries of a row.
        numerics: How to compute.

    Returns:
        [rows, width]; -inf beyond what a row may see.
    """
    places = torch.arange(width, device=query.device)
    index = torch.tensor(offsets, device=query.device)[:, None] + places
    own = keys.index_select(0, index.clamp_max(len(keys) - 1).flatten()).unflatten(0, index.shape)
    hidden = places >= visible[:, None]
    # rows behind a sequence's entries were never written: whatever they hold must not reach the product
    own = own.masked_fill_(hidden[..., None], 0)
    products = torch.bmm(query, own.transpose(1, 2)).to(numerics.dtype).relu_()
    return (products * weights[..., None]).sum(1).masked_fill_(hidden, -torch.inf)


def _products(query: torch.Tensor, keys: torch.Tensor, numerics: Numerics) -> torch.Tensor:
    if not numerics.is_exact:
        return numerics.product(query, keys)
    padded = functional.pad(keys, (0, 0, 0, -len(keys) % _KEY_TILE))
    tiles = [numerics.product(query, tile) for tile in padded.split(_KEY_TILE)]
    return torch.cat(tiles, dim=-1)[:, : len(keys)] if tiles else query.new_empty(len(query), 0)
