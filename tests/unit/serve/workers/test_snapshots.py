"""A group of one real rank: what begins from a snapshot computes what a cold start computes, bit for bit."""

from __future__ import annotations

from array import array

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from millpond.control.group_scheduler import GroupParams, GroupRole, GroupScheduler
from millpond.control.invariants import require_sound
from millpond.control.prefill_scheduler import PrefillParams
from millpond.core.errors import InvariantBroken
from millpond.core.events import Assigned, StepDone
from millpond.core.ids import BlockId, BufferId, DpRank, GatewayId, GroupId, RankRef, RequestId, SlotId
from millpond.core.plan import Assign
from millpond.core.request import RequestSpec, Resume, SamplingParams
from millpond.core.units import BLOCK_TOKENS
from millpond.engine.model.engine import MemoryPlan, V41Engine
from millpond.serve.workers.rank_runner import RankRunner
from millpond.serve.workers.snapshot_buffers import SnapshotBuffers
from tests.unit.engine.model.tiny_v41 import EXACT, prompt, tiny_model

ME = RankRef(GroupId("m0"), DpRank(0))
NUM_BLOCKS, NUM_SLOTS = 16, 3


@pytest.fixture(scope="module")
def models():
    return {mode: tiny_model(numerics) for mode, numerics in EXACT.items()}


class Rank:
    """Scheduler and runner of a mixed group of one rank, and the KV blocks that its sequences left behind."""

    def __init__(self, model, num_snapshots=6, keep=0, max_step_tokens=256):
        memory = MemoryPlan(NUM_BLOCKS, NUM_SLOTS)
        self.engine = V41Engine(model, memory, max_model_len=1024, num_kept_tokens=keep)
        state_bytes = self.engine.layout.state_bytes
        snapshots = SnapshotBuffers(state_bytes, num_snapshots * state_bytes)
        self.runner = RankRunner(DpRank(0), self.engine, None, None, snapshots)
        params = GroupParams(prefill=PrefillParams(max_step_tokens=max_step_tokens))
        self.scheduler = GroupScheduler(ME.group, GroupRole.MIXED, (self.runner.info,), 1024, params)
        self.blocks = {}
        """(request, index) -> rows of that full block, as a pool would keep them."""
        self.tables, self.resumes = {}, {}

    def submit(self, name, ids, max_tokens, resume=None, seed=0, **more):
        sampling = SamplingParams(max_tokens=max_tokens, seed=seed, temperature=1.0)
        spec = RequestSpec(
            RequestId(name), 0, GatewayId("g"), "g", array("i", ids), sampling, resume=resume, **more
        )
        self.resumes[name] = resume
        self.scheduler.advance(0, Assigned(Assign(spec, ME, ME, "")))

    def run(self, *requests):
        """Serve requests together; the output of each, by name."""
        texts = {}
        for request in requests:
            self.submit(**request)
        while (plan := self.scheduler.next_plan(0)) is not None:
            for _, token in plan.outputs:
                texts.setdefault(token.request_id, []).append(token.token_id)
            for part in plan.ranks:
                for start in part.start:
                    self.load(start)
                report = self.runner.carry_out(plan)
                for chunk in part.chunks:
                    self.save(chunk.request_id, chunk.end)
                for row in part.rows:
                    self.tables[row.request_id] += row.new_blocks
                    self.save(row.request_id, row.position + 1)
                self.scheduler.advance(0, StepDone(plan.step, (report,)))
            require_sound([self.scheduler])
        return texts

    def load(self, start):
        """Bring the hit's blocks, and dirt into all that the sequence must write itself."""
        self.tables[start.request_id] = list(start.block_table)
        resume = self.resumes[start.request_id]
        num_hit = resume.position // BLOCK_TOKENS if resume else 0
        for index, block in enumerate(start.block_table):
            for row, layout in enumerate(self.engine.layout.rows):
                dirt = bytes([0x7F]) * layout.num_bytes
                data = self.blocks[resume.request_id, index][row] if index < num_hit else dirt
                self.engine.write_row(block, row, memoryview(data))
        self.engine.write_state(start.slot, memoryview(bytes([0x7F]) * self.engine.layout.state_bytes))

    def save(self, name, end):
        for index in range(end // BLOCK_TOKENS):
            if (name, index) not in self.blocks:
                block, rows = self.tables[name][index], range(len(self.engine.layout.rows))
                self.blocks[name, index] = [bytes(self.engine.read_row(block, row)) for row in rows]

    @property
    def stats(self):
        return self.scheduler.snapshot_stats()[0]


def full_blocks(rank, name):
    return {index: rows for (owner, index), rows in rank.blocks.items() if owner == name}


def cold(model, ids, max_tokens, **more):
    rank = Rank(model, num_snapshots=0, **more)
    (text,) = rank.run({"name": "b", "ids": ids, "max_tokens": max_tokens}).values()
    return text, full_blocks(rank, "b")


@settings(max_examples=4, deadline=None)
@given(
    mode=st.sampled_from(["bf16", "fp32"]),
    num_shared=st.integers(128, 300),
    num_tail=st.integers(1, 60),
    hit=st.integers(1, 2),
    max_step_tokens=st.integers(40, 300),
)
def test_a_prompt_that_begins_after_a_snapshot_of_another(
    models, mode, num_shared, num_tail, hit, max_step_tokens
):
    shared = prompt(num_shared, seed=num_shared).tolist()
    ids = shared + prompt(num_tail, seed=7).tolist()
    position = min(hit, num_shared // BLOCK_TOKENS) * BLOCK_TOKENS
    rank = Rank(models[mode], max_step_tokens=max_step_tokens)
    rank.run({"name": "a", "ids": shared, "max_tokens": 1, "branch_points": (128,)})
    resume = Resume(RequestId("a"), position)
    texts = rank.run({"name": "b", "ids": ids, "max_tokens": 5, "resume": resume})
    assert (rank.stats.used, rank.stats.lost) == (1, 0)
    assert (texts["b"], full_blocks(rank, "b")) == cold(models[mode], ids, 5)


@settings(max_examples=3, deadline=None)
@given(
    mode=st.sampled_from(["bf16", "fp32"]),
    num_prompt=st.integers(118, 140),
    num_output=st.integers(12, 30),
    num_tail=st.integers(1, 40),
)
def test_the_next_turn_begins_after_the_newest_snapshot_of_the_turn_before(
    models, mode, num_prompt, num_output, num_tail
):
    """The second prompt is the first, its answer and a tail."""
    rank = Rank(models[mode])
    ids = prompt(num_prompt, seed=num_prompt).tolist()
    other = {"name": "x", "ids": prompt(60, seed=3).tolist(), "max_tokens": 9}
    answer = rank.run({"name": "a", "ids": ids, "max_tokens": num_output}, other)["a"]
    position = (num_prompt + num_output - 1) // BLOCK_TOKENS * BLOCK_TOKENS
    ids += answer + prompt(num_tail, seed=9).tolist()
    resume = Resume(RequestId("a"), position)
    texts = rank.run({"name": "b", "ids": ids, "max_tokens": 5, "resume": resume})
    assert (rank.stats.used, rank.stats.lost) == (1, 0)
    assert (texts["b"], full_blocks(rank, "b")) == cold(models[mode], ids, 5)


def test_many_branches_from_one_snapshot_at_once(models):
    shared = prompt(200, seed=1).tolist()
    rank = Rank(models["bf16"])
    rank.run({"name": "a", "ids": shared, "max_tokens": 1})
    branches = {name: shared[:128] + prompt(20, seed=i).tolist() for i, name in enumerate("bcd")}
    resume = Resume(RequestId("a"), 128)
    texts = rank.run(
        *({"name": n, "ids": ids, "max_tokens": 4, "resume": resume} for n, ids in branches.items())
    )
    assert rank.stats.used == 3
    assert texts == {name: cold(models["bf16"], ids, 4)[0] for name, ids in branches.items()}


def test_a_lost_snapshot_gives_the_text_of_a_cold_start(models):
    ids = prompt(200, seed=1).tolist()
    rank = Rank(models["bf16"], num_snapshots=1)
    rank.run({"name": "a", "ids": ids, "max_tokens": 1})
    rank.run({"name": "x", "ids": prompt(128, seed=2).tolist(), "max_tokens": 1})
    texts = rank.run({"name": "b", "ids": ids, "max_tokens": 5, "resume": Resume(RequestId("a"), 128)})
    assert (rank.stats.used, rank.stats.lost) == (0, 1)
    assert texts["b"] == cold(models["bf16"], ids, 5)[0]


@pytest.mark.parametrize("num_tail", [23, 24, 90])
def test_with_a_decoder_replay_the_tail_is_computed_as_from_the_start(models, num_tail):
    """The decoder layers' windows of a snapshot are those of another prompt's tail: they must not show."""
    keep = 24
    shared = prompt(130, seed=5).tolist()
    ids = shared[:128] + prompt(num_tail, seed=6).tolist()
    rank = Rank(models["bf16"], keep=keep)
    rank.run({"name": "a", "ids": shared, "max_tokens": 1})
    texts = rank.run({"name": "b", "ids": ids, "max_tokens": 5, "resume": Resume(RequestId("a"), 128)})
    assert rank.stats.used == (num_tail >= keep)
    assert (texts["b"], full_blocks(rank, "b")) == cold(models["bf16"], ids, 5, keep=keep)


def test_buffers_are_as_large_as_a_state_and_as_many_as_fit():
    buffers = SnapshotBuffers(10, 39)
    assert len(buffers) == 3
    buffers.write(BufferId(2), memoryview(b"0123456789"))
    assert buffers.read(BufferId(2)) == b"0123456789"
    with pytest.raises(InvariantBroken):
        buffers.write(BufferId(0), memoryview(b"short"))
    with pytest.raises(InvariantBroken):
        buffers.read(BufferId(1))
    assert len(SnapshotBuffers(0, 1 << 20)) == 0


def test_a_state_of_another_size_is_refused(models):
    rank = Rank(models["bf16"])
    with pytest.raises(InvariantBroken):
        rank.engine.write_state(SlotId(0), memoryview(b"x"))
    with pytest.raises(InvariantBroken):
        rank.engine.read_row(BlockId(0), 0)
