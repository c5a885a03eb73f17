"""Weights of a V4.1 model, taken from a checkpoint under the published names and brought to float32.

Dense weights are stored as E4M3 with a scale per 32 x 32 tile, routed experts as E2M1 with a scale per row
and 32 columns, the rest as bf16 or float32. Engram tables stay as they are stored, and so do routed experts
where native kernels serve; the rest is dequantised when loaded, unless it is kept packed.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from millpond.core.shapes import LayerShape
from millpond.engine.model.checkpoint import Checkpoint
from millpond.engine.model.compressor import CompressorWeights
from millpond.engine.model.config import V41Config
from millpond.engine.model.dense import narrow_exact
from millpond.engine.model.engram import EngramWeights
from millpond.engine.model.formats import dequantise_fp4_weight, dequantise_tiles
from millpond.engine.model.fp4_experts import Fp4Experts
from millpond.engine.model.indexer import IndexerWeights
from millpond.engine.model.mhc import MixWeights
from millpond.engine.model.moe import ExpertWeights, MoeWeights
from millpond.engine.model.packed import Experts, Matrix, PackedWeight


@dataclass(frozen=True, slots=True)
class AttentionWeights:
    """Projections of one layer's attention, float32."""

    norm: torch.Tensor
    query_kv: Matrix
    """[q rank + dim, hidden]: the low-rank query over the shared latent."""
    query_norm: torch.Tensor
    query: Matrix
    """[heads * dim, q rank]"""
    kv_norm: torch.Tensor
    sink: torch.Tensor
    """[heads]"""
    out_groups: Matrix
    """[groups, o rank, heads * dim / groups]"""
    out: Matrix
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
    main_proj: Matrix
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


def load_model_weights(source: Checkpoint, config: V41Config, *, keep_packed: bool = False) -> ModelWeights:
    """Load everything but the vision tower.

    Args:
        source: The files.
        config: What they hold.
        keep_packed: Leave FP8 and FP4 weights mapped as they are stored; see `PackedWeight`.

    Raises:
        ModelFormatError: A shard cannot be read.
    """
    return ModelWeights(
        layers=tuple(
            _Loader(source, f"layers.{layer.layer}.", config, keep_packed).layer(layer)
            for layer in config.shape.layers
        ),
        draft=_load_draft(source, config, keep_packed) if config.shape.num_draft_stages else None,
        embed=source.plain("embed.weight"),
        head=narrow_exact(source.plain("head.weight")),
        norm=source.plain("norm.weight"),
    )


def _load_draft(source: Checkpoint, config: V41Config, keep_packed: bool) -> DraftWeights:
    num_stages = config.shape.num_draft_stages
    loaders = [_Loader(source, f"mtp.{stage}.", config, keep_packed) for stage in range(num_stages)]
    last = f"mtp.{num_stages - 1}."
    return DraftWeights(
        stages=tuple(loader.layer(None) for loader in loaders),
        main_proj=loaders[0].fp8("main_proj"),
        main_norm=source.plain("mtp.0.main_norm.weight"),
        norm=source.plain(last + "norm.weight"),
        markov_embed=source.plain(last + "markov_head.embed.weight"),
        markov_head=narrow_exact(source.plain(last + "markov_head.head.weight")),
        confidence=source.plain(last + "confidence_head.proj.weight"),
    )


@dataclass(frozen=True, slots=True)
class _Loader:
    """Reads the tensors below one prefix."""

    source: Checkpoint
    prefix: str
    config: V41Config
    keep_packed: bool

    def plain(self, name: str) -> torch.Tensor:
        return self.source.plain(self.prefix + name)

    def matrix(self, name: str) -> torch.Tensor:
        """Read one plain weight of a product."""
        return narrow_exact(self.plain(name))

    def fp8(self, *names: str, num_groups: int = 0) -> Matrix:
        """Read one FP8 weight, or several one below the other; cut into groups of rows if so asked."""
        parts = tuple(self.source.quantised(self.prefix + name) for name in names)
        rows, columns = sum(len(values) for values, _ in parts), parts[0][0].shape[1]
        size = (num_groups, rows // num_groups, columns) if num_groups else (rows, columns)
        weight = PackedWeight(size, parts, dequantise_tiles)
        return weight if self.keep_packed else weight.as_matrix()

    def fp4(self, *names: str) -> PackedWeight:
        """Read one FP4 weight, or several one below the other."""
        parts = tuple(self.source.quantised(self.prefix + name) for name in names)
        size = (sum(len(values) for values, _ in parts), 2 * parts[0][0].shape[1])
        return PackedWeight(size, parts, dequantise_fp4_weight)

    def experts(self, num_experts: int, *names: str) -> Experts:
        """Read a weight of every expert."""
        weights = tuple(
            self.fp4(*(f"ffn.experts.{expert}.{name}" for name in names)) for expert in range(num_experts)
        )
        if self.keep_packed:
            return weights
        packed = Fp4Experts.pack([weight.parts for weight in weights])
        if packed is not None:
            return packed
        first = weights[0].as_matrix()
        stacked = first.new_empty(num_experts, *first.shape)
        for place, weight in zip(stacked, weights, strict=True):
            place.copy_(weight.as_matrix())
        return stacked

    def layer(self, layer: LayerShape | None) -> LayerWeights:
        """Read a backbone layer, or a draft stage where `layer` is None."""
        shape = self.config.shape
        return LayerWeights(
            attention_mix=self.mix("hc_attn"),
            ffn_mix=self.mix("hc_ffn"),
            attention=self.attention(),
            compressor=self.compressor(layer.ratio) if layer is not None and layer.owns_kv else None,
            indexer=self.indexer() if layer is not None and layer.owns_index else None,
            ffn_norm=self.plain("ffn_norm.weight"),
            moe=self.moe(shape.num_experts if layer is not None else shape.draft_num_experts),
            engram=self.engram() if layer is not None and layer.has_engram else None,
        )

    def mix(self, name: str) -> MixWeights:
        return MixWeights(self.plain(name + "_fn"), self.plain(name + "_base"), self.plain(name + "_scale"))

    def attention(self) -> AttentionWeights:
        shape = self.config.shape
        return AttentionWeights(
            norm=self.plain("attn_norm.weight"),
            query_kv=self.fp8("attn.wq_a", "attn.wkv"),
            query_norm=self.plain("attn.q_norm.weight"),
            query=self.fp8("attn.wq_b"),
            kv_norm=self.plain("attn.kv_norm.weight"),
            sink=self.plain("attn.attn_sink"),
            out_groups=self.fp8("attn.wo_a", num_groups=shape.o_groups),
            out=self.fp8("attn.wo_b"),
        )

    def compressor(self, ratio: int) -> CompressorWeights:
        name, gate = "attn.compressor.wkv.weight", "attn.compressor.wgate.weight"
        return CompressorWeights(
            kv=self.matrix(name) if ratio == 1 else torch.cat([self.plain(name), self.plain(gate)]),
            norm=self.plain("attn.compressor.norm.weight"),
            index_key=self.matrix("attn.indexer.wk.weight"),
            index_norm=self.plain("attn.indexer.k_norm.weight"),
        )

    def indexer(self) -> IndexerWeights:
        return IndexerWeights(self.fp8("attn.indexer.wq_b"), self.matrix("attn.indexer.weights_proj.weight"))

    def moe(self, num_experts: int) -> MoeWeights:
        shared = "ffn.shared_experts."
        with_images = self.config.vision is not None
        return MoeWeights(
            gate=self.matrix("ffn.gate.weight"),
            bias=self.plain("ffn.gate.bias"),
            bias_image=self.plain("ffn.gate.bias_vl") if with_images else None,
            experts=ExpertWeights(self.experts(num_experts, "w1", "w3"), self.experts(num_experts, "w2")),
            shared=ExpertWeights(self.fp8(shared + "w1", shared + "w3"), self.fp8(shared + "w2")),
        )

    def engram(self) -> EngramWeights:
        data, scales = self.source.quantised(self.prefix + "engram.embed")
        return EngramWeights(
            data=data,
            scales=scales,
            kv=self.fp8("engram.wkv"),
            query_norm=self.plain("engram.q_weight"),
            key_norm=self.plain("engram.k_weight"),
        )
