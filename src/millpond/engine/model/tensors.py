"""Every weight of a V4.1 checkpoint: published name, format and size, from the config alone. No torch here.

Dense weights are stored as E4M3 with a scale per 32 x 32 tile, routed experts as E2M1 with a scale per row
and 32 columns, Engram tables as E4M3 with a scale per row and 32 columns, the rest as bf16 or float32.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum

from millpond.core.errors import ModelFormatError
from millpond.core.shapes import LayerShape, ModelShape
from millpond.core.units import ceil_div
from millpond.engine.model.config import V41Config, VisionConfig
from millpond.engine.safetensors_files import BITS_BY_DTYPE, TensorEntry

PREFIX = "model."
"""May stand before every name; dropped."""
_GROUP = 32


class WeightKind(StrEnum):
    """How a weight is stored."""

    BF16 = "bf16"
    FP32 = "fp32"
    FP8 = "fp8"
    FP4 = "fp4"
    TABLE = "table"


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """One tensor of a file."""

    name: str
    dtypes: tuple[str, ...]
    """The published one first; others hold the same values."""
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        """Bytes in the published dtype."""
        return math.prod(self.shape) * BITS_BY_DTYPE[self.dtypes[0]] // 8


@dataclass(frozen=True, slots=True)
class Weight:
    """One weight as the model sees it; a quantised one is stored as two tensors."""

    name: str
    """Published name, without `.weight` for quantised ones."""
    kind: WeightKind
    size: tuple[int, ...]

    def stored(self) -> tuple[StoredTensor, ...]:
        """Return the tensors of the file: the values and, where they are quantised, the scales."""
        match self.kind:
            case WeightKind.BF16:
                return (StoredTensor(self.name, ("BF16", "F32"), self.size),)
            case WeightKind.FP32:
                return (StoredTensor(self.name, ("F32", "BF16"), self.size),)
            case _:
                return self._quantised()

    def _quantised(self) -> tuple[StoredTensor, ...]:
        rows, columns = self.size
        dtype, width = ("I8", columns // 2) if self.kind is WeightKind.FP4 else ("F8_E4M3", columns)
        scale_rows = ceil_div(rows, _GROUP) if self.kind is WeightKind.FP8 else rows
        return (
            StoredTensor(f"{self.name}.weight", (dtype,), (rows, width)),
            StoredTensor(f"{self.name}.scale", ("F8_E8M0",), (scale_rows, ceil_div(columns, _GROUP))),
        )


def language_weights(config: V41Config) -> Iterator[Weight]:
    """Weights of the backbone and the draft stages; the last ones belong to no layer."""
    shape = config.shape
    for layer in shape.layers:
        yield from _below(f"layers.{layer.layer}.", _layer_weights(config, layer))
    for stage in range(shape.num_draft_stages):
        yield from _below(f"mtp.{stage}.", (*_layer_weights(config, None), *_draft_weights(shape, stage)))
    yield _bf16("embed.weight", shape.vocab_size, shape.hidden_size)
    yield _bf16("head.weight", shape.vocab_size, shape.hidden_size)
    yield _bf16("norm.weight", shape.hidden_size)


def all_weights(config: V41Config) -> Iterator[Weight]:
    """Weights of the whole model, with those of the vision tower where there is one."""
    yield from language_weights(config)
    if config.vision is not None:
        yield from _vision_weights(config.vision, config.shape.hidden_size)


def stored_bytes(weights: Iterable[Weight]) -> int:
    """Bytes of weights in the files, in the published dtypes."""
    return sum(tensor.num_bytes for weight in weights for tensor in weight.stored())


def check_tensors(table: Mapping[str, TensorEntry], config: V41Config) -> dict[str, tuple[str, TensorEntry]]:
    """Compare what the headers say with what the config needs.

    Returns:
        Published name -> (name in the file, its entry), also of tensors that nothing needs.

    Raises:
        ModelFormatError: A tensor is missing, there twice, mis-shaped or of another dtype; names it.
    """
    found: dict[str, tuple[str, TensorEntry]] = {}
    for stored_name, entry in table.items():
        name = stored_name.removeprefix(PREFIX)
        if name in found:
            raise _error(entry.file.name, f"{name} is there twice, with and without {PREFIX!r}", name)
        found[name] = (stored_name, entry)
    for weight in all_weights(config):
        for tensor in weight.stored():
            _check(tensor, found)
    return found


def _check(tensor: StoredTensor, found: Mapping[str, tuple[str, TensorEntry]]) -> None:
    if tensor.name not in found:
        raise _error("checkpoint", f"{tensor.name} is missing", tensor.name)
    _, entry = found[tensor.name]
    if entry.shape != tensor.shape:
        what = f"{tensor.name} has shape {list(entry.shape)}, config.json says {list(tensor.shape)}"
        raise _error(entry.file.name, what, tensor.name)
    if entry.dtype not in tensor.dtypes:
        what = f"{tensor.name} has dtype {entry.dtype}, not {' or '.join(tensor.dtypes)}"
        raise _error(entry.file.name, what, tensor.name)


def _error(where: str, what: str, tensor: str) -> ModelFormatError:
    return ModelFormatError(f"{where}: {what}", code="model.weights", param=tensor)


def _below(prefix: str, weights: Iterable[Weight]) -> Iterator[Weight]:
    return (replace(weight, name=prefix + weight.name) for weight in weights)


def _bf16(name: str, *size: int) -> Weight:
    return Weight(name, WeightKind.BF16, size)


def _fp32(name: str, *size: int) -> Weight:
    return Weight(name, WeightKind.FP32, size)


def _fp8(name: str, rows: int, columns: int) -> Weight:
    return Weight(name, WeightKind.FP8, (rows, columns))


def _layer_weights(config: V41Config, layer: LayerShape | None) -> Iterator[Weight]:
    """Weights of a backbone layer, or of a draft stage where `layer` is None."""
    shape = config.shape
    yield from _mix_weights("hc_attn", shape)
    yield from _mix_weights("hc_ffn", shape)
    yield from _attention_weights(shape)
    if layer is not None and layer.owns_kv:
        yield from _compressor_weights(shape, layer.ratio)
    if layer is not None and layer.owns_index:
        yield _fp8("attn.indexer.wq_b", shape.index_heads * shape.index_head_dim, shape.q_lora_rank)
        yield _bf16("attn.indexer.weights_proj.weight", shape.index_heads, shape.hidden_size)
    num_experts = shape.num_experts if layer is not None else shape.draft_num_experts
    yield from _moe_weights(shape, num_experts, has_images=config.vision is not None)
    if layer is not None and layer.has_engram:
        yield from _engram_weights(shape, shape.engram_rows[config.engram.layers.index(layer.layer)])


def _mix_weights(name: str, shape: ModelShape) -> Iterator[Weight]:
    copies = shape.hc_mult
    count = copies * (copies + 2)
    yield _fp32(name + "_fn", count, copies * shape.hidden_size)
    yield _fp32(name + "_base", count)
    yield _fp32(name + "_scale", 3)


def _attention_weights(shape: ModelShape) -> Iterator[Weight]:
    hidden, width = shape.hidden_size, shape.num_heads * shape.head_dim
    groups, rank = shape.o_groups, shape.o_lora_rank
    yield _bf16("attn_norm.weight", hidden)
    yield _fp8("attn.wq_a", shape.q_lora_rank, hidden)
    yield _fp8("attn.wkv", shape.head_dim, hidden)
    yield _bf16("attn.q_norm.weight", shape.q_lora_rank)
    yield _fp8("attn.wq_b", width, shape.q_lora_rank)
    yield _bf16("attn.kv_norm.weight", shape.head_dim)
    yield _fp32("attn.attn_sink", shape.num_heads)
    yield _fp8("attn.wo_a", groups * rank, width // groups)
    yield _fp8("attn.wo_b", hidden, groups * rank)


def _compressor_weights(shape: ModelShape, ratio: int) -> Iterator[Weight]:
    yield _bf16("attn.compressor.wkv.weight", shape.head_dim, shape.hidden_size)
    if ratio > 1:
        yield _bf16("attn.compressor.wgate.weight", shape.head_dim, shape.hidden_size)
    yield _bf16("attn.compressor.norm.weight", shape.head_dim)
    yield _bf16("attn.indexer.wk.weight", shape.index_head_dim, shape.head_dim)
    yield _bf16("attn.indexer.k_norm.weight", shape.index_head_dim)


def _moe_weights(shape: ModelShape, num_experts: int, *, has_images: bool) -> Iterator[Weight]:
    hidden, width = shape.hidden_size, shape.moe_width
    yield _bf16("ffn_norm.weight", hidden)
    yield _bf16("ffn.gate.weight", num_experts, hidden)
    yield _fp32("ffn.gate.bias", num_experts)
    if has_images:
        yield _fp32("ffn.gate.bias_vl", num_experts)
    for expert in range(num_experts):
        name = f"ffn.experts.{expert}."
        yield Weight(name + "w1", WeightKind.FP4, (width, hidden))
        yield Weight(name + "w3", WeightKind.FP4, (width, hidden))
        yield Weight(name + "w2", WeightKind.FP4, (hidden, width))
    yield _fp8("ffn.shared_experts.w1", width, hidden)
    yield _fp8("ffn.shared_experts.w3", width, hidden)
    yield _fp8("ffn.shared_experts.w2", hidden, width)


def _engram_weights(shape: ModelShape, rows: int) -> Iterator[Weight]:
    width, copies, hidden = shape.engram_head_dim, shape.hc_mult, shape.hidden_size
    yield Weight("engram.embed", WeightKind.TABLE, (rows, width))
    yield _fp8("engram.wkv", (copies + 1) * hidden, shape.engram_columns * width)
    yield _bf16("engram.q_weight", copies, hidden)
    yield _bf16("engram.k_weight", copies, hidden)


def _draft_weights(shape: ModelShape, stage: int) -> Iterator[Weight]:
    """What the first and the last draft stage have beside a layer's weights."""
    hidden, rank = shape.hidden_size, shape.draft_markov_rank
    if stage == 0:
        yield _fp8("main_proj", hidden, len(shape.draft_targets) * hidden)
        yield _bf16("main_norm.weight", hidden)
    if stage == shape.num_draft_stages - 1:
        yield _bf16("norm.weight", hidden)
        yield _bf16("markov_head.embed.weight", shape.vocab_size, rank)
        yield _bf16("markov_head.head.weight", shape.vocab_size, rank)
        yield _bf16("confidence_head.proj.weight", 1, hidden + rank)


def _vision_weights(vision: VisionConfig, hidden: int) -> Iterator[Weight]:
    size, width = vision.hidden_size, vision.width
    yield from _affine("vision.patch_embed.proj", size, 3 * vision.patch_size**2)
    for block in range(vision.num_layers):
        name = f"vision.blocks.{block}."
        yield _bf16(name + "norm1.weight", size)
        yield from _affine(name + "attn.wqkv", 3 * size, size)
        yield from _affine(name + "attn.wo", size, size)
        yield _bf16(name + "norm2.weight", size)
        yield _bf16(name + "mlp.w1.weight", 2 * width, size)
        yield _bf16(name + "mlp.w2.weight", size, width)
    yield _bf16("vision.norm.weight", size)
    yield from _affine("aligner.w1", hidden, size * vision.downsample**2)
    yield from _affine("aligner.w2", hidden, hidden)
    for mark in ("image_start", "image_newline", "image_end"):
        yield _bf16(mark, hidden)


def _affine(name: str, rows: int, columns: int) -> Iterator[Weight]:
    yield _bf16(name + ".weight", rows, columns)
    yield _bf16(name + ".bias", rows)
