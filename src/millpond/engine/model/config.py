"""The `config.json` of a DeepSeek-V4.1 checkpoint, read and checked. No torch here."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from millpond.core.errors import ModelFormatError
from millpond.core.shapes import ModelShape, VisionShape
from millpond.engine.model.engram_ids import table_primes
from millpond.engine.model.fields import Fields
from millpond.engine.model.roles import derive_layers
from millpond.engine.model_files import ModelFiles

MODEL_TYPE = "deepseek_v41"
_GROUP = 32
_MAX_COUNT = 65536
"""Of what is listed one by one: experts, layers of the vision tower."""
_MAX_SINKHORN_ITERS = 1000
"""Every token goes through so many rounds; the released model has 20."""
_MAX_TURNS = 1e6
"""Of a rotation over the original positions; their logarithm is taken."""


@dataclass(frozen=True, slots=True)
class RopeScaling:
    """YaRN parameters of the layers with compressed KV."""

    factor: float
    beta_fast: float
    beta_slow: float
    original_positions: int


@dataclass(frozen=True, slots=True)
class EngramConfig:
    """N-gram tables."""

    layers: tuple[int, ...]
    vocab_size: int
    """The primes of every n-gram size start at this number less one."""
    pad_token_id: int
    compressed_vocab_size: int | None
    """None where the file leaves it to the tokeniser."""


@dataclass(frozen=True, slots=True)
class VisionConfig:
    """Image tower and resize plan."""

    num_layers: int
    hidden_size: int
    num_heads: int
    width: int
    patch_size: int
    rope_theta: float
    downsample: int
    max_image_tokens: int
    min_pixels: int

    def shape(self, out_size: int) -> VisionShape:
        """What the tower costs; `out_size` is the width of the text model's stream."""
        return VisionShape(
            num_layers=self.num_layers,
            hidden_size=self.hidden_size,
            width=self.width,
            patch_size=self.patch_size,
            downsample=self.downsample,
            out_size=out_size,
        )


@dataclass(frozen=True, slots=True)
class V41Config:
    """A V4.1 model: its shape and the constants of its arithmetic."""

    shape: ModelShape
    max_positions: int
    rope_theta: float
    compress_rope_theta: float
    rope_scaling: RopeScaling
    norm_eps: float
    swiglu_limit: float
    routed_scale: float
    hc_iters: int
    hc_eps: float
    engram: EngramConfig
    draft_noise_token_id: int
    vision: VisionConfig | None
    image_token_id: int | None
    bos_token_id: int
    eos_token_id: int
    pad_token_id: int


def is_v41(files: ModelFiles) -> bool:
    """Whether a folder holds a V4.1 model, judged by `model_type` alone."""
    if files.kind != "hf":
        return False
    try:
        values = json.loads((files.root / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return False  # whoever reads the file next says what is wrong with it
    return isinstance(values, dict) and values.get("model_type") == MODEL_TYPE


def read_config(path: Path) -> dict[str, object]:
    """Read a config record without checking its fields.

    Raises:
        ModelFormatError: The file is missing or no JSON object.
    """
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ModelFormatError(f"{path.name}: cannot be read: {error}", code="model.config") from error
    if not isinstance(values, dict):
        raise ModelFormatError(f"{path.name}: not a JSON object", code="model.config")
    return values


def load_config(path: Path) -> V41Config:
    """Read and check a `config.json`.

    Raises:
        ModelFormatError: Not a V4.1 config; names file and field.
    """
    return parse_config(read_config(path), path.name)


def parse_config(values: Mapping[str, object], source: str = "config.json") -> V41Config:
    """Check a config record and turn it into a `V41Config`.

    Args:
        values: The file's content, HF field names.
        source: Name of the file, for messages.

    Raises:
        ModelFormatError: A field is missing, out of range or at odds with another; `param` names it.
    """
    top = Fields(values, source)
    top.must_be("model_type", MODEL_TYPE)
    top.must_be("tie_word_embeddings", False, False)
    text = top.section("text_config")
    _check_constants(text)
    _check_quantization(top.section("quantization_config"))
    shape = _shape(text)
    vision = _vision(top.section("vision_config")) if top.get("vision_config") is not None else None
    image_token_id = top.token("image_token_id", shape.vocab_size) if vision is not None else None
    config = V41Config(
        shape=shape,
        max_positions=text.integer("max_position_embeddings"),
        rope_theta=text.number("rope_theta", minimum=1.0),
        compress_rope_theta=text.number("compress_rope_theta", minimum=1.0),
        rope_scaling=_rope_scaling(text.section("rope_scaling")),
        norm_eps=text.number("rms_norm_eps"),
        swiglu_limit=text.number("swiglu_limit"),
        routed_scale=text.number("routed_scaling_factor"),
        hc_iters=text.integer("hc_sinkhorn_iters", maximum=_MAX_SINKHORN_ITERS),
        hc_eps=text.number("hc_eps"),
        engram=_engram(text, shape),
        draft_noise_token_id=text.token("dspark_noise_token_id", shape.vocab_size)
        if shape.num_draft_stages
        else 0,
        vision=vision,
        image_token_id=image_token_id,
        bos_token_id=text.token("bos_token_id", shape.vocab_size),
        eos_token_id=text.token("eos_token_id", shape.vocab_size),
        pad_token_id=text.token("pad_token_id", shape.vocab_size),
    )
    if config.swiglu_limit <= 0:
        text.refuse("swiglu_limit", f"is {config.swiglu_limit}, not > 0")
    if config.compress_rope_theta <= 1:
        text.refuse("compress_rope_theta", f"is {config.compress_rope_theta}, not > 1")
    return config


def _check_constants(text: Fields) -> None:
    """Refuse variants that this architecture does not have."""
    for field, wanted in {
        "num_key_value_heads": 1,
        "n_shared_experts": 1,
        "scoring_func": "sqrtsoftplus",
        "topk_method": "noaux_tc",
        "norm_topk_prob": True,
        "hidden_act": "silu",
    }.items():
        text.must_be(field, wanted)
    for field, wanted in {
        "attention_bias": False,
        "tie_word_embeddings": False,
        "use_fp4_sparse_kv": True,
        "hc_shifted": True,
        "dspark_target_attn_input": True,
    }.items():
        text.must_be(field, wanted, wanted)


def _check_quantization(fields: Fields) -> None:
    fields.must_be("quant_method", "fp8")
    fields.must_be("weight_block_size", [_GROUP, _GROUP])
    fields.must_be("scale_fmt", "ue8m0")
    fields.must_be("expert_dtype", "fp4")


def _shape(text: Fields) -> ModelShape:
    num_layers = text.integer("num_hidden_layers")
    num_stages = text.integer("num_nextn_predict_layers", minimum=0)
    vocab_size = text.integer("vocab_size")
    engram_layers = _ascending(text, "engram_layer_ids", num_layers)
    layers = derive_layers(text, num_layers, num_stages, engram_layers)
    targets = _ascending(text, "dspark_target_layer_ids", num_layers) if num_stages else ()
    if num_stages and not targets:
        text.refuse("dspark_target_layer_ids", "is empty but there are draft stages")
    has_candidates = any(layer.owns_index and not layer.owns_kv for layer in layers)
    shape = ModelShape(
        vocab_size=vocab_size,
        hidden_size=text.integer("hidden_size"),
        layers=layers,
        num_heads=text.integer("num_attention_heads"),
        head_dim=text.integer("head_dim"),
        rope_dim=text.integer("qk_rope_head_dim"),
        q_lora_rank=text.integer("q_lora_rank"),
        o_lora_rank=text.integer("o_lora_rank"),
        o_groups=text.integer("o_groups"),
        moe_width=text.integer("moe_intermediate_size"),
        num_experts=text.integer("n_routed_experts", maximum=_MAX_COUNT),
        num_experts_per_token=text.integer("num_experts_per_tok"),
        window=text.integer("sliding_window"),
        index_heads=text.integer("index_n_heads"),
        index_head_dim=text.integer("index_head_dim"),
        index_topk=text.integer("index_topk"),
        candidate_source=text.integer("candidate_source_layer_id", minimum=0) if has_candidates else -1,
        candidate_blocks=text.integer("candidate_topk_blocks"),
        candidate_block_size=text.integer("candidate_block_size"),
        hc_mult=text.integer("hc_mult", maximum=64),
        engram_rows=text.integers("engram_num_embeddings"),
        engram_max_ngram=text.integer("engram_max_ngram_size", minimum=2, maximum=64),
        engram_heads=text.integer("engram_n_heads", maximum=64),
        engram_head_dim=text.integer("engram_head_dim"),
        num_draft_stages=num_stages,
        num_draft_tokens=text.integer("dspark_block_size") if num_stages else 0,
        draft_targets=targets,
        draft_markov_rank=text.integer("dspark_markov_rank") if num_stages else 0,
        draft_num_experts=text.integer("dspark_n_routed_experts", maximum=_MAX_COUNT) if num_stages else 0,
        draft_num_experts_per_token=text.integer("dspark_num_experts_per_tok") if num_stages else 0,
    )
    _check_widths(text, shape)
    _check_counts(text, shape, engram_layers)
    return shape


def _check_widths(text: Fields, shape: ModelShape) -> None:
    for field, value in {
        "hidden_size": shape.hidden_size,
        "head_dim": shape.head_dim,
        "q_lora_rank": shape.q_lora_rank,
        "moe_intermediate_size": shape.moe_width,
        "index_head_dim": shape.index_head_dim,
        "engram_head_dim": shape.engram_head_dim if shape.engram_rows else _GROUP,
    }.items():
        if value % _GROUP:
            text.refuse(field, f"is {value}, not a multiple of {_GROUP}")
    if shape.rope_dim % 2 or shape.rope_dim > min(shape.head_dim, shape.index_head_dim):
        text.refuse("qk_rope_head_dim", f"is {shape.rope_dim}: odd, or wider than a head")
    if (shape.num_heads * shape.head_dim) % (shape.o_groups * _GROUP):
        text.refuse("o_groups", f"{shape.o_groups} does not split the heads into groups of whole FP8 tiles")
    if (shape.o_groups * shape.o_lora_rank) % _GROUP or shape.o_lora_rank % _GROUP:
        text.refuse("o_lora_rank", f"is {shape.o_lora_rank}, not a multiple of {_GROUP}")


def _check_counts(text: Fields, shape: ModelShape, engram_layers: Sequence[int]) -> None:
    if shape.num_experts_per_token > shape.num_experts:
        text.refuse("num_experts_per_tok", f"is {shape.num_experts_per_token} of {shape.num_experts} experts")
    if shape.draft_num_experts_per_token > shape.draft_num_experts:
        text.refuse(
            "dspark_num_experts_per_tok",
            f"is {shape.draft_num_experts_per_token} of {shape.draft_num_experts} experts",
        )
    if len(shape.engram_rows) != len(engram_layers):
        text.refuse(
            "engram_num_embeddings", f"names {len(shape.engram_rows)} layers, not {len(engram_layers)}"
        )
    if shape.candidate_source >= 0:
        _check_candidates(text, shape)


def _check_candidates(text: Fields, shape: ModelShape) -> None:
    if shape.candidate_blocks * shape.candidate_block_size < shape.index_topk:
        text.refuse(
            "candidate_topk_blocks",
            f"{shape.candidate_blocks} of {shape.candidate_block_size} cannot fill {shape.index_topk}",
        )
    for layer in shape.layers:
        if layer.owns_index and not layer.owns_kv and layer.kv_source != shape.candidate_source:
            text.refuse(
                "candidate_source_layer_id",
                f"is {shape.candidate_source}; layer {layer.layer} selects among those of {layer.kv_source}",
            )


def _engram(text: Fields, shape: ModelShape) -> EngramConfig:
    _check_tables(text, shape)
    size = text.get("engram_compressed_vocab_size")
    return EngramConfig(
        layers=tuple(layer.layer for layer in shape.layers if layer.has_engram),
        vocab_size=text.integer("engram_vocab_size", minimum=2),
        pad_token_id=text.token("engram_pad_token_id", shape.vocab_size),
        compressed_vocab_size=None if size is None else text.integer("engram_compressed_vocab_size"),
    )


def _check_tables(text: Fields, shape: ModelShape) -> None:
    """Each layer's tables have prime sizes that follow from the config; their sum must be the rows stored."""
    start = text.integer("engram_vocab_size", minimum=2)
    primes = table_primes(len(shape.engram_rows), shape.engram_max_ngram, shape.engram_heads, start)
    wanted = [int(sizes.sum()) for sizes in primes]
    if list(shape.engram_rows) != wanted:
        text.refuse(
            "engram_num_embeddings", f"is {list(shape.engram_rows)}; the table sizes add up to {wanted}"
        )


def _rope_scaling(fields: Fields) -> RopeScaling:
    fields.must_be("rope_type", "yarn")
    for field in ("beta_fast", "beta_slow"):
        if not 1 / _MAX_TURNS <= (turns := fields.number(field)) <= _MAX_TURNS:
            fields.refuse(field, f"is {turns:g}, not from {1 / _MAX_TURNS:g} to {_MAX_TURNS:g}")
    return RopeScaling(
        factor=fields.number("factor", minimum=1.0),
        beta_fast=fields.number("beta_fast"),
        beta_slow=fields.number("beta_slow"),
        original_positions=fields.integer("original_max_position_embeddings"),
    )


def _vision(fields: Fields) -> VisionConfig:
    fields.must_be("max_wh_ratio", None, None)
    vision = VisionConfig(
        num_layers=fields.integer("num_hidden_layers", maximum=_MAX_COUNT),
        hidden_size=fields.integer("hidden_size"),
        num_heads=fields.integer("num_attention_heads"),
        width=fields.integer("intermediate_size"),
        patch_size=fields.integer("patch_size"),
        rope_theta=fields.number("rope_theta", minimum=1.0),
        downsample=fields.integer("downsample_ratio"),
        max_image_tokens=fields.integer("max_image_tokens", minimum=4),
        min_pixels=fields.integer("min_pixels"),
    )
    if vision.hidden_size % (4 * vision.num_heads):
        _refuse_heads(fields, vision)
    return vision


def _refuse_heads(fields: Fields, vision: VisionConfig) -> NoReturn:
    fields.refuse(
        "num_attention_heads", f"{vision.num_heads} does not split {vision.hidden_size} into multiples of 4"
    )


def _ascending(text: Fields, field: str, num_layers: int) -> tuple[int, ...]:
    ids = text.integers(field)
    if any(not 0 <= layer < num_layers for layer in ids) or list(ids) != sorted(set(ids)):
        text.refuse(field, f"is {list(ids)}: not ascending layers below {num_layers}")
    return ids
