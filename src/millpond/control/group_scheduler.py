"""The one scheduler object of a DP group, in the process of its rank 0.

    plan = scheduler.next_plan(now)      decide
    ...                                  the shell carries it out
    scheduler.advance(now, StepDone)     learn

All ranks take the same kind of step. Events that come while a step runs are held until it is done, so
nothing a running step touches is freed under it.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from enum import StrEnum

from millpond.control.decode_scheduler import DecodeParams, DecodeScheduler
from millpond.control.kv_allocator import KvAllocator
from millpond.control.outbox import Outbox
from millpond.control.prefill_scheduler import PrefillParams, PrefillScheduler
from millpond.control.rank_state import RankState
from millpond.control.request_fsm import Signal
from millpond.core.errors import InvariantBroken
from millpond.core.events import (
    Aborted,
    Assigned,
    HandoffArrived,
    HandoffClosed,
    HandoffFailed,
    HandoffSent,
    Loaded,
    RankInfo,
    StepDone,
    Tick,
)
from millpond.core.ids import GroupId, RankRef, RequestId
from millpond.core.plan import Assign, GroupPlan, RankPlan, SequenceEnd, StepKind
from millpond.core.request import RequestSpec
from millpond.core.sequence import Sequence, SequenceState, make_sequence
from millpond.core.views import RankView
from millpond.policies.step_vote import StepVoteParams, max_decode_steps, pick_step_kind


class GroupRole(StrEnum):
    """What a group does."""

    PREFILL = "prefill"
    DECODE = "decode"
    MIXED = "mixed"
    """Both in one scheduler: the unsplit baseline."""


@dataclass(frozen=True, slots=True)
class GroupParams:
    """All that a group's scheduler is parametrised by."""

    prefill: PrefillParams = field(default_factory=PrefillParams)
    """Prefill half; unused by a decode group."""
    decode: DecodeParams = field(default_factory=DecodeParams)
    """Decode half; unused by a prefill group."""
    vote: StepVoteParams = field(default_factory=StepVoteParams)
    """How a mixed group chooses its step."""


_SIGNALS = {Aborted: Signal.ABORT, HandoffSent: Signal.SENT, HandoffClosed: Signal.CLOSED}
_SequenceEvent = Aborted | HandoffSent | HandoffArrived | HandoffFailed | HandoffClosed | Loaded
GroupEvent = Assigned | StepDone | Tick | _SequenceEvent


class GroupScheduler:
    """Scheduler of one group of any role."""

    def __init__(
        self,
        group: GroupId,
        role: GroupRole,
        ranks: tuple[RankInfo, ...],
        max_model_len: int,
        params: GroupParams,
    ) -> None:
        """Make the scheduler of an idle group.

        Args:
            group: Its name.
            role: What it does.
            ranks: Facts of each rank.
            max_model_len: The model's; lowered to what one rank's memory can hold, so that a sequence that
                is alone on a rank always has room to finish.
            params: Parameters.
        """
        self.group = group
        self.role = role
        if role is not GroupRole.PREFILL:
            ranks = tuple(replace(info, num_home_blocks=0) for info in ranks)
        self.max_model_len = min([max_model_len, *(info.max_tokens for info in ranks)])
        self.num_assigns_seen = 0
        self._params = params
        self._outbox = Outbox()
        self._ranks = [
            RankState(
                RankRef(group, info.rank),
                info,
                KvAllocator(info.num_blocks, info.num_slots, info.num_home_blocks, info.num_rows),
                self._outbox,
                self.max_model_len,
            )
            for info in ranks
        ]
        self._prefills = [PrefillScheduler(rank, params.prefill) for rank in self._ranks]
        self._decodes = [DecodeScheduler(rank, params.decode) for rank in self._ranks]
        self._step = 0
        self._decode_steps = 0
        self._prefill_run = 0
        self._running: GroupPlan | None = None
        self._held: list[GroupEvent] = []

    # --- learn -----------------------------------------------------------------------------

    def advance(self, now_ns: int, event: GroupEvent) -> None:
        """Take in one event. Unknown requests, old attempts and repeats are harmless."""
        if isinstance(event, StepDone):
            self._on_step_done(event)
            held, self._held = self._held, []
            for late in held:
                self._apply(late)
        elif self._running is not None:
            self._held.append(event)
        else:
            self._apply(event)

    def _apply(self, event: GroupEvent) -> None:
        if isinstance(event, Assigned):
            self._on_assigned(event.assign)
        elif not isinstance(event, StepDone | Tick):
            for index, rank in enumerate(self._ranks):
                sequence = rank.find((event.request_id, event.attempt))
                if sequence is not None:
                    self._tell(index, sequence, event)
                    return

    def _tell(self, index: int, sequence: Sequence, event: _SequenceEvent) -> None:
        rank = self._ranks[index]
        if isinstance(event, HandoffFailed):
            rank.end(sequence, Signal.FAIL, None, f"handoff failed: {event.why}")
        elif isinstance(event, HandoffArrived):
            self._decodes[index].on_arrived(sequence, event)
        elif isinstance(event, Loaded):
            self._prefills[index].on_loaded(sequence, event)
        else:
            rank.move(sequence, _SIGNALS[type(event)])

    def _on_assigned(self, assign: Assign) -> None:
        self.num_assigns_seen += 1
        me = assign.prefill if assign.prefill.group == self.group else assign.decode
        spec = assign.spec
        for rank in self._ranks:
            for line in rank.lines.values():
                for old in [s for s in line.values() if s.spec.request_id == spec.request_id]:
                    if old.spec.attempt >= spec.attempt:
                        self._refuse_repeat(old, spec)
                        return
                    rank.move(old, Signal.ABORT)
        rank = next((r for r in self._ranks if r.me == me), None)
        if rank is None:
            raise InvariantBroken(f"{spec.request_id} was assigned to {me}, which is not in {self.group}")
        sequence = make_sequence(assign, me, arrival=self.num_assigns_seen)
        if self.role is GroupRole.DECODE:
            rank.add(sequence)
        else:
            self._prefills[self._ranks.index(rank)].add(sequence)

    def _refuse_repeat(self, old: Sequence, spec: RequestSpec) -> None:
        """Answer an assignment that comes too late or twice.

        A restarted controller may assign an attempt whose last transfer is still being closed. The data
        plane cannot tell the two apart, so another attempt is asked for.
        """
        if old.state is SequenceState.CLOSING and old.spec.attempt == spec.attempt:
            self._outbox.ended.append(
                SequenceEnd(spec.request_id, spec.attempt, None, "this attempt is still being closed")
            )

    def _on_step_done(self, event: StepDone) -> None:
        plan = self._running
        if plan is None or plan.step != event.step or len(event.reports) != len(plan.ranks):
            raise InvariantBroken(f"{self.group}: step {event.step} is done but {plan and plan.step} runs")
        self._running = None
        for rank_plan, report, prefill, decode in zip(
            plan.ranks, event.reports, self._prefills, self._decodes, strict=True
        ):
            if plan.kind is StepKind.PREFILL:
                prefill.on_step_done(rank_plan, report)
            else:
                decode.on_step_done(report)

    # --- decide ----------------------------------------------------------------------------

    def next_plan(self, now_ns: int, max_steps: int = 1) -> GroupPlan | None:
        """Return what to do next, or None to park until an event comes.

        A plan with ranks must be answered by `StepDone` before the next one is asked for.

        Args:
            now_ns: Virtual or monotonic time.
            max_steps: A plan may span this many decode steps when nothing can change in between. A plan of
                k steps has the same effect as k plans of one.
        """
        if self._running is not None:
            raise InvariantBroken(f"{self.group}: step {self._running.step} still runs")
        self._admit(now_ns)
        kind = self._pick_kind()
        ranks: tuple[RankPlan, ...] = ()
        num_steps = 1
        if kind is StepKind.DECODE:
            num_ended = len(self._outbox.ended)
            room = [decode.make_room() for decode in self._decodes]
            has_preempted = len(self._outbox.ended) > num_ended
            if any(decode.wants_step for decode in self._decodes):
                # Memory that preemption freed may admit somebody before the next step.
                num_steps = 1 if has_preempted else self._decode_span(max_steps)
                ranks = tuple(d.plan(r, num_steps) for d, r in zip(self._decodes, room, strict=True))
        elif kind is StepKind.PREFILL:
            ranks = tuple(prefill.plan() for prefill in self._prefills)
        if not ranks and self._outbox.is_empty:
            return None
        plan = self._outbox.seal(self._step, kind or StepKind.DECODE, num_steps, ranks)
        if ranks:
            self._running = plan
            self._step += num_steps
            self._count(plan.kind, num_steps)
        return plan

    def _admit(self, now_ns: int) -> None:
        for prefill, decode in zip(self._prefills, self._decodes, strict=True):
            if self.role is GroupRole.DECODE:
                decode.admit()
            else:
                prefill.admit(now_ns, decode.reserve_blocks)

    def _pick_kind(self) -> StepKind | None:
        wants_prefill = tuple(prefill.wants_step for prefill in self._prefills)
        wants_decode = tuple(decode.wants_step for decode in self._decodes)
        return pick_step_kind(
            wants_prefill, wants_decode, self._decode_steps, self._prefill_run, self._params.vote
        )

    def _decode_span(self, max_steps: int) -> int:
        span = min([max_steps, *(decode.max_steps(max_steps) for decode in self._decodes)])
        if self.role is GroupRole.MIXED:
            span = min(span, max_decode_steps(self._decode_steps, self._params.vote))
            span = 1 if self.is_timed else span
        return span

    def _count(self, kind: StepKind, num_steps: int) -> None:
        if kind is StepKind.PREFILL:
            self._decode_steps = 0
            self._prefill_run += 1
        else:
            self._decode_steps += num_steps
            self._prefill_run = 0

    # --- tell ------------------------------------------------------------------------------

    @property
    def is_step_running(self) -> bool:
        """Whether a plan awaits its `StepDone`."""
        return self._running is not None

    @property
    def is_timed(self) -> bool:
        """Whether there may be something to do in `OVERTAKE_NS` although nothing happens until then."""
        return any(prefill.is_timed for prefill in self._prefills)

    @property
    def room(self) -> int:
        """Requests the group would pull now; decode groups pull by their views instead."""
        if self.role is GroupRole.DECODE:
            return 0
        return sum(prefill.room for prefill in self._prefills)

    def views(self) -> tuple[RankView, ...]:
        """Return the load of every rank."""
        return tuple(rank.view() for rank in self._ranks)

    def held_requests(self) -> tuple[tuple[RequestId, int], ...]:
        """Return (request, attempt) of every sequence that is not about to end."""
        return tuple(
            (s.spec.request_id, s.spec.attempt)
            for rank in self._ranks
            for state, line in rank.lines.items()
            if state is not SequenceState.CLOSING
            for s in line.values()
        )

    def check(self) -> list[str]:
        """Return violated laws of all ranks; empty when sound."""
        return [f"{self.group}/{rank.me.rank}: {problem}" for rank in self._ranks for problem in rank.check()]
