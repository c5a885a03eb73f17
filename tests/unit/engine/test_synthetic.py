"""The synthetic engine: its text depends on the tokens only, and on every KV byte of them."""

from __future__ import annotations

import threading
import time
from array import array
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from millpond.config.synthetic_params import SyntheticParams
from millpond.core.errors import ConfigError, InvariantBroken
from millpond.core.ids import BlockId, DpRank, RequestId, SlotId
from millpond.core.plan import DecodeRow, PrefillChunk, RankPlan, SequenceStart
from millpond.core.request import SamplingParams
from millpond.core.units import BLOCK_TOKENS, num_blocks_for
from millpond.engine.synthetic import FIRST_WORD, SyntheticEngine, expected_tokens

PARAMS = SyntheticParams(
    num_layers=3,
    kv_bytes_per_token=1,
    num_blocks=12,
    max_num_seqs=4,
    max_model_len=1024,
    vocab_size=100_003,
    prefill_token_ns=0,
    decode_step_ns=0,
    decode_row_ns=0,
    decode_kv_token_ns=0,
)
GREEDY = SamplingParams(max_tokens=64, seed=0, temperature=0.0)
RANK = DpRank(0)
PROMPTS = st.lists(st.integers(0, PARAMS.vocab_size - 1), min_size=1, max_size=400)


class Driver:
    """Plans steps for one engine as a scheduler would, blocks counted upward."""

    def __init__(self, engine: SyntheticEngine | None = None) -> None:
        self.engine = engine or SyntheticEngine(PARAMS)
        self.next_block = 1
        self.known: dict[RequestId, array[int]] = {}
        self.tables: dict[RequestId, list[BlockId]] = {}

    def blocks(self, count: int) -> tuple[BlockId, ...]:
        blocks = tuple(BlockId(self.next_block + i) for i in range(count))
        self.next_block += count
        return blocks

    def start(
        self, name: str, ids: list[int], num_prompt: int, sampling: SamplingParams = GREEDY
    ) -> SequenceStart:
        request_id = RequestId(name)
        self.known[request_id] = array("i", ids)
        table = self.blocks(num_blocks_for(len(ids)))
        self.tables[request_id] = list(table)
        return SequenceStart(request_id, 0, array("i", ids), num_prompt, sampling, table, SlotId(0))

    def prefill(
        self, name: str, ids: list[int], cuts: Sequence[int] = (), sampling: SamplingParams = GREEDY
    ) -> int:
        starts = (self.start(name, ids, len(ids), sampling),)
        borders = sorted({0, len(ids), *(cut for cut in cuts if cut < len(ids))})
        for begin, end in pairwise(borders):
            chunk = PrefillChunk(RequestId(name), begin, end, is_last=end == len(ids))
            report = self.engine.execute(RankPlan(RANK, start=starts, chunks=(chunk,)))
            starts = ()
        (sample,) = report.sampled
        assert (sample.request_id, sample.position) == (name, len(ids))
        self.known[RequestId(name)].append(sample.token_id)
        return sample.token_id

    def decode(self, *names: str, start: tuple[SequenceStart, ...] = ()) -> list[int]:
        rows = []
        for name in names:
            known = self.known[RequestId(name)]
            missing = num_blocks_for(len(known)) - len(self.tables[RequestId(name)])
            new_blocks = self.blocks(missing)
            self.tables[RequestId(name)] += new_blocks
            rows.append(DecodeRow(RequestId(name), len(known) - 1, new_blocks))
        report = self.engine.execute(RankPlan(RANK, start=start, rows=tuple(rows)))
        for name, sample in zip(names, report.sampled, strict=True):
            assert (sample.request_id, sample.position) == (name, len(self.known[RequestId(name)]))
            self.known[RequestId(name)].append(sample.token_id)
        return [sample.token_id for sample in report.sampled]

    def hand_over(self, name: str, to: Driver) -> SequenceStart:
        """Copy the KV of every known token but the last, which the receiver computes."""
        request_id = RequestId(name)
        known = self.known[request_id]
        start = to.start(name, list(known), len(known) - 1)
        for mine, theirs in zip(self.tables[request_id], start.block_table, strict=False):
            for row in range(len(self.engine.layout.rows)):
                to.engine.write_row(theirs, row, self.engine.read_row(mine, row))
        return start


def text(prompt: list[int], num_tokens: int, sampling: SamplingParams = GREEDY) -> list[int]:
    return list(expected_tokens(PARAMS, array("i", prompt), sampling, num_tokens))


@settings(max_examples=30)
@given(prompt=PROMPTS, cuts=st.lists(st.integers(1, 400), max_size=5))
def test_text_does_not_depend_on_the_chunks(prompt: list[int], cuts: list[int]) -> None:
    driver = Driver()
    tokens = [driver.prefill("a", prompt, cuts), *(driver.decode("a")[0] for _ in range(3))]
    assert tokens == text(prompt, 4)


@settings(max_examples=20)
@given(prompts=st.lists(PROMPTS.map(lambda ids: ids[:200]), min_size=2, max_size=4), order=st.randoms())
def test_text_does_not_depend_on_the_batch(prompts: list[list[int]], order) -> None:
    driver = Driver()
    names = [f"r{i}" for i in range(len(prompts))]
    starts = tuple(driver.start(name, ids, len(ids)) for name, ids in zip(names, prompts, strict=True))
    chunks = tuple(
        PrefillChunk(RequestId(name), 0, len(ids), is_last=True)
        for name, ids in zip(names, prompts, strict=True)
    )
    report = driver.engine.execute(RankPlan(RANK, start=starts, chunks=chunks))
    for sample in report.sampled:
        driver.known[sample.request_id].append(sample.token_id)
    for _ in range(3):
        driver.decode(*order.sample(names, order.randint(1, len(names))))
    for name, ids in zip(names, prompts, strict=True):
        output = list(driver.known[RequestId(name)][len(ids) :])
        assert output == text(ids, len(output))


@settings(max_examples=30)
@given(prompt=PROMPTS, cuts=st.lists(st.integers(1, 400), max_size=3))
def test_handoff_does_not_change_the_text(prompt: list[int], cuts: list[int]) -> None:
    source, target = Driver(), Driver()
    first = source.prefill("a", prompt, cuts)
    start = source.hand_over("a", target)
    tokens = [first, *target.decode("a", start=(start,)), *(target.decode("a")[0] for _ in range(2))]
    assert tokens == text(prompt, 4)


@settings(max_examples=60)
@given(prompt=PROMPTS, data=st.data())
def test_any_flipped_bit_in_a_handoff_changes_the_text(prompt: list[int], data: st.DataObject) -> None:
    source, target = Driver(), Driver()
    source.prefill("a", prompt)
    start = source.hand_over("a", target)
    block = start.block_table[data.draw(st.integers(0, num_blocks_for(len(prompt)) - 1))]
    row = data.draw(st.integers(0, PARAMS.num_layers - 1))
    content = bytearray(target.engine.read_row(block, row))
    content[data.draw(st.integers(0, len(content) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    target.engine.write_row(block, row, memoryview(content))

    tokens = [*target.decode("a", start=(start,)), *(target.decode("a")[0] for _ in range(2))]
    right = text(prompt, 4)[1:]
    assert all(token != expected for token, expected in zip(tokens, right, strict=True))


@pytest.mark.parametrize("num_tokens", [1, 127, 128, 129, 300])
def test_a_row_that_never_arrives_changes_the_text(num_tokens: int) -> None:
    prompt = list(range(num_tokens))
    source, target = Driver(), Driver()
    source.prefill("a", prompt)
    start = source.hand_over("a", target)
    stale = SyntheticEngine(PARAMS)
    for block in start.block_table[:-1] or start.block_table:
        target.engine.write_row(block, 1, stale.read_row(block, 1))
    assert target.decode("a", start=(start,)) != [text(prompt, 2)[1]]


@pytest.mark.parametrize("block", [0, 1], ids=["full block", "growing block"])
@pytest.mark.parametrize("row", range(PARAMS.num_layers))
def test_a_write_that_comes_late_changes_the_text(block: int, row: int) -> None:
    prompt = list(range(BLOCK_TOKENS + 40))
    driver = Driver()
    driver.prefill("a", prompt)
    assert driver.decode("a") == text(prompt, 2)[1:]
    victim = driver.tables[RequestId("a")][block]
    content = bytearray(driver.engine.read_row(victim, row))
    content[-1] ^= 1
    driver.engine.write_row(victim, row, memoryview(content))
    right = text(prompt, 4)[2:]
    assert all(driver.decode("a") != [expected] for expected in right)


def test_a_row_that_arrives_twice_does_no_harm() -> None:
    prompt = list(range(BLOCK_TOKENS + 40))
    driver = Driver()
    driver.prefill("a", prompt)
    for block in driver.tables[RequestId("a")]:
        content = bytes(driver.engine.read_row(block, 1))
        driver.engine.write_row(block, 1, memoryview(content))
    assert driver.decode("a") == text(prompt, 2)[1:]


def test_a_block_that_another_sequence_took_changes_the_text() -> None:
    driver = Driver()
    driver.prefill("a", list(range(200)))
    driver.next_block = 1
    driver.prefill("b", list(range(1000, 1100)))
    driver.next_block = 5
    assert driver.decode("a") != [text(list(range(200)), 2)[1]]
    assert driver.decode("b") == [text(list(range(1000, 1100)), 2)[1]]


def test_a_block_of_another_prefix_changes_the_text() -> None:
    driver = Driver()
    other = list(range(1, BLOCK_TOKENS + 1))
    driver.prefill("other", other)
    start = driver.start("a", list(range(BLOCK_TOKENS + 5)), BLOCK_TOKENS + 5)
    start = replace(start, block_table=(BlockId(1), *start.block_table[1:]))
    chunk = PrefillChunk(RequestId("a"), BLOCK_TOKENS, BLOCK_TOKENS + 5, is_last=True)
    report = driver.engine.execute(RankPlan(RANK, start=(start,), chunks=(chunk,)))
    assert report.sampled[0].token_id != text(list(range(BLOCK_TOKENS + 5)), 1)[0]


def test_prefix_blocks_of_the_same_tokens_can_be_shared() -> None:
    driver = Driver()
    prompt = list(range(BLOCK_TOKENS + 5))
    driver.prefill("first", prompt)
    start = driver.start("a", prompt, len(prompt))
    start = replace(start, block_table=(BlockId(1), *start.block_table[1:]))
    chunk = PrefillChunk(RequestId("a"), BLOCK_TOKENS, len(prompt), is_last=True)
    report = driver.engine.execute(RankPlan(RANK, start=(start,), chunks=(chunk,)))
    assert report.sampled[0].token_id == text(prompt, 1)[0]


def test_resubmitted_sequence_continues_the_text() -> None:
    prompt = list(range(100))
    known = prompt + text(prompt, 60)
    driver = Driver()
    start = driver.start("a", known, len(prompt))
    chunk = PrefillChunk(RequestId("a"), 0, len(known), is_last=True)
    report = driver.engine.execute(RankPlan(RANK, start=(start,), chunks=(chunk,)))
    assert report.sampled[0].token_id == text(prompt, 61)[60]


def test_rows_become_ready_in_order_and_only_for_chunks() -> None:
    calls: list[tuple[str, int]] = []

    class Observer:
        def on_row_needed(self, row: int) -> None:
            calls.append(("needed", row))

        def on_row_ready(self, row: int) -> None:
            calls.append(("ready", row))

    driver = Driver()
    start = driver.start("a", [1, 2], 2)
    plan = RankPlan(RANK, start=(start,), chunks=(PrefillChunk(RequestId("a"), 0, 2, is_last=True),))
    sample = driver.engine.execute(plan, Observer()).sampled[0]
    expected = [(what, row) for row in range(3) for what in ("needed", "ready")]
    assert calls == expected
    driver.known[RequestId("a")].append(sample.token_id)
    driver.engine.execute(RankPlan(RANK, rows=(DecodeRow(RequestId("a"), 2, ()),)), Observer())
    assert calls == expected


def test_seed_and_choice_count_only_with_temperature() -> None:
    warm = SamplingParams(max_tokens=9, seed=1, temperature=1.0)
    kinds = [warm, replace(warm, seed=2), replace(warm, choice=1), GREEDY, replace(GREEDY, seed=5, choice=3)]
    texts = [tuple(text([1, 2, 3], 3, sampling)) for sampling in kinds]
    assert len(set(texts)) == 4
    assert texts[3] == texts[4]
    assert Driver().prefill("a", [1, 2, 3], sampling=warm) == texts[0][0]


def test_stop_token_waits_for_min_tokens() -> None:
    first = text([5], 1)[0]
    held = replace(GREEDY, stop_token_ids=(first,), min_tokens=1)
    assert Driver().prefill("a", [5], sampling=held) == first + 1
    assert Driver().prefill("a", [5], sampling=replace(held, min_tokens=0)) == first


def test_logprobs_come_when_asked_for() -> None:
    driver = Driver()
    start = driver.start("a", [1], 1, replace(GREEDY, num_logprobs=3))
    plan = RankPlan(RANK, start=(start,), chunks=(PrefillChunk(RequestId("a"), 0, 1, is_last=True),))
    (sample,) = driver.engine.execute(plan).sampled
    assert sample.logprob < 0
    assert [token for token, _ in sample.top] == [sample.token_id + i for i in range(3)]


def test_words_only_and_within_the_vocabulary() -> None:
    tokens = text([1, 2], 20)
    assert all(FIRST_WORD <= token < PARAMS.vocab_size for token in tokens)


def test_step_takes_its_time_and_can_be_interrupted() -> None:
    slow = SyntheticEngine(replace(PARAMS, prefill_token_ns=20_000_000))
    driver = Driver(slow)
    begin_ns = time.monotonic_ns()
    driver.prefill("a", [1, 2])
    assert time.monotonic_ns() - begin_ns >= 40_000_000
    endless = SyntheticEngine(replace(PARAMS, prefill_token_ns=10**12))
    thread = threading.Thread(target=Driver(endless).prefill, args=("a", [1, 2]))
    thread.start()
    endless.interrupt()
    thread.join(30)
    assert not thread.is_alive()


def test_plans_that_cannot_be_are_refused() -> None:
    driver = Driver()
    with pytest.raises(InvariantBroken, match="unknown sequence"):
        driver.engine.execute(RankPlan(RANK, rows=(DecodeRow(RequestId("ghost"), 0, ()),)))
    start = driver.start("a", [1, 2, 3], 3)
    with pytest.raises(InvariantBroken, match="sampling after 2 of 3"):
        driver.engine.execute(
            RankPlan(RANK, start=(start,), chunks=(PrefillChunk(RequestId("a"), 0, 2, is_last=True),))
        )
    with pytest.raises(InvariantBroken, match=r"tokens \[1, 2\) after 2"):
        driver.engine.execute(RankPlan(RANK, chunks=(PrefillChunk(RequestId("a"), 1, 2, is_last=False),)))
    empty = replace(driver.start("b", [1], 1), block_table=())
    with pytest.raises(InvariantBroken, match="0 blocks"):
        driver.engine.execute(
            RankPlan(RANK, start=(empty,), chunks=(PrefillChunk(RequestId("b"), 0, 1, is_last=True),))
        )
    null = replace(empty, block_table=(BlockId(0),))
    with pytest.raises(InvariantBroken, match="block 0"):
        driver.engine.execute(
            RankPlan(RANK, start=(null,), chunks=(PrefillChunk(RequestId("b"), 0, 1, is_last=True),))
        )
    with pytest.raises(InvariantBroken, match="row of 3 bytes"):
        driver.engine.write_row(BlockId(1), 0, memoryview(b"abc"))
    driver.engine.forget(RequestId("ghost"))


def test_read_row_gives_the_memory_itself_but_read_only() -> None:
    driver = Driver()
    view = driver.engine.read_row(BlockId(1), 0)
    before = bytes(view)
    driver.prefill("a", [1])
    assert bytes(view) != before
    assert len(view) == driver.engine.layout.rows[0].num_bytes
    with pytest.raises(TypeError):
        view[0] = 1


@pytest.mark.parametrize("field", ["num_layers", "num_blocks", "vocab_size", "decode_row_ns"])
def test_impossible_parameters_name_their_field(field: str) -> None:
    with pytest.raises(ConfigError, match=field):
        SyntheticEngine(replace(PARAMS, **{field: -1}))
