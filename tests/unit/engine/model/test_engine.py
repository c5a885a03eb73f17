"""The engine behind its port: plans in, tokens out, bytes handed over."""

from __future__ import annotations

from array import array
from itertools import pairwise

import pytest

from millpond.core.errors import ConfigError, InvariantBroken
from millpond.core.ids import BlockId, DpRank, RequestId, SlotId
from millpond.core.plan import DecodeRow, PrefillChunk, RankPlan, SequenceStart
from millpond.core.request import SamplingParams
from millpond.core.shapes import KvFormat, kv_layout
from millpond.engine.memory import MemoryPlan, plan_memory
from millpond.engine.model.engine import V41Engine
from tests.unit.engine.model.tiny_v41 import EXACT, prompt, tiny_model

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
        self.rows = []

    def on_row_ready(self, row):
        self.rows.append(row)


def prefill(engine, name, ids, blocks, slot, borders=()):
    first, token = (start(name, ids, blocks, slot),), None
    for begin, end in pairwise([0, *borders, len(ids)]):
        watch = Watch()
        chunk = PrefillChunk(RequestId(name), begin, end, end == len(ids))
        report = engine.execute(RankPlan(RANK, start=first, chunks=(chunk,)), watch)
        assert watch.rows == list(range(len(engine.layout.rows)))
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
