"""Experts and Engram of one token."""

from __future__ import annotations

import math

import torch

from millpond.engine.ref.formats import round_fp8_ref


def route_ref(
    x: torch.Tensor, gate: torch.Tensor, bias: torch.Tensor, count: int, scale: float
) -> dict[int, float]:
    """Expert -> weight of one token."""
    scores = [math.sqrt(math.log1p(math.exp((row @ x.float()).item()))) for row in gate]
    best = sorted(range(len(scores)), key=lambda e: -(scores[e] + bias[e].item()))[:count]
    total = sum(scores[e] for e in best) + 1e-20
    return {e: scores[e] / (total if count > 1 else 1.0) * scale for e in best}


def expert_ref(
    x: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    weight: float,
    limit: float,
    *,
    is_quantised: bool,
) -> torch.Tensor:
    """One expert's share of one token's output, float32."""
    x = round_fp8_ref(x) if is_quantised else x.float()
    width = len(gate_up) // 2
    gate, up = gate_up[:width] @ x, gate_up[width:] @ x
    gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    inner = gate / (1 + torch.exp(-gate)) * up * weight
    return down @ (round_fp8_ref(inner) if is_quantised else inner)


def engram_rows_ref(recent: list[int], multipliers: list[int], primes: list[list[int]]) -> list[int]:
    """Table rows of one token; `recent` are compressed ids, this token's first."""
    rows, offset = [], 0
    rolling = recent[0] * multipliers[0]
    for token, multiplier, sizes in zip(recent[1:], multipliers[1:], primes, strict=True):
        rolling ^= token * multiplier
        for prime in sizes:
            rows.append(rolling % prime + offset)
            offset += prime
    return rows


def add_engram_ref(
    stream: torch.Tensor, keys: torch.Tensor, value: torch.Tensor, weights: torch.Tensor, eps: float
) -> torch.Tensor:
    """One token's copies with the gated value; `weights` are query norm x key norm of each copy."""
    out = []
    hidden = stream.shape[1]
    for row, key, weight in zip(stream.float(), keys, weights, strict=True):
        dot = (row * weight * key).sum() / torch.sqrt((row * row).mean() + eps)
        dot = dot / torch.sqrt((key * key).mean() + eps) / math.sqrt(hidden)
        gate = torch.sigmoid(torch.sign(dot) * torch.sqrt(dot.abs().clamp(min=1e-6)))
        out.append(row + gate * value)
    return torch.stack(out)
