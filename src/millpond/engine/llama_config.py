"""Shape of a Llama-family decoder, from `config.json` or GGUF metadata.

Anything that this engine would compute wrongly is refused here, by the name of the field.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from millpond.core.errors import ModelFormatError
from millpond.core.llama_shape import LlamaShape
from millpond.engine.gguf_file import GgufFile

_HF_ARCHITECTURES = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM")


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary position embedding.

    Source: the `rope_parameters` (older: `rope_scaling`) record of published checkpoints.
    """

    theta: float
    kind: Literal["default", "linear", "llama3", "yarn"] = "default"
    factor: float = 1.0
    original_max_positions: int = 0
    """Context length before extension; llama3 and yarn."""
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float = 0.0
    """Yarn's factor on cos and sin; 0 derives it from `factor`, `mscale` and `mscale_all_dim`."""
    mscale: float = 0.0
    mscale_all_dim: float = 0.0
    truncate: bool = True
    """Yarn: round the borders of the ramp to whole dimensions."""


@dataclass(frozen=True, slots=True)
class LlamaConfig:
    """Shape of a Llama-family decoder."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_positions: int
    rms_norm_eps: float
    rope: RopeConfig
    tie_embeddings: bool
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False

    @property
    def shape(self) -> LlamaShape:
        """What a step costs."""
        return LlamaShape(
            vocab_size=self.vocab_size,
            hidden_size=self.hidden_size,
            mlp_width=self.intermediate_size,
            num_layers=self.num_layers,
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
        )


class _Fields:
    """Typed access to a config record; every complaint names the field and the file."""

    def __init__(self, values: Mapping[str, object], source: str) -> None:
        self._values = values
        self._source = source

    def error(self, field: str, what: str) -> ModelFormatError:
        return ModelFormatError(f"{self._source}: {field} {what}", code="model.config", param=field)

    def get(self, field: str) -> object:
        return self._values.get(field)

    def integer(self, field: str, default: int | None = None, *, minimum: int = 1) -> int:
        value = self._values.get(field)
        if value is None:
            if default is None:
                raise self.error(field, "is missing")
            return default
        if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
            raise self.error(field, f"is {value!r}, not an integer >= {minimum}")
        return value

    def number(self, field: str, default: float | None = None, *, minimum: float = 0.0) -> float:
        value = self._values.get(field)
        if value is None:
            if default is None:
                raise self.error(field, "is missing")
            return default
        if isinstance(value, bool) or not isinstance(value, int | float) or not value >= minimum:
            raise self.error(field, f"is {value!r}, not a number >= {minimum:g}")
        return float(value)

    def flag(self, field: str, default: bool) -> bool:
        value = self._values.get(field)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.error(field, f"is {value!r}, not true or false")
        return value

    def must_be(self, field: str, *allowed: object) -> None:
        value = self._values.get(field)
        if value is not None and value not in allowed:
            raise self.error(field, f"is {value!r}, which is not supported")


def config_from_hf(record: Mapping[str, object]) -> LlamaConfig:
    """Read the shape from the record of a `config.json`.

    Raises:
        ModelFormatError: Names the field.
    """
    fields = _Fields(record, "config.json")
    architectures = record.get("architectures")
    architecture = architectures[0] if isinstance(architectures, list) and architectures else None
    if architecture not in _HF_ARCHITECTURES:
        raise fields.error(
            "architectures", f"is {architectures!r}; supported: {', '.join(_HF_ARCHITECTURES)}"
        )
    fields.must_be("hidden_act", "silu", "swish")
    fields.must_be("pretraining_tp", 1)
    if fields.flag("use_sliding_window", default=architecture == "MistralForCausalLM"):
        fields.must_be("sliding_window")
    if record.get("quantization_config") is not None:
        raise fields.error("quantization_config", "is set, which is not supported")
    hidden_size = fields.integer("hidden_size")
    num_heads = fields.integer("num_attention_heads")
    bias = architecture == "Qwen2ForCausalLM" or fields.flag("attention_bias", default=False)
    config = LlamaConfig(
        vocab_size=fields.integer("vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=fields.integer("intermediate_size"),
        num_layers=fields.integer("num_hidden_layers"),
        num_heads=num_heads,
        num_kv_heads=fields.integer("num_key_value_heads", num_heads),
        head_dim=fields.integer("head_dim", hidden_size // num_heads),
        max_positions=fields.integer("max_position_embeddings"),
        rms_norm_eps=fields.number("rms_norm_eps", 1e-6),
        rope=_rope_from_hf(record, fields),
        tie_embeddings=fields.flag("tie_word_embeddings", default=False),
        qkv_bias=bias,
        output_bias=bias and architecture != "Qwen2ForCausalLM",
        mlp_bias=fields.flag("mlp_bias", default=False),
    )
    _check_shape(config, fields, "num_attention_heads", "num_key_value_heads", "head_dim")
    return config


def _rope_from_hf(record: Mapping[str, object], fields: _Fields) -> RopeConfig:
    merged: dict[str, object] = {}
    for name in ("rope_scaling", "rope_parameters"):
        value = record.get(name)
        if value is None:
            continue
        if not isinstance(value, dict):
            raise fields.error(name, f"is {value!r}, not an object")
        merged.update(value)
    rope = _Fields(merged, "config.json rope_parameters")
    theta = rope.number("rope_theta", fields.number("rope_theta", 10000.0), minimum=1.0)
    fields.must_be("partial_rotary_factor", 1, 1.0)
    rope.must_be("partial_rotary_factor", 1, 1.0)
    kind = rope.get("rope_type") or rope.get("type") or "default"
    if kind == "default":
        return RopeConfig(theta)
    factor = rope.number("factor", minimum=1.0)
    if kind == "linear":
        return RopeConfig(theta, "linear", factor)
    max_positions = fields.integer("max_position_embeddings")
    if kind == "llama3":
        low, high = (
            rope.number("low_freq_factor", minimum=1e-9),
            rope.number("high_freq_factor", minimum=1e-9),
        )
        if low >= high:
            raise rope.error("low_freq_factor", f"is {low:g}, not below high_freq_factor {high:g}")
        original = rope.integer("original_max_position_embeddings")
        return RopeConfig(theta, "llama3", factor, original, low_freq_factor=low, high_freq_factor=high)
    if kind == "yarn":
        return RopeConfig(
            theta,
            "yarn",
            factor,
            rope.integer("original_max_position_embeddings", max_positions),
            beta_fast=rope.number("beta_fast", 32.0),
            beta_slow=rope.number("beta_slow", 1.0),
            attention_factor=rope.number("attention_factor", 0.0),
            mscale=rope.number("mscale", 0.0),
            mscale_all_dim=rope.number("mscale_all_dim", 0.0),
            truncate=rope.flag("truncate", default=True),
        )
    raise rope.error("rope_type", f"is {kind!r}; supported: default, linear, llama3, yarn")


def config_from_gguf(file: GgufFile) -> LlamaConfig:
    """Read the shape from GGUF metadata.

    Raises:
        ModelFormatError: Names the field.
    """
    fields = _Fields(file.metadata, file.path.name)
    architecture = file.metadata.get("general.architecture")
    if architecture != "llama":
        raise fields.error("general.architecture", f"is {architecture!r}; supported: llama")
    if fields.integer("llama.expert_count", 0, minimum=0) > 0:
        raise fields.error("llama.expert_count", "is set: mixture-of-experts models are not supported")
    hidden_size = fields.integer("llama.embedding_length")
    num_heads = fields.integer("llama.attention.head_count")
    head_dim = fields.integer("llama.attention.key_length", hidden_size // num_heads)
    fields.must_be("llama.attention.value_length", head_dim)
    fields.must_be("llama.rope.dimension_count", head_dim)
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None:
        raise fields.error("token_embd.weight", "is missing")
    config = LlamaConfig(
        vocab_size=fields.integer("llama.vocab_size", embedding.shape[0]),
        hidden_size=hidden_size,
        intermediate_size=fields.integer("llama.feed_forward_length"),
        num_layers=fields.integer("llama.block_count"),
        num_heads=num_heads,
        num_kv_heads=fields.integer("llama.attention.head_count_kv", num_heads),
        head_dim=head_dim,
        max_positions=fields.integer("llama.context_length"),
        rms_norm_eps=fields.number("llama.attention.layer_norm_rms_epsilon"),
        rope=_rope_from_gguf(fields),
        tie_embeddings="output.weight" not in file.tensors,
        qkv_bias="blk.0.attn_q.bias" in file.tensors,
        output_bias="blk.0.attn_output.bias" in file.tensors,
    )
    _check_shape(
        config,
        fields,
        "llama.attention.head_count",
        "llama.attention.head_count_kv",
        "llama.attention.key_length",
    )
    return config


def _rope_from_gguf(fields: _Fields) -> RopeConfig:
    theta = fields.number("llama.rope.freq_base", 10000.0, minimum=1.0)
    kind = fields.get("llama.rope.scaling.type") or "none"
    factor = fields.number("llama.rope.scaling.factor", 1.0)
    if kind == "none" or factor <= 0:
        return RopeConfig(theta)
    if kind == "linear":
        return RopeConfig(theta, "linear", factor)
    if kind == "yarn":
        original = fields.integer("llama.rope.scaling.original_context_length")
        return RopeConfig(theta, "yarn", factor, original)
    raise fields.error("llama.rope.scaling.type", f"is {kind!r}; supported: none, linear, yarn")


def _check_shape(config: LlamaConfig, fields: _Fields, heads: str, kv_heads: str, head_dim: str) -> None:
    if config.num_heads % config.num_kv_heads:
        raise fields.error(
            kv_heads, f"is {config.num_kv_heads}, which does not divide {heads} {config.num_heads}"
        )
    if config.head_dim % 2:
        raise fields.error(head_dim, f"is {config.head_dim}, not even")
