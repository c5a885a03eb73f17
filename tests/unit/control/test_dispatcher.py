"""The controller's decisions, event by event."""

from __future__ import annotations

from dataclasses import replace

import pytest

from millpond.control.dispatcher import Dispatcher, DispatchParams
from millpond.control.group_scheduler import GroupRole
from millpond.control.invariants import require_sound
from millpond.core.events import (
    Assigned,
    Cancel,
    Fetch,
    GatewayDown,
    GatewayUp,
    GroupDown,
    Submit,
    Tick,
)
from millpond.core.ids import GatewayId, GroupId, RequestId
from millpond.core.plan import AbortOn, DispatchPlan, Introduce, Resubmit, SequenceEnd
from millpond.core.request import FinishReason
from millpond.core.units import BLOCK_TOKENS, SECOND_NS
from millpond.core.views import RankView
from tests.sim.making import fetch_of, make_group_up, make_scheduler, make_spec

NOTHING = DispatchPlan()


class Desk:
    """A dispatcher with a clock, checked after every call."""

    def __init__(self, *ups, expected=("p0", "d0"), **params):
        self.params = DispatchParams(**params)
        self.dispatcher = Dispatcher(self.params, frozenset(map(GroupId, expected)), 0)
        self.now_ns = 0
        self.tell(GatewayUp(GatewayId("g0")), *ups)

    def tell(self, *events):
        for event in events:
            self.dispatcher.advance(self.now_ns, event)
            require_sound([self.dispatcher])

    def plan(self):
        plan = self.dispatcher.next_plan(self.now_ns) or NOTHING
        require_sound([self.dispatcher])
        assert self.dispatcher.next_plan(self.now_ns) is None
        return plan

    def after(self, *events):
        self.tell(*events)
        return self.plan()

    def wait(self, seconds):
        self.now_ns += int(seconds * SECOND_NS)
        return self.after(Tick())

    def assigned(self, name="r", **more):
        """Submit a request and have it assigned."""
        [assign] = self.after(Submit(make_spec(name, **more))).assigns
        return assign


def view(rank=0, **fields):
    return replace(RankView(rank, 0, 0, 0, 0, free_blocks=64, free_slots=32), **fields)


def report(group, *views, room=0, seen=0, **more):
    return Fetch(GroupId(group), 1, views or (view(),), room, seen, **more)


def ended(group, name="r", attempt=0, reason=None, seen=1):
    return report(group, seen=seen, ended=(SequenceEnd(RequestId(name), attempt, reason, "because"),))


def desk_1p1d(room=8, **params):
    desk = Desk(make_group_up("p0", "prefill"), make_group_up("d0", "decode"), **params)
    desk.tell(report("p0", room=room))
    return desk


# --- assigning --------------------------------------------------------------------------------


def test_a_request_gets_a_prefill_and_a_decode_rank():
    assign = desk_1p1d().assigned()
    assert (assign.prefill.group, assign.decode.group) == ("p0", "d0")
    assert assign.decode_address == "data:0"


def test_a_mixed_group_gets_both_halves():
    desk = Desk(make_group_up("m0", "mixed"), expected=("m0",))
    desk.tell(report("m0", room=1))
    assign = desk.assigned()
    assert assign.prefill == assign.decode


def test_nothing_is_assigned_without_room():
    desk = desk_1p1d(room=0)
    assert desk.after(Submit(make_spec())) == NOTHING
    assert len(desk.after(report("p0", room=1)).assigns) == 1


def test_nothing_is_assigned_without_decode_memory_but_the_next_report_helps():
    desk = desk_1p1d()
    desk.tell(report("d0", view(free_slots=0)))
    assert desk.after(Submit(make_spec())) == NOTHING
    assert len(desk.after(report("d0", view(free_slots=1))).assigns) == 1


def test_room_is_spent_once_per_report():
    desk = desk_1p1d(room=2)
    plan = desk.after(*(Submit(make_spec(f"r{i}")) for i in range(5)))
    assert [a.spec.request_id for a in plan.assigns] == ["r0", "r1"]
    assert desk.after(report("p0", room=2, seen=0)) == NOTHING
    assert len(desk.after(report("p0", room=2, seen=2)).assigns) == 2


def test_priority_is_served_first():
    desk = desk_1p1d(room=0)
    desk.tell(Submit(make_spec("late", priority=1)), Submit(make_spec("soon", priority=0)))
    assert [a.spec.request_id for a in desk.after(report("p0", room=2)).assigns] == ["soon", "late"]


def test_what_no_decode_rank_can_hold_is_refused_and_does_not_block():
    desk = desk_1p1d()
    plan = desk.after(Submit(make_spec("huge", 65 * BLOCK_TOKENS)), Submit(make_spec("ok")))
    assert [(g, e.request_id, e.reason) for g, e in plan.ended] == [("g0", "huge", FinishReason.REFUSED)]
    assert [a.spec.request_id for a in plan.assigns] == ["ok"]
    assert desk.dispatcher.num_requests == 1


def test_a_repeated_submission_starts_once():
    desk = desk_1p1d()
    desk.assigned()
    assert desk.after(Submit(make_spec()), Submit(make_spec())) == NOTHING


def test_bug_46_a_burst_within_one_report_period_spreads_evenly_and_counters_return_to_zero():
    ups = [make_group_up(f"p{i}", "prefill", num_ranks=2) for i in range(2)]
    ups += [make_group_up(f"d{i}", "decode", num_ranks=2, num_blocks=4000, num_slots=600) for i in range(2)]
    desk = Desk(*ups, expected=(), start_grace_s=0.0)
    desk.tell(*(report(f"p{i}", view(0), view(1), room=250) for i in range(2)))
    plan = desk.after(*(Submit(make_spec(f"r{i}", 100)) for i in range(500)))
    for side in ("prefill", "decode"):
        counts = {}
        for assign in plan.assigns:
            ref = getattr(assign, side)
            counts[ref] = counts.get(ref, 0) + 1
        assert sorted(counts.values()) == [125] * 4, side
    # Cancels, a probe and a repeat in between; then everybody has seen everything.
    desk.tell(*(Cancel(RequestId(f"r{i}")) for i in range(0, 500, 2)), Submit(make_spec("r1")))
    assert len(desk.plan().aborts) == 500
    for name in ("p0", "p1", "d0", "d1"):
        rows = tuple(SequenceEnd(a.spec.request_id, 0, FinishReason.STOP) for a in plan.assigns)
        desk.tell(Fetch(GroupId(name), 1, (view(0), view(1)), 0, 250, ended=rows))
    desk.plan()
    assert desk.dispatcher.num_requests == 0
    for group in desk.dispatcher._groups.values():
        assert group.unseen == []
        assert all(v.num_queued == v.queued_tokens == 0 for v in group.adjusted_views())


def test_a_mixed_rank_with_a_queued_hit_is_not_taken_for_empty():
    """Cached tokens need no computing, but memory like all others."""
    num_tokens = 80 * BLOCK_TOKENS
    ups = [make_group_up(name, "mixed", num_blocks=100) for name in ("m0", "m1")]
    desk = Desk(*ups, expected=("m0", "m1"))
    queued = view(free_blocks=100, num_queued=1, queued_tokens=2 * BLOCK_TOKENS, queued_kv_tokens=num_tokens)
    busy = view(free_blocks=100, queued_tokens=3 * BLOCK_TOKENS)  # m0 has less to compute and is asked first
    desk.tell(report("m0", queued, room=1), report("m1", busy, room=1))
    assert desk.assigned("next", num_prompt=num_tokens).decode.group == "m1"


def test_what_was_assigned_since_the_report_counts_as_memory_that_is_taken():
    num_tokens = 80 * BLOCK_TOKENS
    desk = Desk(make_group_up("m0", "mixed", num_blocks=100), expected=("m0",))
    desk.tell(report("m0", view(free_blocks=100), room=2))
    desk.assigned("a", num_prompt=num_tokens, num_cached=78 * BLOCK_TOKENS)
    assert desk.after(Submit(make_spec("b", num_tokens))) == NOTHING
    (group,) = desk.dispatcher._groups.values()
    assert [v.queued_tokens for v in group.adjusted_views()] == [2 * BLOCK_TOKENS]


# --- ends -------------------------------------------------------------------------------------


@pytest.mark.parametrize("reason", [FinishReason.STOP, FinishReason.LENGTH])
def test_a_finished_request_is_forgotten_and_the_other_side_told(reason):
    desk = desk_1p1d()
    desk.assigned()
    plan = desk.after(ended("p0", reason=reason))
    assert plan == DispatchPlan(aborts=(AbortOn(GroupId("d0"), RequestId("r"), 0),))
    assert desk.dispatcher.num_requests == 0
    assert desk.after(ended("d0", reason=reason)) == NOTHING


def test_after_the_start_of_decode_the_prefill_side_is_not_told():
    desk = desk_1p1d()
    desk.assigned()
    desk.tell(report("d0", seen=1, started=((RequestId("r"), 0),)))
    assert desk.after(ended("d0", reason=FinishReason.STOP)) == NOTHING


def test_a_prefill_group_that_learns_late_of_a_failed_handoff_harms_nobody():
    desk = desk_1p1d()
    desk.assigned()
    desk.tell(report("d0", seen=1, started=((RequestId("r"), 0),)))
    assert desk.after(ended("p0", reason=None)) == NOTHING
    assert desk.dispatcher.num_requests == 1


def test_a_refusal_reaches_the_gateway():
    desk = desk_1p1d()
    desk.assigned()
    [(gateway, end)] = desk.after(ended("p0", reason=FinishReason.REFUSED)).ended
    assert (gateway, end.reason, end.detail) == ("g0", FinishReason.REFUSED, "because")


def test_cancel_aborts_both_sides_and_later_news_is_ignored():
    desk = desk_1p1d()
    desk.assigned()
    assert {a.group for a in desk.after(Cancel(RequestId("r"))).aborts} == {"p0", "d0"}
    assert desk.after(ended("p0"), ended("d0"), Cancel(RequestId("r"))) == NOTHING


def test_a_queued_request_is_cancelled_without_a_word():
    desk = desk_1p1d(room=0)
    desk.tell(Submit(make_spec()))
    assert desk.after(Cancel(RequestId("r")), report("p0", room=4)) == NOTHING


# --- losses -----------------------------------------------------------------------------------


def resubmitted(plan):
    return [(gateway, message.request_id, message.attempt) for gateway, message in plan.resubmits]


def test_a_lost_attempt_is_asked_for_once():
    desk = desk_1p1d()
    desk.assigned()
    plan = desk.after(ended("d0"), ended("p0"), ended("d0"))
    assert resubmitted(plan) == [("g0", "r", 0)]
    assert plan.aborts == (AbortOn(GroupId("p0"), RequestId("r"), 0),)
    desk.tell(report("p0", room=8, seen=1))
    assert desk.assigned(attempt=1, num_output=1).spec.attempt == 1


def test_news_of_an_old_attempt_does_not_touch_the_new_one():
    desk = desk_1p1d()
    desk.assigned()
    desk.after(ended("d0"))
    desk.assigned(attempt=1)
    assert desk.after(ended("p0", attempt=0), report("d0", started=((RequestId("r"), 0),))) == NOTHING


def test_an_end_reported_by_a_group_that_does_not_hold_the_queued_attempt_changes_nothing():
    """The gateway came first after a restart; the group speaks of the attempt that is queued again."""
    desk = desk_1p1d(room=0)
    desk.tell(Submit(make_spec()))
    assert desk.after(ended("d0")) == NOTHING
    assert desk.dispatcher.num_queued == 1


@pytest.mark.parametrize("phase", ["queued", "prefill", "decode", "lost"])
@pytest.mark.parametrize("victim", ["p0", "d0"])
def test_bug_24_group_death_in_each_phase(phase, victim):
    desk = desk_1p1d(room=0 if phase == "queued" else 8)
    desk.tell(Submit(make_spec()))
    desk.plan()
    if phase in ("decode", "lost"):
        desk.tell(report("d0", seen=1, started=((RequestId("r"), 0),)))
    if phase == "lost":
        desk.after(ended("d0"))
    plan = desk.after(GroupDown(GroupId(victim), 1, "killed"))
    holds = {"queued": (), "prefill": ("p0", "d0"), "decode": ("d0",), "lost": ()}[phase]
    assert resubmitted(plan) == ([("g0", "r", 0)] if victim in holds else [])
    assert {a.group for a in plan.aborts} == (set(holds) - {victim} if victim in holds else set())
    assert desk.after(GroupDown(GroupId(victim), 1, "killed")) == NOTHING
    # It runs again elsewhere, or after the restart.
    role = "prefill" if victim == "p0" else "decode"
    desk.tell(make_group_up(victim, role, incarnation=2))
    if resubmitted(plan) or phase == "lost":
        desk.tell(Submit(make_spec(attempt=1)))
    fetched = Fetch(GroupId("p0"), 2 if victim == "p0" else 1, (view(),), 8, 0)
    expected = 0 if phase == "decode" and victim == "p0" else 1
    assert len(desk.after(fetched).assigns) == expected


def test_a_restarted_group_loses_what_its_older_self_held():
    desk = desk_1p1d()
    desk.assigned()
    plan = desk.after(make_group_up("d0", "decode", incarnation=2))
    assert resubmitted(plan) == [("g0", "r", 0)]
    assert desk.after(GroupDown(GroupId("d0"), 1, "late word")) == NOTHING
    assert desk.after(make_group_up("d0", "decode", incarnation=1)) == NOTHING
    assert desk.dispatcher.group_incarnation(GroupId("d0")) == 2


def test_a_request_fails_after_losses_without_progress_but_not_with_it():
    desk = desk_1p1d(max_failures=3)
    for attempt in range(10):
        desk.assigned(attempt=attempt, num_output=attempt)
        assert resubmitted(
            desk.after(ended("d0", attempt=attempt, seen=attempt + 1), report("p0", room=8, seen=attempt + 1))
        )
    for attempt in (10, 11):
        desk.assigned(attempt=attempt, num_output=9)
        plan = desk.after(
            ended("d0", attempt=attempt, seen=attempt + 1), report("p0", room=8, seen=attempt + 1)
        )
    [(gateway, end)] = plan.ended
    assert (gateway, end.reason) == ("g0", FinishReason.FAILED)
    assert desk.dispatcher.num_requests == 0


def test_silence_is_death_and_the_supervisor_is_told():
    desk = desk_1p1d(lease_s=10.0, orphan_s=100.0)
    desk.assigned()
    desk.now_ns += 6 * SECOND_NS
    desk.tell(GatewayUp(GatewayId("g0")), report("p0", seen=1))
    plan = desk.wait(6)
    assert [r.group for r in plan.restarts] == ["d0"]
    assert resubmitted(plan) == [("g0", "r", 0)]
    assert desk.after(report("d0")).introduce == (Introduce(GroupId("d0")),)


def test_a_lost_gateway_takes_its_requests_along():
    desk = desk_1p1d()
    desk.assigned()
    desk.assigned("other", gateway=GatewayId("g1"))
    plan = desk.after(GatewayDown(GatewayId("g0")))
    assert {(a.group, a.request_id) for a in plan.aborts} == {("p0", "r"), ("d0", "r")}
    assert desk.dispatcher.num_requests == 1


def test_a_request_that_nobody_takes_fails_in_time():
    desk = desk_1p1d(room=0, queue_timeout_s=20.0)
    desk.tell(Submit(make_spec()))
    assert desk.wait(19) == NOTHING
    [(_, end)] = desk.wait(2).ended
    assert end.reason is FinishReason.FAILED


def test_a_loss_that_no_gateway_answers_is_dropped():
    desk = desk_1p1d(orphan_s=5.0)
    desk.assigned()
    desk.after(ended("d0"))
    desk.wait(6)
    assert desk.dispatcher.num_requests == 0


# --- restart of the controller ----------------------------------------------------------------


def restarted(**params):
    """A new dispatcher; d0 runs (r, 0) since before."""
    desk = Desk(**params)
    up = make_group_up("d0", "decode", running=((RequestId("r"), 0),), seen_assigns=40)
    desk.tell(make_group_up("p0", "prefill"))
    return desk, up


@pytest.mark.parametrize("group_first", [True, False])
def test_a_running_request_is_attached_not_started_twice(group_first):
    desk, up = restarted()
    submit = Submit(make_spec(num_output=2))
    desk.tell(*((up, submit) if group_first else (submit, up)), report("p0", room=8))
    assert desk.plan() == NOTHING
    assert desk.wait(desk.params.orphan_s + 1) == NOTHING
    assert desk.dispatcher.num_requests == 1
    assert desk.after(ended("d0", reason=FinishReason.STOP, seen=40)) == NOTHING
    assert desk.dispatcher.num_requests == 0


def test_nothing_starts_before_all_groups_reported_or_the_grace_is_over():
    desk = Desk(make_group_up("p0", "prefill"), expected=("p0", "d0", "d1"), start_grace_s=2.0)
    desk.tell(make_group_up("d0", "decode"), report("p0", room=8), Submit(make_spec()))
    assert desk.plan() == NOTHING
    assert len(desk.wait(3).assigns) == 1


def test_a_lost_request_keeps_its_place_in_the_queue():
    """Its client looks at a stream that stands still; those that came later have seen nothing yet."""
    desk = desk_1p1d()
    desk.assigned("old")
    desk.tell(report("p0", seen=1), *(Submit(make_spec(f"new{i}")) for i in range(3)))
    desk.after(ended("d0", "old"))
    desk.tell(Submit(make_spec("old", attempt=1, num_output=1)))
    plan = desk.after(report("p0", room=2, seen=1))
    assert [a.spec.request_id for a in plan.assigns] == ["old", "new0"]


def test_a_group_that_comes_after_the_request_moved_on_must_drop_it():
    desk, up = restarted(start_grace_s=0.0)
    desk.tell(make_group_up("d1", "decode"), report("p0", room=8))
    desk.assigned()
    assert desk.after(up).aborts == (AbortOn(GroupId("d0"), RequestId("r"), 0),)


def test_of_two_groups_that_claim_one_request_the_second_must_drop_it():
    desk, up = restarted()
    desk.tell(Submit(make_spec()), up)
    plan = desk.after(make_group_up("d1", "decode", running=((RequestId("r"), 0),)))
    assert plan.aborts == (AbortOn(GroupId("d1"), RequestId("r"), 0),)
    assert resubmitted(desk.after(GroupDown(GroupId("d0"), 1, "killed"))) == [("g0", "r", 0)]


def test_a_running_request_that_nobody_claims_is_dropped():
    desk, up = restarted(orphan_s=4.0)
    desk.tell(up)
    assert desk.wait(5).aborts == (AbortOn(GroupId("d0"), RequestId("r"), 0),)
    assert desk.dispatcher.num_requests == 0


def test_bug_46_assignments_before_the_restart_do_not_hide_those_after_it():
    desk, up = restarted()
    desk.tell(up, report("p0", room=8))
    desk.assigned("new", num_prompt=50)
    [before] = desk.dispatcher._groups[GroupId("d0")].adjusted_views()
    desk.tell(report("d0", seen=40))
    [after] = desk.dispatcher._groups[GroupId("d0")].adjusted_views()
    assert (before.num_queued, after.num_queued) == (1, 1)
    desk.tell(report("d0", seen=41))
    [seen] = desk.dispatcher._groups[GroupId("d0")].adjusted_views()
    assert seen.num_queued == 0


def test_a_stranger_is_asked_to_introduce_itself():
    desk = Desk()
    assert desk.after(report("d0")).introduce == (Introduce(GroupId("d0")),)
    desk.tell(make_group_up("d0", "decode", incarnation=5))
    assert desk.after(report("d0")) == NOTHING  # incarnation 1 is history
    newer = replace(report("d0"), incarnation=6)
    assert desk.after(newer).introduce == (Introduce(GroupId("d0")),)


def test_ready_means_a_whole_path():
    desk = Desk(make_group_up("p0", "prefill"))
    assert not desk.dispatcher.is_ready
    assert desk.dispatcher.max_model_len == 0
    desk.tell(make_group_up("d0", "decode", num_blocks=4))
    assert desk.dispatcher.is_ready
    assert desk.dispatcher.max_model_len == 4 * BLOCK_TOKENS
    desk.tell(GroupDown(GroupId("d0"), 1, "killed"))
    assert not desk.dispatcher.is_ready
    assert desk.dispatcher.max_model_len == 4 * BLOCK_TOKENS


def test_reports_of_a_real_scheduler_are_understood():
    scheduler = make_scheduler(GroupRole.PREFILL, num_ranks=2)
    desk = Desk(make_group_up("p0", "prefill", num_ranks=2), make_group_up("d0", "decode"))
    desk.tell(fetch_of(scheduler))
    plan = desk.after(*(Submit(make_spec(f"r{i}")) for i in range(4)))
    assert [a.prefill.rank for a in plan.assigns] == [0, 1, 0, 1]
    for assign in plan.assigns:
        scheduler.advance(0, Assigned(assign))
    desk.tell(fetch_of(scheduler))
    assert desk.dispatcher._groups[GroupId("p0")].unseen == []


def test_resubmission_names_why():
    desk = desk_1p1d()
    desk.assigned()
    [(_, message)] = desk.after(GroupDown(GroupId("p0"), 1, "exit status -9")).resubmits
    assert message == Resubmit(RequestId("r"), 0, "group p0 is gone: exit status -9")
