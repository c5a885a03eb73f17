"""A whole service in virtual time: gateways, controller, groups, and a supervisor that restarts them.

The objects that decide are those of the service: `Dispatcher` and `GroupScheduler`. Around them stand the
same loops as in `serve`, without processes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from millpond.config.journal import DispatcherSetup, GroupSetup, Setup
from millpond.config.sim_params import SimCostParams, SimRankParams
from millpond.control.dispatcher import Dispatcher, DispatchParams
from millpond.control.group_scheduler import GroupParams, GroupRole, GroupScheduler
from millpond.control.invariants import check_all
from millpond.core.chance import Chance
from millpond.core.errors import InvariantBroken
from millpond.core.events import GatewayDown, GroupDown, RankInfo, TokensOut
from millpond.core.ids import DpRank, GatewayId, GroupId, RequestId
from millpond.core.plan import RestartGroup
from millpond.core.request import FinishReason, RequestSpec, SamplingParams
from millpond.core.units import MILLISECOND_NS, SECOND_NS
from millpond.sim.handoffs import Handoffs
from millpond.sim.kernel import Kernel
from millpond.sim.kv_node import KvNode, LoadFaults
from millpond.sim.kv_pool import KvPool
from millpond.sim.network import Network
from millpond.sim.session_client import SessionClient
from millpond.sim.sim_controller import SimController
from millpond.sim.sim_gateway import SimGateway, Stream
from millpond.sim.sim_leader import SimLeader
from millpond.sim.workload import Arrival, Session

SUPERVISOR = "supervisor"
SUPERVISOR_ORDER = 1
GATEWAY_ORDER = 100
GROUP_ORDER = 500
CLIENT_ORDER = 2_000


@dataclass(frozen=True, slots=True)
class ClusterShape:
    """What is simulated."""

    groups: tuple[tuple[str, GroupRole, int], ...] = (
        ("p0", GroupRole.PREFILL, 1),
        ("d0", GroupRole.DECODE, 1),
    )
    """(name, role, number of ranks)."""
    num_gateways: int = 1
    dispatch: DispatchParams = field(default_factory=DispatchParams)
    group: GroupParams = field(default_factory=GroupParams)
    rank: SimRankParams = field(default_factory=SimRankParams)
    costs: SimCostParams = field(default_factory=SimCostParams)
    jitter_ns: int = 0
    """Messages take up to so much longer, by chance."""
    duplicate_ratio: float = 0.0
    """Share of token messages that come twice."""
    load_faults: LoadFaults = field(default_factory=LoadFaults)
    """What goes wrong with the loads of cached KV."""
    detect_ns: int = 50 * MILLISECOND_NS
    """Time until the supervisor notices a death."""
    restart_ns: int = SECOND_NS
    """Time until a dead process is there again."""
    is_spanning: bool = True
    """Let a plan span several decode steps while nothing else can happen. Changes no result."""


Rebuild = Callable[[str, Setup], Dispatcher | GroupScheduler]
"""Makes a deciding object from (name, setup); may put a journal around it."""


class Cluster:
    """One simulated service."""

    def __init__(self, shape: ClusterShape, seed: int = 0, make: Rebuild | None = None) -> None:
        self.shape = shape
        self.kernel = Kernel()
        self.network = Network(
            self.kernel, shape.costs.message_ns, shape.jitter_ns, Chance(seed, "network.jitter")
        )
        self.handoffs = Handoffs(self.kernel, shape.costs)
        self.kv_node = KvNode(
            self.kernel,
            KvPool(has_state=shape.rank.has_state),
            shape.costs,
            shape.load_faults,
            Chance(seed, "loads"),
        )
        self.streams: list[Stream] = []
        """Every request that was submitted."""
        self.num_kills = 0
        self._make = make or (lambda _name, setup: setup.make())
        self._duplicates = Chance(seed, "network.duplicates")
        self._num_added = 0
        self._num_open = 0
        self._clients: dict[RequestId, SessionClient] = {}
        """Sessions by the request that they wait for."""
        self._incarnations: dict[str, int] = {}
        self._roles = {GroupId(name): (role, num_ranks) for name, role, num_ranks in shape.groups}
        self._dead: set[str] = set()
        self.network.attach(SUPERVISOR, SUPERVISOR_ORDER, self._on_supervisor)
        self.controller = self._start_controller()
        self.leaders: dict[GroupId, SimLeader] = {}
        for group in self._roles:
            self._start_group(group)
        names = [GatewayId(f"g{i}") for i in range(shape.num_gateways)]
        pool = self.kv_node.pool if shape.rank.can_load else None
        self.gateways = {
            name: SimGateway(name, GATEWAY_ORDER + i, self.kernel, self.network, self._on_end, pool)
            for i, name in enumerate(names)
        }

    # --- clients -----------------------------------------------------------------------------

    def add(self, arrivals: list[Arrival]) -> None:
        """Schedule requests. Gateways take turns; output lengths are forced."""
        for i, arrival in enumerate(arrivals, start=self._num_added):
            self._num_added += 1
            self._num_open += 1
            gateway = GatewayId(f"g{i % self.shape.num_gateways}")
            spec = RequestSpec(
                request_id=RequestId(f"r{i}"),
                attempt=0,
                gateway=gateway,
                reply_to=gateway,
                prompt_ids=arrival.prompt_ids(i),
                sampling=SamplingParams(max_tokens=arrival.num_output_tokens, seed=i),
                priority=arrival.priority,
            )
            self.kernel.at(arrival.time_ns, CLIENT_ORDER, lambda spec=spec: self._submit(spec))

    def add_sessions(self, sessions: Sequence[Session]) -> None:
        """Schedule sessions. Each stays with one gateway."""
        for number, session in enumerate(sessions):
            self._num_open += 1
            gateway = GatewayId(f"g{number % self.shape.num_gateways}")
            SessionClient(session, number, gateway, self.kernel, self._submit_turn)

    def _submit_turn(self, client: SessionClient, spec: RequestSpec) -> None:
        self._clients[spec.request_id] = client
        self._submit(spec)

    def _submit(self, spec: RequestSpec) -> None:
        gateway = self.gateways.get(spec.gateway)
        if gateway is None:
            self._num_open -= 1  # connection refused
        else:
            self.streams.append(gateway.submit(spec))

    def cancel(self, request_id: RequestId) -> None:
        """The client of a request leaves."""
        for gateway in self.gateways.values():
            gateway.cancel(request_id)

    def _on_end(self, stream: Stream) -> None:
        client = self._clients.pop(stream.spec.request_id, None)
        if client is None or not client.on_end(stream):
            self._num_open -= 1
        num_tokens = len(stream.token_times_ns)
        if stream.reason is FinishReason.LENGTH and num_tokens > stream.spec.sampling.max_tokens:
            raise InvariantBroken(f"{stream.spec.request_id} got {num_tokens} tokens")

    # --- life and death ----------------------------------------------------------------------

    def kill_group(self, group: GroupId) -> None:
        """Kill -9 of a group; the supervisor notices and starts it again."""
        leader = self.leaders.pop(group, None)
        if leader is None:
            return
        self.num_kills += 1
        leader.kill()
        down = GroupDown(group, self._incarnations[group], "killed")
        self._later(self.shape.detect_ns, lambda: self.network.send(SUPERVISOR, "controller", down))
        self._later(self.shape.detect_ns + self.shape.restart_ns, lambda: self._start_group(group))

    def kill_controller(self) -> None:
        """Kill -9 of the controller; the supervisor starts it again."""
        if self.network.is_attached("controller"):
            self.num_kills += 1
            self.controller.kill()
            self._later(self.shape.restart_ns, self._restart_controller)

    def kill_node_daemons(self, down_ns: int, lost_ratio: float) -> None:
        """Kill -9 of the node daemons of all hosts, with a share of what they had not written down."""
        self.kv_node.kill(down_ns, lost_ratio)

    def kill_gateway(self, gateway: GatewayId) -> None:
        """Kill -9 of a gateway, for good: its clients are gone with it."""
        found = self.gateways.pop(gateway, None)
        if found is None:
            return
        self.num_kills += 1
        self.network.detach(gateway)
        self._num_open -= len(found.streams)
        for stream in found.streams.values():
            stream.reason, stream.detail = FinishReason.ABORTED, "its gateway was killed"
        down = GatewayDown(gateway)
        self._later(self.shape.detect_ns, lambda: self.network.send(SUPERVISOR, "controller", down))

    def _on_supervisor(self, message: object) -> None:
        if isinstance(message, RestartGroup) and self._incarnations[message.group] == message.incarnation:
            self.kill_group(message.group)

    def _start_controller(self) -> SimController:
        incarnation = self._incarnate("controller")
        setup = DispatcherSetup(self.shape.dispatch, tuple(sorted(self._roles)), self.kernel.now_ns)
        dispatcher = self._make(f"controller.{incarnation}", setup)
        assert isinstance(dispatcher, Dispatcher)  # noqa: S101 - what its setup makes
        return SimController(dispatcher, incarnation, self.kernel, self.network)

    def _restart_controller(self) -> None:
        self.controller = self._start_controller()

    def _start_group(self, group: GroupId) -> None:
        if group in self.leaders:
            return
        ranks = self._ranks_of(group)
        incarnation = self._incarnate(group)
        setup = GroupSetup(
            group, self._roles[group][0], ranks, self.shape.rank.max_model_len, self.shape.group
        )
        scheduler = self._make(f"{group}.{incarnation}", setup)
        assert isinstance(scheduler, GroupScheduler)  # noqa: S101 - what its setup makes
        self.leaders[group] = SimLeader(
            scheduler,
            ranks,
            incarnation,
            GROUP_ORDER + list(self._roles).index(group),
            kernel=self.kernel,
            network=self.network,
            handoffs=self.handoffs,
            kv_node=self.kv_node,
            costs=self.shape.costs,
            put_tokens=self._put_tokens,
            is_spanning=self.shape.is_spanning,
        )

    def _ranks_of(self, group: GroupId) -> tuple[RankInfo, ...]:
        role, num_ranks = self._roles[group]
        rank = self.shape.rank
        is_prefill = role is GroupRole.PREFILL
        return tuple(
            RankInfo(
                rank=DpRank(i),
                data_address=f"{group}/{i}",
                num_blocks=(is_prefill and rank.num_prefill_blocks) or rank.num_blocks,
                num_slots=rank.num_slots,
                min_computed_tokens=rank.min_computed_tokens,
                max_drafts=rank.max_drafts,
                can_load=rank.can_load,
                has_state=rank.has_state,
                replay_tokens=rank.replay_tokens if rank.has_state else 0,
                num_home_blocks=rank.num_home_blocks if is_prefill else 0,
                num_rows=rank.num_rows,
            )
            for i in range(num_ranks)
        )

    def _incarnate(self, name: str) -> int:
        self._incarnations[name] = self._incarnations.get(name, 0) + 1
        return self._incarnations[name]

    def _later(self, delay_ns: int, action: Callable[[], object]) -> None:
        self.kernel.after(delay_ns, SUPERVISOR_ORDER, lambda: (action(), None)[1])

    def _put_tokens(self, sender: str, reply_to: str, made_ns: int, message: TokensOut) -> None:
        gateway = self.gateways.get(GatewayId(reply_to))
        if gateway is None:
            return
        copies = 2 if self._duplicates.uniform() < self.shape.duplicate_ratio else 1
        for _ in range(copies):
            gateway.put_tokens(self.network.arrival_ns(sender, f"tokens:{reply_to}", made_ns), message)

    # --- run ---------------------------------------------------------------------------------

    def run(self, limit_s: float = 3600.0) -> bool:
        """Run until every request has ended; False if one has not after `limit_s` more virtual seconds."""
        return self.kernel.run(lambda: self._num_open == 0, self.kernel.now_ns + int(limit_s * SECOND_NS))

    def settle(self, seconds: float = 60.0) -> bool:
        """Run on until nothing is held anywhere; False if that takes longer."""
        return self.kernel.run(lambda: not self.leftovers(), self.kernel.now_ns + int(seconds * SECOND_NS))

    def leftovers(self) -> list[str]:
        """What is still held although every request has ended; empty at rest."""
        found = check_all([self.controller.dispatcher, *(x.scheduler for x in self.leaders.values())])
        if self.controller.dispatcher.num_requests:
            found.append(f"the controller has {self.controller.dispatcher.num_requests} requests")
        if self.handoffs.num_open:
            found.append(f"{self.handoffs.num_open} halves of handoffs are open")
        if self.kv_node.num_open:
            found.append(f"{self.kv_node.num_open} loads are open")
        for group in self._roles:
            leader = self.leaders.get(group)
            if leader is None:
                found.append(f"{group} is down")
                continue
            for view, info in zip(leader.scheduler.views(), self._ranks_of(group), strict=True):
                if (view.free_blocks, view.free_slots) != (
                    info.num_blocks,
                    info.num_slots,
                ) or view.num_queued:
                    found.append(f"{group}/{view.rank} holds {view}")
        return found
