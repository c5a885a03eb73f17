"""Random lives of a group: whatever comes, in whatever order, memory adds up and nobody is lost."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from millpond.control.decode_scheduler import DecodeParams
from millpond.control.group_scheduler import GroupParams, GroupRole
from millpond.control.invariants import require_sound
from millpond.control.prefill_scheduler import PrefillParams
from millpond.core.chance import Chance
from millpond.core.events import (
    Aborted,
    Assigned,
    HandoffArrived,
    HandoffClosed,
    HandoffFailed,
    HandoffSent,
    Loaded,
    Tick,
)
from millpond.core.ids import DpRank, GroupId, RankRef, RequestId
from millpond.core.plan import GroupPlan, StepKind
from millpond.core.request import FinishReason, StateRestore
from millpond.core.units import BLOCK_TOKENS
from millpond.policies.step_vote import StepVoteParams
from millpond.sim.sim_engine import token_at
from tests.sim.making import KV, Engines, make_assign, make_scheduler, make_spec

NAMES = [f"r{i}" for i in range(12)]
OTHER = RankRef(GroupId("x0"), DpRank(0))
MAX_STEP_TOKENS = 96


class GroupLife(RuleBasedStateMachine):
    """A scheduler, engines that check its plans, and a world that says anything at any time."""

    role: GroupRole

    @initialize(
        num_ranks=st.integers(1, 3),
        num_blocks=st.integers(1, 8),
        num_slots=st.integers(1, 5),
        can_load=st.sampled_from([False, True, True]),
        has_state=st.booleans(),
        min_computed_tokens=st.sampled_from([1, 1, 140]),
        num_drafts=st.sampled_from([0, 5]),
        reserve=st.sampled_from([0.0, 0.5, 2.0]),
        num_home_blocks=st.sampled_from([0, 4, 9]),
        num_rows=st.integers(1, 3),
    )
    def start(
        self,
        num_ranks,
        num_blocks,
        num_slots,
        can_load,
        has_state,
        min_computed_tokens,
        num_drafts,
        reserve,
        num_home_blocks,
        num_rows,
    ):
        if num_home_blocks:
            num_blocks = min(num_blocks, 3)  # so that there is something to stream
        params = GroupParams(
            prefill=PrefillParams(
                max_step_tokens=MAX_STEP_TOKENS, fetch_ahead_tokens=200, max_held_seqs=4, max_loads_ahead=2
            ),
            decode=DecodeParams(reserve_blocks_per_seq=reserve, num_draft_tokens=num_drafts),
            vote=StepVoteParams(all_vote_interval=3, any_vote_interval=5, max_prefill_run=2),
        )
        model = {
            "can_load": can_load,
            "has_state": has_state,
            "replay_tokens": BLOCK_TOKENS if has_state else 0,
            "min_computed_tokens": min_computed_tokens,
            "max_drafts": 4,
            "num_home_blocks": num_home_blocks,
            "num_rows": num_rows,
        }
        self.scheduler = make_scheduler(self.role, num_ranks, num_blocks, num_slots, params, **model)
        self.num_ranks, self.num_blocks, self.num_slots = num_ranks, num_blocks, num_slots
        self.engines = Engines(num_ranks, num_blocks=num_blocks, **model)
        self.step: GroupPlan | None = None
        self.specs = {}
        self.attempts = Counter()
        self.closing = set()
        self.sending = set()
        self.receiving = set()
        self.swapped = {}
        """Leading tokens that an engine was given, by request."""
        self.reported = Counter()
        self.dropped = set()
        """Aborted, replaced, or handed off and confirmed."""

    # --- events ---

    @rule(
        name=st.sampled_from(NAMES),
        rank=st.integers(0, 2),
        num_prompt=st.integers(1, 800),
        max_tokens=st.integers(1, 150),
        back=st.sampled_from([0, 0, 0, 1, 2]),
        num_hit=st.integers(0, 4),
        policy=st.sampled_from(list(StateRestore)),
    )
    def assign(self, name, rank, num_prompt, max_tokens, back, num_hit, policy):
        """Mostly the next attempt; sometimes one that was there before, or the same again."""
        attempt = max(self.attempts[name] - back, 0)
        key = (name, attempt)
        if key not in self.specs:
            more = {"branch_points": (BLOCK_TOKENS, 2 * BLOCK_TOKENS, 77), "state_restore": policy}
            more["num_cached"] = num_hit * BLOCK_TOKENS
            self.specs[key] = make_spec(name, num_prompt, max_tokens, attempt=attempt, **more)
            self.attempts[name] = attempt + 1
            self.dropped |= {old for old in self.specs if old[0] == name and old[1] < attempt}
        elif self.is_over(key):
            return  # the controller never assigns what it knows to be over
        me = RankRef(self.scheduler.group, DpRank(rank % self.num_ranks))
        prefill = OTHER if self.role is GroupRole.DECODE else me
        decode = OTHER if self.role is GroupRole.PREFILL else me
        self.tell(Assigned(make_assign(self.specs[key], prefill, decode)))

    @rule(name=st.sampled_from(NAMES), back=st.integers(0, 2))
    def abort(self, name, back):
        key = (name, self.attempts[name] - back)
        if key in self.specs:
            self.dropped.add(key)
        self.tell(Aborted(RequestId(name), key[1]))

    @rule(
        kind=st.sampled_from(["sent", "arrived", "failed", "closed"]),
        name=st.sampled_from(NAMES),
        back=st.integers(1, 3),
    )
    def hear_of_handoff(self, kind, name, back):
        """Asked for or not, repeated, of strangers: as long as it could be true."""
        self.hear(kind, (RequestId(name), self.attempts[name] - back))

    def hear(self, kind, key):
        if kind == "sent":
            if key in self.sending:
                self.dropped.add(key)
            self.tell(HandoffSent(*key))
        elif kind == "arrived":
            spec = self.specs.get(key)
            token_id = token_at(spec.sampling, spec.num_known_tokens) if spec is not None else 1
            self.tell(HandoffArrived(*key, token_id))
        elif kind == "failed":
            self.tell(HandoffFailed(*key, "so it goes"))
        elif key in self.closing:
            self.tell(HandoffClosed(*key))

    @rule(
        name=st.sampled_from(NAMES),
        back=st.sampled_from([1, 1, 1, 0, 2]),
        num_blocks=st.integers(0, 4),
        state_blocks=st.integers(-1, 4),
    )
    def hear_of_load(self, name, back, num_blocks, state_blocks):
        """Ordered or not, again, too late, of strangers, of more than was asked for."""
        key = (RequestId(name), self.attempts[name] - back)
        self.tell(Loaded(*key, num_blocks * BLOCK_TOKENS, state_blocks * BLOCK_TOKENS))

    @precondition(lambda self: self.step is None and self.engines.chains)
    @rule(num_blocks=st.integers(1, 4), state_blocks=st.integers(-1, 4))
    def answer_a_load(self, num_blocks, state_blocks):
        """The oldest one that is open."""
        key = next(iter(self.engines.chains))
        self.tell(Loaded(*key, num_blocks * BLOCK_TOKENS, state_blocks * BLOCK_TOKENS))

    @rule()
    def tick(self):
        self.tell(Tick())

    @precondition(lambda self: self.step is None)
    @rule(max_steps=st.sampled_from([1, 1, 5]))
    def begin(self, max_steps):
        plan = self.scheduler.next_plan(0, max_steps)
        if plan is None:
            assert self.scheduler.next_plan(0, max_steps) is None
            return
        assert (
            plan.ranks
            or plan.sends
            or plan.receives
            or plan.closes
            or plan.outputs
            or plan.ended
            or plan.started
            or plan.finishes
            or plan.loads
            or plan.swaps
            or plan.unloads
        )
        self.note(plan)
        if plan.ranks:
            self.check_step(plan)
            self.step = plan

    @precondition(lambda self: self.step is not None)
    @rule(losses=st.lists(st.sampled_from([None, 0, 1, 4]), max_size=4))
    def finish(self, losses=()):
        """Loads of some chunks break, or none."""
        step, self.step = self.step, None
        loaded = [c.request_id for rank in step.ranks for c in rank.chunks if self.is_loaded(c.request_id)]
        lost = {
            name: min(num_blocks * BLOCK_TOKENS, self.swapped[name])
            for name, num_blocks in zip(loaded, losses, strict=False)
            if num_blocks is not None
        }
        self.swapped |= lost
        self.scheduler.advance(0, self.engines.run(step, lost))

    def is_loaded(self, name):
        return any(key[0] == name for key in self.engines.chains) and name in self.swapped

    # --- bookkeeping ---

    def tell(self, event):
        before = self.scheduler.views(), self.scheduler.held_requests(), self.scheduler.num_assigns_seen
        self.scheduler.advance(0, event)
        if self.step is not None:
            after = self.scheduler.views(), self.scheduler.held_requests(), self.scheduler.num_assigns_seen
            assert after == before, "an event was not held while a step runs"

    def is_over(self, key):
        return key in self.dropped or self.reported[key] > 0

    def note(self, plan):
        self.sending |= {(m.request_id, m.attempt) for m in plan.finishes}
        self.closing |= {(m.request_id, m.attempt) for m in plan.closes}
        for end in plan.unloads:
            self.swapped.pop(end.request_id, None)
        self.swapped |= {swap.request_id: len(swap.block_table) * BLOCK_TOKENS for swap in plan.swaps}
        self.engines.note(plan)
        assert len(self.engines.chains) <= 2 * self.num_ranks, "too many loads at once"
        for end in plan.ended:
            key = (end.request_id, end.attempt)
            self.reported[key] += 1
            assert self.reported[key] == 1, f"{key} ended twice"
            assert key not in self.scheduler.held_requests()
        for _, token in plan.outputs:
            spec = self.specs[token.request_id, token.attempt]
            assert token.token_id == token_at(spec.sampling, token.position)
            assert spec.num_known_tokens <= token.position < spec.max_total_tokens

    def check_step(self, plan):
        assert len(plan.ranks) == self.num_ranks
        assert any(rank.chunks or rank.rows for rank in plan.ranks), "an empty step"
        for rank in plan.ranks:
            for start in rank.start:
                spec = self.specs[start.request_id, start.attempt]
                assert not (start.is_approximate and spec.state_restore is StateRestore.EXACT)
                assert self.role is GroupRole.PREFILL or not start.staging
            assert all(copy.position % BLOCK_TOKENS == 0 for copy in rank.keep)
            if plan.kind is StepKind.PREFILL:
                assert not rank.rows
                assert sum(chunk.end - chunk.begin for chunk in rank.chunks) <= MAX_STEP_TOKENS
            else:
                assert not rank.chunks

    @invariant()
    def sound(self):
        if hasattr(self, "scheduler"):
            require_sound([self.scheduler])
            assert self.scheduler.room >= 0

    def teardown(self):
        """Abort everything and answer every close: all memory is back and everybody has an end."""
        if not hasattr(self, "scheduler"):
            return
        for key in self.specs:
            if not self.is_over(key):
                self.dropped.add(key)
                self.tell(Aborted(*key))
        for _ in range(40):
            if self.step is not None:
                self.finish()
            plan = self.scheduler.next_plan(0)
            if plan is not None:
                self.note(plan)
                self.step = plan if plan.ranks else None
            for key in sorted(self.closing):
                self.tell(HandoffClosed(*key))
        assert self.scheduler.held_requests() == ()
        for view in self.scheduler.views():
            assert (view.free_blocks, view.free_slots) == (self.num_blocks, self.num_slots)
            assert view.num_seqs == view.num_queued == view.queued_tokens == view.kv_tokens == 0
        assert [key for key in self.specs if not self.is_over(key)] == []
        self.tell(Tick())
        assert self.scheduler.next_plan(0) is None
        assert self.engines.chains == {}, "a load was never ended"


class PrefillLife(GroupLife):
    role = GroupRole.PREFILL


class DecodeLife(GroupLife):
    role = GroupRole.DECODE


class MixedLife(GroupLife):
    role = GroupRole.MIXED


LIFE = settings(max_examples=40, stateful_step_count=50, deadline=None)
TestPrefillLife = PrefillLife.TestCase
TestDecodeLife = DecodeLife.TestCase
TestMixedLife = MixedLife.TestCase
TestPrefillLife.settings = TestDecodeLife.settings = TestMixedLife.settings = LIFE


# --- laws -------------------------------------------------------------------------------------

REQUESTS = st.lists(
    st.tuples(st.integers(1, 300), st.integers(1, 200), st.integers(0, 40), st.booleans()),
    min_size=1,
    max_size=8,
)


def load(role, requests, num_ranks, num_blocks, *, has_state=False):
    """A group that was given all requests; a decode group has also received their KV."""
    model = {"has_state": has_state, "can_load": True, "replay_tokens": BLOCK_TOKENS if has_state else 0}
    scheduler = make_scheduler(role, num_ranks, num_blocks, num_slots=6, **model)
    engines = Engines(num_ranks, **model)
    for i, (num_prompt, max_tokens, min_tokens, stops) in enumerate(requests):
        me = RankRef(scheduler.group, DpRank(i % num_ranks))
        more = {"stop_token_ids": (1,), "min_tokens": min_tokens} if stops else {}
        spec = make_spec(f"r{i}", num_prompt, max_tokens, kv=KV, **more)
        prefill = OTHER if role is GroupRole.DECODE else me
        scheduler.advance(0, Assigned(make_assign(spec, prefill, me)))
    return scheduler, engines


def run(scheduler, engines, requests, max_steps, limit=20_000):
    """Run to the end; KV arrives when the group has nothing else to do, so that no event falls into a span.

    Returns outputs by request, ends in order, views by step, the kind of every step, and what states were
    kept.
    """
    outputs, ended, views, kinds, expected, kept = {}, [], {}, [], [], []
    for _ in range(limit):
        plan = scheduler.next_plan(0, max_steps)
        if plan is None:
            if not expected:
                return outputs, ended, views, kinds, kept
            for receive in expected:
                num_prompt = requests[int(receive.request_id[1:])][0]
                token_id = token_at(make_spec(receive.request_id).sampling, num_prompt)
                scheduler.advance(0, HandoffArrived(receive.request_id, 0, token_id))
            expected = []
            continue
        for _, token in plan.outputs:
            outputs.setdefault(token.request_id, []).append(token)
        ended += plan.ended
        expected += plan.receives
        if plan.ranks:
            kinds += [plan.kind] * plan.num_steps
            kept += [copy for rank in plan.ranks for copy in rank.keep]
            scheduler.advance(0, engines.run(plan))
            views[plan.step + plan.num_steps] = scheduler.views()
        require_sound([scheduler])
    pytest.fail("does not come to an end")


@pytest.mark.parametrize("role", [GroupRole.DECODE, GroupRole.MIXED])
@settings(max_examples=30)
@given(REQUESTS, st.integers(1, 3), st.integers(3, 12), st.integers(2, 200), st.booleans())
def test_a_plan_of_k_steps_is_k_plans_of_one(role, requests, num_ranks, num_blocks, max_steps, has_state):
    groups = [load(role, requests, num_ranks, num_blocks, has_state=has_state) for _ in range(2)]
    single = run(*groups[0], requests, 1)
    several = run(*groups[1], requests, max_steps)
    assert several[4] == single[4]
    assert several[0] == single[0]
    assert several[1] == single[1]
    assert several[3] == single[3]
    assert several[2].items() <= single[2].items()


def test_several_steps_are_really_used():
    requests = [(10, 100, 0, False)]
    scheduler, engines = load(GroupRole.MIXED, requests, 1, 4)
    spans = []
    while (plan := scheduler.next_plan(0, 64)) is not None:
        if plan.ranks:
            spans.append(plan.num_steps)
            scheduler.advance(0, engines.run(plan))
    assert sum(spans) == 100
    assert max(spans) == 64


@pytest.mark.parametrize("role", list(GroupRole))
@settings(max_examples=20)
@given(REQUESTS, st.integers(1, 3))
def test_same_events_same_plans(role, requests, num_ranks):
    twins = [load(role, requests, num_ranks, 6) for _ in range(2)]
    for _ in range(60):
        plans = [scheduler.next_plan(0) for scheduler, _ in twins]
        assert plans[0] == plans[1]
        if plans[0] is None:
            break
        if plans[0].ranks:
            for scheduler, engines in twins:
                scheduler.advance(0, engines.run(plans[0]))
        for scheduler, _ in twins:
            for finish in plans[0].finishes:
                scheduler.advance(0, HandoffSent(finish.request_id, finish.attempt))


@settings(max_examples=30)
@given(REQUESTS, st.integers(3, 12))
def test_every_request_is_served_within_its_own_work_and_that_before_it(requests, num_blocks):
    """Prefill is first come, first served: request i is done once the tokens up to it are computed."""
    scheduler, engines = load(GroupRole.MIXED, [(p, 1, 0, False) for p, *_ in requests], 1, num_blocks)
    budget = PrefillParams().max_step_tokens
    fitting = [(i, r[0]) for i, r in enumerate(requests) if r[0] <= num_blocks * 128]
    done_at, num_prefills = {}, 0
    while (plan := scheduler.next_plan(0)) is not None:
        for end in plan.ended:
            if end.reason is FinishReason.LENGTH:
                done_at[end.request_id] = num_prefills
        if plan.ranks:
            num_prefills += plan.kind is StepKind.PREFILL
            scheduler.advance(0, engines.run(plan))
    assert [f"r{i}" for i, _ in fitting] == sorted(done_at, key=lambda name: (done_at[name], name))
    work = 0
    for num_waits, (i, num_prompt) in enumerate(fitting, start=1):
        work += num_prompt  # at worst each one before left a rest of its step, waiting for memory
        assert done_at[f"r{i}"] <= -(-work // budget) + num_waits


# --- loads --------------------------------------------------------------------------------------

VISITS = st.lists(
    st.tuples(
        st.integers(1, 600),  # prompt
        st.integers(1, 200),  # output
        st.integers(0, 5),  # blocks that the gateway found
        st.sampled_from(list(StateRestore)),
        st.integers(0, 6),  # steps until the next one comes
    ),
    min_size=2,
    max_size=10,
)


def visit(role, visits, num_ranks, *, seed=0, is_sound=True, **model):
    """Serve requests whose loads are answered late and by chance; if not `is_sound`, they break, too.

    Returns outputs by request, and how many of their tokens were cached.
    """
    scheduler = make_scheduler(role, num_ranks, num_blocks=40, num_slots=4, **model)
    engines, chance, unanswered = (
        Engines(num_ranks, num_blocks=40, num_slots=4, **model),
        Chance(seed, "w"),
        [],
    )
    texts, cached = {}, {}

    def answer(order):
        asked = len(order.token_ids) // BLOCK_TOKENS
        num_blocks = asked if is_sound else chance.below(asked + 1)
        state_blocks = num_blocks - chance.below(num_blocks + 2)
        event = Loaded(order.request_id, 0, num_blocks * BLOCK_TOKENS, state_blocks * BLOCK_TOKENS)
        for _ in range(1 + chance.below(2)):
            scheduler.advance(0, event)

    def lost_in(plan):
        names = [c.request_id for rank in plan.ranks for c in rank.chunks]
        swapped = {n: s for n in names if (s := in_place.get(n)) and (n, 0) in engines.chains}
        lost = {n: chance.below(s) * BLOCK_TOKENS for n, s in swapped.items() if chance.below(3) == 0}
        in_place.update((name, num_tokens // BLOCK_TOKENS) for name, num_tokens in lost.items())
        return {} if is_sound else lost

    in_place = {}

    def step():
        plan = scheduler.next_plan(0)
        if plan is None:
            if not unanswered:
                return False
            answer(unanswered.pop(chance.below(len(unanswered))))
            return True
        for _, token in plan.outputs:
            texts.setdefault(token.request_id, []).append(token.token_id)
            cached.setdefault(token.request_id, token.num_cached_tokens)
        engines.note(plan)
        unanswered.extend(plan.loads)
        in_place.update((swap.request_id, len(swap.block_table)) for swap in plan.swaps)
        if plan.ranks:
            if unanswered and chance.below(2):
                answer(unanswered.pop(0))
            scheduler.advance(0, engines.run(plan, lost_in(plan)))
        for finish in plan.finishes:
            scheduler.advance(0, HandoffSent(finish.request_id, finish.attempt))
        for close in plan.closes:
            scheduler.advance(0, HandoffClosed(close.request_id, close.attempt))
        require_sound([scheduler])
        return True

    for i, (num_prompt, max_tokens, num_hit, policy, num_steps) in enumerate(visits):
        me = RankRef(scheduler.group, DpRank(i % num_ranks))
        more = {"branch_points": (BLOCK_TOKENS,), "num_cached": num_hit * BLOCK_TOKENS}
        spec = make_spec(f"r{i}", num_prompt, max_tokens, state_restore=policy, **more)
        decode = me if role is GroupRole.MIXED else OTHER
        scheduler.advance(0, Assigned(make_assign(spec, me, decode)))
        for _ in range(num_steps):
            step()
    while step():
        pass
    assert scheduler.held_requests() == ()
    assert engines.chains == {}
    return texts, cached


@pytest.mark.parametrize("role", [GroupRole.PREFILL, GroupRole.MIXED])
@settings(max_examples=40, deadline=None)
@given(
    VISITS, st.integers(1, 2), st.booleans(), st.sampled_from([1, 140]), st.booleans(), st.integers(0, 999)
)
def test_loads_never_change_a_text_whatever_comes_of_them(
    role, visits, num_ranks, has_state, min_computed, is_sound, seed
):
    model = {"has_state": has_state, "replay_tokens": BLOCK_TOKENS if has_state else 0}
    model["min_computed_tokens"] = min_computed
    texts, cached = visit(role, visits, num_ranks, seed=seed, is_sound=is_sound, can_load=True, **model)
    cold, nothing = visit(role, visits, num_ranks, can_load=False, **model)
    assert texts == cold
    assert not any(nothing.values())
    for name, num_cached in cached.items():
        num_prompt, _, num_hit, _, _ = visits[int(name[1:])]
        most = max(0, min(num_hit * BLOCK_TOKENS, num_prompt - min_computed))
        assert num_cached <= most
        if is_sound and not has_state:
            assert num_cached == most // BLOCK_TOKENS * BLOCK_TOKENS
