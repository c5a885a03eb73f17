"""Mixture of experts: router, clamped SwiGLU experts, shared expert."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, NamedTuple, TypeVar

import torch
from torch.nn import functional

from millpond.engine.model.context import Observe, ignore
from millpond.engine.model.native import MAX_EXPERTS, kernels_for
from millpond.engine.model.numerics import Numerics, curve
from millpond.engine.model.packed import Experts, Matrix

_SUM_FLOOR = 1e-20
W = TypeVar("W", Matrix, Experts)


@dataclass(frozen=True, slots=True)
class ExpertWeights(Generic[W]):
    """Weights of one SwiGLU expert, or of several stacked in front."""

    gate_up: W
    """[..., 2 * width, hidden]: w1 over w3."""
    down: W
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
    experts: ExpertWeights[Experts]
    shared: ExpertWeights[Matrix]


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
    scores = curve(functional.softplus, numerics.product(x.float(), w.gate)).sqrt_()
    kernels = kernels_for(scores, 0, x.dtype) if len(w.gate) <= MAX_EXPERTS else None
    if kernels is not None:
        return Routing(*kernels.choose_experts(scores, w.bias, w.bias_image, is_image, count, scale))
    bias = w.bias
    if is_image is not None and w.bias_image is not None:
        bias = torch.where(is_image[:, None], w.bias_image, w.bias)
    experts = (scores + bias).topk(count, dim=-1).indices
    weights = scores.gather(-1, experts)
    if count > 1:
        weights = weights / (weights.sum(-1, keepdim=True) + _SUM_FLOOR)
    return Routing(experts, weights * scale)


def _activate(
    gate_up: torch.Tensor, weights: torch.Tensor | None, limit: float, numerics: Numerics
) -> torch.Tensor:
    """Clamped SwiGLU of float32 rows [n, 2 * width], times the rows' weights, in the stream's dtype."""
    kernels = kernels_for(gate_up, gate_up.shape[1] // 2, numerics.dtype)
    if kernels is not None:
        return kernels.activate(gate_up, weights, limit)
    gate, up = gate_up.to(numerics.dtype).float().chunk(2, dim=-1)
    inner = functional.silu(gate.clamp_max(limit)) * up.clamp(-limit, limit)
    return (inner if weights is None else inner * weights[:, None]).to(numerics.dtype)


def run_shared(x: torch.Tensor, w: ExpertWeights[Matrix], limit: float, numerics: Numerics) -> torch.Tensor:
    """Run the expert that every row passes; x [rows, hidden] is rounded for quantised linears."""
    inner = _activate(numerics.product(x, w.gate_up), None, limit, numerics)
    return numerics.quantised_linear(inner, w.down)


def run_routed(
    x: torch.Tensor,
    w: ExpertWeights[Experts],
    loads: torch.Tensor,
    weights: torch.Tensor,
    limit: float,
    numerics: Numerics,
) -> torch.Tensor:
    """Run rows that are sorted by expert.

    Args:
        x: [rows, hidden], float32, rounded for quantised linears.
        w: Stacked experts.
        loads: [experts]: rows of each, experts ascending.
        weights: [rows]: routing weights, multiplied in before the down projection.
        limit: Clamp of gate (from above) and up (both sides).
        numerics: How to compute.

    Returns:
        [rows, hidden], in the stream's dtype.
    """
    return _routed_sums(x, w, loads, weights, limit, numerics).to(numerics.dtype)


def _routed_sums(
    x: torch.Tensor,
    w: ExpertWeights[Experts],
    loads: torch.Tensor,
    weights: torch.Tensor,
    limit: float,
    numerics: Numerics,
) -> torch.Tensor:
    """`run_routed` before the last rounding."""
    inner = _activate(numerics.product_by_expert(x, w.gate_up, loads), weights, limit, numerics)
    return numerics.product_by_expert(numerics.quantised_input(inner), w.down, loads)


class _Groups(NamedTuple):
    """Choices of experts, sorted by expert and then by row."""

    loads: torch.Tensor
    """[experts]: choices of each."""
    sources: torch.Tensor
    """[choices]: row of each."""
    weights: torch.Tensor
    """[choices]"""
    places: torch.Tensor
    """[rows, k]: where a row's choices are, experts ascending."""


def _group(routing: Routing, num_experts: int, dtype: torch.dtype) -> _Groups:
    """Sort the choices of all rows."""
    kernels = kernels_for(routing.weights, 0, dtype) if num_experts <= MAX_EXPERTS else None
    if kernels is not None:
        return _Groups(*kernels.group_by_expert(routing.experts, routing.weights, num_experts))
    count = routing.experts.shape[1]
    ascending = routing.experts.sort(-1)
    weights = routing.weights.gather(-1, ascending.indices).flatten()
    order = ascending.values.flatten().argsort(stable=True)
    loads = torch.bincount(ascending.values.flatten(), minlength=num_experts)
    places = torch.empty_like(order)
    places[order] = torch.arange(len(order), device=order.device)
    return _Groups(loads, order // count, weights[order], places.unflatten(0, (-1, count)))


def mix_experts(
    x: torch.Tensor,
    w: MoeWeights,
    routing: Routing,
    limit: float,
    numerics: Numerics,
    observe: Observe = ignore,
) -> torch.Tensor:
    """Run the chosen experts and the shared one; sums in float32, experts ascending, the shared one last."""
    rounded = numerics.quantised_input(x)
    groups = _group(routing, len(w.gate), numerics.dtype)
    sorted_rows = rounded.index_select(0, groups.sources)
    out = _routed_sums(sorted_rows, w.experts, groups.loads, groups.weights, limit, numerics)
    observe("routed_out", out)
    shared = run_shared(rounded, w.shared, limit, numerics)
    observe("shared_out", shared)
    kernels = kernels_for(shared)
    if kernels is not None:
        return kernels.sum_shares(out, groups.places, shared)
    shares = out.to(numerics.dtype)[groups.places]
    total = shares[:, 0].float()
    for number in range(1, shares.shape[1]):
        total = total + shares[:, number].float()
    return (total + shared.float()).to(x.dtype)
