"""Every tensor of a Llama-family decoder, checked without torch and without reading any."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

from millpond.core.errors import ModelFormatError
from millpond.engine.gguf_file import GgufFile
from millpond.engine.llama_config import LlamaConfig
from millpond.engine.model_files import ModelFiles, load_llama_config, read_gguf
from millpond.engine.safetensors_files import read_headers

_FLOATS = ("F16", "BF16", "F32", "F64")
_GGUF_TOP = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
    "rope_factors": "rope_freqs.weight",
}
_GGUF_LAYER = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def llama_tensors(config: LlamaConfig) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Hugging Face name and shape of every tensor that there must be."""
    hidden, width = config.hidden_size, config.intermediate_size
    query, key = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    yield "model.embed_tokens.weight", (config.vocab_size, hidden)
    yield "model.norm.weight", (hidden,)
    if not config.tie_embeddings:
        yield "lm_head.weight", (config.vocab_size, hidden)
    matrices = (
        ("self_attn.q_proj", query, hidden, config.qkv_bias),
        ("self_attn.k_proj", key, hidden, config.qkv_bias),
        ("self_attn.v_proj", key, hidden, config.qkv_bias),
        ("self_attn.o_proj", hidden, query, config.output_bias),
        ("mlp.gate_proj", width, hidden, config.mlp_bias),
        ("mlp.up_proj", width, hidden, config.mlp_bias),
        ("mlp.down_proj", hidden, width, config.mlp_bias),
    )
    for layer in range(config.num_layers):
        prefix = f"model.layers.{layer}."
        yield prefix + "input_layernorm.weight", (hidden,)
        yield prefix + "post_attention_layernorm.weight", (hidden,)
        for name, rows, columns, has_bias in matrices:
            yield f"{prefix}{name}.weight", (rows, columns)
            if has_bias:
                yield f"{prefix}{name}.bias", (rows,)


def gguf_name(name: str) -> str:
    """Return a tensor's name in GGUF files."""
    if name in _GGUF_TOP:
        return _GGUF_TOP[name]
    _, _, layer, rest = name.split(".", 3)
    module, kind = rest.rsplit(".", 1)
    return f"blk.{layer}.{_GGUF_LAYER[module]}.{kind}"


def check_llama_files(files: ModelFiles) -> LlamaConfig:
    """Check config and headers of a model that `locate_model` found.

    Raises:
        ModelFormatError: The first thing that is wrong; names file and tensor or field.
    """
    config = load_llama_config(files)
    if files.kind == "gguf":
        _check_gguf(read_gguf(files.weight_files[0]), config)
    else:
        _check_safetensors(files, config)
    return config


def _check_safetensors(files: ModelFiles, config: LlamaConfig) -> None:
    table = read_headers(files.weight_files)
    for name, shape in llama_tensors(config):
        if name not in table:
            raise _error(files.weight_files[0], name, "is missing")
        entry = table[name]
        if entry.shape != shape:
            raise _error(entry.file, name, f"has shape {list(entry.shape)}, config.json says {list(shape)}")
        if entry.dtype not in _FLOATS:
            raise _error(entry.file, name, f"has dtype {entry.dtype}, not {', '.join(_FLOATS)}")


def _check_gguf(file: GgufFile, config: LlamaConfig) -> None:
    from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType  # noqa: PLC0415 - 0.3 s

    file_bytes = file.path.stat().st_size
    for hf_name, shape in llama_tensors(config):
        name = gguf_name(hf_name)
        tensor = file.tensors.get(name)
        if tensor is None:
            raise _error(file.path, name, "is missing")
        if tensor.shape != shape:
            raise _error(file.path, name, f"has shape {list(tensor.shape)}, the metadata say {list(shape)}")
        if tensor.ggml_type not in set(GGMLQuantizationType):
            raise _error(file.path, name, f"has unknown type {tensor.ggml_type}")
        block_items, block_bytes = GGML_QUANT_SIZES[GGMLQuantizationType(tensor.ggml_type)]
        end = tensor.offset + math.prod(shape) // block_items * block_bytes
        if file_bytes < end:
            raise _error(file.path, name, f"ends at byte {end} of {file_bytes}: truncated file")


def _error(file: Path, tensor: str, what: str) -> ModelFormatError:
    return ModelFormatError(f"{file.name}: {tensor} {what}", code="model.weights", param=tensor)
