"""Weights of a V4.1 model, taken from a checkpoint under the published names and brought to float32.

Dense weights are stored as E4M3 with a scale per 32 x 32 tile, routed experts as E2M1 with a scale per row
and 32 columns, the rest as bf16 or float32. All but the Engram tables are dequantised when loaded.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from millpond.core.shapes import LayerShape, ModelShape
from millpond.engine.model.checkpoint import TensorSource
from millpond.engine.model.compressor import CompressorWeights
from millpond.engine.model.config import V41Config
from millpond.engine.model.engram import EngramWeights
from millpond.engine.model.indexer import IndexerWeights
from millpond.engine.model.mhc import MixWeights
from millpond.engine.model.moe import ExpertWeights, MoeWeights


@dataclass(frozen=True, slots=True)
class AttentionWeights:
    """Projections of one layer's attention, float32."""

    norm: torch.Tensor
    query_kv: torch.Tensor
    """[q rank + dim, hidden]: the low-rank query over the shared latent."""
    query_norm: torch.Tensor
    query: torch.Tensor
    """[heads * dim, q rank]"""
    kv_norm: torch.Tensor
    sink: torch.Tensor
    """[heads]"""
    out_groups: torch.Tensor
    """[groups, o rank, heads * dim / groups]"""
    out: torch.Tensor
    """[hidden, groups * o rank]"""


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One layer or draft stage."""

    attention_mix: MixWeights
    ffn_mix: MixWeights
    attention: AttentionWeights
    compressor: CompressorWeights | None
    indexer: IndexerWeights | None
    ffn_norm: torch.Tensor
    moe: MoeWeights
    engram: EngramWeights | None


@dataclass(frozen=True, slots=True)
class DraftWeights:
    """DSpark: its stages and what turns their output into drafts."""

    stages: tuple[LayerWeights, ...]
    main_proj: torch.Tensor
    """[hidden, targets * hidden]"""
    main_norm: torch.Tensor
    norm: torch.Tensor
    markov_embed: torch.Tensor
    """[vocab, rank]"""
    markov_head: torch.Tensor
    """[vocab, rank]"""
    confidence: torch.Tensor
    """[1, hidden + rank]"""


@dataclass(frozen=True, slots=True)
class ModelWeights:
    """The backbone and, where there is one, the draft head."""

    embed: torch.Tensor
    """[vocab, hidden]"""
    head: torch.Tensor
    """[vocab, hidden]"""
    norm: torch.Tensor
    layers: tuple[LayerWeights, ...]
    draft: DraftWeights | None


def load_model_weights(source: TensorSource, config: V41Config, advance: Callable[[], None]) -> ModelWeights:
    """Load everything but the vision tower; calls `advance` after each layer.

    Raises:
        ModelFormatError: A tensor is missing, mis-shaped or of the wrong type.
    """
    shape = config.shape
    vocab, hidden = shape.vocab_size, shape.hidden_size
    layers = []
    for layer in shape.layers:
        layers.append(_Loader(source, f"layers.{layer.layer}.", config).layer(layer))
        advance()
    return ModelWeights(
        embed=source.plain("embed.weight", vocab, hidden),
        head=source.plain("head.weight", vocab, hidden),
        norm=source.plain("norm.weight", hidden),
        layers=tuple(layers),
        draft=_load_draft(source, config, advance) if shape.num_draft_stages else None,
    )


def _load_draft(source: TensorSource, config: V41Config, advance: Callable[[], None]) -> DraftWeights:
    shape = config.shape
    hidden, rank = shape.hidden_size, shape.draft_markov_rank
    first, last = "mtp.0.", f"mtp.{shape.num_draft_stages - 1}."
    stages = []
    for stage in range(shape.num_draft_stages):
        stages.append(_Loader(source, f"mtp.{stage}.", config).layer(None))
        advance()
    return DraftWeights(
        stages=tuple(stages),
        main_proj=source.fp8(first + "main_proj", hidden, len(shape.draft_targets) * hidden),
        main_norm=source.plain(first + "main_norm.weight", hidden),
        norm=source.plain(last + "norm.weight", hidden),
        markov_embed=source.plain(last + "markov_head.embed.weight", shape.vocab_size, rank),
        markov_head=source.plain(last + "markov_head.head.weight", shape.vocab_size, rank),
        confidence=source.plain(last + "confidence_head.proj.weight", 1, hidden + rank),
    )


@dataclass(frozen=True, slots=True)
class _Loader:
    """Reads the tensors below one prefix."""

    source: TensorSource
    prefix: str
    config: V41Config

    @property
    def shape(self) -> ModelShape:
        return self.config.shape

    def plain(self, name: str, *size: int) -> torch.Tensor:
        return self.source.plain(self.prefix + name, *size)

    def fp8(self, name: str, rows: int, columns: int) -> torch.Tensor:
        return self.source.fp8(self.prefix + name, rows, columns)

    def layer(self, layer: LayerShape | None) -> LayerWeights:
        """Read a backbone layer, or a draft stage where `layer` is None."""
        return LayerWeights(
            attention_mix=self.mix("hc_attn"),
            ffn_mix=self.mix("hc_ffn"),
            attention=self.attention(),
            compressor=self.compressor(layer.ratio) if layer is not None and layer.owns_kv else None,
            indexer=self.indexer() if layer is not None and layer.owns_index else None,
            ffn_norm=self.plain("ffn_norm.weight", self.shape.hidden_size),
            moe=self.moe(self.shape.num_experts if layer is not None else self.shape.draft_num_experts),
            engram=self.engram(layer.layer) if layer is not None and layer.has_engram else None,
        )

    def mix(self, name: str) -> MixWeights:
        copies = self.shape.hc_mult
        count = copies * (copies + 2)
        return MixWeights(
            self.plain(name + "_fn", count, copies * self.shape.hidden_size),
            self.plain(name + "_base", count),
            self.plain(name + "_scale", 3),
        )

    def attention(self) -> AttentionWeights:
        shape = self.shape
        hidden, width = shape.hidden_size, shape.num_heads * shape.head_dim
        groups, rank = shape.o_groups, shape.o_lora_rank
        out_groups = self.fp8("attn.wo_a", groups * rank, width // groups)
        return AttentionWeights(
            norm=self.plain("attn_norm.weight", hidden),
            query_kv=torch.cat(
                [
                    self.fp8("attn.wq_a", shape.q_lora_rank, hidden),
                    self.fp8("attn.wkv", shape.head_dim, hidden),
                ]
            ),
            query_norm=self.plain("attn.q_norm.weight", shape.q_lora_rank),
            query=self.fp8("attn.wq_b", width, shape.q_lora_rank),
            kv_norm=self.plain("attn.kv_norm.weight", shape.head_dim),
            sink=self.plain("attn.attn_sink", shape.num_heads),
            out_groups=out_groups.unflatten(0, (groups, rank)),
            out=self.fp8("attn.wo_b", hidden, groups * rank),
        )

    def compressor(self, ratio: int) -> CompressorWeights:
        shape = self.shape
        kv = self.plain("attn.compressor.wkv.weight", shape.head_dim, shape.hidden_size)
        if ratio > 1:
            gate = self.plain("attn.compressor.wgate.weight", shape.head_dim, shape.hidden_size)
            kv = torch.cat([kv, gate])
        return CompressorWeights(
            kv=kv,
            norm=self.plain("attn.compressor.norm.weight", shape.head_dim),
            index_key=self.plain("attn.indexer.wk.weight", shape.index_head_dim, shape.head_dim),
            index_norm=self.plain("attn.indexer.k_norm.weight", shape.index_head_dim),
        )

    def indexer(self) -> IndexerWeights:
        shape = self.shape
        return IndexerWeights(
            self.fp8("attn.indexer.wq_b", shape.index_heads * shape.index_head_dim, shape.q_lora_rank),
            self.plain("attn.indexer.weights_proj.weight", shape.index_heads, shape.hidden_size),
        )

    def moe(self, num_experts: int) -> MoeWeights:
        hidden, width = self.shape.hidden_size, self.shape.moe_width
        gate = self.plain("ffn.gate.weight", num_experts, hidden)
        gate_up = gate.new_empty(num_experts, 2 * width, hidden)
        down = gate.new_empty(num_experts, hidden, width)
        for expert in range(num_experts):
            name = f"{self.prefix}ffn.experts.{expert}."
            gate_up[expert, :width] = self.source.fp4(name + "w1", width, hidden)
            gate_up[expert, width:] = self.source.fp4(name + "w3", width, hidden)
            down[expert] = self.source.fp4(name + "w2", hidden, width)
        shared = "ffn.shared_experts."
        with_images = self.config.vision is not None
        return MoeWeights(
            gate=gate,
            bias=self.plain("ffn.gate.bias", num_experts),
            bias_image=self.plain("ffn.gate.bias_vl", num_experts) if with_images else None,
            experts=ExpertWeights(gate_up, down),
            shared=ExpertWeights(
                torch.cat([self.fp8(shared + "w1", width, hidden), self.fp8(shared + "w3", width, hidden)]),
                self.fp8(shared + "w2", hidden, width),
            ),
        )

    def engram(self, layer: int) -> EngramWeights:
        shape = self.shape
        rows = shape.engram_rows[self.config.engram.layers.index(layer)]
        width, copies, hidden = shape.engram_head_dim, shape.hc_mult, shape.hidden_size
        data, scales = self.source.table(self.prefix + "engram.embed", rows, width)
        return EngramWeights(
            data=data,
            scales=scales,
            kv=self.fp8("engram.wkv", (copies + 1) * hidden, shape.engram_columns * width),
            query_norm=self.plain("engram.q_weight", copies, hidden),
            key_norm=self.plain("engram.k_weight", copies, hidden),
        )
