"""Ranks of a group that live in other processes, seen from the leader, and their own loop.

Leader to rank: its slice of every `GroupPlan`. Rank to leader: `RankInfo` once, `StepDone` with its one
report, the events of its transfer and load threads as they come, and its counters now and then.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable

from millpond.core.errors import DeadlineExceeded
from millpond.core.events import (
    HandoffArrived,
    HandoffClosed,
    HandoffFailed,
    HandoffSent,
    Loaded,
    RankInfo,
    RankReport,
    StepDone,
    Telemetry,
)
from millpond.core.ids import DpRank, GroupId
from millpond.core.plan import GroupPlan
from millpond.core.units import SECOND_NS
from millpond.serve.rpc import Connected, Dealer, Router, Source, Wakeup, wait_any
from millpond.serve.workers.rank_runner import RankRunner, has_work, slice_for_rank

STEP_DEADLINE_S = 120.0
"""A rank that does not answer a step in this time breaks the group; the supervisor restarts it whole."""
COUNTERS_INTERVAL_NS = SECOND_NS


def rank_identity(rank: DpRank) -> str:
    """Socket name of a rank towards its leader."""
    return f"rank-{rank}"


class RemoteRanks:
    """The leader's end."""

    def __init__(self, router: Router, ranks: tuple[DpRank, ...]) -> None:
        self._router = router
        self._ranks = ranks
        self._events: list[object] = []
        self._reports: dict[DpRank, RankReport] = {}
        self._counters: dict[str, tuple[tuple[str, float], ...]] = {}
        """Newest ones, by the rank's socket name."""

    def wait_until_up(self, deadline_s: float) -> tuple[RankInfo, ...]:
        """Wait for every rank's introduction.

        Raises:
            DeadlineExceeded: One did not come up in time.
        """
        infos: dict[DpRank, RankInfo] = {}
        until_ns = time.monotonic_ns() + int(deadline_s * SECOND_NS)
        while len(infos) < len(self._ranks):
            if not wait_any((self._router,), _left_s(until_ns)):
                missing = sorted(set(self._ranks) - infos.keys())
                raise DeadlineExceeded(
                    f"ranks {missing} did not report within {deadline_s} s", code="group.start"
                )
            while (received := self._router.recv()) is not None:
                if isinstance(received[1], RankInfo):
                    infos[received[1].rank] = received[1]
        return tuple(infos[rank] for rank in self._ranks)

    def sources(self) -> tuple[Source, ...]:
        """What a parked leader also waits for."""
        return (self._router,)

    def take_events(self) -> list[object]:
        """Return the transfer events that have come."""
        self._receive()
        events, self._events = self._events, []
        return events

    def counters(self) -> list[tuple[str, float]]:
        """(name, value) of every rank, as they told them last."""
        return [item for values in self._counters.values() for item in values]

    def begin(self, plan: GroupPlan) -> None:
        """Send every rank its slice."""
        for rank in self._ranks:
            part = slice_for_rank(plan, rank)
            if has_work(part) and not self._router.send(rank_identity(rank), part):
                raise DeadlineExceeded(f"rank {rank} is not reachable", code="group.rank_lost")

    def finish(self, plan: GroupPlan) -> tuple[RankReport, ...]:
        """Wait for every rank's report of this step, in order of rank."""
        until_ns = time.monotonic_ns() + int(STEP_DEADLINE_S * SECOND_NS)
        self._receive()
        while len(self._reports) < len(self._ranks):
            if not wait_any((self._router,), _left_s(until_ns)):
                raise DeadlineExceeded(f"step {plan.step} was not answered by every rank", code="group.step")
            self._receive()
        reports = tuple(self._reports[rank] for rank in self._ranks)
        self._reports.clear()
        return reports

    def _receive(self) -> None:
        while (received := self._router.recv()) is not None:
            message = received[1]
            if isinstance(message, Telemetry):
                self._counters[received[0]] = message.values
            elif isinstance(message, StepDone):
                self._reports.update({report.rank: report for report in message.reports})
            else:
                self._events.append(message)


def _left_s(until_ns: int) -> float:
    return max(until_ns - time.monotonic_ns(), 0) / SECOND_NS


def run_rank(
    group: GroupId,
    incarnation: int,
    runner: RankRunner,
    leader: Dealer,
    wakeup: Wakeup,
    is_stopping: Callable[[], bool],
) -> None:
    """Loop of a rank that is not its group's leader."""
    counters_ns = 0
    while not is_stopping():
        while (message := leader.recv()) is not None:
            if isinstance(message, Connected):
                leader.send(runner.info)
            elif isinstance(message, GroupPlan):
                report = runner.carry_out(message)
                if report is not None:
                    leader.send(StepDone(message.step, (report,)))
        for event in wakeup.take():
            if isinstance(event, HandoffSent | HandoffArrived | HandoffFailed | HandoffClosed | Loaded):
                leader.send(event)
        if runner.kv is not None and time.monotonic_ns() - counters_ns >= COUNTERS_INTERVAL_NS:
            counters_ns = time.monotonic_ns()
            values = tuple(sorted(runner.kv.counters().items()))
            leader.send(Telemetry(group, incarnation, os.getpid(), values))
        wait_any((leader, wakeup), 0.5)
