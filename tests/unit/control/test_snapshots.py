"""When the state of a sequence is kept, and when a prefill begins from it."""

from __future__ import annotations

import pytest

from millpond.control.group_scheduler import GroupParams, GroupRole
from millpond.control.prefill_scheduler import PrefillParams
from millpond.control.snapshot_holder import SnapshotParams
from millpond.core.events import Aborted, Assigned, HandoffArrived, HandoffSent, Tick
from millpond.core.ids import DpRank, GroupId, RankRef, RequestId
from millpond.core.request import Resume
from millpond.core.units import SECOND_NS
from millpond.sim.sim_engine import token_at
from tests.sim.making import Engines, make_assign, make_scheduler, make_spec

M0 = RankRef(GroupId("m0"), DpRank(0))
PARAMS = GroupParams(prefill=PrefillParams(max_step_tokens=300), snapshot=SnapshotParams(ttl_s=60))


class Group:
    """A group and its engine; notes what was kept and restored, and each chunk."""

    def __init__(self, role=GroupRole.MIXED, num_snapshots=8, **more):
        self.scheduler = make_scheduler(role, params=PARAMS, num_snapshots=num_snapshots, **more)
        self.engines = Engines(1)
        self.now_s = 0
        self.kept, self.restored, self.chunks = [], [], []

    def assign(self, name, num_prompt, max_tokens=1, **more):
        spec = make_spec(name, num_prompt, max_tokens, **more)
        decode = M0 if self.scheduler.role is GroupRole.MIXED else RankRef(GroupId("d0"), DpRank(0))
        prefill = RankRef(self.scheduler.group, DpRank(0))
        if self.scheduler.role is GroupRole.DECODE:
            prefill, decode = RankRef(GroupId("p0"), DpRank(0)), prefill
        self.scheduler.advance(self.now_s * SECOND_NS, Assigned(make_assign(spec, prefill, decode)))
        return spec

    def run(self):
        while (plan := self.scheduler.next_plan(self.now_s * SECOND_NS)) is not None:
            for rank in plan.ranks:
                self.kept += [(c.request_id, c.position) for c in rank.keep]
                self.restored += [(c.request_id, c.position) for c in rank.restore]
                self.chunks += [(c.request_id, c.begin, c.end) for c in rank.chunks]
            if plan.ranks:
                self.scheduler.advance(self.now_s * SECOND_NS, self.engines.run(plan))
            assert self.scheduler.check() == []

    @property
    def stats(self):
        return self.scheduler.snapshot_stats()[0]


def test_a_chunk_ends_at_the_last_block_border_of_the_prompt():
    group = Group()
    group.assign("a", 500)
    group.run()
    assert group.chunks == [("a", 0, 300), ("a", 300, 384), ("a", 384, 500)]
    assert group.kept == [("a", 384)]


@pytest.mark.parametrize(("num_prompt", "kept"), [(127, []), (128, [128]), (256, [256]), (257, [256])])
def test_a_prompt_may_end_at_a_border(num_prompt, kept):
    group = Group()
    group.assign("a", num_prompt)
    group.run()
    assert [position for _, position in group.kept] == kept


def test_chunks_end_at_branch_points_too():
    group = Group()
    group.assign("a", 300, branch_points=(128, 100, 1024))
    group.run()
    assert group.chunks == [("a", 0, 128), ("a", 128, 256), ("a", 256, 300)]
    assert group.kept == [("a", 128), ("a", 256)]


def test_a_model_without_state_has_no_extra_borders():
    group = Group(num_snapshots=0)
    group.assign("a", 500, 200, branch_points=(128,), resume=Resume(RequestId("b"), 128))
    group.run()
    assert group.chunks == [("a", 0, 300), ("a", 300, 500)]
    assert group.kept == group.restored == []


def test_the_rest_of_a_step_goes_to_the_next_sequence():
    group = Group()
    group.assign("a", 130)
    group.assign("b", 100)
    group.run()
    assert group.chunks == [("a", 0, 128), ("b", 0, 100), ("a", 128, 130)]


def test_decoding_keeps_the_newest_border_and_the_prompts():
    group = Group()
    group.assign("a", 130, max_tokens=300)
    group.run()
    assert group.kept == [("a", 128), ("a", 256), ("a", 384)]
    assert group.stats.held == 2
    assert group.scheduler._ranks[0].snapshots.use(RequestId("a"), 256) is None
    assert group.scheduler._ranks[0].snapshots.use(RequestId("a"), 384) is not None


def test_a_decode_rank_keeps_what_it_crosses():
    group = Group(GroupRole.DECODE)
    spec = group.assign("a", 127, max_tokens=4)
    group.run()
    group.scheduler.advance(0, HandoffArrived(RequestId("a"), 0, token_at(spec.sampling, 127)))
    group.run()
    assert group.kept == [("a", 128)]
    assert group.stats.held == 1


def test_a_prefill_begins_after_a_snapshot():
    group = Group()
    group.assign("a", 300)
    group.run()
    group.assign("b", 400, resume=Resume(RequestId("a"), 256))
    group.run()
    assert group.restored == [("b", 256)]
    assert group.chunks[-2:] == [("b", 256, 384), ("b", 384, 400)]
    assert (group.stats.used, group.stats.lost) == (1, 0)


def test_a_snapshot_of_a_sequence_that_still_runs_can_be_used():
    group = Group()
    group.assign("a", 300, max_tokens=900)
    for _ in range(2):
        plan = group.scheduler.next_plan(0)
        group.scheduler.advance(0, group.engines.run(plan))
    group.assign("b", 300, resume=Resume(RequestId("a"), 256))
    group.run()
    assert group.restored == [("b", 256)]


@pytest.mark.parametrize("position", [128, 256, 384])
def test_a_snapshot_that_is_not_there_means_a_cold_start(position):
    group = Group()
    group.assign("b", 400, resume=Resume(RequestId("a"), position))
    group.run()
    assert group.chunks[0] == ("b", 0, 300)
    assert (group.stats.used, group.stats.lost) == (0, 1)


@pytest.mark.parametrize(("num_prompt", "begin"), [(256, 0), (257, 256)])
def test_at_least_one_token_is_computed(num_prompt, begin):
    group = Group()
    group.assign("a", 256)
    group.run()
    group.assign("b", num_prompt, resume=Resume(RequestId("a"), 256))
    group.run()
    assert next(c for c in group.chunks if c[0] == "b")[1] == begin


@pytest.mark.parametrize(("num_prompt", "begin"), [(395, 0), (396, 256)])
def test_as_many_tokens_are_computed_as_the_engine_asks_for(num_prompt, begin):
    group = Group(min_computed_tokens=140)
    group.assign("a", 256)
    group.run()
    group.assign("b", num_prompt, resume=Resume(RequestId("a"), 256))
    group.run()
    assert next(c for c in group.chunks if c[0] == "b")[1] == begin


def test_the_queue_counts_only_what_is_still_to_be_computed():
    group = Group()
    group.assign("a", 256)
    group.run()
    group.assign("b", 900, resume=Resume(RequestId("a"), 256))
    group.scheduler.advance(0, group.engines.run(group.scheduler.next_plan(0)))
    assert group.scheduler.views()[0].queued_tokens == 900 - 256 - 300


def test_an_idle_group_lets_snapshots_expire():
    group = Group()
    group.assign("a", 256)
    group.run()
    group.scheduler.advance(59 * SECOND_NS, Tick())
    assert group.stats.held == 1
    group.scheduler.advance(60 * SECOND_NS, Tick())
    assert (group.stats.held, group.stats.expired) == (0, 1)


def test_use_prolongs_a_snapshot():
    group = Group()
    group.assign("a", 256)
    group.run()
    group.now_s = 50
    group.assign("b", 300, resume=Resume(RequestId("a"), 256))
    group.run()
    group.scheduler.advance(109 * SECOND_NS, Tick())
    assert group.scheduler._ranks[0].snapshots.use(RequestId("a"), 256) is not None


def test_a_full_holder_lets_the_longest_unused_go():
    group = Group(num_snapshots=2)
    for name in "abc":
        group.assign(name, 128)
        group.run()
    assert group.stats.evicted == 1
    group.assign("d", 200, resume=Resume(RequestId("a"), 128))
    group.assign("e", 200, resume=Resume(RequestId("c"), 128))
    group.run()
    assert group.restored == [("e", 128)]


def test_running_sequences_keep_their_buffers():
    group = Group(num_snapshots=1)
    group.assign("a", 128, max_tokens=60)
    group.assign("b", 128, max_tokens=60)
    group.run()
    assert group.kept == [("a", 128)]
    assert group.stats.refused == 1


def test_an_abort_hands_the_snapshots_over():
    group = Group(GroupRole.PREFILL)
    group.assign("a", 300)
    group.run()
    group.scheduler.advance(0, Aborted(RequestId("a"), 0))
    group.run()
    group.scheduler.advance(0, HandoffSent(RequestId("a"), 0))
    assert group.scheduler.check() == []
    group.scheduler.advance(61 * SECOND_NS, Tick())
    assert group.stats.held == 0


def test_the_next_attempt_replaces_the_snapshot_of_the_one_before():
    group = Group()
    group.assign("a", 300)
    group.run()
    group.assign("a", 300, attempt=1)
    group.run()
    assert group.kept == [("a", 256), ("a", 256)]
    assert group.stats.held == 1
