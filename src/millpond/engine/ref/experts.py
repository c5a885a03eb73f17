"""Experts and Engram of one token."""

from __future__ import annotations

import math

import torch

from millpond.core.work import WorkKind
from millpond.engine.model.packed import Matrix
from millpond.engine.ref.formats import round_fp8_ref
from millpond.engine.ref.tally import count, multiply_ref


def route_ref(
    x: torch.Tensor, gate: torch.Tensor, bias: torch.Tensor, num_chosen: int, scale: float
) -> dict[int, float]:
    """Expert -> weight of one token."""
    scores = [math.sqrt(math.log1p(math.exp(score))) for score in multiply_ref(gate, x).tolist()]
    best = sorted(range(len(scores)), key=lambda e: -(scores[e] + bias[e].item()))[:num_chosen]
    total = sum(scores[e] for e in best) + 1e-20
    return {e: scores[e] / (total if num_chosen > 1 else 1.0) * scale for e in best}


def expert_ref(
    x: torch.Tensor,
    gate_up: Matrix,
    down: Matrix,
    weight: float,
    limit: float,
    *,
    is_quantised: bool,
) -> torch.Tensor:
    """One expert's share of one token's output, float32."""
    x = round_fp8_ref(x) if is_quantised else x.float()
    gate, up = multiply_ref(gate_up, x).chunk(2)
    gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    inner = gate / (1 + torch.exp(-gate)) * up * weight
    return multiply_ref(down, round_fp8_ref(inner) if is_quantised else inner)


def look_back_ref(ids: list[int], is_dead: list[bool], position: int, pad: int, max_ngram: int) -> list[int]:
    """Compressed ids of the token at `position` and those before it, newest first; dead ones end it."""
    out: list[int] = []
    for place in range(position, position - max_ngram, -1):
        if place < 0 or is_dead[place]:
            return out + [pad] * (max_ngram - len(out))
        out.append(ids[place])
    return out


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
        count(WorkKind.MIXING, 2 * hidden)  # this product, and the gated sum below
        dot = (row * weight * key).sum() / torch.sqrt((row * row).mean() + eps)
        dot = dot / torch.sqrt((key * key).mean() + eps) / math.sqrt(hidden)
        gate = torch.sigmoid(torch.sign(dot) * torch.sqrt(dot.abs().clamp(min=1e-6)))
        out.append(row + gate * value)
    return torch.stack(out)
