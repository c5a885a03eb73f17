"""Which layer owns long-range KV, which selects, which reuses: derived from the config and checked.

Compressed layers follow the window-only ones. They fall into KV segments, each opened by the layer that
owns the KV; KV segments fall into index segments, each opened by a layer that selects. The first ratio-1
layer opens the last KV segment: from there on (the decoder) no layer adds long-range KV of its own.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from millpond.core.shapes import LayerRole, LayerShape
from millpond.engine.model.fields import Fields

_RATIOS = (0, 1, 2)


def derive_layers(
    text: Fields, num_layers: int, num_stages: int, engram_layers: Collection[int]
) -> tuple[LayerShape, ...]:
    """Derive every backbone layer's role.

    Raises:
        ModelFormatError: The lists contradict each other; `param` names the field at fault.
    """
    ratios = _ratios(text, num_layers, num_stages)
    kv_sources = _sources(text, "kv_source_layer_ids", ratios)
    index_sources = _sources(text, "index_source_layer_ids", ratios)
    if text.get("index_k_source_layer_ids") is not None:
        text.must_be("index_k_source_layer_ids", list(kv_sources))
    _check_segments(text, ratios, kv_sources, index_sources)
    layers: list[LayerShape] = []
    kv_source = index_source = -1
    for layer, ratio in enumerate(ratios):
        role = LayerRole.WINDOW if ratio == 0 else LayerRole.REUSE
        if layer in index_sources:
            index_source, role = layer, LayerRole.REINDEX
        if layer in kv_sources:
            kv_source, role = layer, LayerRole.FULL
        layers.append(LayerShape(layer, ratio, role, kv_source, index_source, layer in engram_layers))
    return tuple(layers)


def _ratios(text: Fields, num_layers: int, num_stages: int) -> tuple[int, ...]:
    field = "compress_ratios"
    ratios = text.integers(field)
    if len(ratios) != num_layers + num_stages:
        text.refuse(field, f"has {len(ratios)} entries for {num_layers} layers and {num_stages} draft stages")
    backbone, drafts = ratios[:num_layers], ratios[num_layers:]
    if any(drafts):
        text.refuse(field, "is not 0 for every draft stage")
    for ratio in backbone:
        if ratio not in _RATIOS:
            text.refuse(field, f"holds {ratio}; known are {list(_RATIOS)}")
    order = [ratio or max(_RATIOS) + 1 for ratio in backbone]
    if order != sorted(order, reverse=True):
        text.refuse(field, "does not go from 0 over 2 to 1")
    if 1 not in backbone:
        text.refuse(field, "has no layer of ratio 1, so nothing parts encoder from decoder")
    return backbone


def _sources(text: Fields, field: str, ratios: Sequence[int]) -> tuple[int, ...]:
    ids = text.integers(field)
    if not ids or list(ids) != sorted(set(ids)) or ids[-1] >= len(ratios):
        text.refuse(field, f"is {list(ids)}: not ascending layers below {len(ratios)}")
    for layer in ids:
        if ratios[layer] == 0:
            text.refuse(field, f"names layer {layer}, which has no compressed KV")
    return ids


def _check_segments(
    text: Fields, ratios: Sequence[int], kv_sources: Sequence[int], index_sources: Sequence[int]
) -> None:
    first = next(layer for layer, ratio in enumerate(ratios) if ratio)
    boundary = next(layer for layer, ratio in enumerate(ratios) if ratio == 1)
    if first not in kv_sources:
        text.refuse("kv_source_layer_ids", f"lacks layer {first}, the first with compressed KV")
    if kv_sources[-1] != boundary:
        text.refuse(
            "kv_source_layer_ids", f"ends with {kv_sources[-1]}, not with {boundary}, the first of ratio 1"
        )
    for layer in kv_sources:
        if layer not in index_sources:
            text.refuse("index_source_layer_ids", f"lacks layer {layer}, which opens a KV segment")
    for layer in index_sources:
        if layer < boundary and layer not in kv_sources:
            text.refuse(
                "index_source_layer_ids", f"names layer {layer}, which has neither own KV nor candidates"
            )
