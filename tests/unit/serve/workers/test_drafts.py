"""A real rank that drafts: the texts of one that does not."""

from __future__ import annotations

from array import array

import pytest

from millpond.control.decode_scheduler import DecodeParams
from millpond.control.group_scheduler import GroupParams, GroupRole, GroupScheduler
from millpond.control.invariants import require_sound
from millpond.core.errors import InvariantBroken
from millpond.core.events import Assigned, StepDone
from millpond.core.ids import BlockId, DpRank, GatewayId, GroupId, RankRef, RequestId, SlotId
from millpond.core.plan import Assign, DecodeRow, RankPlan, SequenceStart
from millpond.core.request import RequestSpec, SamplingParams
from millpond.engine.model.engine import MemoryPlan, V41Engine
from millpond.serve.workers.rank_runner import RankRunner
from tests.unit.engine.model.tiny_v41 import EXACT, prompt, tiny_model

ME = RankRef(GroupId("m0"), DpRank(0))
REQUESTS = {
    "greedy": (20, SamplingParams(max_tokens=24, seed=1, temperature=0.0)),
    "warm": (121, SamplingParams(max_tokens=16, seed=2, temperature=0.7, top_p=0.9, num_logprobs=2)),
    "strict": (
        33,
        SamplingParams(max_tokens=20, seed=3, temperature=0.2, repetition_penalty=1.3, frequency_penalty=0.5),
    ),
    "narrow": (60, SamplingParams(max_tokens=22, seed=4, temperature=0.0, logit_bias=((7, 100.0),))),
}


@pytest.fixture(scope="module")
def model():
    return tiny_model(EXACT["bf16"])


def serve(model, num_drafts):
    """Outputs of all requests, served together, by name; all decode rows; how many drafts were right."""
    engine = V41Engine(model, MemoryPlan(12, 5), max_model_len=512, num_kept_tokens=0)
    runner = RankRunner(DpRank(0), engine, None, None)
    params = GroupParams(decode=DecodeParams(num_draft_tokens=num_drafts))
    scheduler = GroupScheduler(ME.group, GroupRole.MIXED, (runner.info,), 512, params)
    for name, (num_prompt, sampling) in REQUESTS.items():
        ids = array("i", prompt(num_prompt, seed=num_prompt).tolist())
        spec = RequestSpec(RequestId(name), 0, GatewayId("g"), "g", ids, sampling)
        scheduler.advance(0, Assigned(Assign(spec, ME, ME, "")))
    texts, rows, num_right = {}, [], 0
    while (plan := scheduler.next_plan(0)) is not None:
        for _, token in plan.outputs:
            item = (token.position, token.token_id, token.logprob, token.top, token.finish)
            texts.setdefault(token.request_id, []).append(item)
        if plan.ranks:
            report = runner.carry_out(plan)
            rows += plan.ranks[0].rows
            if plan.ranks[0].rows:
                num_right += len(report.sampled) - len(plan.ranks[0].rows)
            scheduler.advance(0, StepDone(plan.step, (report,)))
        require_sound([scheduler])
    return texts, rows, num_right


def test_texts_do_not_depend_on_drafts(model):
    """The biased request always gets its token, so that drafts of it are right; others are wrong at times."""
    plain, rows, _ = serve(model, 0)
    assert all(row.draft_ids == () for row in rows)
    assert all(len(text) == REQUESTS[name][1].max_tokens for name, text in plain.items())
    for num_drafts in (1, 5):
        texts, rows, num_right = serve(model, num_drafts)
        assert texts == plain
        num_drafted = sum(len(row.draft_ids) for row in rows)
        assert max(len(row.draft_ids) for row in rows) == num_drafts
        assert 0 < num_right < num_drafted


def test_more_drafts_than_the_rings_allow_are_refused(model):
    engine = V41Engine(model, MemoryPlan(4, 2), max_model_len=512, num_kept_tokens=0)
    most = engine.max_drafts
    assert most == model.config.shape.num_draft_tokens
    name, sampling = RequestId("a"), SamplingParams(max_tokens=9, seed=1, temperature=0.0)
    first = SequenceStart(name, 0, array("i", [5]), 1, sampling, (BlockId(1),), SlotId(0))
    engine.execute(RankPlan(DpRank(0), start=(first,)))
    with pytest.raises(InvariantBroken, match="at most"):
        engine.execute(RankPlan(DpRank(0), rows=(DecodeRow(name, 0, (), (1,) * (most + 1)),)))
    with pytest.raises(InvariantBroken, match="at most"):
        engine.execute(RankPlan(DpRank(0), rows=(DecodeRow(name, 0, ()),), num_drafts=most + 1))
