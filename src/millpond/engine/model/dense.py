"""Products with weights in bf16 or float32: the native kernels where they serve, torch elsewhere."""

from __future__ import annotations

import ctypes
from functools import lru_cache

import torch

from millpond.engine.native import load_kernels

_STEP = 16
"""Widths are multiples of the widest vector of the kernels."""


def narrow_exact(weight: torch.Tensor) -> torch.Tensor:
    """Keep a float32 weight in bf16 if that loses nothing and native kernels can read it.

    FP8 and FP4 weights and those stored as bf16 always fit: half the bytes to read in every step.
    """
    if _kernels_for(weight, torch.bfloat16) is None:
        return weight
    narrow = weight.bfloat16()
    return narrow if torch.equal(narrow.float(), weight) else weight


def linear_address(weight: torch.Tensor) -> int | None:
    """Address of the native product for a weight [out, in], which kernels call; None if torch must do."""
    if not weight.is_contiguous() or _kernels_for(weight, weight.dtype) is None:
        return None
    return _address_of(weight.dtype)


@lru_cache(maxsize=2)
def _address_of(dtype: torch.dtype) -> int | None:
    kernels = load_kernels(dtype)
    return None if kernels is None else ctypes.cast(kernels.mp_linear, ctypes.c_void_p).value


def multiply(rows: torch.Tensor, weight: torch.Tensor) -> torch.Tensor | None:
    """Float32 rows [n, in] by a weight [out, in]; None if torch must do.

    Guarantees:
        A row's bits depend on that row and the weight only. So do those of the functions below.
    """
    kernels = _kernels_for(weight, weight.dtype)
    if kernels is None:
        return None
    rows, weight = rows.contiguous(), weight.contiguous()
    (count, width), out_width = rows.shape, weight.shape[0]
    out = torch.empty(count, out_width)
    kernels.mp_linear(
        rows.data_ptr(),
        width,
        weight.data_ptr(),
        None,
        count,
        width,
        out_width,
        out.data_ptr(),
        out_width,
        0,
    )
    return out


def multiply_groups(rows: torch.Tensor, weight: torch.Tensor) -> torch.Tensor | None:
    """Float32 rows [n, groups, in] by weights [groups, out, in]: [n, groups, out]; None if torch must do."""
    kernels = _kernels_for(weight, weight.dtype)
    if kernels is None:
        return None
    rows = rows.contiguous()
    count, groups, width = rows.shape
    out_width = weight.shape[1]
    out = torch.empty(count, groups, out_width)
    to, source, matrix = out.data_ptr(), rows.data_ptr(), weight.data_ptr()
    matrix_bytes = weight.stride(0) * weight.element_size()
    for group in range(groups):
        kernels.mp_linear(
            source + group * width * rows.element_size(),
            groups * width,
            matrix + group * matrix_bytes,
            None,
            count,
            width,
            out_width,
            to + group * out_width * out.element_size(),
            groups * out_width,
            0,
        )
    return out


def multiply_by_expert(rows: torch.Tensor, weight: torch.Tensor, loads: torch.Tensor) -> torch.Tensor | None:
    """Float32 rows, `loads` [experts] of them for each weight [experts, out, in]; None if torch must do."""
    kernels = _kernels_for(weight, weight.dtype)
    if kernels is None:
        return None
    rows = rows.contiguous()
    out = torch.empty(rows.shape[0], weight.shape[1])
    kernels.mp_linear_experts(
        rows.data_ptr(),
        weight.data_ptr(),
        loads.data_ptr(),
        weight.shape[0],
        weight.shape[2],
        weight.shape[1],
        out.data_ptr(),
    )
    return out


def _kernels_for(weight: torch.Tensor, dtype: torch.dtype) -> ctypes.CDLL | None:
    if weight.device.type != "cpu" or weight.shape[-1] % _STEP:
        return None
    return load_kernels(dtype)
