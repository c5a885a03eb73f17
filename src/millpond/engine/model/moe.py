"""Mixture of experts: router, clamped SwiGLU experts, shared expert."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch.nn import functional

from millpond.engine.model.numerics import Numerics, curve

_SUM_FLOOR = 1e-20


@dataclass(frozen=True, slots=True)
class ExpertWeights:
    """Float32 weights of one SwiGLU expert, or of several stacked in front."""

    gate_up: torch.Tensor
    """[..., 2 * width, hidden]: w1 over w3."""
    down: torch.Tensor
    """[..., hidden, width]: w2."""


@dataclass(frozen=True, slots=True)
class MoeWeights:
    """Weights of one layer's experts."""

    gate: torch.Tensor
    """[experts, hidden], float32."""
    bias: torch.Tensor
    """[experts], float32: corrects the selection, not the weights."""
    bias_image: torch.Tensor | None
    """[experts]: the bias for tokens of an image span."""
    experts: ExpertWeights
    shared: ExpertWeights


class Routing(NamedTuple):
    """Chosen experts of each row."""

    experts: torch.Tensor
    """[rows, k], best first."""
    weights: torch.Tensor
    """[rows, k], float32, with the routing scale."""


def route(
    x: torch.Tensor,
    w: MoeWeights,
    is_image: torch.Tensor | None,
    count: int,
    scale: float,
    numerics: Numerics,
) -> Routing:
    """Choose `count` experts for each row of x [rows, hidden]; `is_image` [rows] picks the bias."""
    scores = curve(functional.softplus, numerics.product(x.float(), w.gate)).sqrt()
    bias = w.bias
    if is_image is not None and w.bias_image is not None:
        bias = torch.where(is_image[:, None], w.bias_image, w.bias)
    experts = (scores + bias).topk(count, dim=-1).indices
    weights = scores.gather(-1, experts)
    if count > 1:
        weights = weights / (weights.sum(-1, keepdim=True) + _SUM_FLOOR)
    return Routing(experts, weights * scale)


def run_expert(
    x: torch.Tensor, w: ExpertWeights, weights: torch.Tensor | None, limit: float, numerics: Numerics
) -> torch.Tensor:
    """Run one expert.

    Args:
        x: [rows, hidden], float32, rounded for quantised linears.
        w: The expert.
        weights: [rows]: routing weights, multiplied in before the down projection; None for the shared one.
        limit: Clamp of gate (from above) and up (both sides).
    """
    gate, up = numerics.product(x, w.gate_up).to(numerics.dtype).float().chunk(2, dim=-1)
    inner = functional.silu(gate.clamp_max(limit)) * up.clamp(-limit, limit)
    if weights is not None:
        inner = inner * weights[:, None]
    return numerics.quantised_linear(inner.to(numerics.dtype), w.down)


def mix_experts(
    x: torch.Tensor, w: MoeWeights, routing: Routing, limit: float, numerics: Numerics
) -> torch.Tensor:
    """Run the chosen experts and the shared one; sums in float32, experts ascending, the shared one last."""
    rounded = numerics.quantised_input(x)
    count = routing.experts.shape[1]
    order = routing.experts.flatten().argsort(stable=True)
    rows, weights = order // count, routing.weights.flatten()[order]
    loads = torch.bincount(routing.experts.flatten(), minlength=len(w.gate)).tolist()
    total = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    begin = 0
    for expert, load in enumerate(loads):
        if load:
            mine = rows[begin : begin + load]
            chosen = ExpertWeights(w.experts.gate_up[expert], w.experts.down[expert])
            out = run_expert(rounded[mine], chosen, weights[begin : begin + load], limit, numerics)
            total.index_add_(0, mine, out.float())
            begin += load
    total += run_expert(rounded, w.shared, None, limit, numerics).float()
    return total.to(x.dtype)
