"""When the state of a sequence is kept."""

from __future__ import annotations

import pytest

from millpond.control.group_scheduler import GroupParams, GroupRole
from millpond.control.prefill_scheduler import PrefillParams
from millpond.core.events import Assigned, HandoffArrived
from millpond.core.ids import DpRank, GroupId, RankRef, RequestId
from millpond.sim.sim_engine import token_at
from tests.sim.making import KV, Engines, make_assign, make_scheduler, make_spec

PARAMS = GroupParams(prefill=PrefillParams(max_step_tokens=300))
MODEL = {"has_state": True, "replay_tokens": 128, "can_load": True}


class Group:
    """A group and its engine; notes what was kept, and each chunk."""

    def __init__(self, role=GroupRole.MIXED, **more):
        more = {**MODEL, **more}
        self.scheduler = make_scheduler(role, params=PARAMS, **more)
        self.engines = Engines(1, **more)
        self.kept, self.rolling, self.chunks = [], [], []

    def assign(self, name, num_prompt, max_tokens=1, kv=KV, **more):
        spec = make_spec(name, num_prompt, max_tokens, kv=kv, **more)
        me = RankRef(self.scheduler.group, DpRank(0))
        prefill = RankRef(GroupId("p0"), DpRank(0)) if self.scheduler.role is GroupRole.DECODE else me
        self.scheduler.advance(0, Assigned(make_assign(spec, prefill, me)))
        return spec

    def run(self):
        while (plan := self.scheduler.next_plan(0)) is not None:
            for rank in plan.ranks:
                self.kept += [(c.request_id, c.position) for c in rank.keep]
                self.rolling += [c.is_rolling for c in rank.keep]
                self.chunks += [(c.request_id, c.begin, c.end) for c in rank.chunks]
            if plan.ranks:
                self.scheduler.advance(0, self.engines.run(plan))
            assert self.scheduler.check() == []


def test_a_chunk_ends_at_the_last_block_border_of_the_prompt():
    group = Group()
    group.assign("a", 500)
    group.run()
    assert group.chunks == [("a", 0, 300), ("a", 300, 384), ("a", 384, 500)]
    assert group.kept == [("a", 384)]
    assert group.rolling == [False]


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


@pytest.mark.parametrize("more", [{"has_state": False}, {"can_load": False}])
def test_where_no_state_is_kept_there_are_no_extra_borders(more):
    group = Group(**more)
    group.assign("a", 500, 200, branch_points=(128,))
    group.run()
    assert group.chunks == [("a", 0, 300), ("a", 300, 500)]
    assert group.kept == []


def test_of_a_request_that_shares_nothing_no_state_is_kept():
    group = Group()
    group.assign("a", 500, 200, kv=None)
    group.run()
    assert group.kept == []


def test_the_rest_of_a_step_goes_to_the_next_sequence():
    group = Group()
    group.assign("a", 130)
    group.assign("b", 100)
    group.run()
    assert group.chunks == [("a", 0, 128), ("b", 0, 100), ("a", 128, 130)]


def test_decoding_keeps_each_border_in_place_of_the_one_before():
    group = Group()
    group.assign("a", 130, max_tokens=300)
    group.run()
    assert group.kept == [("a", 128), ("a", 256), ("a", 384)]
    assert group.rolling == [False, True, True]


def test_a_decode_rank_keeps_what_it_crosses():
    group = Group(GroupRole.DECODE)
    spec = group.assign("a", 127, max_tokens=4)
    group.run()
    group.scheduler.advance(0, HandoffArrived(RequestId("a"), 0, token_at(spec.sampling, 127)))
    group.run()
    assert group.kept == [("a", 128)]
