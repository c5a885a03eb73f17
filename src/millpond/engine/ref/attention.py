"""Attention, windows and selection of one query."""

from __future__ import annotations

import torch


def rotate_ref(row: torch.Tensor, position: int, frequencies: torch.Tensor, *, sign: int = 1) -> torch.Tensor:
    """Rotate the last pairs of one row [width] by position x frequency; `sign` -1 rotates back."""
    out = row.float().clone()
    first = len(row) - 2 * len(frequencies)
    for pair, frequency in enumerate(frequencies):
        angle = torch.tensor(float(position)) * frequency
        a, b = out[first + 2 * pair].clone(), out[first + 2 * pair + 1].clone()
        cos, sin = angle.cos(), sign * angle.sin()
        out[first + 2 * pair], out[first + 2 * pair + 1] = a * cos - b * sin, a * sin + b * cos
    return out


def attend_ref(query: torch.Tensor, rows: torch.Tensor, seen: list[int], sink: torch.Tensor) -> torch.Tensor:
    """One query [heads, dim] over the rows it sees; the sink enters the denominator only."""
    out = torch.zeros(query.shape)
    if not seen:
        return out
    for head, vector in enumerate(query.float()):
        scores = torch.stack([vector @ rows[at] for at in seen]) * len(vector) ** -0.5
        top = scores.max()
        weights = torch.exp(scores - top)
        total = weights.sum() + torch.exp(sink[head] - top)
        for weight, at in zip(weights, seen, strict=True):
            out[head] += weight / total * rows[at]
    return out


def window_ref(position: int, window: int, first: int = 0) -> list[int]:
    """Positions that the query at `position` sees, oldest first; none below `first`."""
    return list(range(max(first, position - window + 1), position + 1))


def choose_largest_ref(scores: list[float], count: int) -> list[int]:
    """Places of the largest scores, ascending; of equal ones the lower place; -1 pads."""
    reachable = [place for place, score in enumerate(scores) if score != float("-inf")]
    best = sorted(sorted(reachable, key=lambda place: (-scores[place], place))[:count])
    return best + [-1] * (count - len(best))


def choose_candidates_ref(scores: list[float], visible: int, num_blocks: int, size: int) -> list[bool]:
    """Which entries lie in the best blocks; the newest visible entry's block is always kept."""
    blocks = [max(scores[at : at + size]) for at in range(0, len(scores), size)]
    if visible:
        blocks[(visible - 1) // size] = float("inf")
    kept = set(choose_largest_ref(blocks, num_blocks))
    return [place // size in kept for place in range(len(scores))]


def score_entries_ref(
    query: torch.Tensor, weights: torch.Tensor, keys: torch.Tensor, visible: int
) -> list[float]:
    """Index scores of one query [heads, dim]; -inf for what it may not see."""
    scores = []
    for place, key in enumerate(keys):
        total = torch.zeros(())
        for vector, weight in zip(query, weights, strict=True):
            total = total + torch.relu(vector @ key) * weight
        scores.append(total.item() if place < visible else float("-inf"))
    return scores


def make_latents_ref(
    values: torch.Tensor, gates: torch.Tensor, norm: torch.Tensor, ratio: int, eps: float
) -> torch.Tensor:
    """Latents of whole groups: a softmax over each group's tokens, channel by channel, then the norm."""
    out = []
    for first in range(0, len(values) - ratio + 1, ratio):
        latent = torch.empty(values.shape[1])
        for channel in range(values.shape[1]):
            share = torch.softmax(gates[first : first + ratio, channel], dim=0)
            latent[channel] = share @ values[first : first + ratio, channel]
        out.append(rms_norm_ref(latent, norm, eps))
    return torch.stack(out)


def rms_norm_ref(row: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Norm of one row, float32."""
    values = row.float()
    return values / torch.sqrt((values * values).mean() + eps) * weight
