"""Native decoder layers: builds `kernels.c` for this CPU at first use and calls it through ctypes.

One call runs as many layers as asked, without the interpreter lock, so that threads which move KV meanwhile
neither wait for the step nor stall it at every operation.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import ClassVar

import torch

from millpond.engine.compiler import build_library
from millpond.engine.kv_tensors import KvTensors
from millpond.engine.layers import StepRows
from millpond.engine.llama_config import LlamaConfig
from millpond.engine.rope import RopeTable
from millpond.engine.torch_layers import linear_bf16
from millpond.engine.weights import LayerWeights, LlamaWeights

_SOURCE = Path(__file__).with_name("kernels.c")
_MAX_GROUP = 16
_MAX_HEAD_DIM = 256
_LANES = 16
"""Sizes are multiples of the widest vector, so that no kernel needs a scalar tail."""

_WIDE_ROWS = 64
"""Rows from which a step counts as wide: enough to fill a matrix unit."""

_Long = ctypes.c_long
_Pointer = ctypes.c_void_p


class _Kv(ctypes.Structure):
    _fields_: ClassVar = [
        ("num_heads", ctypes.c_int32),
        ("num_kv_heads", ctypes.c_int32),
        ("head_dim", ctypes.c_int32),
        ("table_stride", ctypes.c_int32),
        ("kv", _Pointer),
        ("row_bytes", ctypes.c_int64),
        ("cos", _Pointer),
        ("sin", _Pointer),
    ]


class _Rows(ctypes.Structure):
    _fields_: ClassVar = [
        ("num_rows", ctypes.c_int64),
        ("position", _Pointer),
        ("sequence", _Pointer),
        ("tables", _Pointer),
    ]


_LAYER_FIELDS = (
    "attention_norm",
    "mlp_norm",
    "qkv",
    "output",
    "gate_up",
    "down",
    "qkv_bias",
    "output_bias",
    "gate_up_bias",
    "down_bias",
)


class _Layer(ctypes.Structure):
    _fields_: ClassVar = [(name, _Pointer) for name in _LAYER_FIELDS]


class _Shape(ctypes.Structure):
    _fields_: ClassVar = [
        ("hidden", ctypes.c_int64),
        ("intermediate", ctypes.c_int64),
        ("eps", ctypes.c_float),
    ]


@lru_cache(maxsize=2)
def load_kernels(dtype: torch.dtype) -> ctypes.CDLL | None:
    """Build if need be and load the kernels for a weight dtype; None where that is not possible."""
    path = build_library(_SOURCE, *(("-DMP_FP32",) if dtype == torch.float32 else ()))
    if path is None:
        return None
    library = ctypes.CDLL(str(path))
    p, n = _Pointer, _Long
    if dtype != torch.float32:
        library.mp_linear_experts_fp4.argtypes = [p, p, p, p, p, n, n, n, p]
        library.mp_linear_experts_fp4.restype = None
    for name, arguments in {
        "mp_linear": [p, n, p, p, n, n, n, p, n, ctypes.c_int],
        "mp_linear_experts": [p, p, p, n, n, n, p],
        "mp_rms_norm": [p, p, ctypes.c_float, n, n, p],
        "mp_silu_mul": [p, n, n, p],
        "mp_rope_store": [p, p, n, n, n, p],
        "mp_attention": [p, p, n, n, n, p, p, p],
        "mp_layers": [p, p, p, p, n, n, p, p],
    }.items():
        function = getattr(library, name)
        function.argtypes = arguments
        function.restype = None
    library.mp_scratch.argtypes = [p, p]
    library.mp_scratch.restype = n
    return library


def _supports(config: LlamaConfig) -> bool:
    return (
        config.hidden_size % _LANES == 0
        and config.intermediate_size % _LANES == 0
        and config.head_dim % (2 * _LANES) == 0
        and config.head_dim <= _MAX_HEAD_DIM
        and config.num_heads // config.num_kv_heads <= _MAX_GROUP
    )


def _address(tensor: torch.Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def _layer_record(w: LayerWeights) -> _Layer:
    return _Layer(**{name: _address(getattr(w, name)) for name in _LAYER_FIELDS})


def is_torch_faster(kernels: ctypes.CDLL, weight: torch.Tensor) -> bool:
    """Measure whether torch multiplies wide steps by a bf16 weight [out, in] faster than the kernels."""
    if weight.dtype != torch.bfloat16:
        return False
    out_width, width = weight.shape
    x, out = torch.zeros(_WIDE_ROWS, width), torch.empty(_WIDE_ROWS, out_width)

    def native() -> None:
        kernels.mp_linear(
            x.data_ptr(),
            width,
            weight.data_ptr(),
            None,
            len(x),
            width,
            out_width,
            out.data_ptr(),
            out_width,
            0,
        )

    return _best_ns(lambda: linear_bf16(x, weight, None)) < _best_ns(native)


def _best_ns(work: Callable[[], object]) -> int:
    times = []
    for _ in range(3):
        begin_ns = time.thread_time_ns()
        work()
        times.append(time.thread_time_ns() - begin_ns)
    return min(times)


class NativeLayers:
    """Implements `DecoderLayers` with the native kernels; exact in both numeric modes."""

    @classmethod
    def make(
        cls, config: LlamaConfig, weights: LlamaWeights, kv: KvTensors, rope: RopeTable, *, is_exact: bool
    ) -> NativeLayers | None:
        """Make native layers, or None where the device, the model's sizes or the compiler do not allow.

        In fast mode torch does the large products of a prefill if it is measured to be faster, which it is
        on CPUs with bf16 matrix units.
        """
        if weights.embedding.device.type != "cpu" or not _supports(config):
            return None
        kernels = load_kernels(weights.embedding.dtype)
        if kernels is None:
            return None
        is_wide = not is_exact and is_torch_faster(kernels, weights.layers[0].gate_up)
        return cls(kernels, config, weights, kv, rope, wide_rows=_WIDE_ROWS if is_wide else None)

    def __init__(
        self,
        kernels: ctypes.CDLL,
        config: LlamaConfig,
        weights: LlamaWeights,
        kv: KvTensors,
        rope: RopeTable,
        *,
        wide_rows: int | None = None,
    ) -> None:
        """Collect addresses; the tensors are kept alive by the references held here.

        Args:
            kernels: See `load_kernels`.
            config: The decoder.
            weights: On the CPU, in the kernels' dtype.
            kv: Block memory in the same dtype.
            rope: Cosines and sines.
            wide_rows: From this many rows on torch multiplies by the weights; None: never.
        """
        self._kernels = kernels
        self._config = config
        self._weights = weights
        self._tensors = kv
        self._rope = rope
        self._wide_rows = wide_rows
        self._layers = (_Layer * config.num_layers)(*map(_layer_record, weights.layers))
        self._shape = _Shape(config.hidden_size, config.intermediate_size, config.rms_norm_eps)
        self._kv = _Kv(
            config.num_heads,
            config.num_kv_heads,
            config.head_dim,
            0,
            kv.memory.data_ptr(),
            kv.row_bytes,
            rope.cos.data_ptr(),
            rope.sin.data_ptr(),
        )
        size = kernels.mp_scratch(ctypes.byref(self._shape), ctypes.byref(self._kv))
        self._scratch = torch.zeros(size)
        self._logits = torch.empty(0, config.vocab_size)

    def run(self, hidden: torch.Tensor, rows: StepRows, begin: int, end: int) -> None:
        """See `DecoderLayers.run`."""
        self._rope.ensure(rows.num_positions)
        self._kv.table_stride = rows.tables.shape[1]
        record = _Rows(
            len(hidden), rows.positions.data_ptr(), rows.sequences.data_ptr(), rows.tables.data_ptr()
        )
        if self._wide_rows is not None and len(hidden) >= self._wide_rows:
            for layer in range(begin, end):
                self._wide_layer(layer, hidden, record)
            return
        self._kernels.mp_layers(
            ctypes.byref(self._shape),
            ctypes.byref(self._kv),
            ctypes.byref(record),
            self._layers,
            begin,
            end,
            hidden.data_ptr(),
            self._scratch.data_ptr(),
        )

    def _wide_layer(self, layer: int, hidden: torch.Tensor, rows: _Rows) -> None:
        """One layer with torch's bf16 products and the native rest."""
        kernels, w, config = self._kernels, self._weights.layers[layer], self._config
        count, width, inter = len(hidden), config.hidden_size, config.intermediate_size
        eps, kv, record = config.rms_norm_eps, ctypes.byref(self._kv), ctypes.byref(rows)
        normed = torch.empty_like(hidden)
        kernels.mp_rms_norm(
            hidden.data_ptr(), w.attention_norm.data_ptr(), eps, count, width, normed.data_ptr()
        )
        qkv = linear_bf16(normed, w.qkv, w.qkv_bias)
        kernels.mp_rope_store(kv, record, layer, 0, count, qkv.data_ptr())
        mixed = torch.empty(count, config.num_heads * config.head_dim)
        kernels.mp_attention(
            kv, record, layer, 0, count, qkv.data_ptr(), mixed.data_ptr(), self._scratch.data_ptr()
        )
        hidden += linear_bf16(mixed, w.output, w.output_bias)
        kernels.mp_rms_norm(hidden.data_ptr(), w.mlp_norm.data_ptr(), eps, count, width, normed.data_ptr())
        gate_up = linear_bf16(normed, w.gate_up, w.gate_up_bias)
        active = torch.empty(count, inter)
        kernels.mp_silu_mul(gate_up.data_ptr(), count, inter, active.data_ptr())
        hidden += linear_bf16(active, w.down, w.down_bias)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """See `DecoderLayers.logits`."""
        count, width, vocab = len(hidden), self._config.hidden_size, self._config.vocab_size
        if count > len(self._logits):  # kept: fresh pages would cost more than the product
            self._logits = torch.zeros(count, vocab)
        normed = torch.empty_like(hidden)
        norm, head, out = self._weights.final_norm, self._weights.head, self._logits
        self._kernels.mp_rms_norm(
            hidden.data_ptr(), norm.data_ptr(), self._config.rms_norm_eps, count, width, normed.data_ptr()
        )
        self._kernels.mp_linear(
            normed.data_ptr(), width, head.data_ptr(), None, count, width, vocab, out.data_ptr(), vocab, 0
        )
        return out[:count]
