"""Decode steps with drafts: several tokens per sequence and step, and what the wrong ones leave behind."""

from __future__ import annotations

import pytest

from millpond.control.decode_scheduler import DecodeParams
from millpond.control.group_scheduler import GroupParams, GroupRole
from millpond.control.invariants import require_sound
from millpond.core.events import Assigned, Drafts, RankReport, SampledToken, StepDone
from millpond.core.ids import DpRank, GroupId, RankRef, RequestId
from millpond.core.plan import StepKind
from millpond.core.request import FinishReason
from millpond.sim.sim_engine import token_at
from tests.sim.making import KV, Engines, make_assign, make_scheduler, make_spec

M0 = RankRef(GroupId("m0"), DpRank(0))
NAME = RequestId("r")


def make_group(num_drafts=3, max_drafts=5, **more):
    params = GroupParams(decode=DecodeParams(num_draft_tokens=num_drafts))
    return make_scheduler(GroupRole.MIXED, params=params, max_drafts=max_drafts, **more)


def assign(scheduler, name="r", num_prompt=10, max_tokens=40, **more):
    spec = make_spec(name, num_prompt, max_tokens, **more)
    scheduler.advance(0, Assigned(make_assign(spec, M0, M0)))
    return spec


def run(scheduler, engines):
    """Outputs, ends and decode plans up to the end."""
    outputs, ended, rows = [], [], []
    while (plan := scheduler.next_plan(0, 8)) is not None:
        outputs += [token for _, token in plan.outputs]
        ended += plan.ended
        if plan.ranks:
            rows += [plan.ranks[0].rows] if plan.kind is StepKind.DECODE else []
            assert plan.num_steps == 1 or not plan.ranks[0].num_drafts
            scheduler.advance(0, engines.run(plan))
        require_sound([scheduler])
    return outputs, ended, rows


@pytest.mark.parametrize("num_drafts", [1, 2, 5])
def test_the_text_is_that_without_drafts_in_fewer_steps(num_drafts):
    scheduler = make_group(num_drafts)
    spec = assign(scheduler)
    outputs, ended, rows = run(scheduler, Engines(1))
    assert [t.token_id for t in outputs] == [token_at(spec.sampling, 10 + i) for i in range(40)]
    assert [t.position for t in outputs] == list(range(10, 50))
    assert [t.finish for t in outputs] == [None] * 39 + [FinishReason.LENGTH]
    assert len(ended) == 1
    assert len(rows) < 36


@pytest.mark.parametrize(("num_drafts", "max_drafts", "most"), [(3, 5, 3), (5, 2, 2), (3, 0, 0), (0, 5, 0)])
def test_no_more_drafts_than_asked_for_and_possible(num_drafts, max_drafts, most):
    scheduler = make_group(num_drafts, max_drafts)
    assign(scheduler)
    _, _, rows = run(scheduler, Engines(1))
    assert max(len(row.draft_ids) for step in rows for row in step) == most


@pytest.mark.parametrize("limits", [{"max_model_len": 50}, {"max_tokens": 40}])
def test_no_row_reaches_beyond_the_last_token(limits):
    """What is computed after the last token but one is of no use."""
    max_tokens = limits.pop("max_tokens", 100)
    scheduler = make_group(5, **limits)
    assign(scheduler, max_tokens=max_tokens)
    outputs, _, rows = run(scheduler, Engines(1))
    assert outputs[-1].position == 49
    assert all(row.position + len(row.draft_ids) < 49 for step in rows for row in step)


def report(scheduler, plan, *tokens, drafts=()):
    position = plan.ranks[0].rows[0].position + 1
    sampled = tuple(SampledToken(NAME, position + i, token) for i, token in enumerate(tokens))
    guesses = (Drafts(NAME, drafts),) if drafts else ()
    scheduler.advance(0, StepDone(plan.step, (RankReport(DpRank(0), sampled, guesses),)))


def decoding(scheduler, **more):
    """The first decode plan of one sequence."""
    assign(scheduler, **more)
    while (plan := scheduler.next_plan(0)).kind is StepKind.PREFILL:
        last = [c for c in plan.ranks[0].chunks if c.is_last]
        sampled = tuple(SampledToken(NAME, c.end, 5) for c in last)
        scheduler.advance(0, StepDone(plan.step, (RankReport(DpRank(0), sampled),)))
    return plan


def test_what_was_guessed_stands_in_the_next_row_once():
    scheduler = make_group()
    report(scheduler, decoding(scheduler), 6, drafts=(7, 8, 9))
    plan = scheduler.next_plan(0)
    assert plan.ranks[0].rows[0].draft_ids == (7, 8, 9)
    report(scheduler, plan, 7, 8, 1)
    (row,) = scheduler.next_plan(0).ranks[0].rows
    assert (row.position, row.draft_ids) == (14, ())


def test_a_stop_among_drafts_ends_the_text_there():
    scheduler = make_group()
    report(scheduler, decoding(scheduler, stop_token_ids=(7,)), 6, drafts=(7, 8, 9))
    report(scheduler, scheduler.next_plan(0), 7, 8, 9, 1)
    plan = scheduler.next_plan(0)
    assert [(t.token_id, t.finish) for _, t in plan.outputs] == [(7, FinishReason.STOP)]
    assert [e.reason for e in plan.ended] == [FinishReason.STOP]
    assert scheduler.held_requests() == ()
    require_sound([scheduler])


def test_a_border_that_drafts_may_lead_to_is_kept_if_they_do():
    """Known are 126 tokens, computed 125; the row covers 125 ... 128, the border is after 127."""
    scheduler = make_group(has_state=True, can_load=True)
    report(scheduler, decoding(scheduler, num_prompt=124, kv=KV), 6, drafts=(7, 8, 9))
    plan = scheduler.next_plan(0)
    assert [(copy.position, copy.is_rolling) for copy in plan.ranks[0].keep] == [(128, True)]
    report(scheduler, plan, 1)  # they did not: the rank sees it, and the next step may
    plan = scheduler.next_plan(0)
    assert plan.ranks[0].keep == ()
    report(scheduler, plan, 2)
    assert [copy.position for copy in scheduler.next_plan(0).ranks[0].keep] == [128]


def test_drafts_take_no_block_that_is_not_free():
    scheduler = make_group(num_blocks=1)
    report(scheduler, decoding(scheduler, num_prompt=124), 6, drafts=(7, 8, 9))
    (row,) = scheduler.next_plan(0).ranks[0].rows
    assert len(row.draft_ids) == 1  # 128 tokens are all that the memory holds


def test_drafts_are_dropped_before_anybody_is_preempted():
    scheduler, engines = make_group(num_blocks=2), Engines(1)
    assign(scheduler, "a", num_prompt=120, max_tokens=8)
    assign(scheduler, "b", num_prompt=120, max_tokens=8)
    outputs, ended, _ = run(scheduler, engines)
    assert [e.reason for e in ended] == [FinishReason.LENGTH] * 2
    assert len(outputs) == 16
