"""Random lives of the controller: groups and gateways come, die and say anything; the books stay right."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from millpond.control.dispatcher import Dispatcher, DispatchParams
from millpond.control.invariants import require_sound
from millpond.core.events import (
    Cancel,
    Fetch,
    GatewayDown,
    GatewayUp,
    GroupDown,
    Submit,
    Tick,
)
from millpond.core.ids import GatewayId, GroupId, RequestId
from millpond.core.plan import SequenceEnd
from millpond.core.request import FinishReason
from millpond.core.units import SECOND_NS
from millpond.core.views import RankView
from tests.sim.making import make_group_up, make_spec

ROLES = {"p0": "prefill", "p1": "prefill", "d0": "decode", "d1": "decode", "m0": "mixed"}
GROUPS = sorted(ROLES)
GATEWAYS = ["g0", "g1"]
NAMES = [f"r{i}" for i in range(8)]
NUM_BLOCKS, NUM_SLOTS, NUM_RANKS = 12, 4, 2


class DispatcherLife(RuleBasedStateMachine):
    """A dispatcher between leaders and gateways that we keep the books of.

    Leaders here hold what was assigned until it ends; what they report is true, but may come at any time.
    """

    @initialize(grace_s=st.sampled_from([0.0, 2.0]))
    def start(self, grace_s):
        params = DispatchParams(
            start_grace_s=grace_s, orphan_s=5.0, lease_s=20.0, queue_timeout_s=40.0, max_failures=3
        )
        self.now_ns = 0
        self.dispatcher = Dispatcher(params, frozenset({GroupId("p0"), GroupId("d0")}), 0)
        self.twin = Dispatcher(params, frozenset({GroupId("p0"), GroupId("d0")}), 0)
        self.incarnation = dict.fromkeys(GROUPS, 0)
        self.up = set()
        self.held = {group: {} for group in GROUPS}
        """Per group: (request, attempt) -> rank."""
        self.seen = dict.fromkeys(GROUPS, 0)
        self.open = {}
        """Request -> spec, as its gateway has it."""
        self.num_submitted = 0

    def tell(self, event):
        self.dispatcher.advance(self.now_ns, event)
        self.twin.advance(self.now_ns, event)
        require_sound([self.dispatcher])

    # --- groups ---

    @rule(group=st.sampled_from(GROUPS), keeps=st.booleans())
    def group_up(self, group, keeps):
        """A fresh process; or one that ran on and introduces itself again."""
        if not (keeps and group in self.up):
            self.incarnation[group] += 1
            self.held[group], self.seen[group] = {}, 0
            self.up.add(group)
        up = make_group_up(
            group,
            ROLES[group],
            NUM_RANKS,
            self.incarnation[group],
            NUM_BLOCKS,
            num_slots=NUM_SLOTS,
            running=tuple(self.held[group]),
            seen_assigns=self.seen[group],
        )
        self.tell(up)

    @rule(group=st.sampled_from(GROUPS), back=st.integers(0, 1))
    def group_down(self, group, back):
        if back == 0:
            self.up.discard(group)
            self.held[group] = {}
        self.tell(GroupDown(GroupId(group), self.incarnation[group] - back, "killed"))

    @rule(
        group=st.sampled_from(GROUPS),
        room=st.integers(0, 3),
        ends=st.lists(st.sampled_from([*FinishReason, None]), max_size=3),
        start=st.booleans(),
    )
    def fetch(self, group, room, ends, start):
        """A true report: some of what it holds has ended, the rest may have started."""
        if group not in self.up:
            return
        ended = []
        for reason, key in zip(ends, list(self.held[group]), strict=False):
            del self.held[group][key]
            ended.append(SequenceEnd(RequestId(key[0]), key[1], reason, "so it goes"))
            if reason is not None and ROLES[group] != "prefill" and reason is not FinishReason.ABORTED:
                self.close(key)
        started = tuple(self.held[group]) if start and ROLES[group] == "decode" else ()
        views = []
        for rank in range(NUM_RANKS):
            count = list(self.held[group].values()).count(rank)
            views.append(
                RankView(
                    rank,
                    count,
                    0,
                    0,
                    10 * count,
                    NUM_BLOCKS - min(count, NUM_BLOCKS),
                    max(NUM_SLOTS - count, 0),
                )
            )
        room = room if ROLES[group] != "decode" else 0
        self.tell(
            Fetch(
                GroupId(group),
                self.incarnation[group],
                tuple(views),
                room,
                self.seen[group],
                started,
                tuple(ended),
            )
        )

    # --- gateways ---

    @rule(gateway=st.sampled_from(GATEWAYS))
    def gateway_up(self, gateway):
        self.tell(GatewayUp(GatewayId(gateway)))

    @rule(gateway=st.sampled_from(GATEWAYS))
    def gateway_down(self, gateway):
        self.open = {name: spec for name, spec in self.open.items() if spec.gateway != gateway}
        self.tell(GatewayDown(GatewayId(gateway)))

    @rule(
        name=st.sampled_from(NAMES),
        gateway=st.sampled_from(GATEWAYS),
        num_prompt=st.integers(1, 2000),
        priority=st.integers(0, 1),
    )
    def submit(self, name, gateway, num_prompt, priority):
        """A new request, or the same submission again."""
        if name not in self.open:
            self.num_submitted += 1
            # Request ids are never used twice; a new attempt stands for the new id here.
            spec = make_spec(
                name,
                num_prompt,
                9,
                attempt=10 * self.num_submitted,
                gateway=GatewayId(gateway),
                priority=priority,
            )
            self.open[name] = spec
        self.tell(Submit(self.open[name]))

    @rule(name=st.sampled_from(NAMES))
    def cancel(self, name):
        self.open.pop(name, None)
        self.tell(Cancel(RequestId(name)))

    @rule(seconds=st.sampled_from([0.1, 1.0, 6.0, 25.0]))
    def wait(self, seconds):
        self.now_ns += int(seconds * SECOND_NS)
        self.tell(Tick())

    # --- plans ---

    @rule()
    def plan(self):
        plan = self.dispatcher.next_plan(self.now_ns)
        assert plan == self.twin.next_plan(self.now_ns), "same events, other plan"
        assert self.dispatcher.next_plan(self.now_ns) is None
        assert self.twin.next_plan(self.now_ns) is None
        if plan is not None:
            self.carry_out(plan)

    def carry_out(self, plan):
        for abort in plan.aborts:
            self.held[abort.group].pop((abort.request_id, abort.attempt), None)
        for assign in plan.assigns:
            spec = assign.spec
            assert self.open.get(spec.request_id) is not None, "assigned, but nobody wants it"
            assert spec.attempt == self.open[spec.request_id].attempt
            assert ROLES[assign.decode.group] != "prefill"
            assert ROLES[assign.prefill.group] != "decode"
            assert (assign.prefill == assign.decode) == (ROLES[assign.decode.group] == "mixed")
            for ref in {assign.prefill, assign.decode}:
                key = (spec.request_id, spec.attempt)
                assert key not in self.held[ref.group], f"{key} was started twice on {ref.group}"
                if ref.group in self.up:
                    self.held[ref.group][key] = ref.rank
                    self.seen[ref.group] += 1
        for gateway, message in (*plan.resubmits, *plan.ended):
            spec = self.open.get(message.request_id)
            if spec is None or spec.attempt != message.attempt:
                continue
            assert spec.gateway == gateway
            if message in [m for _, m in plan.resubmits]:
                self.open[spec.request_id] = make_spec(
                    spec.request_id, len(spec.prompt_ids), 9, attempt=spec.attempt + 1, gateway=spec.gateway
                )
                self.tell(Submit(self.open[spec.request_id]))
            else:
                del self.open[spec.request_id]

    def close(self, key):
        """The last token reached the gateway."""
        spec = self.open.get(key[0])
        if spec is not None and spec.attempt == key[1]:
            del self.open[key[0]]

    @invariant()
    def counts(self):
        if hasattr(self, "dispatcher"):
            assert 0 <= self.dispatcher.num_queued <= self.dispatcher.num_requests
            for group in self.dispatcher._groups.values():
                for view in group.adjusted_views():
                    assert view.num_queued >= 0

    def teardown(self):
        """Every gateway gives up: nothing is wanted, so nothing is known or held after a while."""
        if not hasattr(self, "dispatcher"):
            return
        for name in NAMES:
            self.cancel(name)
        self.plan()
        for group in sorted(self.up):
            self.group_up(group, keeps=True)
            self.fetch(group, 0, [], start=False)
        self.plan()
        self.wait(6.0)
        for _ in range(2):
            for group in sorted(self.up):
                self.group_up(group, keeps=True)
                self.fetch(group, 0, [], start=False)
            self.plan()
            self.wait(6.0)
        self.plan()
        assert self.dispatcher.num_requests == 0
        assert self.dispatcher.num_queued == 0
        for group in self.dispatcher._groups.values():
            assert group.unseen == []


TestDispatcherLife = DispatcherLife.TestCase
TestDispatcherLife.settings = settings(max_examples=80, stateful_step_count=50, deadline=None)
