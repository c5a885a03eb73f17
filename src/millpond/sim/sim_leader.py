"""A group in virtual time: the loop of its leader around the `GroupScheduler`, and its engines."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from millpond.config.sim_params import SimCostParams
from millpond.control.group_scheduler import GroupEvent, GroupScheduler
from millpond.control.invariants import require_sound
from millpond.control.kv_loads import OVERTAKE_NS
from millpond.core.events import (
    Aborted,
    Assigned,
    Fetch,
    GroupUp,
    Loaded,
    RankInfo,
    RankReport,
    StepDone,
    Tick,
    TokensOut,
)
from millpond.core.ids import RequestId
from millpond.core.plan import (
    AbortOn,
    Assign,
    GroupPlan,
    Introduce,
    RankPlan,
    SequenceEnd,
    StepKind,
    TokenOut,
)
from millpond.core.units import MILLISECOND_NS
from millpond.sim.handoffs import HandoffEvent, Handoffs
from millpond.sim.kernel import Kernel
from millpond.sim.kv_node import KvNode
from millpond.sim.network import Network
from millpond.sim.sim_engine import SimEngine

HEARTBEAT_NS = 500 * MILLISECOND_NS
REPORT_INTERVAL_NS = 50 * MILLISECOND_NS
MAX_SPAN_STEPS = 1_000


@dataclass(frozen=True, slots=True)
class _Span:
    """The step that runs, or the last one: when each of its tokens was made."""

    begin_ns: int
    step_ns: int
    num_steps: int
    position_by_id: dict[RequestId, int]

    def made_ns(self, token: TokenOut, now_ns: int) -> int:
        begin = self.position_by_id.get(token.request_id)
        if begin is None:
            return now_ns
        return self.begin_ns + min(token.position - begin, self.num_steps) * self.step_ns


class SimLeader:
    """One life of a group."""

    def __init__(
        self,
        scheduler: GroupScheduler,
        ranks: tuple[RankInfo, ...],
        incarnation: int,
        order: int,
        *,
        kernel: Kernel,
        network: Network,
        handoffs: Handoffs,
        kv_node: KvNode,
        costs: SimCostParams,
        put_tokens: Callable[[str, str, int, TokensOut], None],
        is_spanning: bool,
    ) -> None:
        self.scheduler = scheduler
        self.num_plans = 0
        self.num_steps = 0
        self._name = scheduler.group
        self._ranks = ranks
        self._incarnation = incarnation
        self._order = order
        self._kernel = kernel
        self._network = network
        self._handoffs = handoffs
        self._kv_node = kv_node
        self._costs = costs
        self._put_tokens = put_tokens
        self._is_spanning = is_spanning
        self._engines = [SimEngine(info) for info in ranks]
        self._owner = f"{self._name}#{incarnation}"
        self._is_dead = False
        self._is_loop_due = self._is_wake_due = False
        self._span = _Span(0, 0, 0, {})
        self._ended: list[SequenceEnd] = []
        self._started: list[tuple[RequestId, int]] = []
        self._last_fetch: Fetch | None = None
        self._last_fetch_ns = 0
        network.attach(self._name, order, self._on_message)
        self._introduce()
        self._beat()

    def kill(self) -> None:
        """Die with everything in memory."""
        self._is_dead = True
        self._network.detach(self._name)
        self._handoffs.lose(self._owner)
        self._kv_node.lose(self._owner)

    # --- in ----------------------------------------------------------------------------------

    def _on_message(self, message: object) -> None:
        if isinstance(message, Assign):
            self._advance(Assigned(message))
        elif isinstance(message, AbortOn):
            self._advance(Aborted(message.request_id, message.attempt))
        elif isinstance(message, Introduce):
            self._introduce()

    def _on_answer(self, event: HandoffEvent | Loaded) -> None:
        if not self._is_dead:
            self._advance(event)

    def _advance(self, event: GroupEvent) -> None:
        self.scheduler.advance(self._kernel.now_ns, event)
        self._loop_soon()

    def _loop_soon(self) -> None:
        if not self._is_loop_due and not self.scheduler.is_step_running:
            self._is_loop_due = True
            self._kernel.after(0, self._order, self._loop)

    def _beat(self) -> None:
        if self._is_dead:
            return
        if not self.scheduler.is_step_running:
            self._advance(Tick())
        self._kernel.after(HEARTBEAT_NS, self._order, self._beat)

    # --- out ---------------------------------------------------------------------------------

    def _loop(self) -> None:
        self._is_loop_due = False
        while not self._is_dead and not self.scheduler.is_step_running:
            plan = self.scheduler.next_plan(self._kernel.now_ns, self._max_steps())
            require_sound([self.scheduler])
            if plan is not None:
                self._carry_out(plan)
            self._report()
            if plan is None:
                self._wake_in_time()
                return

    def _wake_in_time(self) -> None:
        if self.scheduler.is_timed and not self._is_wake_due:
            self._is_wake_due = True
            self._kernel.after(OVERTAKE_NS, self._order, self._wake)

    def _wake(self) -> None:
        self._is_wake_due = False
        self._loop_soon()

    def _max_steps(self) -> int:
        """Decode steps that end before anything else can happen in the whole cluster."""
        next_ns = self._kernel.next_time_ns
        if not self._is_spanning or next_ns is None:
            return 1
        rows = max(view.num_seqs for view in self.scheduler.views())
        step_ns = self._costs.decode_step_ns + rows * self._costs.decode_row_ns
        horizon_ns = min(next_ns, self._last_fetch_ns + REPORT_INTERVAL_NS) - 1 - self._kernel.now_ns
        return max(1, min(horizon_ns // step_ns, MAX_SPAN_STEPS))

    def _carry_out(self, plan: GroupPlan) -> None:
        self.num_plans += 1
        self._send_tokens(plan)
        self._started += plan.started
        self._ended += plan.ended
        if plan.started or plan.ended:
            self._report()
        for unload in plan.unloads:
            self._kv_node.end(self._owner, unload)
        for load in plan.loads:
            self._kv_node.start(self._owner, self._on_answer, load)
        for swap in plan.swaps:
            digests = self._kv_node.swap_in(self._owner, swap)
            approximate = self._kv_node.approximate(self._owner, swap.request_id)
            self._engines[swap.rank].swap_in(swap, digests, approximate)
        for send in plan.sends:
            self._handoffs.send(self._owner, self._on_answer, send)
        for receive in plan.receives:
            self._handoffs.receive(self._owner, self._name, self._on_answer, receive)
        for finish in plan.finishes:
            self._handoffs.finish(self._owner, finish)
        for close in plan.closes:
            self._handoffs.close(self._owner, self._on_answer, close)
        if plan.ranks:
            self._begin_step(plan)

    def _begin_step(self, plan: GroupPlan) -> None:
        reports = tuple(
            self._execute(engine, rank, plan.num_steps)
            for engine, rank in zip(self._engines, plan.ranks, strict=True)
        )
        step_ns = self._step_ns(plan)
        rows = {row.request_id: row.position for rank in plan.ranks for row in rank.rows}
        self._span = _Span(self._kernel.now_ns, step_ns, plan.num_steps, rows)
        self.num_steps += plan.num_steps
        done = StepDone(plan.step, reports)
        self._kernel.after(step_ns * plan.num_steps, self._order, lambda: self._end_step(plan, done))

    def _execute(self, engine: SimEngine, part: RankPlan, num_steps: int) -> RankReport:
        for copy in part.restore:
            engine.write_state(copy.slot, self._kv_node.state(self._owner, copy))
        lost: dict[RequestId, int] = {}
        for chunk in part.chunks:
            num_tokens = self._kv_node.take_break(self._owner, chunk.request_id)
            if num_tokens is not None:
                lost[chunk.request_id] = num_tokens
        return engine.execute(part, num_steps, lost)

    def _end_step(self, plan: GroupPlan, done: StepDone) -> None:
        if self._is_dead:
            return
        if self._kv_node.is_up:
            for engine, part in zip(self._engines, plan.ranks, strict=True):
                self._keep(engine, part)
        self._advance(done)

    def _keep(self, engine: SimEngine, part: RankPlan) -> None:
        pool = self._kv_node.pool
        for work in (*part.chunks, *part.rows):
            for block in engine.take_full_blocks(work.request_id):
                pool.put_block(block.digest, is_approximate=block.is_approximate)
        for copy in part.keep:
            state = engine.read_state(copy)
            if state is not None:
                pool.put_state(state.digest, is_approximate=state.is_approximate)

    def _step_ns(self, plan: GroupPlan) -> int:
        costs = self._costs
        if plan.kind is StepKind.DECODE:
            most = max(sum(1 + len(row.draft_ids) for row in rank.rows) for rank in plan.ranks)
            return costs.decode_step_ns + most * costs.decode_row_ns
        most = max(sum(chunk.end - chunk.begin for chunk in rank.chunks) for rank in plan.ranks)
        compute_ns = costs.prefill_step_ns + most * costs.prefill_token_ns
        names = [chunk.request_id for rank in plan.ranks for chunk in rank.chunks]
        loaded_ns = max((self._kv_node.ready_ns(self._owner, name) for name in names), default=0)
        return max(compute_ns, loaded_ns - self._kernel.now_ns)

    def _send_tokens(self, plan: GroupPlan) -> None:
        now_ns = self._kernel.now_ns
        batches: dict[tuple[int, str], list[TokenOut]] = {}
        for reply_to, token in plan.outputs:
            batches.setdefault((self._span.made_ns(token, now_ns), reply_to), []).append(token)
        for (made_ns, reply_to), tokens in sorted(batches.items(), key=lambda item: item[0]):
            self._put_tokens(self._name, reply_to, made_ns, TokensOut(self._name, tuple(tokens)))

    def _report(self) -> None:
        now_ns = self._kernel.now_ns
        fetch = Fetch(
            group=self._name,
            incarnation=self._incarnation,
            views=self.scheduler.views(),
            room=self.scheduler.room,
            seen_assigns=self.scheduler.num_assigns_seen,
            ended=tuple(self._ended),
            started=tuple(self._started),
        )
        if self._is_due(fetch, now_ns) and self._network.send(self._name, "controller", fetch):
            self._last_fetch = fetch
            self._last_fetch_ns = now_ns
            self._ended.clear()
            self._started.clear()

    def _is_due(self, fetch: Fetch, now_ns: int) -> bool:
        last = self._last_fetch
        if last is None or now_ns - self._last_fetch_ns >= HEARTBEAT_NS:
            return True
        if fetch.ended or fetch.started or fetch.room > last.room or fetch.seen_assigns != last.seen_assigns:
            return True
        return fetch.views != last.views and now_ns - self._last_fetch_ns >= REPORT_INTERVAL_NS

    def _introduce(self) -> None:
        up = GroupUp(
            group=self._name,
            incarnation=self._incarnation,
            role=self.scheduler.role.value,
            max_model_len=self.scheduler.max_model_len,
            max_num_seqs=sum(info.num_slots for info in self._ranks),
            ranks=self._ranks,
            running=self.scheduler.held_requests(),
            seen_assigns=self.scheduler.num_assigns_seen,
        )
        if self._network.send(self._name, "controller", up):
            self._last_fetch = None
            self._loop_soon()
