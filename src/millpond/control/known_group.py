"""What the controller knows of one group, its own later assignments counted in."""

from __future__ import annotations

from dataclasses import replace

from millpond.core.events import Fetch, GroupUp
from millpond.core.ids import DpRank
from millpond.core.views import RankView


class KnownGroup:
    """One group that is up: its last report, and what it was assigned since."""

    def __init__(self, up: GroupUp, now_ns: int) -> None:
        self.up = up
        self.seen_ns = now_ns
        self.room = 0
        self.num_assigns = up.seen_assigns
        """Assignments sent in this incarnation, those of earlier controllers included."""
        self.unseen: list[tuple[int, DpRank, int, int]] = []
        """(ordinal, rank, tokens to compute, tokens to hold) of assignments that the last report does not
        include."""
        self.views = {
            info.rank: RankView(info.rank, 0, 0, 0, 0, info.num_blocks, info.num_slots) for info in up.ranks
        }
        """As last reported."""
        self._adjusted = dict(self.views)

    def take_report(self, now_ns: int, report: Fetch) -> None:
        """Replace the views; what was assigned since stays counted in."""
        self.seen_ns = now_ns
        self.room = report.room
        self.views = {view.rank: view for view in report.views}
        self.unseen = [entry for entry in self.unseen if entry[0] > report.seen_assigns]
        self._adjusted = dict(self.views)
        for _, rank, num_todo, num_kv in self.unseen:
            self._count_in(rank, num_todo, num_kv)

    def book(self, rank: DpRank, num_todo_tokens: int, num_kv_tokens: int) -> None:
        """Note an assignment: tokens that the rank will report as queued, and tokens that it will hold."""
        self.num_assigns += 1
        self.unseen.append((self.num_assigns, rank, num_todo_tokens, num_kv_tokens))
        self._count_in(rank, num_todo_tokens, num_kv_tokens)

    def adjusted_views(self) -> list[RankView]:
        """Views with our own later assignments counted in, so that a burst within one report period
        does not herd onto one rank.
        """
        return list(self._adjusted.values())

    def _count_in(self, rank: DpRank, num_todo_tokens: int, num_kv_tokens: int) -> None:
        view = self._adjusted[rank]
        self._adjusted[rank] = replace(
            view,
            num_queued=view.num_queued + 1,
            queued_tokens=view.queued_tokens + num_todo_tokens,
            queued_kv_tokens=view.queued_kv_tokens + num_kv_tokens,
        )
