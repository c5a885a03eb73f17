"""When cached KV is loaded, where a prefill begins with it, and what happens if it does not come."""

from __future__ import annotations

import pytest

from millpond.control.group_scheduler import GroupParams, GroupRole
from millpond.control.kv_loads import OVERTAKE_NS
from millpond.control.prefill_scheduler import PrefillParams
from millpond.core.errors import InvariantBroken
from millpond.core.events import Aborted, Assigned, HandoffArrived, HandoffClosed, HandoffFailed, Loaded
from millpond.core.ids import DpRank, GroupId, RankRef, RequestId
from millpond.core.plan import LoadEnd
from millpond.core.request import FinishReason, StateRestore
from millpond.sim.sim_engine import token_at
from tests.sim.making import KV, Engines, make_assign, make_scheduler, make_spec

STATE = {"has_state": True, "replay_tokens": 128}


class Group:
    """A group with a node daemon, its engine, and everything that its plans said."""

    def __init__(self, role=GroupRole.MIXED, max_step_tokens=1000, max_loads_ahead=4, **more):
        prefill = PrefillParams(max_step_tokens=max_step_tokens, max_loads_ahead=max_loads_ahead)
        more = {"can_load": True, "num_blocks": 40, **more}
        self.scheduler = make_scheduler(role, params=GroupParams(prefill=prefill), **more)
        self.engines = Engines(1, **more)
        self.now_ns = 0
        self.loads, self.swaps, self.ends, self.chunks, self.starts = [], [], [], [], []
        self.restored, self.outputs, self.finished, self.sends, self.finishes = [], [], [], [], []

    def assign(self, name="r", num_prompt=600, max_tokens=1, **more):
        spec = make_spec(name, num_prompt, max_tokens, **more)
        me, other = RankRef(self.scheduler.group, DpRank(0)), RankRef(GroupId("x0"), DpRank(0))
        prefill = other if self.scheduler.role is GroupRole.DECODE else me
        decode = other if self.scheduler.role is GroupRole.PREFILL else me
        self.scheduler.advance(0, Assigned(make_assign(spec, prefill, decode)))
        return spec

    def loaded(self, name, num_tokens, state_position=-1, attempt=0, **more):
        self.scheduler.advance(
            self.now_ns, Loaded(RequestId(name), attempt, num_tokens, state_position, **more)
        )

    def plan(self):
        plan = self.scheduler.next_plan(self.now_ns)
        assert self.scheduler.check() == []
        if plan is not None:
            self.loads += plan.loads
            self.swaps += plan.swaps
            self.ends += plan.unloads
            self.sends += plan.sends
            self.finishes += plan.finishes
            self.outputs += [token for _, token in plan.outputs]
            self.finished += plan.ended
            for rank in plan.ranks:
                self.chunks += [(c.request_id, c.begin, c.end) for c in rank.chunks]
                self.restored += [(c.request_id, c.position) for c in rank.restore]
                self.starts += rank.start
            self.engines.note(plan)
        return plan

    def step(self, lost=None):
        """One plan; its step with it. False if there is nothing to do."""
        plan = self.plan()
        if plan is not None and plan.ranks:
            self.scheduler.advance(0, self.engines.run(plan, lost))
            assert self.scheduler.check() == []
        return plan is not None

    def run(self):
        while self.step():
            pass


def test_a_hit_is_loaded_swapped_in_and_not_computed():
    group = Group()
    group.assign(num_cached=512)
    group.run()
    (order,) = group.loads
    assert (order.kv, order.located, order.wants_state) == (KV, b"there", False)
    assert list(order.token_ids) == list(range(512))
    assert group.chunks == []
    group.loaded("r", 512)
    group.run()
    assert group.chunks == [("r", 512, 600)]
    (swap,), (start,) = group.swaps, group.starts
    assert swap.block_table == start.block_table[:4]
    assert (start.kv, start.num_stored_blocks, start.is_approximate) == (KV, 4, False)
    assert [token.num_cached_tokens for token in group.outputs] == [512]
    assert group.ends == [LoadEnd(RequestId("r"), 0, DpRank(0))]


@pytest.mark.parametrize("more", [{"num_cached": 0}, {"num_cached": 0, "kv": KV}])
def test_without_a_hit_nothing_waits(more):
    group = Group()
    group.assign(**more)
    group.run()
    assert group.chunks == [("r", 0, 600)]
    assert group.loads == group.ends == []
    assert [token.num_cached_tokens for token in group.outputs] == [0]


def test_without_a_node_daemon_everything_is_computed():
    group = Group(can_load=False)
    group.assign(num_cached=512)
    group.run()
    assert group.chunks == [("r", 0, 600)]
    assert group.loads == []


@pytest.mark.parametrize(("num_loaded", "begin"), [(0, 0), (100, 0), (128, 128), (384, 384), (900, 512)])
def test_less_may_come_than_was_found_but_never_more(num_loaded, begin):
    group = Group()
    group.assign(num_cached=512)
    group.run()
    group.loaded("r", num_loaded)
    group.run()
    assert group.chunks == [("r", begin, 600)]
    assert len(group.ends) == 1
    assert sum(len(swap.block_table) for swap in group.swaps) == begin // 128


def test_the_first_answer_counts():
    group = Group()
    group.assign(num_cached=512)
    group.run()
    group.loaded("r", 256)
    group.loaded("r", 512)
    group.plan()
    group.loaded("r", 0)
    assert group.chunks == [("r", 256, 600)]


def test_answers_to_nobody_and_late_ones_are_harmless():
    group = Group()
    group.loaded("nobody", 128)
    group.assign(num_cached=512)
    group.run()
    group.loaded("r", 512, attempt=1)
    assert not group.step()
    group.loaded("r", 512)
    group.run()
    group.loaded("r", 512)
    group.run()
    assert len(group.ends) == 1


def test_nobody_is_overtaken_while_the_head_waits_for_its_load():
    group = Group()
    group.assign("a", num_cached=512)
    group.assign("b", 100)
    group.run()
    assert group.chunks == []
    group.loaded("a", 512)
    group.run()
    assert group.chunks == [("a", 512, 600), ("b", 0, 100)]


def test_who_waits_for_long_for_a_load_is_overtaken():
    group = Group(max_step_tokens=50)
    group.assign("a", num_cached=512)
    group.assign("b", 100)
    group.run()
    group.now_ns = OVERTAKE_NS - 1
    assert group.scheduler.is_timed
    group.run()
    assert group.chunks == []
    group.now_ns = OVERTAKE_NS
    group.step()
    assert not group.scheduler.is_timed
    group.loaded("a", 512)
    group.run()
    assert group.chunks == [("b", 0, 50), ("a", 512, 562), ("a", 562, 600), ("b", 50, 62), ("b", 62, 100)]


def test_loads_that_were_ordered_together_are_overtaken_together():
    """And so is what could not be ordered behind them; what comes later has its time, too."""
    group = Group(max_loads_ahead=3)
    for name in "abcd":
        group.assign(name, num_cached=512)
    group.assign("e", 100)
    group.run()
    group.now_ns = OVERTAKE_NS
    group.run()
    assert group.chunks == []
    group.now_ns = 2 * OVERTAKE_NS  # "d" was not awaited while others were before it
    group.run()
    assert group.chunks == [("e", 0, 100)]
    group.loaded("b", 512)
    group.run()
    assert [name for name, _, _ in group.chunks] == ["e", "b"]
    assert [order.request_id for order in group.loads] == ["a", "b", "c", "d"]
    for name in "acd":
        group.loaded(name, 0)
    group.run()
    assert [name for name, _, _ in group.chunks] == ["e", "b", "a", "c", "c", "d"]


def test_what_was_overtaken_is_first_once_it_is_answered():
    group = Group(GroupRole.PREFILL, num_blocks=6, max_step_tokens=1000)
    group.assign("a", num_cached=512)
    group.run()
    group.now_ns = OVERTAKE_NS
    group.assign("b", 300)
    group.assign("c", 300)
    group.run()
    group.loaded("a", 512)
    assert group.scheduler.room == 0, "it waits for memory"
    group.assign("d", 100)
    group.scheduler.advance(group.now_ns, HandoffFailed(RequestId("b"), 0, "gone"))
    group.run()
    assert [name for name, _, _ in group.chunks] == ["b", "c"]
    group.scheduler.advance(group.now_ns, HandoffFailed(RequestId("c"), 0, "gone"))
    group.run()
    assert [name for name, _, _ in group.chunks] == ["b", "c", "a", "d"]


def test_a_rank_pulls_on_past_loads_of_which_nothing_comes():
    group = Group(GroupRole.PREFILL, max_loads_ahead=2)
    group.assign("a", num_cached=512)
    group.assign("b", num_cached=512)
    group.run()
    assert group.scheduler.room == 0
    group.now_ns = OVERTAKE_NS
    group.run()
    assert group.scheduler.room == 2


def test_a_span_of_decode_steps_ends_where_time_may_let_somebody_overtake():
    group = Group()
    group.assign("r", 100, max_tokens=500)
    group.step()
    group.assign("a", num_cached=512)
    plan = group.scheduler.next_plan(0, 8)
    assert plan.num_steps == 8, "nobody is behind it"
    group.scheduler.advance(0, group.engines.run(plan))
    group.assign("b", 100)
    assert group.scheduler.next_plan(0, 8).num_steps == 1


@pytest.mark.parametrize("reason", ["no_room", "deadline"])
def test_a_load_that_had_no_room_behind_others_is_ordered_again_when_its_turn_is_near(reason):
    group = Group(GroupRole.PREFILL, max_step_tokens=50)
    for name in "abc":
        group.assign(name, num_cached=512)
    group.plan()
    group.loaded("a", 512)
    group.loaded("b", 512)
    group.loaded("c", 0, refused=reason)
    plan = group.plan()
    assert [end.request_id for end in plan.unloads] == ["c"]
    assert plan.loads == ()
    group.scheduler.advance(0, group.engines.run(plan))
    assert group.scheduler.views()[0].queued_tokens == 38 + 2 * 88, "it is hoped for still"
    while len(group.loads) == 3:
        group.step()
    assert [order.request_id for order in group.loads] == ["a", "b", "c", "c"]
    assert group.chunks[-1][0] == "b"
    group.loaded("c", 512)
    group.run()
    assert [begin for name, begin, _ in group.chunks if name == "c"] == [512, 536, 586]
    assert sorted(end.request_id for end in group.ends) == ["a", "b", "c", "c"]


@pytest.mark.parametrize("reason", ["absent", "no_daemon", "daemon_lost", "layout", "stopping", ""])
def test_other_refusals_are_final(reason):
    group = Group()
    for name in "abc":
        group.assign(name, num_cached=512)
    group.plan()
    group.loaded("c", 0, refused=reason)
    group.loaded("a", 512)
    group.loaded("b", 512)
    group.run()
    assert len(group.loads) == 3
    assert group.chunks[-1] == ("c", 0, 600)


def test_whose_turn_it_is_gets_no_second_load():
    group = Group()
    group.assign("a", num_cached=512)
    group.plan()
    group.loaded("a", 0, refused="no_room")
    group.run()
    assert group.chunks == [("a", 0, 600)]
    assert len(group.loads) == len(group.ends) == 1


def test_a_load_is_ordered_again_twice_at_most_and_holds_up_nobody_meanwhile():
    group = Group(GroupRole.PREFILL, max_step_tokens=50)
    for name in "abc":
        group.assign(name, num_cached=512)
    group.assign("d", 10)
    group.plan()
    group.loaded("c", 0, refused="no_room")
    group.loaded("a", 512)
    group.loaded("b", 512)
    for num_loads in (4, 5):
        while len(group.loads) < num_loads:
            assert group.step()
        group.loaded("c", 0, refused="no_room")
    group.run()
    assert len(group.loads) == 5
    assert [name for name, _, end in group.chunks if end in {600, 10}] == ["a", "b", "d", "c"]
    assert group.chunks[-1] == ("c", 550, 600)


def test_an_abort_of_what_is_wanted_again_ends_nothing_twice():
    group = Group(GroupRole.PREFILL, max_step_tokens=50)
    for name in "abc":
        group.assign(name, num_cached=512)
    group.plan()
    group.loaded("a", 512)
    group.loaded("c", 0, refused="no_room")
    group.step()
    group.scheduler.advance(0, Aborted(RequestId("c"), 0))
    group.plan()
    assert [end.request_id for end in group.ends] == ["c"]


def test_loads_of_the_queue_are_ordered_ahead_in_its_order_and_no_further():
    group = Group(max_loads_ahead=2)
    for name in "abcd":
        group.assign(name, num_cached=512)
    group.run()
    assert [order.request_id for order in group.loads] == ["a", "b"]
    group.loaded("b", 512)
    group.run()
    assert [order.request_id for order in group.loads] == ["a", "b"]
    group.loaded("a", 512)
    group.run()
    assert [order.request_id for order in group.loads] == ["a", "b", "c", "d"]
    group.loaded("c", 512)
    group.loaded("d", 512)
    group.run()
    assert [name for name, _, _ in group.chunks] == ["a", "b", "c", "d"]


def test_the_queue_counts_only_what_is_to_be_computed():
    group = Group(max_step_tokens=50)
    group.assign(num_cached=512)
    assert group.scheduler.views()[0].queued_tokens == 600 - 512
    group.run()
    group.loaded("r", 256)
    assert group.scheduler.views()[0].queued_tokens == 600 - 256
    group.step()
    assert group.scheduler.views()[0].queued_tokens == 600 - 256 - 50


def test_a_rank_pulls_on_while_loads_are_on_their_way_but_not_while_memory_lacks():
    group = Group(GroupRole.PREFILL, num_blocks=5, max_loads_ahead=3)
    group.assign("a", num_cached=512)
    group.run()
    assert group.scheduler.room == 2
    group.assign("b", num_cached=512)
    group.assign("c", num_cached=512)
    assert group.scheduler.room == 0
    group.run()
    for name in "abc":
        group.loaded(name, 512)
    group.run()
    assert [name for name, _, _ in group.chunks] == ["a"]
    assert group.scheduler.room == 0
    group.scheduler.advance(0, HandoffFailed(RequestId("a"), 0, "gone"))
    group.run()
    assert [name for name, _, _ in group.chunks] == ["a", "b"]


def test_what_can_never_fit_loads_nothing():
    group = Group(num_blocks=4)
    group.assign(num_cached=512)
    group.run()
    assert [end.reason for end in group.finished] == [FinishReason.REFUSED]
    assert group.loads == group.ends == []


# --- ends -------------------------------------------------------------------------------------


@pytest.mark.parametrize("when", ["unordered", "ordered", "answered", "computing", "computed"])
@pytest.mark.parametrize("role", [GroupRole.PREFILL, GroupRole.MIXED])
def test_an_abort_ends_a_load_exactly_if_it_is_open(role, when):
    group = Group(role, max_step_tokens=50)
    group.assign(num_cached=512, max_tokens=50)
    if when != "unordered":
        group.plan()
    if when not in ("unordered", "ordered"):
        group.loaded("r", 512)
    if when == "computing":
        group.step()
    if when == "computed":
        for _ in range(3):
            group.step()
        assert len(group.ends) == 1
    group.scheduler.advance(0, Aborted(RequestId("r"), 0))
    group.run()
    assert len(group.ends) == len(group.loads) == (when != "unordered")
    for _ in range(2):
        group.scheduler.advance(0, HandoffClosed(RequestId("r"), 0))
    assert group.scheduler.held_requests() == ()


def test_a_newer_attempt_loads_anew():
    group = Group()
    group.assign(num_cached=512)
    group.run()
    group.assign(num_cached=512, attempt=1)
    plan = group.plan()
    assert [end.attempt for end in plan.unloads] == [0]
    assert [order.attempt for order in plan.loads] == [1]


# --- loss -------------------------------------------------------------------------------------


def test_a_broken_load_begins_anew_with_what_is_in_place():
    group = Group()
    group.assign(num_cached=512)
    group.run()
    group.loaded("r", 512)
    group.step(lost={"r": 256})
    assert group.outputs == []
    assert group.scheduler.views()[0].queued_tokens == 600 - 256
    group.run()
    assert group.chunks == [("r", 512, 600), ("r", 256, 600)]
    assert [start.num_stored_blocks for start in group.starts] == [4, 2]
    assert len(group.swaps) == len(group.ends) == 1
    assert [token.num_cached_tokens for token in group.outputs] == [256]


def test_only_the_chunk_that_lost_its_load_is_void():
    group = Group()
    group.assign("a", num_cached=512)
    group.assign("b", 100)
    group.run()
    group.loaded("a", 512)
    group.step(lost={"a": 0})
    group.step()
    assert [token.request_id for token in group.outputs] == ["b"]
    group.run()
    assert [token.request_id for token in group.outputs] == ["b", "a"]
    assert group.chunks == [("a", 512, 600), ("b", 0, 100), ("a", 0, 600)]


def test_each_loss_takes_a_block_at_least():
    """Whatever a rank says, a sequence does not begin anew for ever."""
    group = Group()
    group.assign(num_cached=512)
    group.run()
    group.loaded("r", 512)
    for _ in range(4):
        group.step(lost={"r": 512})
    group.run()
    assert [begin for _, begin, _ in group.chunks] == [512, 384, 256, 128, 0]


def test_a_load_may_break_at_a_later_chunk():
    group = Group(max_step_tokens=50)
    group.assign(num_cached=512)
    group.run()
    group.loaded("r", 512)
    group.step()
    group.step(lost={"r": 384})
    group.run()
    assert group.chunks[:3] == [("r", 512, 562), ("r", 562, 600), ("r", 384, 434)]
    assert [token.position for token in group.outputs] == [600]


def test_an_abort_that_waits_for_the_step_frees_a_lost_sequence_too():
    group = Group(GroupRole.PREFILL)
    group.assign(num_cached=512)
    group.run()
    group.loaded("r", 512)
    plan = group.plan()
    group.scheduler.advance(0, Aborted(RequestId("r"), 0))
    group.scheduler.advance(0, group.engines.run(plan, {RequestId("r"): 0}))
    plan = group.plan()
    assert len(plan.closes) == len(plan.unloads) == 1
    group.scheduler.advance(0, HandoffClosed(RequestId("r"), 0))
    assert group.scheduler.views()[0].free_blocks == 40


def test_a_sequence_without_a_load_cannot_lose_it():
    group = Group()
    group.assign()
    plan = group.plan()
    with pytest.raises(InvariantBroken):
        group.scheduler.advance(0, group.engines.run(plan, {RequestId("r"): 0}))


# --- window state -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("policy", "position", "chunks", "restored", "is_approximate"),
    [
        (StateRestore.REPLAY, 512, [("r", 512, 600)], [("r", 512)], False),
        (StateRestore.REPLAY, 128, [("r", 128, 512), ("r", 512, 600)], [("r", 128)], False),
        (StateRestore.REPLAY, -1, [("r", 384, 512), ("r", 512, 600)], [], True),
        (StateRestore.REPLAY, 640, [("r", 384, 512), ("r", 512, 600)], [], True),
        (StateRestore.EXACT, 512, [("r", 512, 600)], [("r", 512)], False),
        (StateRestore.EXACT, 128, [("r", 128, 512), ("r", 512, 600)], [("r", 128)], False),
        (StateRestore.EXACT, -1, [("r", 0, 512), ("r", 512, 600)], [], False),
    ],
)
def test_a_model_with_state_begins_where_its_state_is_right_or_replays(
    policy, position, chunks, restored, is_approximate
):
    group = Group(**STATE)
    group.assign(num_cached=512, state_restore=policy)
    group.run()
    assert group.loads[0].wants_state
    group.loaded("r", 512, position)
    group.run()
    assert group.chunks == chunks
    assert group.restored == restored
    assert [start.is_approximate for start in group.starts] == [is_approximate]
    assert [start.num_stored_blocks for start in group.starts] == [4]
    assert [token.num_cached_tokens for token in group.outputs] == [chunks[0][1]]
    assert len(group.ends) == 1


@pytest.mark.parametrize(
    ("model", "policy", "num_tokens", "position", "is_approximate"),
    [
        (STATE, StateRestore.REPLAY, 512, 512, True),
        (STATE, StateRestore.REPLAY, 512, 128, True),
        (STATE, StateRestore.REPLAY, 512, -1, True),
        (STATE, StateRestore.REPLAY, 0, -1, False),
        (STATE, StateRestore.EXACT, 512, 512, False),
        (STATE, StateRestore.EXACT, 512, -1, False),
        ({}, StateRestore.REPLAY, 512, -1, False),
    ],
)
def test_what_begins_with_what_may_be_approximate_is_unless_nothing_ever_is(
    model, policy, num_tokens, position, is_approximate
):
    """Its state is right, and all the same: what it was made of is not."""
    group = Group(GroupRole.PREFILL, **model)
    group.assign(num_cached=512, state_restore=policy, max_tokens=4)
    group.run()
    group.loaded("r", num_tokens, position, is_approximate=True)
    group.run()
    assert [start.is_approximate for start in group.starts] == [is_approximate]
    assert [finish.is_approximate for finish in group.finishes] == [is_approximate]


def test_what_nothing_is_left_of_after_a_loss_makes_nothing_approximate():
    group = Group(**STATE)
    group.assign(num_cached=512)
    group.run()
    group.loaded("r", 512, 512, is_approximate=True)
    group.step(lost={"r": 0})
    group.run()
    assert [start.is_approximate for start in group.starts] == [True, False]


@pytest.mark.parametrize("is_approximate", [False, True])
def test_a_decode_rank_flags_what_follows_an_approximate_prefill(is_approximate):
    group = Group(GroupRole.DECODE, **STATE)
    spec = group.assign(max_tokens=4, num_prompt=640, kv=KV)
    group.run()
    first = token_at(spec.sampling, 640)
    group.scheduler.advance(0, HandoffArrived(RequestId("r"), 0, first, is_approximate))
    group.run()
    assert [start.is_approximate for start in group.starts] == [is_approximate]


def test_a_replay_writes_no_block_below_the_hit_however_it_is_cut():
    group = Group(max_step_tokens=50, **STATE)
    group.assign(num_cached=512)
    group.run()
    group.loaded("r", 512)
    begins = []
    while (plan := group.plan()) is not None:
        begins += [(c.begin, c.write_begin) for rank in plan.ranks for c in rank.chunks]
        if plan.ranks:
            group.scheduler.advance(0, group.engines.run(plan))
    assert begins == [(384, 512), (434, 512), (484, 512), (512, 512), (562, 512)]


def test_no_state_is_kept_amid_a_replay():
    group = Group(has_state=True, replay_tokens=128, min_computed_tokens=400)
    group.assign(num_cached=512, branch_points=(256, 384, 512))
    group.run()
    group.loaded("r", 512)
    kept = []
    while (plan := group.plan()) is not None:
        kept += [copy.position for rank in plan.ranks for copy in rank.keep]
        if plan.ranks:
            group.scheduler.advance(0, group.engines.run(plan))
    assert group.chunks == [("r", 200, 512), ("r", 512, 600)]
    assert kept == [512]


@pytest.mark.parametrize(
    ("num_left", "begin", "restored"), [(384, 256, [256]), (256, 256, [256]), (128, 0, [])]
)
def test_a_state_within_what_is_left_is_used_after_a_loss(num_left, begin, restored):
    group = Group(**STATE)
    group.assign(num_cached=512)
    group.run()
    group.loaded("r", 512, 256)
    group.step(lost={"r": num_left})
    group.run()
    assert group.restored[0] == ("r", 256)
    assert [position for _, position in group.restored[1:]] == restored
    assert group.chunks[1][1] == begin


def test_a_decode_rank_loads_nothing_and_knows_what_prefill_keeps():
    group = Group(GroupRole.DECODE, **STATE)
    spec = group.assign(num_cached=512, max_tokens=4, num_prompt=640)
    group.run()
    group.scheduler.advance(0, HandoffArrived(RequestId("r"), 0, token_at(spec.sampling, 640)))
    group.run()
    assert group.loads == []
    assert [(start.kv, start.num_stored_blocks) for start in group.starts] == [(KV, 5)]


def test_the_first_sampled_token_does_not_make_a_block_stored():
    group = Group(GroupRole.DECODE)
    spec = group.assign(num_prompt=127, max_tokens=4, kv=KV)
    group.run()
    group.scheduler.advance(0, HandoffArrived(RequestId("r"), 0, token_at(spec.sampling, 127)))
    group.run()
    assert [start.num_stored_blocks for start in group.starts] == [0]
