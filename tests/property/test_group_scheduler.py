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
from millpond.core.events import (
    Aborted,
    Assigned,
    HandoffArrived,
    HandoffClosed,
    HandoffFailed,
    HandoffSent,
    Tick,
)
from millpond.core.ids import DpRank, GroupId, RankRef, RequestId
from millpond.core.plan import GroupPlan, StepKind
from millpond.core.request import FinishReason, Resume
from millpond.core.units import BLOCK_TOKENS, SECOND_NS
from millpond.policies.step_vote import StepVoteParams
from millpond.sim.sim_engine import token_at
from tests.sim.making import Engines, make_assign, make_scheduler, make_spec

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
        num_snapshots=st.sampled_from([0, 1, 4]),
        num_drafts=st.sampled_from([0, 5]),
        reserve=st.sampled_from([0.0, 0.5, 2.0]),
    )
    def start(self, num_ranks, num_blocks, num_slots, num_snapshots, num_drafts, reserve):
        params = GroupParams(
            prefill=PrefillParams(max_step_tokens=MAX_STEP_TOKENS, fetch_ahead_tokens=200, max_held_seqs=4),
            decode=DecodeParams(reserve_blocks_per_seq=reserve, num_draft_tokens=num_drafts),
            vote=StepVoteParams(all_vote_interval=3, any_vote_interval=5, max_prefill_run=2),
        )
        self.scheduler = make_scheduler(
            self.role, num_ranks, num_blocks, num_slots, params, num_snapshots=num_snapshots, max_drafts=4
        )
        self.num_ranks, self.num_blocks, self.num_slots = num_ranks, num_blocks, num_slots
        self.engines = Engines(num_ranks)
        self.step: GroupPlan | None = None
        self.specs = {}
        self.attempts = Counter()
        self.closing = set()
        self.sending = set()
        self.receiving = set()
        self.reported = Counter()
        self.dropped = set()
        """Aborted, replaced, or handed off and confirmed."""

    # --- events ---

    @rule(
        name=st.sampled_from(NAMES),
        rank=st.integers(0, 2),
        num_prompt=st.integers(1, 400),
        max_tokens=st.integers(1, 150),
        back=st.sampled_from([0, 0, 0, 1, 2]),
        donor=st.sampled_from(NAMES),
        num_hit=st.integers(0, 3),
    )
    def assign(self, name, rank, num_prompt, max_tokens, back, donor, num_hit):
        """Mostly the next attempt; sometimes one that was there before, or the same again."""
        attempt = max(self.attempts[name] - back, 0)
        key = (name, attempt)
        if key not in self.specs:
            shared = min(num_prompt, self.longest_shared(donor)) // BLOCK_TOKENS
            resume = Resume(RequestId(donor), min(num_hit, shared) * BLOCK_TOKENS)
            more = {"branch_points": (BLOCK_TOKENS, 2 * BLOCK_TOKENS, 77), "resume": resume}
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
        )
        self.note(plan)
        if plan.ranks:
            self.check_step(plan)
            self.step = plan

    @precondition(lambda self: self.step is not None)
    @rule()
    def finish(self):
        step, self.step = self.step, None
        self.scheduler.advance(0, self.engines.run(step))

    # --- bookkeeping ---

    def tell(self, event):
        before = self.scheduler.views(), self.scheduler.held_requests(), self.scheduler.num_assigns_seen
        self.scheduler.advance(0, event)
        if self.step is not None:
            after = self.scheduler.views(), self.scheduler.held_requests(), self.scheduler.num_assigns_seen
            assert after == before, "an event was not held while a step runs"

    def longest_shared(self, donor):
        """Leading tokens that any prompt has in common with every attempt of `donor`."""
        return min((s.num_prompt_tokens for key, s in self.specs.items() if key[0] == donor), default=0)

    def is_over(self, key):
        return key in self.dropped or self.reported[key] > 0

    def note(self, plan):
        self.sending |= {(m.request_id, m.attempt) for m in plan.finishes}
        self.closing |= {(m.request_id, m.attempt) for m in plan.closes}
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
            assert len({copy.buffer for copy in rank.keep}) == len(rank.keep)
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
        assert self.scheduler.next_plan(GroupParams().snapshot.ttl_s * SECOND_NS) is None
        assert all(stats.held == 0 for stats in self.scheduler.snapshot_stats())


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


def load(role, requests, num_ranks, num_blocks, num_snapshots=0):
    """A group that was given all requests; a decode group has also received their KV."""
    scheduler = make_scheduler(role, num_ranks, num_blocks, num_slots=6, num_snapshots=num_snapshots)
    engines = Engines(num_ranks)
    for i, (num_prompt, max_tokens, min_tokens, stops) in enumerate(requests):
        me = RankRef(scheduler.group, DpRank(i % num_ranks))
        more = {"stop_token_ids": (1,), "min_tokens": min_tokens} if stops else {}
        spec = make_spec(f"r{i}", num_prompt, max_tokens, **more)
        prefill = OTHER if role is GroupRole.DECODE else me
        scheduler.advance(0, Assigned(make_assign(spec, prefill, me)))
    return scheduler, engines


def run(scheduler, engines, requests, max_steps, limit=20_000):
    """Run to the end; KV arrives when the group has nothing else to do, so that no event falls into a span.

    Returns outputs by request, ends in order, views by step, and the kind of every step.
    """
    outputs, ended, views, kinds, expected = {}, [], {}, [], []
    for _ in range(limit):
        plan = scheduler.next_plan(0, max_steps)
        if plan is None:
            if not expected:
                return outputs, ended, views, kinds
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
            scheduler.advance(0, engines.run(plan))
            views[plan.step + plan.num_steps] = scheduler.views()
        require_sound([scheduler])
    pytest.fail("does not come to an end")


@pytest.mark.parametrize("role", [GroupRole.DECODE, GroupRole.MIXED])
@settings(max_examples=30)
@given(REQUESTS, st.integers(1, 3), st.integers(3, 12), st.integers(2, 200), st.integers(0, 3))
def test_a_plan_of_k_steps_is_k_plans_of_one(role, requests, num_ranks, num_blocks, max_steps, num_snapshots):
    groups = [load(role, requests, num_ranks, num_blocks, num_snapshots) for _ in range(2)]
    single = run(*groups[0], requests, 1)
    several = run(*groups[1], requests, max_steps)
    assert groups[0][0].snapshot_stats() == groups[1][0].snapshot_stats()
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


# --- snapshots ----------------------------------------------------------------------------------

VISITS = st.lists(
    st.tuples(
        st.integers(1, 600),  # prompt
        st.integers(1, 300),  # output
        st.integers(1, 4),  # which of those before it resumes from
        st.integers(0, 4),  # after how many blocks
        st.integers(0, 6),  # steps until the next one comes
        st.integers(0, 40),  # seconds
    ),
    min_size=2,
    max_size=10,
)


def visit(visits, num_ranks, num_snapshots, role, num_drafts=0):
    """Serve requests that resume from each other; the engines check every state that is restored.

    Returns outputs by request and the snapshots' stats of all ranks.
    """
    params = GroupParams(decode=DecodeParams(num_draft_tokens=num_drafts))
    memory = {"num_blocks": 40, "num_slots": 4, "num_snapshots": num_snapshots, "max_drafts": num_drafts}
    scheduler = make_scheduler(role, num_ranks, params=params, **memory)
    engines, texts, now_s = Engines(num_ranks), {}, 0

    def step():
        plan = scheduler.next_plan(now_s * SECOND_NS)
        if plan is None:
            return False
        for _, token in plan.outputs:
            texts.setdefault(token.request_id, []).append(token.token_id)
        if plan.ranks:
            scheduler.advance(now_s * SECOND_NS, engines.run(plan))
        for finish in plan.finishes:
            scheduler.advance(now_s * SECOND_NS, HandoffSent(finish.request_id, finish.attempt))
        for close in plan.closes:
            scheduler.advance(now_s * SECOND_NS, HandoffClosed(close.request_id, close.attempt))
        require_sound([scheduler])
        return True

    for i, (num_prompt, max_tokens, back, num_hit, num_steps, seconds) in enumerate(visits):
        me = RankRef(scheduler.group, DpRank(i % num_ranks))
        donor = max(i - back, 0)
        shared = min(num_prompt, visits[donor][0]) // BLOCK_TOKENS
        resume = Resume(RequestId(f"r{donor}"), min(num_hit, shared) * BLOCK_TOKENS)
        points = (BLOCK_TOKENS, 2 * BLOCK_TOKENS)
        spec = make_spec(f"r{i}", num_prompt, max_tokens, resume=resume, branch_points=points)
        decode = me if role is GroupRole.MIXED else OTHER
        scheduler.advance(now_s * SECOND_NS, Assigned(make_assign(spec, me, decode)))
        for _ in range(num_steps):
            step()
        now_s += seconds
    while step():
        pass
    scheduler.advance(now_s * SECOND_NS, Tick())
    stats = scheduler.snapshot_stats()
    later_s = now_s + GroupParams().snapshot.ttl_s
    assert scheduler.next_plan(later_s * SECOND_NS) is None
    assert all(s.held == 0 for s in scheduler.snapshot_stats())
    return texts, stats


@pytest.mark.parametrize("role", [GroupRole.PREFILL, GroupRole.MIXED])
@settings(max_examples=25, deadline=None)
@given(VISITS, st.integers(1, 2), st.integers(1, 6), st.sampled_from([0, 1, 5]))
def test_snapshots_and_drafts_never_change_a_text(role, visits, num_ranks, num_snapshots, num_drafts):
    texts, stats = visit(visits, num_ranks, num_snapshots, role, num_drafts)
    without, none = visit(visits, num_ranks, 0, role)
    assert texts == without
    assert all(s.held <= num_snapshots for s in stats)
    assert all(s.kept == s.used == 0 for s in none)


def test_snapshots_of_one_visit_are_used_by_the_next():
    visits = [(300, 1, 1, 0, 9, 0), (400, 1, 1, 2, 9, 0), (300, 1, 2, 1, 9, 0)]
    _, (stats,) = visit(visits, 1, 6, GroupRole.MIXED)
    assert (stats.used, stats.lost) == (2, 0)
