"""The engine as a carrier-out of plans: what it reports, what it refuses, and its KV from outside."""

from __future__ import annotations

import threading
from array import array

import pytest

from millpond.core.errors import InvariantBroken
from millpond.core.ids import BlockId, DpRank, RequestId, SlotId
from millpond.core.plan import DecodeRow, PrefillChunk, RankPlan, SequenceStart
from millpond.core.request import SamplingParams
from tests.unit.engine.tiny_llama import GREEDY, Hand, tiny_engine, write_checkpoint

_PROMPT = [(5 * i + 1) % 160 for i in range(300)]
_R = DpRank(0)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_checkpoint(tmp_path_factory.mktemp("tiny") / "model")


class Watch:
    """Notes the rows it is told about."""

    def __init__(self):
        self.calls = []

    def on_row_needed(self, row):
        self.calls.append(("needed", row))

    def on_row_ready(self, row):
        self.calls.append(("ready", row))


def test_a_handed_over_sequence_continues_with_the_same_bits(folder):
    whole, split = Hand(tiny_engine(folder)), Hand(tiny_engine(folder))
    expected = [whole.prefill("a", _PROMPT)] + [whole.decode("a")[0] for _ in range(10)]
    table = [BlockId(9), BlockId(4), BlockId(7)]
    for source, target in zip(whole.tables["a"], table, strict=True):
        for row in range(len(whole.engine.layout.rows)):
            split.engine.write_row(target, row, whole.engine.read_row(source, row))
    known = array("i", [*_PROMPT, expected[0]])
    start = SequenceStart(RequestId("a"), 0, known, len(_PROMPT), GREEDY, tuple(table), SlotId(1))
    split.engine.execute(RankPlan(_R, start=(start,)))
    split.lengths["a"] = len(known)
    assert [split.decode("a")[0] for _ in range(10)] == expected[1:]


def test_rows_are_announced_in_order_once_for_every_prefill_step(folder):
    engine = tiny_engine(folder)
    hand, watch = Hand(engine), Watch()
    start = hand.start("a", _PROMPT)
    for begin, end in ((0, 200), (200, 300)):
        chunk = PrefillChunk(RequestId("a"), begin, end, end == 300)
        engine.execute(RankPlan(_R, start=(start,) if begin == 0 else (), chunks=(chunk,)), watch)
    expected = [(what, row) for row in (0, 1) for what in ("needed", "ready")] * 2
    assert watch.calls == expected
    hand.lengths["a"] += 1
    engine.execute(RankPlan(_R, rows=(DecodeRow(RequestId("a"), 300, ()),)), watch)
    assert watch.calls == expected


def test_an_announced_row_is_complete(folder):
    engine = tiny_engine(folder)
    hand, seen = Hand(engine), {}

    class Copy:
        def on_row_needed(self, row):
            assert row not in seen

        def on_row_ready(self, row):
            seen[row] = [bytes(engine.read_row(block, row)) for block in hand.tables["a"]]

    start = hand.start("a", _PROMPT)
    chunk = PrefillChunk(RequestId("a"), 0, 300, True)
    engine.execute(RankPlan(_R, start=(start,), chunks=(chunk,)), Copy())
    for row, blocks in seen.items():
        assert blocks == [bytes(engine.read_row(block, row)) for block in hand.tables["a"]]


def test_reports_follow_the_order_of_the_plan(folder):
    engine = tiny_engine(folder)
    hand = Hand(engine)
    hand.prefill("a", _PROMPT[:50])
    hand.prefill("b", _PROMPT[:60])
    start = hand.start("c", _PROMPT[:40])
    plan = RankPlan(
        _R,
        start=(start,),
        chunks=(PrefillChunk(RequestId("c"), 0, 40, True),),
        rows=(DecodeRow(RequestId("b"), 60, ()), DecodeRow(RequestId("a"), 50, ())),
    )
    sampled = engine.execute(plan).sampled
    assert [(token.request_id, token.position) for token in sampled] == [("c", 40), ("b", 61), ("a", 51)]
    assert engine.execute(RankPlan(_R)).sampled == ()


def test_new_blocks_extend_the_table(folder):
    engine = tiny_engine(folder)
    hand = Hand(engine)
    start = hand.start("a", _PROMPT[:128], room=0)
    chunk = PrefillChunk(RequestId("a"), 0, 128, True)
    engine.execute(RankPlan(_R, start=(start,), chunks=(chunk,)))
    with pytest.raises(InvariantBroken, match="1 blocks"):
        engine.execute(RankPlan(_R, rows=(DecodeRow(RequestId("a"), 128, ()),)))
    row = DecodeRow(RequestId("a"), 128, (BlockId(5),))
    assert engine.execute(RankPlan(_R, rows=(row,))).sampled[0].position == 129


def test_sampling_rules_reach_the_sampler(folder):
    hand = Hand(tiny_engine(folder))
    first = hand.prefill("a", _PROMPT[:20])
    forbidden = SamplingParams(max_tokens=8, seed=0, temperature=0.0, logit_bias=((first, -100.0),))
    assert hand.prefill("b", _PROMPT[:20], sampling=forbidden) != first
    waiting = SamplingParams(max_tokens=8, seed=0, temperature=0.0, min_tokens=2, stop_token_ids=(first,))
    assert hand.prefill("c", _PROMPT[:20], sampling=waiting) != first
    random = SamplingParams(max_tokens=8, seed=3, temperature=1.5)
    texts = []
    for name in ("d", "e"):
        texts.append([hand.prefill(name, _PROMPT[:20], sampling=random)])
        texts[-1] += [hand.decode(name)[0] for _ in range(5)]
    assert texts[0] == texts[1]


@pytest.mark.parametrize(
    "plan",
    [
        RankPlan(_R, chunks=(PrefillChunk(RequestId("nobody"), 0, 1, True),)),
        RankPlan(_R, chunks=(PrefillChunk(RequestId("a"), 0, 11, True),)),
        RankPlan(_R, chunks=(PrefillChunk(RequestId("a"), 0, 9, True),)),
        RankPlan(_R, chunks=(PrefillChunk(RequestId("a"), 5, 5, False),)),
        RankPlan(_R, rows=(DecodeRow(RequestId("a"), 11, ()),)),
        RankPlan(_R, rows=(DecodeRow(RequestId("nobody"), 0, ()),)),
    ],
)
def test_plans_that_contradict_what_is_known_are_our_own_bug(folder, plan):
    engine = tiny_engine(folder)
    engine.execute(RankPlan(_R, start=(Hand(engine).start("a", _PROMPT[:10]),)))
    with pytest.raises(InvariantBroken):
        engine.execute(plan)


def test_blocks_and_slots_outside_the_memory_are_refused(folder):
    engine = tiny_engine(folder)
    for block, slot in (
        (BlockId(0), SlotId(0)),
        (BlockId(engine.num_blocks + 1), SlotId(0)),
        (BlockId(1), SlotId(999)),
    ):
        start = SequenceStart(RequestId("a"), 0, array("i", [1, 2]), 2, GREEDY, (block,), slot)
        with pytest.raises(InvariantBroken):
            engine.execute(RankPlan(_R, start=(start,), chunks=(PrefillChunk(RequestId("a"), 0, 2, True),)))
    for block, row in ((0, 0), (engine.num_blocks + engine.num_home_blocks + 1, 0), (1, 2), (1, -1)):
        with pytest.raises(InvariantBroken):
            engine.read_row(BlockId(block), row)
    with pytest.raises(InvariantBroken, match="bytes"):
        engine.write_row(BlockId(1), 0, memoryview(b"short"))


def test_a_forgotten_sequence_is_unknown(folder):
    hand = Hand(tiny_engine(folder))
    hand.prefill("a", _PROMPT[:10])
    hand.engine.execute(RankPlan(_R, forget=(RequestId("a"), RequestId("never"))))
    with pytest.raises(InvariantBroken, match="never started"):
        hand.decode("a")


def test_rows_of_other_blocks_move_while_a_step_runs(folder):
    hand = Hand(tiny_engine(folder))
    engine = hand.engine
    expected = hand.prefill("a", _PROMPT)
    spare = BlockId(engine.num_blocks)
    pattern, done, errors = (
        bytes(range(256)) * (engine.layout.rows[0].num_bytes // 256),
        threading.Event(),
        [],
    )

    def move():
        while not done.is_set():
            engine.write_row(spare, 1, memoryview(pattern))
            if bytes(engine.read_row(spare, 1)) != pattern:
                errors.append("torn")

    thread = threading.Thread(target=move)
    thread.start()
    try:
        for i in range(8):
            hand.next_block = 1
            assert hand.prefill(f"b{i}", _PROMPT) == expected
    finally:
        done.set()
        thread.join(10)
    assert not errors
