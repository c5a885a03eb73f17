"""One backbone layer: Engram, shared KV, selection, attention, experts."""

from __future__ import annotations

from typing import NamedTuple

import torch

from millpond.core.errors import InvariantBroken
from millpond.core.shapes import LayerShape
from millpond.engine.model.attention import KvPart, attend
from millpond.engine.model.compressor import CompressorWeights, make_latents, store_entries
from millpond.engine.model.context import StepContext
from millpond.engine.model.indexer import (
    IndexerWeights,
    head_weights,
    index_queries,
    score_entries,
    score_single_rows,
)
from millpond.engine.model.mhc import Mix, MixWeights, collapse, compute_mix, expand
from millpond.engine.model.moe import mix_experts, route
from millpond.engine.model.native import kernels_for
from millpond.engine.model.numerics import rms_norm
from millpond.engine.model.rope import Rotation
from millpond.engine.model.selection import choose_candidates, choose_largest
from millpond.engine.model.step import EntryIndex, Rows
from millpond.engine.model.weights import AttentionWeights, LayerWeights


class Projected(NamedTuple):
    """What attention makes of its input."""

    qr: torch.Tensor
    """[rows, q rank]: the low-rank query."""
    query: torch.Tensor
    """[rows, heads, dim], rotated."""
    kv: torch.Tensor
    """[rows, dim], rotated."""


def mix_of(ctx: StepContext, stream: torch.Tensor, w: MixWeights) -> Mix:
    """Mixing coefficients of a sub-layer."""
    config = ctx.config
    return compute_mix(
        stream, w, ctx.numerics, norm_eps=config.norm_eps, iters=config.hc_iters, eps=config.hc_eps
    )


def project(ctx: StepContext, x: torch.Tensor, w: AttentionWeights, rotation: Rotation) -> Projected:
    """Queries and latent KV of normed rows x."""
    shape, numerics, eps = ctx.config.shape, ctx.numerics, ctx.config.norm_eps
    low, kv = numerics.quantised_linear(x, w.query_kv).split([shape.q_lora_rank, shape.head_dim], dim=-1)
    qr = rms_norm(low, w.query_norm, eps)
    query = numerics.quantised_linear(qr, w.query).unflatten(-1, (shape.num_heads, shape.head_dim))
    return Projected(qr, rotation.apply(query), rotation.apply(rms_norm(kv, w.kv_norm, eps)))


def combine_heads(
    ctx: StepContext, core: torch.Tensor, w: AttentionWeights, rotation: Rotation
) -> torch.Tensor:
    """Rotate the heads' outputs back (values carry rotation) and project them: [rows, hidden]."""
    groups = rotation.undo(core).flatten(1).unflatten(1, (len(w.out_groups), -1))
    low = ctx.numerics.grouped_product(groups.float(), w.out_groups).to(ctx.numerics.dtype)
    return ctx.numerics.quantised_linear(low.flatten(1), w.out)


def window_part(ctx: StepContext, layer: int, rows: Rows, kv: torch.Tensor) -> KvPart:
    """Window of each row: ring rows from before, the step's own rows; the ring is brought up to date."""
    ring, index = ctx.caches.windows[layer], rows.window
    data = ring.row_format.encode(kv)
    seen = ring.read_before(index.read_slots, index.read_rows, data)
    ctx.observe("win_kv", seen[index.read_slots.shape[0] :])
    ring.write(index.write_slots, index.write_rows, data[index.write_from])
    return KvPart(seen, index.index)


def publish_entries(ctx: StepContext, layer: LayerShape, w: CompressorWeights, x: torch.Tensor) -> None:
    """Make and store the entries that this step completes; later layers read them."""
    entries, caches = ctx.entries(layer.ratio), ctx.caches
    held = caches.compressors.get(layer.layer)
    latents = make_latents(x, w, entries, held, ctx.config.norm_eps, ctx.numerics)
    ctx.observe("latent", latents)
    rotation = Rotation(ctx.frequencies.compressed, entries.new_positions)
    main, keys = caches.main[layer.layer], caches.index_keys[layer.layer]
    store_entries(latents, w, entries, rotation, main, keys, ctx.config.norm_eps, ctx.numerics)
    ctx.keys = keys.read_all(entries.blocks)
    ctx.observe("keys", ctx.keys)


def select_entries(
    ctx: StepContext, layer: LayerShape, w: IndexerWeights, x: torch.Tensor, qr: torch.Tensor, rows: Rows
) -> None:
    """Choose the entries that this layer and the reusing ones after it attend to."""
    shape, entries = ctx.config.shape, ctx.entries(layer.ratio)
    rotation = ctx.rotation(rows, is_compressed=True)
    query = index_queries(qr, w, rotation, shape.index_head_dim, ctx.numerics)
    weights = head_weights(x, w, shape.index_head_dim, ctx.numerics)
    ctx.observe("idx_q", query)
    ctx.observe("idx_w", weights)
    visible = (rows.positions + 1) // layer.ratio
    scores = _score_spans(ctx, entries, rows, query, weights, visible)
    ctx.observe("idx_score", scores)
    if layer.layer == shape.candidate_source:
        blocks, size = shape.candidate_blocks, shape.candidate_block_size
        ctx.candidates = choose_candidates(scores, visible, blocks, size)
        ctx.observe("candidates", ctx.candidates)
    elif not layer.owns_kv and ctx.candidates is not None:
        scores = scores.masked_fill(~ctx.candidates, -torch.inf)
    places = choose_largest(scores, shape.index_topk)
    ctx.observe("topk", places)
    offsets = torch.tensor(entries.offsets, device=places.device)[rows.sequences]
    chosen = torch.where(places < 0, -1, places + offsets[:, None])
    ctx.selected = _read_selected(ctx, layer, entries, chosen)


def _score_spans(
    ctx: StepContext,
    entries: EntryIndex,
    rows: Rows,
    query: torch.Tensor,
    weights: torch.Tensor,
    visible: torch.Tensor,
) -> torch.Tensor:
    """Scores of every row for its own sequence's entries: [rows, most entries of a span], -inf beyond."""
    keys, numerics = ctx.keys, ctx.numerics
    if keys is None:
        raise InvariantBroken("a layer selects before any keys are published")
    width = max(entries.counts)
    kernels = kernels_for(weights, query.shape[-1])
    if kernels is not None:
        firsts = torch.tensor(entries.offsets)[rows.sequences]
        return kernels.score_entries(query, weights, keys, firsts, visible, width)
    if not numerics.is_exact and rows.num_rows == len(rows.spans) and width:
        return score_single_rows(query, weights, keys, entries.offsets, visible, width, numerics)
    scores = query.new_full((len(query), width), -torch.inf, dtype=numerics.dtype)
    for number, begin in enumerate(rows.row_begins.tolist()):
        own = slice(begin, begin + int(rows.counts[number]))
        at, count = entries.offsets[number], entries.counts[number]
        part = score_entries(query[own], weights[own], keys[at : at + count], visible[own], numerics)
        scores[own, :count] = part
    return scores


def _read_selected(ctx: StepContext, layer: LayerShape, entries: EntryIndex, chosen: torch.Tensor) -> KvPart:
    """Read the chosen entries' KV: all entries once where rows share them, else only those chosen."""
    main = ctx.caches.main[layer.kv_source]
    if len(entries.blocks) * entries.per_block <= chosen.numel():
        return KvPart(main.read_all(entries.blocks), chosen)
    flat = chosen.clamp_min(0).flatten()
    own = torch.arange(len(flat), device=chosen.device).view_as(chosen)
    return KvPart(main.read(*entries.locate(flat)), own.masked_fill(chosen < 0, -1))


def run_attention(
    ctx: StepContext, layer: LayerShape, w: LayerWeights, x: torch.Tensor, rows: Rows
) -> torch.Tensor:
    """Attention of normed rows over their windows and selected entries: [rows, hidden]."""
    rotation = ctx.rotation(rows, is_compressed=layer.ratio > 0)
    projected = project(ctx, x, w.attention, rotation)
    ctx.observe("qr", projected.qr)
    ctx.observe("q", projected.query)
    parts = [window_part(ctx, layer.layer, rows, projected.kv)]
    if w.indexer is not None:
        select_entries(ctx, layer, w.indexer, x, projected.qr, rows)
    if layer.ratio:
        if ctx.selected is None:
            raise InvariantBroken("a layer reuses a selection before any was made")
        parts.append(ctx.selected)
    core = attend(projected.query, parts, w.attention.sink, ctx.numerics.dtype)
    ctx.observe("attn_core", core)
    return combine_heads(ctx, core, w.attention, rotation)


def run_experts(
    ctx: StepContext, w: LayerWeights, x: torch.Tensor, is_image: torch.Tensor | None, count: int
) -> torch.Tensor:
    """Mixture of experts over normed rows: [rows, hidden]."""
    config = ctx.config
    routing = route(x, w.moe, is_image, count, config.routed_scale, ctx.numerics)
    ctx.observe("route_idx", routing.experts)
    ctx.observe("route_w", routing.weights)
    return mix_experts(x, w.moe, routing, config.swiglu_limit, ctx.numerics, ctx.observe)


def run_ffn(
    ctx: StepContext,
    w: LayerWeights,
    stream: torch.Tensor,
    pre: torch.Tensor,
    is_image: torch.Tensor | None,
    count: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Second half of a block; returns the new stream and the `pre` for the next sub-layer."""
    mix = mix_of(ctx, stream, w.ffn_mix)
    ctx.observe("ffn_pre", mix.pre)
    ctx.observe("ffn_post", mix.post)
    ctx.observe("ffn_comb", mix.comb)
    x = rms_norm(collapse(stream, pre), w.ffn_norm, ctx.config.norm_eps)
    ctx.observe("ffn_in", x)
    out = run_experts(ctx, w, x, is_image, count)
    ctx.observe("ffn_out", out)
    return expand(stream, out, mix), mix.pre


def run_layer(
    ctx: StepContext,
    layer: LayerShape,
    w: LayerWeights,
    stream: torch.Tensor,
    pre: torch.Tensor,
    is_image: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Run one block.

    Args:
        ctx: The step.
        layer: The block's part in sharing KV.
        w: Its weights.
        stream: [rows, copies, hidden], after the layer's Engram.
        pre: [rows, copies]: collapse handed on by the block before.
        is_image: [rows of this layer's queries]; None if all are text.

    Returns:
        The new stream and `pre`; at the last KV source with the kept rows only, which may be none.
    """
    ctx.observe("x_in", stream)
    ctx.observe("pre_in", pre)
    rows = ctx.rows(layer)
    x = rms_norm(collapse(stream, pre), w.attention.norm, ctx.config.norm_eps)
    ctx.observe("attn_normed", x)
    if w.compressor is not None:
        publish_entries(ctx, layer, w.compressor, x)
    if len(stream) != rows.num_rows:
        x, stream = x[ctx.step.kept], stream[ctx.step.kept]
        if not len(stream):
            return stream, pre[ctx.step.kept]
    mix = mix_of(ctx, stream, w.attention_mix)
    ctx.observe("attn_pre", mix.pre)
    ctx.observe("attn_post", mix.post)
    ctx.observe("attn_comb", mix.comb)
    ctx.observe("attn_in", x)
    out = run_attention(ctx, layer, w, x, rows)
    ctx.observe("attn_out", out)
    stream = expand(stream, out, mix)
    ctx.observe("x_mid", stream)
    return run_ffn(ctx, w, stream, mix.pre, is_image, ctx.config.shape.num_experts_per_token)
