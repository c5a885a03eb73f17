"""The process of a group's rank 0: one loop around the group's scheduler.

    drain sockets -> advance -> next_plan -> carry out -> advance(StepDone) -> ...

A group with nothing to do parks in `wait_any`; it wakes for messages, transfer events and heartbeats.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass

import structlog

from millpond.control.group_scheduler import GroupEvent, GroupScheduler
from millpond.control.invariants import require_sound
from millpond.control.kv_loads import OVERTAKE_NS
from millpond.core.events import (
    Aborted,
    Assigned,
    Fetch,
    GroupUp,
    HandoffArrived,
    HandoffClosed,
    HandoffFailed,
    HandoffSent,
    Loaded,
    RankInfo,
    RankReport,
    StepDone,
    Telemetry,
    Tick,
    TokensOut,
)
from millpond.core.ids import RequestId
from millpond.core.plan import AbortOn, Assign, GroupPlan, Introduce, SequenceEnd, TokenOut
from millpond.core.units import MILLISECOND_NS, SECOND_NS
from millpond.serve.rpc import Connected, Dealer, Network, Push, Wakeup, wait_any
from millpond.serve.transfer.protocol import CLOSED_BY_SENDER
from millpond.serve.workers.rank_runner import RankRunner, slice_for_rank
from millpond.serve.workers.remote_rank import RemoteRanks

HEARTBEAT_NS = 500 * MILLISECOND_NS
REPORT_INTERVAL_NS = 50 * MILLISECOND_NS
"""Reports of a busy group are at least this far apart, unless they carry news the controller waits for."""
TELEMETRY_INTERVAL_NS = SECOND_NS
IDLE_CHECK_NS = 10 * SECOND_NS
"""A parked group inspects its invariants this often."""

log = structlog.get_logger(__name__)

TransferEvent = HandoffSent | HandoffArrived | HandoffFailed | HandoffClosed | Loaded


@dataclass(frozen=True, slots=True)
class LeaderIdentity:
    """Who a leader is."""

    incarnation: int
    max_num_seqs: int


class Leader:
    """Loop of one group."""

    def __init__(
        self,
        identity: LeaderIdentity,
        scheduler: GroupScheduler,
        ranks: tuple[RankInfo, ...],
        own: RankRunner,
        others: RemoteRanks | None,
        controller: Dealer,
        wakeup: Wakeup,
        network: Network,
    ) -> None:
        self._identity = identity
        self._scheduler = scheduler
        self._ranks = ranks
        self._own = own
        self._others = others
        self._controller = controller
        self._wakeup = wakeup
        self._network = network
        self._gateways: dict[str, Push] = {}
        self._ended: list[SequenceEnd] = []
        self._started: list[tuple[RequestId, int]] = []
        self._last_fetch: Fetch | None = None
        self._last_fetch_ns = 0
        self._last_telemetry_ns = 0
        self._last_check_ns = 0
        self._counters: dict[str, float] = {}

    def run(self, is_stopping: Callable[[], bool]) -> None:
        """Serve until `is_stopping`. Raises what breaks the group; the supervisor restarts it."""
        while not is_stopping():
            self._drain()
            now_ns = time.monotonic_ns()
            plan = self._scheduler.next_plan(now_ns)
            if plan is not None:
                self._carry_out(plan)
            self._report(time.monotonic_ns())
            if plan is None:
                self._park()

    # --- in ----------------------------------------------------------------------------------

    def _drain(self) -> None:
        while (message := self._controller.recv()) is not None:
            self._on_message(message)
        for event in self._wakeup.take():
            self._on_transfer_event(event)
        if self._others is not None:
            for event in self._others.take_events():
                self._on_transfer_event(event)

    def _on_message(self, message: object) -> None:
        match message:
            case Assign():
                self._advance(Assigned(message))
            case AbortOn():
                self._advance(Aborted(message.request_id, message.attempt))
            case Connected() | Introduce():
                self._introduce()
            case _:
                log.warning("leader.message_unexpected", kind=type(message).__name__)

    def _on_transfer_event(self, event: object) -> None:
        if isinstance(event, HandoffFailed) and event.why.endswith(CLOSED_BY_SENDER):
            self._count("millpond_handoff_withdrawn_total")
        elif isinstance(event, HandoffFailed):
            self._count("millpond_handoff_failed_total")
            log.warning("handoff.failed", request_id=event.request_id, attempt=event.attempt, why=event.why)
        elif isinstance(event, HandoffArrived):
            self._count("millpond_handoff_received_total")
        elif isinstance(event, Loaded):
            self._count("millpond_loaded_tokens_promised_total", event.num_tokens)
        if isinstance(event, TransferEvent):
            self._advance(event)

    def _advance(self, event: GroupEvent) -> None:
        self._scheduler.advance(time.monotonic_ns(), event)

    # --- out ---------------------------------------------------------------------------------

    def _carry_out(self, plan: GroupPlan) -> None:
        self._send_tokens(plan.outputs)
        self._started += plan.started
        self._ended += plan.ended
        for end in plan.ended:
            if end.reason is None and end.detail.startswith("preempted"):
                self._count("millpond_preemptions_total")
        if plan.ended or plan.started:
            self._report(time.monotonic_ns())
        begin_ns = time.monotonic_ns()
        if self._others is not None:
            self._others.begin(plan)
        report = self._own.carry_out(slice_for_rank(plan, self._own.rank))
        if report is None:
            return
        reports: tuple[RankReport, ...] = (report,)
        if self._others is not None:
            reports += self._others.finish(plan)
        for lost in (lost for rank_report in reports for lost in rank_report.lost):
            self._count("millpond_loads_lost_total")
            log.warning("load.lost", request_id=lost[0], num_tokens_left=lost[1])
        end_ns = time.monotonic_ns()
        self._count(f"millpond_steps_total:{plan.kind.value}")
        self._count(f"millpond_step_seconds_total:{plan.kind.value}", (end_ns - begin_ns) / SECOND_NS)
        computed = sum(c.end - c.begin for r in plan.ranks for c in r.chunks)
        self._count("millpond_prompt_tokens_total:computed", computed)
        self._count_approximate(plan)
        rows = [row for r in plan.ranks for row in r.rows]
        num_drafts = sum(len(row.draft_ids) for row in rows)
        if num_drafts:
            self._count("millpond_draft_tokens_total", num_drafts)
            self._count(
                "millpond_draft_tokens_accepted_total", sum(len(r.sampled) for r in reports) - len(rows)
            )
        self._scheduler.advance(end_ns, StepDone(plan.step, reports))

    def _count_approximate(self, plan: GroupPlan) -> None:
        """Count replays, and sequences whose KV is downstream of one, theirs or an earlier turn's."""
        for part in plan.ranks:
            started = {start.request_id for start in part.start if start.is_approximate}
            firsts = [chunk for chunk in part.chunks if chunk.request_id in started]
            replayed = [chunk.write_begin - chunk.begin for chunk in firsts]
            self._count("millpond_approximate_sequences_total", len(started))
            self._count("millpond_replays_total", sum(num_tokens > 0 for num_tokens in replayed))
            self._count("millpond_replayed_tokens_total", sum(max(0, num_tokens) for num_tokens in replayed))

    def _send_tokens(self, outputs: tuple[tuple[str, TokenOut], ...]) -> None:
        by_gateway: dict[str, list[TokenOut]] = {}
        for reply_to, token in outputs:
            by_gateway.setdefault(reply_to, []).append(token)
        for reply_to, tokens in by_gateway.items():
            push = self._gateways.get(reply_to)
            if push is None:
                push = self._gateways[reply_to] = Push(self._network, reply_to)
            self._count("millpond_generated_tokens_total", len(tokens))
            # A full queue means the gateway is gone or stuck. The gap it sees, if it ever comes back, makes
            # it ask again; nothing may block here.
            if not push.send(TokensOut(self._scheduler.group, tuple(tokens))):
                self._count("millpond_tokens_unsent_total", len(tokens))

    def _report(self, now_ns: int) -> None:
        fetch = Fetch(
            group=self._scheduler.group,
            incarnation=self._identity.incarnation,
            views=self._scheduler.views(),
            room=self._scheduler.room,
            seen_assigns=self._scheduler.num_assigns_seen,
            ended=tuple(self._ended),
            started=tuple(self._started),
        )
        if self._is_due(fetch, now_ns) and self._controller.send(fetch):
            self._last_fetch = fetch
            self._last_fetch_ns = now_ns
            self._ended.clear()
            self._started.clear()
        if now_ns - self._last_telemetry_ns >= TELEMETRY_INTERVAL_NS:
            self._last_telemetry_ns = now_ns
            self._controller.send(self._telemetry())

    def _is_due(self, fetch: Fetch, now_ns: int) -> bool:
        last = self._last_fetch
        if last is None or now_ns - self._last_fetch_ns >= HEARTBEAT_NS:
            return True
        if fetch.ended or fetch.started or fetch.room > last.room or fetch.seen_assigns != last.seen_assigns:
            return True
        return fetch.views != last.views and now_ns - self._last_fetch_ns >= REPORT_INTERVAL_NS

    def _introduce(self) -> None:
        up = GroupUp(
            group=self._scheduler.group,
            incarnation=self._identity.incarnation,
            role=self._scheduler.role.value,
            max_model_len=self._scheduler.max_model_len,
            max_num_seqs=self._identity.max_num_seqs,
            ranks=self._ranks,
            running=self._scheduler.held_requests(),
            seen_assigns=self._scheduler.num_assigns_seen,
        )
        if self._controller.send(up):
            self._last_fetch = None

    def _park(self) -> None:
        now_ns = time.monotonic_ns()
        if now_ns - self._last_check_ns >= IDLE_CHECK_NS:
            self._last_check_ns = now_ns
            require_sound([self._scheduler])
            self._advance(Tick())
        wait_ns = max(self._last_fetch_ns + HEARTBEAT_NS - now_ns, MILLISECOND_NS)
        if self._scheduler.is_timed:
            wait_ns = min(wait_ns, OVERTAKE_NS)
        sources = (self._controller, self._wakeup, *(self._others.sources() if self._others else ()))
        wait_any(sources, wait_ns / SECOND_NS)

    def _telemetry(self) -> Telemetry:
        values = dict(self._counters)
        for side in (self._own.sender, self._own.receiver):
            if side is not None:
                name = "send" if side is self._own.sender else "receive"
                values |= {f"millpond_handoff_{name}_{k}": float(v) for k, v in asdict(side.stats()).items()}
        if self._own.kv is not None:
            values |= self._own.kv.counters()
        for name, number in self._others.counters() if self._others is not None else ():
            values[name] = values.get(name, 0) + number
        return Telemetry(
            self._scheduler.group, self._identity.incarnation, os.getpid(), tuple(sorted(values.items()))
        )

    def _count(self, name: str, amount: float = 1) -> None:
        self._counters[name] = self._counters.get(name, 0) + amount

    def close(self) -> None:
        """Close the token sockets."""
        for push in self._gateways.values():
            push.close()
