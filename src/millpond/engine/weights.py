"""Weights of a Llama-family decoder, ready for the layers: fused, in the engine's dtype, checked."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from safetensors import SafetensorError, safe_open

from millpond.core.errors import ModelFormatError
from millpond.engine.llama_config import LlamaConfig
from millpond.engine.llama_tensors import llama_tensors
from millpond.engine.model_files import ModelFiles, read_gguf
from millpond.engine.progress import ByteCounter, ShowProgress, show_nothing
from millpond.engine.safetensors_files import read_headers


@dataclass(frozen=True, slots=True, eq=False)
class LayerWeights:
    """One decoder layer. Matrices are [out, in] in the engine's dtype, vectors float32, all contiguous."""

    attention_norm: torch.Tensor
    qkv: torch.Tensor
    """Rows of query, key, value."""
    qkv_bias: torch.Tensor | None
    output: torch.Tensor
    output_bias: torch.Tensor | None
    mlp_norm: torch.Tensor
    gate_up: torch.Tensor
    """Rows of gate, up."""
    gate_up_bias: torch.Tensor | None
    down: torch.Tensor
    down_bias: torch.Tensor | None


@dataclass(frozen=True, slots=True, eq=False)
class LlamaWeights:
    """All weights of one decoder."""

    embedding: torch.Tensor
    """[vocab, hidden]."""
    layers: tuple[LayerWeights, ...]
    final_norm: torch.Tensor
    head: torch.Tensor
    """[vocab, hidden]; the embedding itself when tied."""
    rope_factors: torch.Tensor | None
    """[head_dim / 2] divisors of the rotary frequencies that some GGUF files carry."""


class TensorSource(Protocol):
    """Where tensors come from, by Hugging Face name."""

    def has(self, name: str) -> bool:
        """Whether the tensor exists."""
        ...

    def read(self, name: str) -> torch.Tensor:
        """The tensor, or ModelFormatError naming tensor and file."""
        ...


class SafetensorsSource:
    """Reads tensors from the safetensors files of a Hugging Face folder, sharded or not."""

    def __init__(self, files: ModelFiles) -> None:
        """Open every file and learn which tensor lies where.

        Raises:
            ModelFormatError: A file is not safetensors or is cut short.
        """
        self._table = read_headers(files.weight_files)

    def has(self, name: str) -> bool:
        """Whether some file claims the tensor."""
        return name in self._table

    def read(self, name: str) -> torch.Tensor:
        """Read one tensor in the dtype of the file."""
        entry = self._table.get(name)
        if entry is None:
            raise ModelFormatError(f"tensor {name} is missing", code="model.tensor", param=name)
        with _open(entry.file) as file:
            return file.get_tensor(name)


def _open(path: Path) -> safe_open:
    try:
        return safe_open(path, framework="pt")
    except (SafetensorError, OSError) as error:
        raise ModelFormatError(
            f"{path.name}: not readable as safetensors: {error}", code="model.files"
        ) from error


class _Loader:
    """Reads, checks, converts and fuses tensors of one model."""

    def __init__(
        self,
        source: TensorSource,
        dtype: torch.dtype,
        device: torch.device,
        label: str,
        counter: ByteCounter,
    ) -> None:
        self._source = source
        self._counter = counter
        self._dtype = dtype
        self._device = device
        self._label = label

    def _checked(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        tensor = self._source.read(name)
        if tuple(tensor.shape) != shape:
            raise ModelFormatError(
                f"{self._label}: tensor {name} has shape {tuple(tensor.shape)}, the config says {shape}",
                code="model.tensor",
                param=name,
            )
        if not tensor.is_floating_point():
            raise ModelFormatError(
                f"{self._label}: tensor {name} has type {tensor.dtype}, not a floating type",
                code="model.tensor",
                param=name,
            )
        self._counter.advance(tensor.numel() * self._dtype.itemsize)
        return tensor

    def matrix(self, rows: dict[str, int], columns: int) -> torch.Tensor:
        """Stack matrices [rows, columns] below each other in the engine's dtype."""
        fused = torch.empty(sum(rows.values()), columns, dtype=self._dtype, device=self._device)
        begin = 0
        for name, count in rows.items():
            fused[begin : begin + count].copy_(self._checked(name, (count, columns)))
            begin += count
        return fused

    def vector(self, rows: dict[str, int]) -> torch.Tensor:
        """Join vectors, float32."""
        parts = [self._checked(name, (count,)).float() for name, count in rows.items()]
        return torch.cat(parts).to(self._device)


def load_weights(
    files: ModelFiles,
    config: LlamaConfig,
    dtype: torch.dtype,
    device: torch.device,
    show: ShowProgress = show_nothing,
) -> LlamaWeights:
    """Load all weights of a model; `show` is told how far it is.

    Raises:
        ModelFormatError: A tensor is missing, has the wrong shape or type, or its file is cut short; the
            message names tensor and file.
    """
    source: TensorSource
    if files.kind == "gguf":
        from millpond.engine.gguf_weights import GgufSource  # noqa: PLC0415 - 0.3 s that HF folders do not need

        source = GgufSource(read_gguf(files.weight_files[0]), config)
    else:
        source = SafetensorsSource(files)
    num_bytes = dtype.itemsize * sum(math.prod(shape) for _, shape in llama_tensors(config))
    load = _Loader(source, dtype, device, files.name, ByteCounter(num_bytes, show))
    embedding = load.matrix({"model.embed_tokens.weight": config.vocab_size}, config.hidden_size)
    head = embedding
    if not config.tie_embeddings:
        head = load.matrix({"lm_head.weight": config.vocab_size}, config.hidden_size)
    factors = None
    if source.has("rope_factors"):
        factors = load.vector({"rope_factors": config.head_dim // 2})
    return LlamaWeights(
        embedding=embedding,
        layers=tuple(_load_layer(load, config, f"model.layers.{i}.") for i in range(config.num_layers)),
        final_norm=load.vector({"model.norm.weight": config.hidden_size}),
        head=head,
        rope_factors=factors,
    )


def _load_layer(load: _Loader, config: LlamaConfig, prefix: str) -> LayerWeights:
    hidden, inter = config.hidden_size, config.intermediate_size
    query, key = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    attention, mlp = prefix + "self_attn.", prefix + "mlp."
    qkv = {attention + "q_proj": query, attention + "k_proj": key, attention + "v_proj": key}
    gate_up = {mlp + "gate_proj": inter, mlp + "up_proj": inter}
    output = {attention + "o_proj": hidden}
    down = {mlp + "down_proj": hidden}

    def weight(rows: dict[str, int], columns: int) -> torch.Tensor:
        return load.matrix({f"{name}.weight": count for name, count in rows.items()}, columns)

    def bias(rows: dict[str, int], wanted: bool) -> torch.Tensor | None:
        return load.vector({f"{name}.bias": count for name, count in rows.items()}) if wanted else None

    return LayerWeights(
        attention_norm=load.vector({prefix + "input_layernorm.weight": hidden}),
        qkv=weight(qkv, hidden),
        qkv_bias=bias(qkv, config.qkv_bias),
        output=weight(output, query),
        output_bias=bias(output, config.output_bias),
        mlp_norm=load.vector({prefix + "post_attention_layernorm.weight": hidden}),
        gate_up=weight(gate_up, hidden),
        gate_up_bias=bias(gate_up, config.mlp_bias),
        down=weight(down, inter),
        down_bias=bias(down, config.mlp_bias),
    )
