"""The controller's brain: who prefills, who decodes, and what happens to requests when groups die.

State is soft. After a restart, groups say what they hold (`GroupUp.running`) and gateways submit again
what they still wait for; a submission that matches what a group holds is attached, not started twice.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from millpond.control.known_group import KnownGroup
from millpond.core.events import (
    Cancel,
    Fetch,
    GatewayDown,
    GatewayUp,
    GroupDown,
    GroupUp,
    RankInfo,
    Submit,
    Tick,
)
from millpond.core.ids import DpRank, GatewayId, GroupId, RankRef, RequestId
from millpond.core.plan import (
    AbortOn,
    Assign,
    DispatchPlan,
    Introduce,
    RequestEnded,
    RestartGroup,
    Resubmit,
    SequenceEnd,
)
from millpond.core.request import FinishReason, RequestSpec
from millpond.core.units import SECOND_NS, num_blocks_for
from millpond.core.views import RankView
from millpond.policies.decode_place import DecodePlaceParams, pick_decode_rank, tokens_of
from millpond.policies.prefill_pull import pick_prefill_rank
from millpond.policies.queue_order import OrderedQueue, QueueOrderParams


@dataclass(frozen=True, slots=True)
class DispatchParams:
    """Dispatching across groups."""

    start_grace_s: float = 3.0
    """After a start, requests wait until every configured group has reported, at most this long. Groups that
    run through a controller restart are thus known before anything is started twice."""
    orphan_s: float = 10.0
    """A running request that no gateway claims, or a lost one that no gateway re-submits, is dropped after
    this long."""
    lease_s: float = 30.0
    """A group or gateway that sent nothing for so long is taken for dead. Its supervisor usually knows
    sooner."""
    queue_timeout_s: float = 300.0
    """A request that found no group in this time fails with one clear error."""
    max_failures: int = 5
    """Losses in a row without a new token after which a request fails, >= 1."""
    place: DecodePlaceParams = field(default_factory=DecodePlaceParams)
    """Choice of the decode rank."""
    order: QueueOrderParams = field(default_factory=QueueOrderParams)
    """Order of waiting requests."""


class _Phase(Enum):
    QUEUED = "queued"
    PREFILL = "prefill"
    """Assigned; the decode group does not hold the whole KV yet."""
    DECODE = "decode"
    LOST = "lost"
    """Waits for the gateway to submit the next attempt."""
    ORPHAN = "orphan"
    """A group runs it, but no gateway has claimed it since we started."""


@dataclass(slots=True)
class _Request:
    request_id: RequestId
    attempt: int
    phase: _Phase
    since_ns: int
    """When the phase began."""
    spec: RequestSpec | None = None
    prefill: GroupId | None = None
    decode: GroupId | None = None
    arrival: int = 0
    """Order of the first submission; 0 for what was only heard of from a group."""
    num_failures: int = 0

    @property
    def groups(self) -> tuple[GroupId, ...]:
        """Groups that may hold something for it, each once."""
        return tuple(dict.fromkeys(g for g in (self.prefill, self.decode) if g is not None))


class Dispatcher:
    """All global decisions of the first slice: queue, pull, pair, loss, cancel."""

    def __init__(self, params: DispatchParams, expected_groups: frozenset[GroupId], now_ns: int) -> None:
        self._params = params
        self._expected = expected_groups
        self._grace_until_ns = now_ns + int(params.start_grace_s * SECOND_NS)
        self._groups: dict[GroupId, KnownGroup] = {}
        self._gateways: dict[GatewayId, int] = {}
        self._requests: dict[RequestId, _Request] = {}
        self._queue = OrderedQueue(params.order)
        self._num_arrivals = 0
        self._max_model_len = 0
        self._aborts: list[AbortOn] = []
        self._resubmits: list[tuple[str, Resubmit]] = []
        self._ended: list[tuple[str, RequestEnded]] = []
        self._introduce: list[Introduce] = []
        self._restarts: list[RestartGroup] = []

    # --- learn -----------------------------------------------------------------------------

    def advance(
        self,
        now_ns: int,
        event: Submit | Cancel | Fetch | GroupUp | GroupDown | GatewayUp | GatewayDown | Tick,
    ) -> None:
        """Take in one event. Unknown ids, old incarnations and repeats are harmless."""
        match event:
            case Fetch():
                self._on_fetch(now_ns, event)
            case Submit():
                self._on_submit(now_ns, event.spec)
            case Cancel():
                self._drop(event.request_id)
            case GroupUp():
                self._on_group_up(now_ns, event)
            case GroupDown():
                group = self._groups.get(event.group)
                if group is not None and group.up.incarnation <= event.incarnation:
                    self._lose_group(now_ns, event.group, event.why)
            case GatewayUp():
                self._gateways[event.gateway] = now_ns
            case GatewayDown():
                self._lose_gateway(event.gateway)
            case Tick():
                self._expire(now_ns)

    def _on_submit(self, now_ns: int, spec: RequestSpec) -> None:
        known = self._requests.get(spec.request_id)
        if known is not None and known.attempt == spec.attempt and known.phase is _Phase.ORPHAN:
            known.spec = spec
            known.phase = _Phase.DECODE
            known.since_ns = now_ns
            return
        if known is not None and known.attempt >= spec.attempt:
            return
        num_failures = 0
        self._num_arrivals += 1
        arrival = self._num_arrivals
        if known is not None:
            arrival = known.arrival or arrival  # keeps its place: its client sees a stream stand still
            progressed = known.spec is None or len(spec.output_ids) > len(known.spec.output_ids)
            num_failures = 0 if progressed else known.num_failures
            self._abort_on(known, known.groups)
            self._queue.discard(spec.request_id)
        self._requests[spec.request_id] = _Request(
            spec.request_id,
            spec.attempt,
            _Phase.QUEUED,
            now_ns,
            spec,
            arrival=arrival,
            num_failures=num_failures,
        )
        self._queue.push(spec.request_id, spec.priority, arrival)

    def _on_group_up(self, now_ns: int, event: GroupUp) -> None:
        old = self._groups.get(event.group)
        if old is not None:
            if event.incarnation < old.up.incarnation:
                return
            if event.incarnation == old.up.incarnation:
                old.seen_ns = now_ns
                return
            self._lose_group(now_ns, event.group, "restarted")
        self._groups[event.group] = KnownGroup(event, now_ns)
        for request_id, attempt in event.running:
            self._on_group_runs(now_ns, event, request_id, attempt)
        self._update_max_model_len()

    def _on_group_runs(self, now_ns: int, group: GroupUp, request_id: RequestId, attempt: int) -> None:
        """Attach what a group says it holds, or have it dropped if the request has gone on elsewhere."""
        request = self._requests.get(request_id)
        if request is None:
            request = _Request(request_id, attempt, _Phase.ORPHAN, now_ns)
            self._requests[request_id] = request
        holder = request.prefill if group.role == "prefill" else request.decode
        is_taken = request.phase in (_Phase.PREFILL, _Phase.LOST) or holder is not None
        if request.attempt != attempt or is_taken:
            self._aborts.append(AbortOn(group.group, request_id, attempt))
            return
        if request.phase is _Phase.QUEUED:
            self._queue.discard(request_id)
            request.phase = _Phase.DECODE
            request.since_ns = now_ns
        if group.role == "prefill":
            request.prefill = group.group
        else:
            request.decode = group.group

    def _on_fetch(self, now_ns: int, event: Fetch) -> None:
        group = self._groups.get(event.group)
        if group is None or group.up.incarnation != event.incarnation:
            if group is None or group.up.incarnation < event.incarnation:
                self._introduce.append(Introduce(event.group))
            return
        group.take_report(now_ns, event)
        for request_id, attempt in event.started:
            request = self._requests.get(request_id)
            if request is None or request.attempt != attempt:
                continue
            request.prefill = None
            if request.phase is _Phase.PREFILL:
                request.phase = _Phase.DECODE
        for end in event.ended:
            self._on_sequence_end(now_ns, event.group, end)

    def _on_sequence_end(self, now_ns: int, group: GroupId, end: SequenceEnd) -> None:
        request = self._requests.get(end.request_id)
        if request is None or request.attempt != end.attempt or group not in request.groups:
            return  # old news: the request is over, lost, queued again, or handed on by this group
        others = tuple(g for g in request.groups if g != group)
        self._abort_on(request, others)
        if end.reason is None:
            self._lose(now_ns, request, end.detail, is_failure=True)
            return
        if end.reason not in (FinishReason.STOP, FinishReason.LENGTH):
            self._tell_ended(request, end.reason, end.detail)
        del self._requests[end.request_id]

    def _lose_group(self, now_ns: int, group: GroupId, why: str) -> None:
        del self._groups[group]
        for request in list(self._requests.values()):
            if group in request.groups:
                self._abort_on(request, tuple(g for g in request.groups if g != group))
                self._lose(now_ns, request, f"group {group} is gone: {why}", is_failure=True)

    def _lose_gateway(self, gateway: GatewayId) -> None:
        self._gateways.pop(gateway, None)
        for request in list(self._requests.values()):
            if request.spec is not None and request.spec.gateway == gateway:
                self._drop(request.request_id)

    def _lose(self, now_ns: int, request: _Request, why: str, *, is_failure: bool) -> None:
        """Ask the gateway for the next attempt, or give up."""
        request.num_failures += is_failure
        if request.spec is None:
            del self._requests[request.request_id]
        elif request.num_failures >= self._params.max_failures:
            self._tell_ended(
                request, FinishReason.FAILED, f"gave up after {request.num_failures} losses: {why}"
            )
            del self._requests[request.request_id]
        else:
            self._resubmits.append((request.spec.gateway, Resubmit(request.request_id, request.attempt, why)))
            request.phase = _Phase.LOST
            request.since_ns = now_ns
            request.prefill = request.decode = None

    def _drop(self, request_id: RequestId) -> None:
        request = self._requests.pop(request_id, None)
        if request is not None:
            self._queue.discard(request_id)
            self._abort_on(request, request.groups)

    def _abort_on(self, request: _Request, groups: tuple[GroupId, ...]) -> None:
        self._aborts += [AbortOn(g, request.request_id, request.attempt) for g in groups if g in self._groups]

    def _tell_ended(self, request: _Request, reason: FinishReason, detail: str) -> None:
        if request.spec is not None:
            ended = RequestEnded(request.request_id, request.attempt, reason, detail)
            self._ended.append((request.spec.gateway, ended))

    def _expire(self, now_ns: int) -> None:
        lease_ns = int(self._params.lease_s * SECOND_NS)
        for name, group in list(self._groups.items()):
            if now_ns - group.seen_ns > lease_ns:
                why = f"silent for {self._params.lease_s} s"
                self._restarts.append(RestartGroup(name, group.up.incarnation, why))
                self._lose_group(now_ns, name, why)
        for gateway, seen_ns in list(self._gateways.items()):
            if now_ns - seen_ns > lease_ns:
                self._lose_gateway(gateway)
        orphan_ns = int(self._params.orphan_s * SECOND_NS)
        queue_ns = int(self._params.queue_timeout_s * SECOND_NS)
        for request in list(self._requests.values()):
            waited_ns = now_ns - request.since_ns
            if request.phase in (_Phase.LOST, _Phase.ORPHAN) and waited_ns > orphan_ns:
                # Should its gateway still wait, because our word was lost, it must not wait for ever.
                self._tell_ended(request, FinishReason.FAILED, "it was lost and not submitted again")
                self._drop(request.request_id)
            elif request.phase is _Phase.QUEUED and waited_ns > queue_ns:
                self._tell_ended(request, FinishReason.FAILED, "no group took it before queue_timeout_s")
                self._drop(request.request_id)

    # --- decide ----------------------------------------------------------------------------

    def next_plan(self, now_ns: int) -> DispatchPlan | None:
        """Return what to send now, or None."""
        assigns = tuple(self._assign_all(now_ns))
        boxes = (self._aborts, self._resubmits, self._ended, self._introduce, self._restarts)
        if not assigns and not any(boxes):
            return None
        plan = DispatchPlan(
            assigns=assigns,
            aborts=tuple(self._aborts),
            resubmits=tuple(self._resubmits),
            ended=tuple(self._ended),
            introduce=tuple(self._introduce),
            restarts=tuple(self._restarts),
        )
        for box in boxes:
            box.clear()
        return plan

    def _assign_all(self, now_ns: int) -> list[Assign]:
        assigns: list[Assign] = []
        if now_ns < self._grace_until_ns and not self._expected <= self._groups.keys():
            return assigns
        while (head := self._queue.head()) is not None:
            request = self._requests[RequestId(head)]
            spec = request.spec
            assert spec is not None  # noqa: S101 - queued requests come from Submit
            if self._refuse_too_long(request, spec):
                continue
            assign = self._try_assign(spec)
            if assign is None:
                break
            self._queue.pop(head)
            self._book(now_ns, request, assign)
            assigns.append(assign)
        return assigns

    def _refuse_too_long(self, request: _Request, spec: RequestSpec) -> bool:
        """End a request that no decode rank could ever hold."""
        ranks = [
            info for group in self._groups.values() if group.up.role != "prefill" for info in group.up.ranks
        ]
        if not ranks or num_blocks_for(spec.num_known_tokens) <= max(info.num_blocks for info in ranks):
            return False
        self._tell_ended(
            request, FinishReason.REFUSED, f"{spec.num_known_tokens} tokens do not fit any decode rank"
        )
        self._drop(request.request_id)
        return True

    def _try_assign(self, spec: RequestSpec) -> Assign | None:
        """Form the pair (prefill rank, decode rank), or None while some side has no room."""
        pullers = [
            (name, group)
            for name, group in sorted(self._groups.items())
            if group.up.role != "decode" and group.room > len(group.unseen)
        ]
        for name, group in sorted(pullers, key=lambda item: (_queued(item[1]), item[0])):
            views = group.adjusted_views()
            if group.up.role == "mixed":
                rank = pick_decode_rank(views, spec.num_known_tokens, self._params.place)
                if rank is not None:
                    both = RankRef(name, rank)
                    return Assign(spec, both, both, _address(group, rank))
                continue
            decode = self._pick_decode(spec)
            if decode is not None:
                prefill = RankRef(name, pick_prefill_rank(views))
                return Assign(spec, prefill, decode, _address(self._groups[decode.group], decode.rank))
        return None

    def _pick_decode(self, spec: RequestSpec) -> RankRef | None:
        groups = [
            (name, group.adjusted_views())
            for name, group in self._groups.items()
            if group.up.role == "decode"
        ]
        for name, views in sorted(groups, key=lambda item: (sum(map(tokens_of, item[1])), item[0])):
            rank = pick_decode_rank(views, spec.num_known_tokens, self._params.place)
            if rank is not None:
                return RankRef(name, rank)
        return None

    def _book(self, now_ns: int, request: _Request, assign: Assign) -> None:
        request.phase = _Phase.PREFILL
        request.since_ns = now_ns
        request.prefill = assign.prefill.group
        request.decode = assign.decode.group
        sides = {assign.prefill.group: assign.prefill, assign.decode.group: assign.decode}
        for name, ref in sides.items():
            spec = assign.spec
            num_todo = spec.num_uncached_tokens if ref == assign.prefill else spec.num_known_tokens
            self._groups[name].book(ref.rank, num_todo, spec.num_known_tokens)

    # --- tell ------------------------------------------------------------------------------

    @property
    def max_model_len(self) -> int:
        """Longest sequence that the service can hold; 0 until a complete path was up once."""
        return self._max_model_len

    @property
    def is_ready(self) -> bool:
        """Whether a complete prefill and decode path is up."""
        roles = {group.up.role for group in self._groups.values()}
        return "mixed" in roles or {"prefill", "decode"} <= roles

    @property
    def gateways(self) -> frozenset[GatewayId]:
        """Gateways that introduced themselves."""
        return frozenset(self._gateways)

    @property
    def num_queued(self) -> int:
        """Requests that no group has taken."""
        return len(self._queue)

    @property
    def num_requests(self) -> int:
        """Requests that are not over."""
        return len(self._requests)

    def group_incarnation(self, group: GroupId) -> int | None:
        """Incarnation of a group that is up."""
        found = self._groups.get(group)
        return None if found is None else found.up.incarnation

    def group_views(self) -> dict[GroupId, tuple[str, tuple[RankView, ...]]]:
        """Role and last reported views by group, for status displays."""
        return {name: (g.up.role, tuple(g.views.values())) for name, g in sorted(self._groups.items())}

    def _update_max_model_len(self) -> None:
        if self.is_ready:
            self._max_model_len = min(_max_len(group.up) for group in self._groups.values())

    def check(self) -> list[str]:
        """Return violated laws; empty when sound."""
        on_queue = set(self._queue)
        problems = [
            f"{request_id} is on the queue, but over" for request_id in on_queue - self._requests.keys()
        ]
        problems += [
            f"{request.request_id} is {request.phase.value}; on the queue: {request.request_id in on_queue}"
            for request in self._requests.values()
            if (request.phase is _Phase.QUEUED) != (request.request_id in on_queue)
        ]
        problems += [
            f"{request.request_id} is on {group}, which is not up"
            for request in self._requests.values()
            for group in request.groups
            if group not in self._groups
        ]
        return problems


def _queued(group: KnownGroup) -> int:
    return sum(view.queued_tokens for view in group.adjusted_views())


def _address(group: KnownGroup, rank: DpRank) -> str:
    info: RankInfo = next(info for info in group.up.ranks if info.rank == rank)
    return info.data_address


def _max_len(up: GroupUp) -> int:
    return min([up.max_model_len, *(info.max_tokens for info in up.ranks)])
