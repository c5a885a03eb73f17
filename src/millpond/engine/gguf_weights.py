"""Tensors of a GGUF file, dequantised, under Hugging Face names.

Source: GGUF tensor naming; the query and key rows are interleaved by the converter, which is undone here.
"""

from __future__ import annotations

import numpy as np
import torch
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize

from millpond.core.errors import ModelFormatError
from millpond.engine.gguf_file import GgufFile, GgufTensor
from millpond.engine.llama_config import LlamaConfig
from millpond.engine.llama_tensors import gguf_name


class GgufSource:
    """Reads tensors by Hugging Face name from a GGUF file."""

    def __init__(self, file: GgufFile, config: LlamaConfig) -> None:
        """Map the file; nothing is dequantised until asked for."""
        self._file = file
        self._config = config
        self._bytes = np.memmap(file.path, dtype=np.uint8, mode="r")

    def has(self, name: str) -> bool:
        """Whether the file holds the tensor."""
        return gguf_name(name) in self._file.tensors

    def read(self, name: str) -> torch.Tensor:
        """Dequantise one tensor, float32.

        Raises:
            ModelFormatError: The tensor is missing, of an unknown type, or the file ends before its data.
        """
        tensor = self._file.tensors.get(gguf_name(name))
        if tensor is None:
            raise self._error(gguf_name(name), "is missing")
        values = self._dequantise(tensor)
        if "q_proj" in name:
            values = _split_halves(values, self._config.num_heads)
        elif "k_proj" in name:
            values = _split_halves(values, self._config.num_kv_heads)
        return torch.from_numpy(np.array(values, dtype=np.float32))  # a copy: the map is read-only

    def _error(self, tensor: str, what: str) -> ModelFormatError:
        return ModelFormatError(
            f"{self._file.path.name}: tensor {tensor} {what}", code="model.tensor", param=tensor
        )

    def _dequantise(self, tensor: GgufTensor) -> np.ndarray:
        try:
            kind = GGMLQuantizationType(tensor.ggml_type)
        except ValueError:
            raise self._error(tensor.name, f"has unknown type {tensor.ggml_type}") from None
        block_items, block_bytes = GGML_QUANT_SIZES[kind]
        if not tensor.shape or tensor.shape[-1] % block_items:
            raise self._error(tensor.name, f"has shape {tensor.shape}, not whole blocks of {block_items}")
        row_bytes = tensor.shape[-1] // block_items * block_bytes
        num_bytes = int(np.prod(tensor.shape[:-1], dtype=np.int64)) * row_bytes
        data = self._bytes[tensor.offset : tensor.offset + num_bytes]
        if len(data) != num_bytes:
            raise self._error(tensor.name, f"ends after {len(data)} of {num_bytes} bytes: truncated file")
        try:
            values = dequantize(np.asarray(data).reshape(-1, row_bytes), kind)
        except NotImplementedError:
            raise self._error(tensor.name, f"has type {kind.name}, which cannot be read") from None
        return values.reshape(tensor.shape)


def _split_halves(rows: np.ndarray, num_heads: int) -> np.ndarray:
    """Undo the converter's row order: pairs (2i, 2i+1) of a head back to (i, i + head_dim / 2)."""
    pairs = rows.reshape(num_heads, rows.shape[0] // num_heads // 2, 2, *rows.shape[1:])
    return pairs.swapaxes(1, 2).reshape(rows.shape)
