"""Shifted hyper-connections: several copies of the stream, mixed by small learned matrices per token."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch

from millpond.engine.model.dense import linear_address
from millpond.engine.model.native import MAX_COPIES, kernels_for
from millpond.engine.model.numerics import Numerics, curve


@dataclass(frozen=True, slots=True)
class MixWeights:
    """Float32 parameters of one sub-layer's mixes; m = copies * (copies + 2)."""

    fn: torch.Tensor
    """[m, copies * hidden]"""
    base: torch.Tensor
    """[m]"""
    scale: torch.Tensor
    """[3]: of pre, post and comb."""


class Mix(NamedTuple):
    """Coefficients of one sub-layer, float32."""

    pre: torch.Tensor
    """[rows, copies]: collapse for the *next* sub-layer."""
    post: torch.Tensor
    """[rows, copies]: share of the sub-layer's output."""
    comb: torch.Tensor
    """[rows, copies (old), copies (new)]."""


def compute_mix(
    stream: torch.Tensor, w: MixWeights, numerics: Numerics, *, norm_eps: float, iters: int, eps: float
) -> Mix:
    """Coefficients from the stream [rows, copies, hidden] before a sub-layer."""
    copies = stream.shape[1]
    kernels = kernels_for(stream) if copies <= MAX_COPIES else None
    linear = None if kernels is None else linear_address(w.fn)
    if kernels is not None and linear is not None:
        return Mix(*kernels.compute_mix(linear, stream, w.fn, w.base, w.scale, norm_eps, iters, eps))
    flat = stream.flatten(1).float()
    scale = torch.rsqrt((flat * flat).mean(-1, keepdim=True) + norm_eps)
    return split_mix(numerics.product(flat, w.fn) * scale, w, copies, iters=iters, eps=eps)


def split_mix(raw: torch.Tensor, w: MixWeights, copies: int, *, iters: int, eps: float) -> Mix:
    """Turn raw numbers [rows, m] into coefficients; `comb` is made doubly stochastic by `iters` rounds."""
    pre, post, comb = raw.split([copies, copies, copies * copies], dim=-1)
    base_pre, base_post, base_comb = w.base.split([copies, copies, copies * copies])
    pre = curve(torch.sigmoid, pre * w.scale[0] + base_pre) + eps
    post = 2 * curve(torch.sigmoid, post * w.scale[1] + base_post)
    comb = (comb * w.scale[2] + base_comb).unflatten(-1, (copies, copies))
    comb = comb.softmax(-1) + eps
    comb = comb / (comb.sum(-2, keepdim=True) + eps)
    for _ in range(iters - 1):
        comb = comb / (comb.sum(-1, keepdim=True) + eps)
        comb = comb / (comb.sum(-2, keepdim=True) + eps)
    return Mix(pre, post, comb)


def collapse(stream: torch.Tensor, pre: torch.Tensor) -> torch.Tensor:
    """Weighted sum of the copies: [rows, hidden], in the stream's dtype."""
    kernels = kernels_for(stream)
    if kernels is not None:
        return kernels.collapse(stream, pre)
    return torch.bmm(pre[:, None], stream.float())[:, 0].to(stream.dtype)


def expand(stream: torch.Tensor, out: torch.Tensor, mix: Mix) -> torch.Tensor:
    """Mix the old copies and add each one's share of the sub-layer's output [rows, hidden]."""
    kernels = kernels_for(stream) if stream.shape[1] <= MAX_COPIES else None
    if kernels is not None:
        return kernels.expand(stream, out, mix.post, mix.comb)
    kept = torch.bmm(mix.comb.transpose(1, 2), stream.float())
    return torch.baddbmm(kept, mix.post[..., None], out.float()[:, None]).to(stream.dtype)
