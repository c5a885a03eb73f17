"""Compressed KV: groups of `ratio` tokens become one latent, kept as main KV and as an index key."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from millpond.engine.model.caches import PackedRows
from millpond.engine.model.numerics import Numerics, rms_norm
from millpond.engine.model.rope import Rotation
from millpond.engine.model.step import EntryIndex


@dataclass(frozen=True, slots=True)
class CompressorWeights:
    """Float32 weights of a KV source layer."""

    kv: torch.Tensor
    """[dim, hidden]; with a gate [2 * dim, hidden], float32: values over scores."""
    norm: torch.Tensor
    """[dim]"""
    index_key: torch.Tensor
    """[index dim, dim]"""
    index_norm: torch.Tensor
    """[index dim]"""


def make_latents(
    x: torch.Tensor,
    w: CompressorWeights,
    entries: EntryIndex,
    held: PackedRows | None,
    eps: float,
    numerics: Numerics,
) -> torch.Tensor:
    """Latents of the entries that this step completes, before rotation: [new, dim].

    Args:
        x: [rows, hidden]: normed input of the layer.
        w: The source layer's compressor.
        entries: Which rows make which entries.
        held: (value, score) rows of the newest tokens of each sequence; updated. None for ratio 1.
        eps: Of the norm.
        numerics: How to compute.
    """
    if held is None:
        return rms_norm(numerics.linear(x[entries.members[:, 0]], w.kv), w.norm, eps)
    own = numerics.torch_product(x.float(), w.kv)
    carried = held.read(entries.state_slots, entries.state_rows)
    held.write(entries.keep_slots, entries.keep_rows, held.row_format.encode(own[entries.keep_from]))
    values, scores = torch.cat([carried, own])[entries.members].chunk(2, dim=-1)  # [new, ratio, dim]
    latents = (values * scores.softmax(1)).sum(1)
    return rms_norm(latents.to(numerics.dtype), w.norm, eps)


def store_entries(
    latents: torch.Tensor,
    w: CompressorWeights,
    entries: EntryIndex,
    rotation: Rotation,
    main: PackedRows,
    index_keys: PackedRows,
    eps: float,
    numerics: Numerics,
) -> None:
    """Write main KV and index keys of new entries; `rotation` is that of each group's first token."""
    blocks, places = entries.locate(entries.new)
    main.write(blocks, places, main.row_format.encode(rotation.apply(latents)))
    keys = rms_norm(numerics.linear(latents, w.index_key), w.index_norm, eps)
    index_keys.write(blocks, places, index_keys.row_format.encode(rotation.apply(keys)))
