"""Attention, windows and selection of one query."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from millpond.core.work import Mechanism, WorkKind
from millpond.engine.ref.tally import count, inside


@dataclass(frozen=True, slots=True)
class SeenRows:
    """Cached rows that one query sees, and what attending to them counts as."""

    mechanism: Mechanism
    rows: list[torch.Tensor]


def rope_frequencies_ref(
    theta: float, rope_dim: int, yarn: tuple[float, float, float, int] | None = None
) -> torch.Tensor:
    """Radians per position of each pair; `yarn` is (factor, beta_fast, beta_slow, original positions)."""
    plain = [theta ** (-2 * k / rope_dim) for k in range(rope_dim // 2)]
    if yarn is None:
        return torch.tensor(plain)
    factor, fast, slow, positions = yarn

    def pair_that_turns(turns: float) -> float:
        return rope_dim * math.log(positions / (2 * math.pi * turns)) / (2 * math.log(theta))

    low = max(math.floor(pair_that_turns(fast)), 0)
    high = min(math.ceil(pair_that_turns(slow)), rope_dim - 1)
    out = []
    for k, frequency in enumerate(plain):
        slowed = min(max((k - low) / (high - low or 0.001), 0.0), 1.0)
        out.append(frequency / factor * slowed + frequency * (1 - slowed))
    return torch.tensor(out)


def rotate_ref(row: torch.Tensor, position: int, frequencies: torch.Tensor, *, sign: int = 1) -> torch.Tensor:
    """Rotate the last pairs of one row [width] by position x frequency; `sign` -1 rotates back."""
    out = row.tolist()
    first = len(out) - 2 * len(frequencies)
    for pair, angle in enumerate((position * frequencies).tolist()):
        real, imaginary = out[first + 2 * pair], out[first + 2 * pair + 1]
        cos, sin = math.cos(angle), sign * math.sin(angle)
        out[first + 2 * pair] = real * cos - imaginary * sin
        out[first + 2 * pair + 1] = real * sin + imaginary * cos
    return torch.tensor(out)


def attend_ref(query: torch.Tensor, seen: list[SeenRows], sink: torch.Tensor) -> torch.Tensor:
    """One query [heads, dim] over the rows it sees; the sink enters the denominator only."""
    out = torch.zeros(query.shape)
    rows = [row for part in seen for row in part.rows]
    if not rows:
        return out
    for part in seen:
        with inside(part.mechanism):
            count(WorkKind.ATTENTION, 2 * query.numel() * len(part.rows))  # scores, and the weighted sum
    for head, vector in enumerate(query.float()):
        scores = torch.stack([vector @ row for row in rows]) * len(vector) ** -0.5
        top = scores.max()
        weights = torch.exp(scores - top)
        total = weights.sum() + torch.exp(sink[head] - top)
        for weight, row in zip(weights, rows, strict=True):
            out[head] += weight / total * row
    return out


def window_ref(position: int, window: int, first: int = 0) -> list[int]:
    """Positions that the query at `position` sees, oldest first; none below `first`."""
    return list(range(max(first, position - window + 1), position + 1))


def choose_largest_ref(scores: list[float], num_chosen: int) -> list[int]:
    """Places of the largest scores, ascending; of equal ones the lower place; -1 pads."""
    reachable = [place for place, score in enumerate(scores) if score != float("-inf")]
    best = sorted(sorted(reachable, key=lambda place: (-scores[place], place))[:num_chosen])
    return best + [-1] * (num_chosen - len(best))


def choose_candidates_ref(scores: list[float], visible: int, num_blocks: int, size: int) -> list[bool]:
    """Which entries lie in the best blocks; the newest visible entry's block is always kept."""
    blocks = [max(scores[at : at + size]) for at in range(0, len(scores), size)]
    if visible:
        blocks[(visible - 1) // size] = float("inf")
    kept = set(choose_largest_ref(blocks, num_blocks))
    return [place // size in kept for place in range(len(scores))]


def score_entries_ref(
    query: torch.Tensor,
    weights: torch.Tensor,
    keys: torch.Tensor | list[torch.Tensor],
    visible: int,
    candidates: list[bool] | None = None,
) -> list[float]:
    """Index scores of one query [heads, dim]; -inf for what it may not see and what is no candidate."""
    scores = []
    for place, key in enumerate(keys):
        if place >= visible or (candidates is not None and not candidates[place]):
            scores.append(float("-inf"))
            continue
        total = torch.zeros(())
        for vector, weight in zip(query, weights, strict=True):
            count(WorkKind.ATTENTION, len(key) + 1)
            total = total + torch.relu(vector @ key) * weight
        scores.append(total.item())
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
            count(WorkKind.MIXING, ratio)
        out.append(rms_norm_ref(latent, norm, eps))
    return torch.stack(out)


def rms_norm_ref(row: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Norm of one row, float32."""
    values = row.float()
    return values / torch.sqrt((values * values).mean() + eps) * weight
