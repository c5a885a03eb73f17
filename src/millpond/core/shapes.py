"""`ModelShape`: the sizes of a DeepSeek-V4.1 model and what each layer does (interfaces A.2).

Everything that block sizes, parameter counts and step costs follow from; nothing about numbers' values.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from millpond.core.kv_layout import KvLayout, KvPart, KvRow, StatePart
from millpond.core.units import BLOCK_TOKENS

ACTIVATION_GROUP = 32
"""Channels that share one power-of-two scale in FP8 rows and FP4 index rows."""
MAIN_KV_GROUP = 16
"""Channels that share one E4M3 scale in FP4 main KV."""
_FP32_BYTES = 4


class LayerRole(StrEnum):
    """How a layer gets long-range KV."""

    WINDOW = "window"
    """Sliding window only."""
    FULL = "full"
    """Owns a compressor and index keys and selects with its own indexer."""
    REINDEX = "reindex"
    """Selects anew among the candidates of an earlier layer's KV."""
    REUSE = "reuse"
    """Takes the KV and the selection of earlier layers."""


class KvFormat(StrEnum):
    """How cached rows are written."""

    PACKED = "packed"
    """FP8 window rows, FP4 main and index rows, with their scales."""
    FP32 = "fp32"
    """Plain floats, for checking."""


@dataclass(frozen=True, slots=True)
class LayerShape:
    """One layer's part in the sharing of KV."""

    layer: int
    ratio: int
    """Tokens per compressed entry; 0 without compressed KV."""
    role: LayerRole
    kv_source: int = -1
    """Layer whose compressed KV it reads; -1 for none."""
    index_source: int = -1
    """Layer whose selection it uses; -1 for none."""
    has_engram: bool = False

    @property
    def owns_kv(self) -> bool:
        """Whether blocks hold a row of this layer."""
        return self.role is LayerRole.FULL

    @property
    def owns_index(self) -> bool:
        """Whether the layer runs an indexer."""
        return self.role in (LayerRole.FULL, LayerRole.REINDEX)


@dataclass(frozen=True, slots=True)
class ModelShape:
    """Sizes of one model. Widths in channels, `hc_mult` copies of the stream."""

    vocab_size: int
    hidden_size: int
    layers: tuple[LayerShape, ...]
    num_heads: int
    head_dim: int
    rope_dim: int
    q_lora_rank: int
    o_lora_rank: int
    o_groups: int
    moe_width: int
    num_experts: int
    num_experts_per_token: int
    window: int
    index_heads: int
    index_head_dim: int
    index_topk: int
    candidate_source: int
    """Layer that chooses the candidate blocks; -1 for none."""
    candidate_blocks: int
    candidate_block_size: int
    hc_mult: int
    engram_rows: tuple[int, ...]
    """Table rows of each Engram layer."""
    engram_max_ngram: int
    engram_heads: int
    engram_head_dim: int
    num_draft_stages: int
    num_draft_tokens: int
    draft_targets: tuple[int, ...]
    draft_markov_rank: int
    draft_num_experts: int
    draft_num_experts_per_token: int

    @property
    def kv_sources(self) -> tuple[LayerShape, ...]:
        """Layers that own rows of blocks, ascending."""
        return tuple(layer for layer in self.layers if layer.owns_kv)

    @property
    def num_encoder_layers(self) -> int:
        """Layers before the last KV source: every prompt row passes them; later ones need only the last."""
        return self.kv_sources[-1].layer

    @property
    def backtracking(self) -> int:
        """Rows that one verification step may write: one token and its drafts."""
        return 1 + (self.num_draft_tokens if self.num_draft_stages else 0)

    @property
    def ring_rows(self) -> int:
        """Rows of a window ring: rejected drafts may be overwritten without losing the window."""
        return self.window + self.backtracking

    @property
    def engram_columns(self) -> int:
        """Table rows that one token looks up in one layer."""
        return (self.engram_max_ngram - 1) * self.engram_heads

    def compressor_rows(self, ratio: int) -> int:
        """(kv, score) rows kept of the newest tokens, so that a group survives rejected drafts."""
        return ratio + self.backtracking - 1


@dataclass(frozen=True, slots=True)
class VisionShape:
    """Sizes of the vision tower and the aligner."""

    num_layers: int
    hidden_size: int
    width: int
    """Of the inner layer of a block's MLP."""
    patch_size: int
    """Pixels of a patch's side; three colours."""
    downsample: int
    """Patches of a token's side."""
    out_size: int
    """Width of the text model's stream."""


def window_row_bytes(shape: ModelShape, kv_format: KvFormat) -> int:
    """Bytes of one window row of one layer."""
    if kv_format is KvFormat.FP32:
        return shape.head_dim * _FP32_BYTES
    return shape.head_dim + shape.head_dim // ACTIVATION_GROUP


def main_entry_bytes(shape: ModelShape, kv_format: KvFormat) -> int:
    """Bytes of one compressed entry's main KV."""
    if kv_format is KvFormat.FP32:
        return shape.head_dim * _FP32_BYTES
    return shape.head_dim // 2 + shape.head_dim // MAIN_KV_GROUP


def index_entry_bytes(shape: ModelShape, kv_format: KvFormat) -> int:
    """Bytes of one compressed entry's index key."""
    if kv_format is KvFormat.FP32:
        return shape.index_head_dim * _FP32_BYTES
    return shape.index_head_dim // 2 + shape.index_head_dim // ACTIVATION_GROUP


def kv_layout(shape: ModelShape, kv_format: KvFormat) -> KvLayout:
    """Make the layout of blocks and state slots.

    Blocks: index keys, then main KV of each source layer. State: the window rings of the encoder layers
    (persisted), then those of the decoder layers, the draft stages' and the rows of incomplete groups.
    """
    tags = ("e2m1+e8m0", "e2m1+e4m3") if kv_format is KvFormat.PACKED else ("fp32", "fp32")
    rows = tuple(
        KvRow(
            source.layer,
            (
                KvPart(
                    "index_k",
                    BLOCK_TOKENS // source.ratio * index_entry_bytes(shape, kv_format),
                    tags[0],
                ),
                KvPart("main", BLOCK_TOKENS // source.ratio * main_entry_bytes(shape, kv_format), tags[1]),
            ),
        )
        for source in shape.kv_sources
    )
    ring = shape.ring_rows * window_row_bytes(shape, kv_format)
    boundary = shape.num_encoder_layers
    windows = (StatePart(layer.layer, "window", ring, layer.layer < boundary) for layer in shape.layers)
    drafts = (StatePart(stage, "draft", ring, persisted=False) for stage in range(shape.num_draft_stages))
    compressors = (
        StatePart(
            source.layer,
            "compressor",
            shape.compressor_rows(source.ratio) * 2 * shape.head_dim * _FP32_BYTES,
            persisted=False,
        )
        for source in shape.kv_sources
        if source.ratio > 1
    )
    return KvLayout(rows=rows, state=(*windows, *drafts, *compressors))


def kv_bytes_per_token(shape: ModelShape, kv_format: KvFormat = KvFormat.PACKED) -> float:
    """Block bytes that one token adds, over all source layers."""
    entry = index_entry_bytes(shape, kv_format) + main_entry_bytes(shape, kv_format)
    return sum(entry / source.ratio for source in shape.kv_sources)


def encoder_state_bytes(layout: KvLayout) -> int:
    """Bytes of the persisted part of a state slot."""
    return sum(part.num_bytes for part in layout.state if part.persisted)


def num_backbone_parameters(shape: ModelShape) -> int:
    """Count the weights of the backbone: embedding, layers, final norm, head.

    Without Engram, draft stages, vision and quantisation scales.
    """
    hidden = shape.hidden_size
    total = 2 * shape.vocab_size * hidden + hidden
    return total + sum(_layer_parameters(shape, layer) for layer in shape.layers)


def _layer_parameters(shape: ModelShape, layer: LayerShape) -> int:
    hidden, heads_width = shape.hidden_size, shape.num_heads * shape.head_dim
    copies = shape.hc_mult
    num_mixes = copies * (copies + 2)
    mixes = 2 * (num_mixes * (copies * hidden + 1) + 3)
    attention = (
        shape.q_lora_rank * (hidden + 1 + heads_width)
        + shape.head_dim * (hidden + 1)
        + shape.o_lora_rank * heads_width
        + hidden * shape.o_groups * shape.o_lora_rank
        + shape.num_heads
    )
    experts = 3 * hidden * shape.moe_width * (shape.num_experts + 1)
    gate = shape.num_experts * (hidden + 2)
    total = mixes + attention + experts + gate + 2 * hidden
    if layer.owns_kv:
        num_matrices = 2 if layer.ratio > 1 else 1
        total += shape.head_dim * (num_matrices * hidden + 1) + shape.index_head_dim * (shape.head_dim + 1)
    if layer.owns_index:
        total += shape.index_heads * (shape.index_head_dim * shape.q_lora_rank + hidden)
    return total
