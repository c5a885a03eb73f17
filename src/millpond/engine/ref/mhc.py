"""Hyper-connections of one token."""

from __future__ import annotations

import torch


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
    raw = torch.stack([row @ flat for row in fn]) * torch.rsqrt((flat * flat).mean() + norm_eps)
    pre = torch.sigmoid(raw[:copies] * scale[0] + base[:copies]) + eps
    post = 2 * torch.sigmoid(raw[copies : 2 * copies] * scale[1] + base[copies : 2 * copies])
    comb = torch.empty(copies, copies)
    for old in range(copies):
        at = 2 * copies + old * copies
        row = raw[at : at + copies] * scale[2] + base[at : at + copies]
        comb[old] = torch.exp(row - row.max()) / torch.exp(row - row.max()).sum() + eps
    for round_number in range(iters):
        if round_number > 0:
            for old in range(copies):
                comb[old] = comb[old] / (comb[old].sum() + eps)
        for new in range(copies):
            comb[:, new] = comb[:, new] / (comb[:, new].sum() + eps)
    return pre, post, comb


def collapse_ref(stream: torch.Tensor, pre: torch.Tensor) -> torch.Tensor:
    """Weighted sum of one token's copies."""
    total = torch.zeros(stream.shape[1])
    for weight, row in zip(pre, stream, strict=True):
        total += weight * row.float()
    return total


def expand_ref(
    stream: torch.Tensor, out: torch.Tensor, post: torch.Tensor, comb: torch.Tensor
) -> torch.Tensor:
    """One token's new copies."""
    rows = []
    for new in range(len(stream)):
        total = post[new] * out.float()
        for old in range(len(stream)):
            total = total + comb[old, new] * stream[old].float()
        rows.append(total)
    return torch.stack(rows)
