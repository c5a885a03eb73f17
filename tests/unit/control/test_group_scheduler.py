"""One group's scheduler, event by event."""

from __future__ import annotations

import pytest

from millpond.control.decode_scheduler import DecodeParams
from millpond.control.group_scheduler import GroupParams, GroupRole
from millpond.control.invariants import require_sound
from millpond.control.prefill_scheduler import PrefillParams
from millpond.core.errors import InvariantBroken
from millpond.core.events import (
    Aborted,
    Assigned,
    HandoffArrived,
    HandoffClosed,
    HandoffFailed,
    HandoffSent,
    Loaded,
    StepDone,
)
from millpond.core.ids import DpRank, GroupId, RankRef, RequestId
from millpond.core.plan import HandoffClose, StepKind
from millpond.core.request import FinishReason
from millpond.core.units import BLOCK_TOKENS
from millpond.sim.sim_engine import token_at
from tests.sim.making import D0, P0, Engines, make_assign, make_scheduler, make_spec

M0 = RankRef(GroupId("m0"), DpRank(0))


def assign_all(scheduler, *assigns):
    for assign in assigns:
        scheduler.advance(0, Assigned(assign))


def is_empty(scheduler):
    require_sound([scheduler])
    return (
        all(
            view.num_seqs == view.num_queued == view.queued_tokens == view.kv_tokens == 0
            for view in scheduler.views()
        )
        and not scheduler.held_requests()
    )


def local(name="r", num_prompt=10, **more):
    return make_assign(make_spec(name, num_prompt, **more), M0, M0)


def test_what_waits_will_hold_all_its_tokens_however_many_need_no_computing():
    scheduler = make_scheduler(GroupRole.MIXED, num_blocks=40, can_load=True)
    assign_all(scheduler, local(num_prompt=600, num_cached=512))
    (view,) = scheduler.views()
    assert (view.queued_tokens, view.queued_kv_tokens, view.kv_tokens) == (600 - 512, 600, 0)
    scheduler.next_plan(0)
    scheduler.advance(0, Loaded(RequestId("r"), 0, 512))
    scheduler.next_plan(0)
    (view,) = scheduler.views()
    assert (view.queued_tokens, view.queued_kv_tokens, view.kv_tokens) == (600 - 512, 0, 600)
    require_sound([scheduler])


def run_to_end(scheduler, engines, limit=2000):
    """Run a mixed or lone group until it parks. Returns outputs and ends in order."""
    outputs, ended = [], []
    for _ in range(limit):
        plan = scheduler.next_plan(0)
        if plan is None:
            return outputs, ended
        outputs += [token for _, token in plan.outputs]
        ended += plan.ended
        if plan.ranks:
            scheduler.advance(0, engines.run(plan))
        require_sound([scheduler])
    pytest.fail(f"still busy after {limit} plans")


# --- mixed ------------------------------------------------------------------------------------


def test_mixed_group_computes_a_request_to_its_end():
    scheduler, engines = make_scheduler(GroupRole.MIXED), Engines(1)
    spec = make_spec(num_prompt=300, max_tokens=5)
    assign_all(scheduler, make_assign(spec, M0, M0))
    outputs, ended = run_to_end(scheduler, engines)
    assert [(t.position, t.token_id) for t in outputs] == [
        (300 + i, token_at(spec.sampling, 300 + i)) for i in range(5)
    ]
    assert [t.finish for t in outputs] == [None] * 4 + [FinishReason.LENGTH]
    assert [(e.request_id, e.reason) for e in ended] == [("r", FinishReason.LENGTH)]
    assert is_empty(scheduler)


def test_a_single_output_token_ends_with_the_prefill():
    scheduler, engines = make_scheduler(GroupRole.MIXED), Engines(1)
    assign_all(scheduler, local(max_tokens=1))
    outputs, ended = run_to_end(scheduler, engines)
    assert [t.finish for t in outputs] == [FinishReason.LENGTH]
    assert len(ended) == 1


def test_stop_token_counts_only_after_min_tokens():
    spec = make_spec(num_prompt=10, max_tokens=9, min_tokens=3)
    scheduler, engines = make_scheduler(GroupRole.MIXED), Engines(1)
    assign_all(scheduler, make_assign(spec, M0, M0))
    stop = 7
    seen = 0
    while (plan := scheduler.next_plan(0)) is not None:
        seen += len(plan.outputs)
        if plan.ranks:
            scheduler.advance(0, engines.run(plan))
    assert seen == 9
    spec = make_spec("s", max_tokens=9, min_tokens=3, stop_token_ids=(stop,))
    assign_all(scheduler, make_assign(spec, M0, M0))
    outputs = []
    while (plan := scheduler.next_plan(0)) is not None:
        outputs += [token for _, token in plan.outputs]
        if plan.ranks:
            done = engines.run(plan)
            # Every token is the stop token.
            reports = tuple(
                type(r)(r.rank, tuple(type(t)(t.request_id, t.position, stop) for t in r.sampled))
                for r in done.reports
            )
            scheduler.advance(0, StepDone(done.step, reports))
            for engine in engines.engines:
                for known in engine._known.values():
                    known.token_ids[-1] = token_at(known.sampling, len(known.token_ids) - 1)
    assert [t.finish for t in outputs] == [None, None, None, FinishReason.STOP]


def test_context_end_finishes_with_length():
    scheduler, engines = make_scheduler(GroupRole.MIXED, max_model_len=20), Engines(1)
    assign_all(scheduler, local(num_prompt=15, max_tokens=100))
    outputs, _ = run_to_end(scheduler, engines)
    assert [t.position for t in outputs] == [15, 16, 17, 18, 19]
    assert outputs[-1].finish is FinishReason.LENGTH


def test_a_sequence_alone_may_fill_the_whole_memory():
    scheduler, engines = make_scheduler(GroupRole.MIXED, num_blocks=2), Engines(1)
    assign_all(scheduler, local(num_prompt=200, max_tokens=10_000))
    outputs, ended = run_to_end(scheduler, engines)
    assert scheduler.max_model_len == 2 * BLOCK_TOKENS
    assert outputs[-1].position == 2 * BLOCK_TOKENS - 1
    assert [e.reason for e in ended] == [FinishReason.LENGTH]


def test_what_can_never_fit_is_refused_and_does_not_block_the_queue():
    scheduler, engines = make_scheduler(GroupRole.MIXED, num_blocks=2), Engines(1)
    assign_all(scheduler, local("huge", num_prompt=400), local("ok"))
    _, ended = run_to_end(scheduler, engines)
    assert [(e.request_id, e.reason) for e in ended] == [
        ("huge", FinishReason.REFUSED),
        ("ok", FinishReason.LENGTH),
    ]


def test_the_youngest_is_preempted_and_says_so():
    scheduler, engines = make_scheduler(GroupRole.MIXED, num_blocks=3), Engines(1)
    assign_all(scheduler, local("old", 120, max_tokens=60), local("new", 120, max_tokens=60))
    _, ended = run_to_end(scheduler, engines)
    assert [(e.request_id, e.reason) for e in ended] == [
        ("new", None),
        ("old", FinishReason.LENGTH),
    ]
    assert is_empty(scheduler)


def test_a_prefill_step_never_exceeds_its_token_budget():
    params = GroupParams(prefill=PrefillParams(max_step_tokens=100))
    scheduler, engines = make_scheduler(GroupRole.MIXED, params=params), Engines(1)
    assign_all(scheduler, local("a", 250), local("b", 30), local("c", 90))
    sizes = []
    while (plan := scheduler.next_plan(0)) is not None:
        if plan.ranks:
            if plan.kind is StepKind.PREFILL:
                sizes.append(sum(c.end - c.begin for c in plan.ranks[0].chunks))
            scheduler.advance(0, engines.run(plan))
    assert sum(sizes) == 370
    assert max(sizes) <= 100
    assert all(size > 0 for size in sizes)


def test_bug_48_running_streams_get_a_step_between_bounded_runs_of_prefill():
    scheduler, engines = make_scheduler(GroupRole.MIXED, num_blocks=64, num_slots=32), Engines(1)
    assign_all(scheduler, local("stream", max_tokens=3000))
    gap = longest = num_decodes = 0
    for turn in range(600):
        if scheduler.room:
            assign_all(scheduler, local(f"p{turn}", num_prompt=1000, max_tokens=1))
        plan = scheduler.next_plan(0)
        scheduler.advance(0, engines.run(plan))
        if any(row.request_id == "stream" for row in plan.ranks[0].rows):
            gap, num_decodes = 0, num_decodes + 1
        elif num_decodes:
            gap += 1
            longest = max(longest, gap)
    assert 0 < longest <= GroupParams().vote.max_prefill_run
    assert num_decodes > 100


# --- prefill ----------------------------------------------------------------------------------


def prefilled(scheduler, engines, name="r", **more):
    """Assign and compute one request; returns everything its plans carried."""
    assign_all(scheduler, make_assign(make_spec(name, **more)))
    plans = []
    while (plan := scheduler.next_plan(0)) is not None:
        plans.append(plan)
        if plan.ranks:
            scheduler.advance(0, engines.run(plan))
    return plans


def test_prefill_group_streams_then_finishes_then_frees_on_confirmation():
    scheduler, engines = make_scheduler(GroupRole.PREFILL), Engines(1)
    plans = prefilled(scheduler, engines, num_prompt=300, max_tokens=5)
    [send] = [s for plan in plans for s in plan.sends]
    assert (send.num_tokens, len(send.block_table), send.to) == (300, 3, D0)
    assert plans[0].sends == (send,)
    [finish] = plans[-1].finishes
    spec = make_spec(num_prompt=300)
    assert finish.first_token_id == token_at(spec.sampling, 300)
    assert [t.position for _, t in plans[-1].outputs] == [300]
    assert scheduler.views()[0].num_seqs == 1
    scheduler.advance(0, HandoffSent(RequestId("r"), 0))
    assert is_empty(scheduler)
    assert scheduler.next_plan(0) is None


def test_prefill_that_ends_the_request_closes_its_handoff_first():
    scheduler, engines = make_scheduler(GroupRole.PREFILL), Engines(1)
    plans = prefilled(scheduler, engines, max_tokens=1)
    assert [e.reason for e in plans[-1].ended] == [FinishReason.LENGTH]
    assert plans[-1].closes == (HandoffClose(RequestId("r"), 0, DpRank(0)),)
    assert plans[-1].finishes == ()
    assert scheduler.views()[0].num_seqs == 1
    scheduler.advance(0, HandoffClosed(RequestId("r"), 0))
    assert is_empty(scheduler)


def test_abort_during_a_step_is_held_until_it_is_done():
    scheduler, engines = make_scheduler(GroupRole.PREFILL), Engines(1)
    assign_all(scheduler, make_assign(make_spec(num_prompt=1000)))
    plan = scheduler.next_plan(0)
    scheduler.advance(0, Aborted(RequestId("r"), 0))
    assert scheduler.held_requests() == ((RequestId("r"), 0),)
    scheduler.advance(0, engines.run(plan))
    assert scheduler.held_requests() == ()
    [close] = scheduler.next_plan(0).closes
    assert close.request_id == "r"
    assert scheduler.views()[0].free_blocks == 16 - 8
    scheduler.advance(0, HandoffClosed(RequestId("r"), 0))
    assert is_empty(scheduler)


def test_events_during_a_step_leave_views_and_counts_alone():
    scheduler, engines = make_scheduler(GroupRole.PREFILL), Engines(1)
    assign_all(scheduler, make_assign(make_spec("a", 300)))
    plan = scheduler.next_plan(0)
    before = (scheduler.views(), scheduler.num_assigns_seen, scheduler.room)
    assign_all(scheduler, make_assign(make_spec("b")))
    assert (scheduler.views(), scheduler.num_assigns_seen, scheduler.room) == before
    scheduler.advance(0, engines.run(plan))
    assert scheduler.num_assigns_seen == 2


def test_failed_handoff_asks_for_resubmission_and_frees_at_once():
    scheduler, engines = make_scheduler(GroupRole.PREFILL), Engines(1)
    prefilled(scheduler, engines)
    scheduler.advance(0, HandoffFailed(RequestId("r"), 0, "receiver is gone"))
    plan = scheduler.next_plan(0)
    assert [(e.reason, e.detail) for e in plan.ended] == [(None, "handoff failed: receiver is gone")]
    assert is_empty(scheduler)


def test_bug_17_pool_full_of_cancelled_transfers_drains_without_arrivals():
    scheduler, engines = make_scheduler(GroupRole.PREFILL, num_blocks=8), Engines(1)
    names = [f"r{i}" for i in range(8)]
    for name in names:
        prefilled(scheduler, engines, name)
    assert scheduler.views()[0].free_blocks == 0
    for name in names:
        scheduler.advance(0, Aborted(RequestId(name), 0))
    closes = []
    while (plan := scheduler.next_plan(0)) is not None:
        assert plan.ranks == ()
        closes += plan.closes
    for close in closes:
        scheduler.advance(0, HandoffClosed(close.request_id, close.attempt))
    assert is_empty(scheduler)
    assert scheduler.views()[0].free_blocks == 8


def test_bug_18_blocks_stay_while_bytes_are_being_sent():
    scheduler, engines = make_scheduler(GroupRole.PREFILL, num_blocks=2), Engines(1)
    [send] = [s for p in prefilled(scheduler, engines, "slow", num_prompt=128) for s in p.sends]
    assign_all(scheduler, *(make_assign(make_spec(f"r{i}", 128)) for i in range(3)))
    reused = []
    for _ in range(4):
        while (plan := scheduler.next_plan(0)) is not None:
            reused += [b for s in plan.sends for b in s.block_table]
            if plan.ranks:
                scheduler.advance(0, engines.run(plan))
    assert set(reused).isdisjoint(send.block_table)
    scheduler.advance(0, HandoffSent(RequestId("slow"), 0))
    assert scheduler.next_plan(0).sends[0].block_table == send.block_table


def test_bug_19_slots_bound_admission_at_any_ratio_of_slots_to_sequences():
    for num_slots in (1, 2, 3, 5):
        params = GroupParams(prefill=PrefillParams(max_held_seqs=6))
        scheduler = make_scheduler(GroupRole.PREFILL, num_blocks=64, num_slots=num_slots, params=params)
        assert scheduler.room == num_slots
        engines = Engines(1)
        assign_all(scheduler, *(make_assign(make_spec(f"r{i}")) for i in range(8)))
        sent = 0
        while (plan := scheduler.next_plan(0)) is not None:
            require_sound([scheduler])
            sent += len(plan.sends)
            if plan.ranks:
                scheduler.advance(0, engines.run(plan))
        assert sent == num_slots


# --- decode -----------------------------------------------------------------------------------


def receive(scheduler, name="r", attempt=0, **more):
    """Assign, let it be admitted, and let its KV arrive."""
    spec = make_spec(name, attempt=attempt, **more)
    assign_all(scheduler, make_assign(spec))
    plan = scheduler.next_plan(0)
    first = token_at(spec.sampling, spec.num_known_tokens)
    scheduler.advance(0, HandoffArrived(spec.request_id, attempt, first))
    return spec, plan


def test_decode_group_receives_runs_and_ends():
    scheduler, engines = make_scheduler(GroupRole.DECODE), Engines(1)
    spec, plan = receive(scheduler, num_prompt=127, max_tokens=4)
    [expected] = plan.receives
    assert (expected.num_tokens, len(expected.block_table)) == (127, 1)
    outputs, ended = [], []
    started = []
    while (plan := scheduler.next_plan(0)) is not None:
        outputs += [t for _, t in plan.outputs]
        ended += plan.ended
        started += plan.started
        if plan.ranks:
            scheduler.advance(0, engines.run(plan))
    assert started == [("r", 0)]
    assert [(t.position, t.token_id) for t in outputs] == [
        (p, token_at(spec.sampling, p)) for p in (128, 129, 130)
    ]
    assert [e.reason for e in ended] == [FinishReason.LENGTH]
    assert is_empty(scheduler)


def test_bug_14_arrival_twice_adds_its_token_once():
    scheduler, engines = make_scheduler(GroupRole.DECODE), Engines(1)
    receive(scheduler, num_prompt=10, max_tokens=4)
    again = HandoffArrived(RequestId("r"), 0, 99)
    scheduler.advance(0, again)
    positions, started = [], []
    while (plan := scheduler.next_plan(0)) is not None:
        started += plan.started
        positions += [t.position for _, t in plan.outputs]
        if plan.ranks:
            scheduler.advance(0, again)
            scheduler.advance(0, engines.run(plan))
        require_sound([scheduler])
    assert positions == [11, 12, 13]
    assert started == [("r", 0)]


def test_bug_14_late_failure_of_a_running_sequence_is_ignored():
    scheduler, engines = make_scheduler(GroupRole.DECODE), Engines(1)
    receive(scheduler, num_prompt=10, max_tokens=4)
    scheduler.advance(0, HandoffFailed(RequestId("r"), 0, "late"))
    reasons = []
    while (plan := scheduler.next_plan(0)) is not None:
        reasons += [e.reason for e in plan.ended]
        if plan.ranks:
            scheduler.advance(0, engines.run(plan))
    assert reasons == [FinishReason.LENGTH]


def test_bug_14_late_failure_of_a_queued_sequence_is_ignored():
    scheduler = make_scheduler(GroupRole.DECODE)
    assign_all(scheduler, make_assign(make_spec("big", 16 * BLOCK_TOKENS)), make_assign(make_spec("next")))
    scheduler.next_plan(0)
    scheduler.advance(0, HandoffFailed(RequestId("next"), 0, "of nothing"))
    assert scheduler.next_plan(0) is None
    assert scheduler.held_requests() == (("next", 0), ("big", 0))


@pytest.mark.parametrize("role", list(GroupRole))
@pytest.mark.parametrize("event", [Aborted, HandoffSent, HandoffClosed])
def test_bug_14_events_about_strangers_and_old_attempts_are_harmless(role, event):
    scheduler = make_scheduler(role)
    scheduler.advance(0, event(RequestId("nobody"), 0))
    scheduler.advance(0, HandoffFailed(RequestId("nobody"), 0, "x"))
    scheduler.advance(0, HandoffArrived(RequestId("nobody"), 0, 1))
    me = RankRef(scheduler.group, DpRank(0))
    assign_all(scheduler, make_assign(make_spec(attempt=3), me, me))
    for attempt in (0, 2, 4):
        scheduler.advance(0, event(RequestId("r"), attempt))
    assert scheduler.held_requests() == (("r", 3),)


def test_a_newer_attempt_replaces_the_older_one():
    scheduler, engines = make_scheduler(GroupRole.DECODE), Engines(1)
    receive(scheduler, max_tokens=50)
    scheduler.advance(0, engines.run(scheduler.next_plan(0)))
    receive(scheduler, attempt=1, num_output=2, max_tokens=5)
    ended, positions = [], []
    while (plan := scheduler.next_plan(0)) is not None:
        ended += [(e.attempt, e.reason) for e in plan.ended]
        positions += [t.position for _, t in plan.outputs if t.attempt == 1]
        if plan.ranks:
            scheduler.advance(0, engines.run(plan))
    assert ended == [(1, FinishReason.LENGTH)]
    assert positions == [13, 14]
    assert is_empty(scheduler)


def test_an_older_attempt_never_replaces_a_newer_one():
    scheduler = make_scheduler(GroupRole.DECODE)
    assign_all(scheduler, make_assign(make_spec(attempt=2)), make_assign(make_spec(attempt=1)))
    assert scheduler.held_requests() == (("r", 2),)


def test_an_attempt_whose_transfer_is_still_closing_cannot_start_again_and_says_so():
    """A restarted controller may assign the same attempt again. Were it dropped, it would wait for ever."""
    scheduler = make_scheduler(GroupRole.DECODE)
    assign_all(scheduler, make_assign(make_spec()))
    scheduler.next_plan(0)
    scheduler.advance(0, Aborted(RequestId("r"), 0))
    assign_all(scheduler, make_assign(make_spec()))
    plan = scheduler.next_plan(0)
    assert [(e.request_id, e.attempt, e.reason) for e in plan.ended] == [("r", 0, None)]
    scheduler.advance(0, HandoffClosed(RequestId("r"), 0))
    assert is_empty(scheduler)


def test_an_assignment_to_an_unknown_rank_is_our_bug():
    scheduler = make_scheduler(GroupRole.DECODE)
    with pytest.raises(InvariantBroken):
        assign_all(scheduler, make_assign(make_spec(), P0, RankRef(GroupId("d0"), DpRank(7))))


def test_a_step_that_does_not_run_cannot_be_done():
    scheduler = make_scheduler(GroupRole.DECODE)
    with pytest.raises(InvariantBroken):
        scheduler.advance(0, StepDone(0, ()))


def test_no_second_plan_while_a_step_runs():
    scheduler = make_scheduler(GroupRole.MIXED)
    assign_all(scheduler, local())
    scheduler.next_plan(0)
    with pytest.raises(InvariantBroken):
        scheduler.next_plan(0)


@pytest.mark.parametrize("role", list(GroupRole))
def test_bug_16_abort_storm_empties_every_queue_of_every_rank(role):
    num_ranks = 3
    scheduler, engines = make_scheduler(role, num_ranks, num_blocks=64, num_slots=32), Engines(num_ranks)
    for i in range(1000):
        me = RankRef(scheduler.group, DpRank(i % num_ranks))
        other = RankRef(GroupId("x0"), DpRank(0))
        prefill = other if role is GroupRole.DECODE else me
        decode = other if role is GroupRole.PREFILL else me
        assign_all(scheduler, make_assign(make_spec(f"r{i}", 100, max_tokens=300), prefill, decode))
    closes = set()

    def plan_once():
        plan = scheduler.next_plan(0)
        if plan is None:
            return False
        closes.update((c.request_id, c.attempt) for c in plan.closes)
        for expected in plan.receives:
            first = token_at(make_spec(expected.request_id).sampling, 100)
            scheduler.advance(0, HandoffArrived(expected.request_id, 0, first))
        if plan.ranks:
            scheduler.advance(0, engines.run(plan))
        return True

    for i in range(1000):
        if i % 2:
            scheduler.advance(0, Aborted(RequestId(f"r{i}"), 0))
        if i % 100 == 0:
            plan_once()
    depths = {(view.num_queued + view.num_seqs) for view in scheduler.views()}
    assert max(depths) - min(depths) <= 2
    for i in range(1000):
        scheduler.advance(0, Aborted(RequestId(f"r{i}"), 0))
        scheduler.advance(0, Aborted(RequestId(f"r{i}"), 0))
    while plan_once():
        pass
    for key in closes:
        scheduler.advance(0, HandoffClosed(*key))
    assert is_empty(scheduler)
    assert {(v.free_blocks, v.free_slots) for v in scheduler.views()} == {(64, 32)}


@pytest.mark.parametrize("role", [GroupRole.PREFILL, GroupRole.DECODE])
def test_memory_is_granted_in_order_of_assignment_and_the_head_is_never_overtaken(role):
    """Else the prefill of one request and the decode of another could wait for each other in a ring."""
    scheduler = make_scheduler(role, num_blocks=4)
    first, big, small = (make_spec(name, num) for name, num in (("first", 200), ("big", 400), ("small", 10)))
    assign_all(scheduler, *map(make_assign, (first, big, small)))
    granted = []
    while (plan := scheduler.next_plan(0)) is not None and not plan.ranks:
        granted += [m.request_id for m in (*plan.sends, *plan.receives)]
    if plan is not None:
        granted += [m.request_id for m in (*plan.sends, *plan.receives)]
        scheduler.advance(0, Engines(1).run(plan))
    assert granted == ["first"]
    scheduler.advance(0, HandoffFailed(RequestId("first"), 0, "gone"))
    plan = scheduler.next_plan(0)
    assert [m.request_id for m in (*plan.sends, *plan.receives)] == ["big"]


@pytest.mark.parametrize(("min_tokens", "num_steps"), [(0, 1), (1, 1), (2, 1), (20, 19), (100, 40)])
def test_a_span_ends_before_a_stop_token_may_come(min_tokens, num_steps):
    scheduler, engines = make_scheduler(GroupRole.MIXED), Engines(1)
    assign_all(scheduler, local(num_prompt=10, max_tokens=90, min_tokens=min_tokens, stop_token_ids=(3,)))
    scheduler.advance(0, engines.run(scheduler.next_plan(0)))
    assert scheduler.next_plan(0, max_steps=40).num_steps == num_steps


def test_a_span_that_preempts_is_one_step_since_its_memory_may_admit_somebody():
    params = GroupParams(decode=DecodeParams(reserve_blocks_per_seq=0.0))
    scheduler, engines = make_scheduler(GroupRole.MIXED, num_blocks=4, params=params), Engines(1)
    assign_all(
        scheduler, local("old", 120, max_tokens=90), local("new", 250, max_tokens=90), local("next", 200)
    )
    while not (plan := scheduler.next_plan(0, max_steps=50)).ended:
        scheduler.advance(0, engines.run(plan))
    assert [(end.request_id, end.reason) for end in plan.ended] == [("new", None)]
    assert plan.num_steps == 1
    scheduler.advance(0, engines.run(plan))
    assert scheduler.views()[0].num_queued == 1
    scheduler.next_plan(0, max_steps=50)
    assert scheduler.views()[0].num_queued == 0


def test_a_prefill_group_streams_what_its_blocks_cannot_hold_and_others_do_not():
    more = {"num_blocks": 2, "num_home_blocks": 10, "num_rows": 4}
    for role in (GroupRole.MIXED, GroupRole.DECODE):
        assert make_scheduler(role, **more).max_model_len == 2 * BLOCK_TOKENS
    scheduler, engines = make_scheduler(GroupRole.PREFILL, **more), Engines(1, **more)
    assert scheduler.max_model_len == 8 * BLOCK_TOKENS
    assign_all(
        scheduler,
        make_assign(make_spec("long", 5 * BLOCK_TOKENS), P0, D0),
        make_assign(make_spec("next", BLOCK_TOKENS), P0, D0),
    )
    plan = scheduler.next_plan(0)
    [send], [start] = plan.sends, plan.ranks[0].start
    assert send.block_table == start.block_table == (3, 4, 5, 6, 7)
    assert start.staging == (1, 2)
    scheduler.advance(0, engines.run(plan))
    scheduler.advance(0, Aborted(RequestId("long"), 0))
    plan = scheduler.next_plan(0)
    assert plan.closes == (HandoffClose(RequestId("long"), 0, DpRank(0)),)
    assert not plan.ranks, "its staging is in use until the transfer is closed"
    scheduler.advance(0, HandoffClosed(RequestId("long"), 0))
    plan = scheduler.next_plan(0)
    assert [(s.request_id, s.block_table, s.staging) for s in plan.ranks[0].start] == [("next", (1,), ())]
    require_sound([scheduler])
