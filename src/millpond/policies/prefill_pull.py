"""Which prefill rank gets the next request of its group."""

from __future__ import annotations

from collections.abc import Sequence

from millpond.core.ids import DpRank
from millpond.core.views import RankView


def pick_prefill_rank(ranks: Sequence[RankView]) -> DpRank:
    """Pick the rank with the fewest prompt tokens still to compute.

    Args:
        ranks: At least one; requests assigned since the report must be counted in.

    Guarantees:
        Deterministic: ties go to the lower rank.

    Source:
        dualpath 5.2: next request to the rank with the least outstanding work.
    """
    return min(ranks, key=lambda view: (view.queued_tokens, view.num_queued, view.rank)).rank
