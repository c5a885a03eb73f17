"""The engine behind its port: plans in, tokens out, bytes handed over."""

from __future__ import annotations

from array import array
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch

from millpond.core.errors import ConfigError, InvariantBroken
from millpond.core.ids import BlockId, DpRank, RequestId, SlotId
from millpond.core.plan import DecodeRow, PrefillChunk, RankPlan, SequenceStart
from millpond.core.request import SamplingParams
from millpond.core.shapes import KvFormat, kv_layout
from millpond.engine.memory import MemoryPlan, plan_memory
from millpond.engine.model.engine import V41Engine
from millpond.engine.sampler import Sampler
from tests.unit.engine.model.tiny_v41 import EXACT, Hand, prompt, tiny_model

GREEDY = SamplingParams(max_tokens=64, seed=0, temperature=0.0)
RANK = DpRank(0)


@pytest.fixture(scope="module")
def model():
    return tiny_model(EXACT["bf16"])


def make_engine(model, keep=0):
    return V41Engine(model, MemoryPlan(12, 5), max_model_len=512, num_kept_tokens=keep)


def start(name, ids, blocks, slot, known_prompt=None):
    table, tokens = tuple(map(BlockId, blocks)), array("i", ids)
    return SequenceStart(RequestId(name), 0, tokens, known_prompt or len(ids), GREEDY, table, SlotId(slot))


class Watch:
    def __init__(self):
        self.calls = []

    def on_row_needed(self, row):
        self.calls.append(("needed", row))

    def on_row_ready(self, row):
        self.calls.append(("ready", row))


def prefill(engine, name, ids, blocks, slot, borders=()):
    first, token = (start(name, ids, blocks, slot),), None
    for begin, end in pairwise([0, *borders, len(ids)]):
        watch = Watch()
        chunk = PrefillChunk(RequestId(name), begin, end, end == len(ids))
        report = engine.execute(RankPlan(RANK, start=first, chunks=(chunk,)), watch)
        rows = range(len(engine.layout.rows))
        assert watch.calls == [(what, row) for row in rows for what in ("needed", "ready")]
        first = ()
        token = report.sampled
    return token[0].token_id


def decode(engine, name, position, count):
    ids = []
    for at in range(position, position + count):
        report = engine.execute(RankPlan(RANK, rows=(DecodeRow(RequestId(name), at, ()),)))
        assert report.sampled[0].position == at + 1
        ids.append(report.sampled[0].token_id)
    return ids


@pytest.mark.parametrize(("count", "keep"), [(1, 0), (129, 0), (128, 24), (149, 24)])
def test_a_handed_over_sequence_goes_on_like_an_unsplit_one(model, keep, count):
    ids = prompt(count, seed=count).tolist()
    unsplit = make_engine(model, keep)
    text = [prefill(unsplit, "a", ids, (3, 5), 0)]
    text += decode(unsplit, "a", count, 4)
    sender, receiver = make_engine(model, keep), make_engine(model)
    first = prefill(sender, "a", ids, (1, 2), 4, borders=(count // 2,) if count > 1 else ())
    for mine, theirs in zip((1, 2), (9, 4), strict=True):
        for row in range(len(sender.layout.rows)):
            receiver.write_row(BlockId(theirs), row, sender.read_row(BlockId(mine), row))
    receiver.write_state(SlotId(2), sender.read_state(SlotId(4)))
    receiver.execute(RankPlan(RANK, start=(start("a", [*ids, first], (9, 4), 2, len(ids)),)))
    assert [first, *decode(receiver, "a", count, 4)] == text


def test_rows_of_several_sequences_in_one_step(model):
    engine, texts = make_engine(model), {}
    ids = {"a": prompt(30, seed=1).tolist(), "b": prompt(90, seed=2).tolist()}
    for number, name in enumerate(ids):
        alone = make_engine(model)
        texts[name] = [prefill(alone, name, ids[name], (1,), 0), *decode(alone, name, len(ids[name]), 3)]
        assert prefill(engine, name, ids[name], (number + 1,), number) == texts[name][0]
    for step in range(3):
        rows = tuple(DecodeRow(RequestId(name), len(ids[name]) + step, ()) for name in ids)
        report = engine.execute(RankPlan(RANK, rows=rows))
        assert [t.token_id for t in report.sampled] == [texts[name][step + 1] for name in ids]


def share_prefix(engine, ids, hit):
    """A donor whose first block later sequences share; returns its text and its state at `hit` tokens."""
    engine.execute(RankPlan(RANK, start=(start("donor", ids, (1, 2), 0),)))
    engine.execute(RankPlan(RANK, chunks=(PrefillChunk(RequestId("donor"), 0, hit, is_last=False),)))
    state = bytes(engine.read_state(SlotId(0)))
    report = engine.execute(
        RankPlan(RANK, chunks=(PrefillChunk(RequestId("donor"), hit, len(ids), is_last=True),))
    )
    return report.sampled[0].token_id, state


def test_a_hit_with_its_state_is_exact(model):
    ids, hit = prompt(170).tolist(), 128
    engine = make_engine(model)
    first, state = share_prefix(engine, ids, hit)
    text = [first, *decode(engine, "donor", 170, 3)]
    engine.write_state(SlotId(3), memoryview(state))
    chunk = PrefillChunk(RequestId("b"), hit, 170, is_last=True)
    report = engine.execute(RankPlan(RANK, start=(start("b", ids, (1, 7), 3),), chunks=(chunk,)))
    assert [report.sampled[0].token_id, *decode(engine, "b", 170, 3)] == text


@pytest.mark.parametrize("keep", [0, 24])
def test_a_hit_without_windows_replays_and_leaves_the_hit_alone(model, keep):
    ids, hit = prompt(170).tolist(), 128
    begin, texts = hit - model.config.shape.window, []
    for border in (150, 121):
        engine = make_engine(model, keep)
        share_prefix(engine, ids, hit)
        before = [bytes(engine.read_row(BlockId(1), row)) for row in range(len(engine.layout.rows))]
        first = (start("b", ids, (1, 7), 3),)
        for a, b in ((begin, border), (border, 170)):
            chunk = PrefillChunk(RequestId("b"), a, b, b == 170, write_begin=hit)
            report = engine.execute(RankPlan(RANK, start=first, chunks=(chunk,)))
            first = ()
        assert [bytes(engine.read_row(BlockId(1), row)) for row in range(len(engine.layout.rows))] == before
        texts.append([report.sampled[0].token_id, *decode(engine, "b", 170, 3)])
    assert texts[0] == texts[1]


def test_right_drafts_are_taken_up_to_the_first_wrong_one(model):
    ids, plain = prompt(40).tolist(), make_engine(model)
    text = [prefill(plain, "a", ids, (1,), 0), *decode(plain, "a", 40, 7)]
    wrong = (text[4] + 1) % model.config.shape.vocab_size
    for right, drafts in ((3, (*text[1:4], wrong, text[5])), (2, text[1:3]), (0, (wrong, text[2]))):
        engine = make_engine(model)
        assert prefill(engine, "a", ids, (1,), 0) == text[0]
        row = DecodeRow(RequestId("a"), 40, (), tuple(drafts))
        sampled = engine.execute(RankPlan(RANK, rows=(row,))).sampled
        assert [token.token_id for token in sampled] == text[1 : right + 2]
        assert [token.position for token in sampled] == list(range(41, 42 + right))
        assert decode(engine, "a", 41 + right, 6 - right) == text[right + 2 :]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_drafts_are_chosen_by_the_rules_and_the_noise_of_their_places(model, temperature):
    """Each as if the drafts before it had been sampled; sequences of different lengths in one step."""
    rules = replace(GREEDY, temperature=temperature, frequency_penalty=2.0)
    engine, hand, sampler = make_engine(model), Hand(model), Sampler(model.config.shape.vocab_size)
    texts = {
        name: prompt(count, seed=count).tolist() for name, count in zip("abcd", (3, 18, 33, 61), strict=True)
    }
    for slot in range(len(texts)):  # what an earlier owner left behind decodes to NaN
        engine.write_state(SlotId(slot), memoryview(b"\x7f" * engine.layout.state_bytes))
    for number, (name, ids) in enumerate(texts.items()):
        begun = replace(start(name, ids, (number + 1,), number), sampling=rules)
        chunk = PrefillChunk(RequestId(name), 0, len(ids), is_last=True)
        (first,) = engine.execute(RankPlan(RANK, start=(begun,), chunks=(chunk,))).sampled
        ids.append(first.token_id)
    rows = tuple(DecodeRow(RequestId(name), len(ids) - 1, ()) for name, ids in texts.items())
    report = engine.execute(RankPlan(RANK, rows=rows, num_drafts=5))
    for (name, ids), token, drafts in zip(texts.items(), report.sampled, report.drafts, strict=True):
        hand.prefill(name, np.array(ids, np.int32))
        num_prompt, output = len(ids) - 1, array("i", [ids[-1], token.token_id])

        def choose(_number, logits, ids=ids, num_prompt=num_prompt, output=output):
            place = num_prompt + len(output)
            chosen = sampler.sample(logits[0].numpy(), rules, array("i", ids[:num_prompt]), output, place)
            output.append(chosen.token_id)
            return torch.tensor([chosen.token_id])

        hand.drafts((name, token.token_id, len(ids) - 1), choose=choose)
        assert drafts.request_id == name
        assert drafts.token_ids == tuple(output[2:7])


def test_an_idle_step_reports_nothing(model):
    assert make_engine(model).execute(RankPlan(RANK)).sampled == ()


def whole_prompt(ids, blocks):
    chunk = PrefillChunk(RequestId("c"), 0, len(ids), is_last=True)
    return RankPlan(RANK, start=(start("c", ids, blocks, 1),), chunks=(chunk,))


def test_broken_plans_are_refused(model):
    engine = make_engine(model)
    engine.execute(RankPlan(RANK, start=(start("a", [5, 6, 7], (1,), 0),)))
    for plan in (
        RankPlan(RANK, rows=(DecodeRow(RequestId("b"), 0, ()),)),
        RankPlan(RANK, rows=(DecodeRow(RequestId("a"), 1, ()),)),
        RankPlan(RANK, chunks=(PrefillChunk(RequestId("a"), 0, 2, is_last=True),)),
        RankPlan(RANK, chunks=(PrefillChunk(RequestId("a"), 0, 4, is_last=True),)),
        RankPlan(RANK, start=(start("c", [5], (1,), 5),)),
        RankPlan(RANK, start=(start("c", [512], (1,), 1),)),
        whole_prompt([5], (13,)),
        whole_prompt([5] * 129, (2,)),
    ):
        with pytest.raises(InvariantBroken):
            engine.execute(plan)
    with pytest.raises(InvariantBroken):
        engine.read_row(BlockId(0), 0)
    with pytest.raises(InvariantBroken):
        engine.write_state(SlotId(0), memoryview(b"x"))


def test_a_hit_that_leaves_too_few_tokens_to_compute_is_refused(model):
    """Decoder layers would look back on windows that nobody computed."""
    ids, keep = prompt(170).tolist(), 24
    for begin in (147, 128):
        engine = make_engine(model, keep)
        chunk = PrefillChunk(RequestId("a"), begin, 170, is_last=True)
        plan = RankPlan(RANK, start=(start("a", ids, (1, 2), 0),), chunks=(chunk,))
        if begin + keep <= 170:
            assert engine.execute(plan).sampled
            continue
        with pytest.raises(InvariantBroken, match="the last 24 of 170 tokens must be computed"):
            engine.execute(plan)


def test_slots_come_first_and_blocks_get_the_rest(model):
    layout = kv_layout(model.config.shape, KvFormat.PACKED)
    slots = int(10 * 1.2) + 1
    plan = plan_memory(layout, slots * layout.state_bytes + 8 * layout.block_bytes, 10)
    assert plan == MemoryPlan(7, slots)
    with pytest.raises(ConfigError):
        plan_memory(layout, slots * layout.state_bytes + layout.block_bytes, 10)


def test_too_few_kept_tokens_are_refused(model):
    with pytest.raises(ConfigError, match=r"engine.num_kept_tokens = \d+: .*; use that or more, or 0"):
        make_engine(model, keep=model.config.shape.ring_rows - 1)
