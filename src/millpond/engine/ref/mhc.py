"""Hyper-connections of one token."""

from __future__ import annotations

import math

import torch

from millpond.core.work import WorkKind
from millpond.engine.ref.tally import count, multiply_ref


def compute_mix_ref(
    stream: torch.Tensor,
    fn: torch.Tensor,
    base: torch.Tensor,
    scale: torch.Tensor,
    *,
    norm_eps: float,
    iters: int,
    eps: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(pre [copies], post [copies], comb [old, new]) of one token's stream [copies, hidden]."""
    copies = len(stream)
    flat = stream.float().flatten()
    raw = multiply_ref(fn, flat) * torch.rsqrt((flat * flat).mean() + norm_eps)
    pre = torch.sigmoid(raw[:copies] * scale[0] + base[:copies]) + eps
    post = 2 * torch.sigmoid(raw[copies : 2 * copies] * scale[1] + base[copies : 2 * copies])
    comb: list[list[float]] = []
    for old in range(copies):
        at = 2 * copies + old * copies
        row = (raw[at : at + copies] * scale[2] + base[at : at + copies]).tolist()
        parts = [math.exp(value - max(row)) for value in row]
        comb.append([part / sum(parts) + eps for part in parts])
    for round_number in range(iters):
        if round_number > 0:
            comb = [[value / (sum(row) + eps) for value in row] for row in comb]
        columns = [sum(column) + eps for column in zip(*comb, strict=True)]
        comb = [[value / total for value, total in zip(row, columns, strict=True)] for row in comb]
    return pre, post, torch.tensor(comb)


def collapse_ref(stream: torch.Tensor, pre: torch.Tensor) -> torch.Tensor:
    """Weighted sum of one token's copies."""
    total = torch.zeros(stream.shape[1])
    for weight, row in zip(pre, stream, strict=True):
        total += weight * row.float()
        count(WorkKind.MIXING, len(row))
    return total


def expand_ref(
    stream: torch.Tensor, out: torch.Tensor, post: torch.Tensor, comb: torch.Tensor
) -> torch.Tensor:
    """One token's new copies."""
    rows = []
    for new in range(len(stream)):
        total = post[new] * out.float()
        count(WorkKind.MIXING, len(out))
        for old in range(len(stream)):
            total = total + comb[old, new] * stream[old].float()
            count(WorkKind.MIXING, len(out))
        rows.append(total)
    return torch.stack(rows)
