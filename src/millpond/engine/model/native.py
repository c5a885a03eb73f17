"""Native twins of the row-wise operations: `kernels.c` of this folder, called through ctypes.

Each serves bf16 streams on a CPU in both numeric modes: a row's bits depend on that row only. Where no
compiler works, or rows are of another kind, the torch code beside each call does the same.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import ClassVar

import torch

from millpond.engine.compiler import build_library

_SOURCE = Path(__file__).with_name("kernels.c")
_STEP = 16
"""Widths are multiples of what the kernels take at a time."""
MAX_COPIES = 8
"""Copies of the stream that the kernels have room for."""
MAX_EXPERTS = 1024
"""Experts of a layer that the kernels have room for."""

_Pointer = ctypes.c_void_p
_Long = ctypes.c_long
_Float = ctypes.c_float
_Int = ctypes.c_int
_SIGNATURES = {
    "mp_round_fp8": (_Pointer, _Long, _Long, _Pointer),
    "mp_quantised_linear": (_Pointer, _Pointer, _Pointer, _Long, _Long, _Long, _Pointer),
    "mp_encode_rows": (_Int, _Pointer, _Long, _Long, _Long, _Pointer),
    "mp_decode_rows": (
        *(_Int, _Pointer, _Long, _Long, _Pointer, _Pointer),
        *(_Long, _Long, _Long, _Pointer),
    ),
    "mp_rms_norm": (_Pointer, _Long, _Pointer, _Float, _Long, _Long, _Pointer),
    "mp_rotate": (_Pointer, _Pointer, _Pointer, _Float, _Long, _Long, _Long, _Long, _Pointer),
    "mp_compute_mix": (
        *(_Pointer, _Pointer, _Pointer, _Pointer, _Pointer, _Long, _Long, _Long, _Long),
        *(_Float, _Float, _Pointer, _Pointer, _Pointer),
    ),
    "mp_collapse": (_Pointer, _Pointer, _Long, _Long, _Long, _Pointer),
    "mp_expand": (_Pointer, _Pointer, _Pointer, _Pointer, _Long, _Long, _Long, _Pointer),
    "mp_choose_experts": (
        *(_Pointer, _Pointer, _Pointer, _Pointer, _Long, _Long, _Long, _Float),
        *(_Pointer, _Pointer),
    ),
    "mp_group_by_expert": (
        *(_Pointer, _Pointer, _Long, _Long, _Long),
        *(_Pointer, _Pointer, _Pointer, _Pointer),
    ),
    "mp_activate": (_Pointer, _Pointer, _Float, _Long, _Long, _Pointer),
    "mp_sum_shares": (_Pointer, _Pointer, _Pointer, _Long, _Long, _Long, _Pointer),
    "mp_add_engram": (
        *(_Pointer, _Pointer, _Pointer, _Pointer, _Float),
        *(_Long, _Long, _Long, _Pointer, _Pointer),
    ),
    "mp_attend": (_Pointer, _Pointer, _Long, _Pointer, _Long, _Long, _Long, _Pointer),
    "mp_score_entries": (
        *(_Pointer, _Pointer, _Pointer, _Pointer, _Pointer),
        *(_Long, _Long, _Long, _Long, _Pointer),
    ),
    "mp_choose_largest": (_Pointer, _Long, _Long, _Long, _Pointer),
}
_CAN_FAIL = {"mp_quantised_linear", "mp_compute_mix", "mp_attend", "mp_score_entries"}
"""Those that allocate scratch and return a status."""


class _Part(ctypes.Structure):
    _fields_: ClassVar = [("rows", _Pointer), ("index", _Pointer), ("width", ctypes.c_int64)]


@lru_cache(maxsize=1)
def _load() -> ctypes.CDLL | None:
    path = build_library(_SOURCE)
    if path is None:
        return None
    library = ctypes.CDLL(str(path))
    for name, arguments in _SIGNATURES.items():
        function = getattr(library, name)
        function.argtypes = arguments
        function.restype = _Int if name in _CAN_FAIL else None
    return library


@lru_cache(maxsize=1)
def load_kernels() -> Kernels | None:
    """Build if need be and load the kernels; None where no compiler works."""
    library = _load()
    return None if library is None else Kernels(library)


def kernels_for(
    rows: torch.Tensor, width: int | None = None, dtype: torch.dtype | None = None
) -> Kernels | None:
    """Kernels for rows of this width in streams of this dtype (their own if None); None if torch must do."""
    width = rows.shape[-1] if width is None else width
    if (
        (rows.dtype if dtype is None else dtype) != torch.bfloat16
        or rows.device.type != "cpu"
        or width % _STEP
    ):
        return None
    return load_kernels()


def kernels_for_bytes(data: torch.Tensor, width: int) -> Kernels | None:
    """Kernels that unpack rows of `width` channels from uint8 memory; None if torch must do."""
    if data.device.type != "cpu" or data.stride(-1) != 1 or width % _STEP:
        return None
    return load_kernels()


class Kernels:
    """The native operations; arguments are as in the torch functions of the same names."""

    def __init__(self, library: ctypes.CDLL) -> None:
        """Wrap a loaded library."""
        self._library = library

    def round_fp8(self, rows: torch.Tensor) -> torch.Tensor:
        """Quantise and dequantise, to float32."""
        rows = rows.contiguous()
        out = torch.empty(rows.shape)
        width = rows.shape[-1]
        self._library.mp_round_fp8(rows.data_ptr(), rows.numel() // width, width, out.data_ptr())
        return out

    def quantised_linear(self, linear: int, rows: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """Round rows to FP8 and multiply; `linear` is the address of the product for the weight's dtype."""
        rows, weight = rows.contiguous(), weight.contiguous()
        (count, width), out_width = rows.shape, weight.shape[0]
        out = torch.empty(count, out_width, dtype=rows.dtype)
        self._check(
            self._library.mp_quantised_linear(
                linear, rows.data_ptr(), weight.data_ptr(), count, width, out_width, out.data_ptr()
            )
        )
        return out

    def encode_rows(self, number_format: int, rows: torch.Tensor, row_bytes: int) -> torch.Tensor:
        """Packed bytes [..., row_bytes] of rows [..., width]."""
        rows = rows.contiguous()
        out = torch.empty(*rows.shape[:-1], row_bytes, dtype=torch.uint8)
        width = rows.shape[-1]
        self._library.mp_encode_rows(
            number_format, rows.data_ptr(), rows.numel() // width, width, row_bytes, out.data_ptr()
        )
        return out

    def decode_rows(
        self,
        number_format: int,
        memory: torch.Tensor,
        first: torch.Tensor,
        second: torch.Tensor | None,
        width: int,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Float32 rows of memory [blocks, rows, row bytes] at (first, second), in `out` if given.

        Without `second`: all rows of the blocks `first`.
        """
        first = first.contiguous()
        if second is None:
            per, shape = memory.shape[1], (len(first) * memory.shape[1], width)
        else:
            second = second.expand_as(first).contiguous()
            per, shape = 1, (*first.shape, width)
        out = torch.empty(shape) if out is None else out
        self._library.mp_decode_rows(
            number_format,
            memory.data_ptr(),
            memory.stride(0),
            memory.stride(1),
            first.data_ptr(),
            None if second is None else second.data_ptr(),
            per,
            out.numel() // width,
            width,
            out.data_ptr(),
        )
        return out

    def rms_norm(self, rows: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """Root-mean-square norm over the last axis."""
        if rows.dim() != 2 or rows.stride(1) != 1:
            rows = rows.contiguous()
        width = rows.shape[-1]
        stride = rows.stride(0) if rows.dim() == 2 else width
        out = torch.empty(rows.shape, dtype=rows.dtype)
        self._library.mp_rms_norm(
            rows.data_ptr(), stride, weight.data_ptr(), eps, rows.numel() // width, width, out.data_ptr()
        )
        return out

    def rotate(self, rows: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, sign: int) -> torch.Tensor:
        """Rotate the last channels of [rows, width] or [rows, heads, width]; sign -1 rotates back."""
        rows = rows.contiguous()
        width, heads = rows.shape[-1], rows.shape[1] if rows.dim() == 3 else 1
        out = torch.empty_like(rows)
        self._library.mp_rotate(
            rows.data_ptr(),
            cos.data_ptr(),
            sin.data_ptr(),
            sign,
            rows.shape[0],
            heads,
            width,
            cos.shape[1],
            out.data_ptr(),
        )
        return out

    def compute_mix(
        self,
        linear: int,
        stream: torch.Tensor,
        fn: torch.Tensor,
        base: torch.Tensor,
        factors: torch.Tensor,
        norm_eps: float,
        iters: int,
        eps: float,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Pre, post and comb of a stream; `linear` is the address of the product for fn's dtype."""
        stream = stream.contiguous()
        count, copies, width = stream.shape
        pre, post = torch.empty(count, copies), torch.empty(count, copies)
        comb = torch.empty(count, copies, copies)
        self._check(
            self._library.mp_compute_mix(
                linear,
                stream.data_ptr(),
                fn.data_ptr(),
                base.data_ptr(),
                factors.data_ptr(),
                count,
                copies,
                width,
                iters,
                norm_eps,
                eps,
                pre.data_ptr(),
                post.data_ptr(),
                comb.data_ptr(),
            )
        )
        return pre, post, comb

    def collapse(self, stream: torch.Tensor, pre: torch.Tensor) -> torch.Tensor:
        """Weighted sum of the copies."""
        stream, pre = stream.contiguous(), pre.contiguous()
        count, copies, width = stream.shape
        out = torch.empty(count, width, dtype=stream.dtype)
        self._library.mp_collapse(stream.data_ptr(), pre.data_ptr(), count, copies, width, out.data_ptr())
        return out

    def expand(
        self, stream: torch.Tensor, out: torch.Tensor, post: torch.Tensor, comb: torch.Tensor
    ) -> torch.Tensor:
        """Mix the copies and add the sub-layer's output."""
        stream, out, post, comb = stream.contiguous(), out.contiguous(), post.contiguous(), comb.contiguous()
        count, copies, width = stream.shape
        new = torch.empty_like(stream)
        self._library.mp_expand(
            stream.data_ptr(),
            out.data_ptr(),
            post.data_ptr(),
            comb.data_ptr(),
            count,
            copies,
            width,
            new.data_ptr(),
        )
        return new

    def choose_experts(
        self,
        scores: torch.Tensor,
        bias: torch.Tensor,
        bias_image: torch.Tensor | None,
        is_image: torch.Tensor | None,
        count: int,
        scale: float,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Experts and weights [rows, count] of float32 scores [rows, experts]."""
        scores = scores.contiguous()
        rows, experts = scores.shape
        mask = None if is_image is None or bias_image is None else is_image.contiguous()
        chosen, weights = torch.empty(rows, count, dtype=torch.int64), torch.empty(rows, count)
        self._library.mp_choose_experts(
            scores.data_ptr(),
            bias.data_ptr(),
            None if bias_image is None else bias_image.data_ptr(),
            None if mask is None else mask.data_ptr(),
            rows,
            experts,
            count,
            scale,
            chosen.data_ptr(),
            weights.data_ptr(),
        )
        return chosen, weights

    def group_by_expert(
        self, chosen: torch.Tensor, weights: torch.Tensor, num_experts: int
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """Loads, rows and weights of the sorted choices, and the places of each row's."""
        chosen, weights = chosen.contiguous(), weights.contiguous()
        rows, count = chosen.shape
        loads, sources = torch.empty(num_experts, dtype=torch.int64), chosen.new_empty(rows * count)
        ordered, places = weights.new_empty(rows * count), torch.empty_like(chosen)
        self._library.mp_group_by_expert(
            chosen.data_ptr(),
            weights.data_ptr(),
            rows,
            count,
            num_experts,
            loads.data_ptr(),
            sources.data_ptr(),
            ordered.data_ptr(),
            places.data_ptr(),
        )
        return loads, sources, ordered, places

    def activate(self, gate_up: torch.Tensor, weights: torch.Tensor | None, limit: float) -> torch.Tensor:
        """Clamped SwiGLU of float32 rows [n, 2 * width], times the rows' weights."""
        gate_up = gate_up.contiguous()
        width = gate_up.shape[1] // 2
        out = torch.empty(gate_up.shape[0], width, dtype=torch.bfloat16)
        self._library.mp_activate(
            gate_up.data_ptr(),
            None if weights is None else weights.data_ptr(),
            limit,
            gate_up.shape[0],
            width,
            out.data_ptr(),
        )
        return out

    def sum_shares(self, shares: torch.Tensor, places: torch.Tensor, shared: torch.Tensor) -> torch.Tensor:
        """Sum the float32 shares at `places` [rows, k], in order, and the shared expert's rows."""
        shares, places, shared = shares.contiguous(), places.contiguous(), shared.contiguous()
        out = torch.empty_like(shared)
        self._library.mp_sum_shares(
            shares.data_ptr(),
            places.data_ptr(),
            shared.data_ptr(),
            *places.shape,
            shared.shape[1],
            out.data_ptr(),
        )
        return out

    def add_engram(
        self,
        stream: torch.Tensor,
        keys_value: torch.Tensor,
        weight: torch.Tensor,
        is_text: torch.Tensor | None,
        eps: float,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Add the gated value to every copy; also the gates."""
        stream = stream.contiguous()
        count, copies, width = stream.shape
        out, gates = torch.empty_like(stream), torch.empty(count, copies)
        mask = None if is_text is None else is_text.contiguous()
        self._library.mp_add_engram(
            stream.data_ptr(),
            keys_value.data_ptr(),
            weight.data_ptr(),
            None if mask is None else mask.data_ptr(),
            eps,
            count,
            copies,
            width,
            out.data_ptr(),
            gates.data_ptr(),
        )
        return out, gates

    def attend(
        self, query: torch.Tensor, parts: Sequence[tuple[torch.Tensor, torch.Tensor]], sink: torch.Tensor
    ) -> torch.Tensor:
        """Attention of query [n, heads, dim] over (rows, index) of each part."""
        query = query.contiguous()
        held = [(rows.contiguous(), index.contiguous()) for rows, index in parts]
        records = [_Part(rows.data_ptr(), index.data_ptr(), index.shape[1]) for rows, index in held]
        out = torch.empty_like(query)
        self._check(
            self._library.mp_attend(
                query.data_ptr(),
                (_Part * len(records))(*records),
                len(records),
                sink.data_ptr(),
                *query.shape,
                out.data_ptr(),
            )
        )
        return out

    def score_entries(
        self,
        query: torch.Tensor,
        weights: torch.Tensor,
        keys: torch.Tensor,
        first: torch.Tensor,
        visible: torch.Tensor,
        width: int,
    ) -> torch.Tensor:
        """Scores [rows, width] in bf16; each row's keys begin at `first`, -inf behind the visible ones."""
        query, weights, keys = query.contiguous(), weights.contiguous(), keys.contiguous()
        first, visible = first.contiguous(), visible.contiguous()
        out = torch.empty(query.shape[0], width, dtype=weights.dtype)
        self._check(
            self._library.mp_score_entries(
                query.data_ptr(),
                weights.data_ptr(),
                keys.data_ptr(),
                first.data_ptr(),
                visible.data_ptr(),
                *query.shape,
                width,
                out.data_ptr(),
            )
        )
        return out

    def choose_largest(self, scores: torch.Tensor, count: int) -> torch.Tensor:
        """Places of the largest scores, ascending, -1 behind them."""
        scores = scores.contiguous()
        out = torch.empty(scores.shape[0], count, dtype=torch.int64)
        self._library.mp_choose_largest(scores.data_ptr(), *scores.shape, count, out.data_ptr())
        return out

    @staticmethod
    def _check(status: int) -> None:
        if status:
            raise MemoryError("no memory for a kernel's scratch")
