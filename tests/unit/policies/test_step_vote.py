"""Votes of a mixed group."""

from __future__ import annotations

import itertools

import pytest

from millpond.core.plan import StepKind
from millpond.policies.step_vote import StepVoteParams, max_decode_steps, pick_step_kind

PARAMS = StepVoteParams()
YES, NO = (True, True), (False, False)
ONE = (True, False)


def pick(wants_prefill, wants_decode, decode_steps=1, prefill_run=0, params=PARAMS):
    return pick_step_kind(wants_prefill, wants_decode, decode_steps, prefill_run, params)


def test_nobody_wants_anything():
    assert pick(NO, NO) is None


@pytest.mark.parametrize("decode_steps", [0, 1, 69, 70, 100])
def test_only_one_kind_is_wanted(decode_steps):
    assert pick(ONE, NO, decode_steps) is StepKind.PREFILL
    assert pick(NO, ONE, decode_steps) is StepKind.DECODE


@pytest.mark.parametrize(
    ("wants", "decode_steps", "kind"),
    [
        (YES, 69, StepKind.DECODE),
        (YES, 70, StepKind.PREFILL),
        (ONE, 70, StepKind.DECODE),
        (ONE, 99, StepKind.DECODE),
        (ONE, 100, StepKind.PREFILL),
        (YES, 0, StepKind.PREFILL),
        (ONE, 0, StepKind.DECODE),
    ],
)
def test_all_vote_every_70_any_vote_every_100(wants, decode_steps, kind):
    assert pick(wants, ONE, decode_steps) is kind


def run_vote(num_steps, wants_prefill, wants_decode, params=PARAMS):
    kinds, decode_steps, prefill_run = [], 0, 0
    for _ in range(num_steps):
        kind = pick_step_kind(wants_prefill, wants_decode, decode_steps, prefill_run, params)
        kinds.append(kind)
        if kind is StepKind.PREFILL:
            decode_steps, prefill_run = 0, prefill_run + 1
        else:
            decode_steps, prefill_run = decode_steps + 1, 0
    return kinds


@pytest.mark.parametrize("wants_prefill", [(True,), YES, ONE])
@pytest.mark.parametrize("max_prefill_run", [1, 4, 9])
def test_bug_48_decode_gap_is_bounded_under_endless_prefill(wants_prefill, max_prefill_run):
    params = StepVoteParams(max_prefill_run=max_prefill_run)
    kinds = run_vote(2000, wants_prefill, (True,) * len(wants_prefill), params)
    gaps = [len(list(run)) for kind, run in itertools.groupby(kinds) if kind is StepKind.PREFILL]
    assert gaps
    assert max(gaps) <= max_prefill_run


@pytest.mark.parametrize("wants_prefill", [(True,), YES, ONE])
def test_prefill_is_served_within_the_any_interval(wants_prefill):
    kinds = run_vote(2000, wants_prefill, (True,) * len(wants_prefill))
    gaps = [len(list(run)) for kind, run in itertools.groupby(kinds) if kind is StepKind.DECODE]
    assert max(gaps) <= PARAMS.any_vote_interval


@pytest.mark.parametrize("decode_steps", range(0, 250, 7))
def test_no_vote_falls_inside_a_span(decode_steps):
    span = max_decode_steps(decode_steps, PARAMS)
    assert span >= 1
    inside = [pick(YES, YES, decode_steps + i) for i in range(1, span)]
    assert set(inside) <= {StepKind.DECODE}
    assert pick(YES, YES, decode_steps + span) is StepKind.PREFILL
