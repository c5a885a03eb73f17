"""Where a sequence decodes: the group with the fewest tokens, inside it the slack rule."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from millpond.core.ids import DpRank
from millpond.core.units import num_blocks_for
from millpond.core.views import RankView


@dataclass(frozen=True, slots=True)
class DecodePlaceParams:
    """Placement of sequences on decode ranks."""

    slack_ratio: float = 0.05
    """Allowed excess over the mean token load, >= 0. Source: dualpath 5.3 (Z = 1.05 x mean)."""


def can_take(rank: RankView, need_tokens: int) -> bool:
    """Tell whether a rank could grant memory now. Queued sequences count as if they held theirs."""
    queued_blocks = num_blocks_for(rank.queued_kv_tokens) + rank.num_queued
    return rank.free_slots > rank.num_queued and rank.free_blocks - queued_blocks >= num_blocks_for(
        need_tokens
    )


def pick_decode_rank(ranks: Sequence[RankView], need_tokens: int, params: DecodePlaceParams) -> DpRank | None:
    """Pick the decode rank for one sequence inside one group.

    Among ranks that stay at or below (1 + slack_ratio) times the mean token load, take the one with the
    fewest sequences; if none does, take the one with the fewest tokens.

    Args:
        ranks: Ranks of the group; assignments since the report must be counted in.
        need_tokens: Tokens the sequence brings, > 0.
        params: Slack.

    Returns:
        The chosen rank; None if no rank has memory now.

    Guarantees:
        Deterministic: ties go to the lower rank. O(len(ranks)).

    Source:
        dualpath 5.3.
    """
    fitting = [rank for rank in ranks if can_take(rank, need_tokens)]
    if not fitting:
        return None
    line = (1 + params.slack_ratio) * (sum(map(tokens_of, fitting)) + need_tokens) / len(fitting)
    under = [rank for rank in fitting if tokens_of(rank) + need_tokens <= line]
    if under:
        return min(under, key=lambda r: (r.num_seqs + r.num_queued, tokens_of(r), r.rank)).rank
    return min(fitting, key=lambda r: (tokens_of(r), r.rank)).rank


def tokens_of(rank: RankView) -> int:
    """Tokens resident on a rank or on their way to it."""
    return rank.kv_tokens + rank.queued_kv_tokens
