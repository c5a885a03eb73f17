"""A service in one process: schedulers, ranks with real threads, and the node daemon of their host."""

from __future__ import annotations

import queue
import tempfile
import time
from array import array
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

from millpond.config.node_params import NodeParams
from millpond.config.transfer_params import TransferParams
from millpond.control.group_scheduler import GroupParams, GroupRole, GroupScheduler
from millpond.control.invariants import require_sound
from millpond.core.events import Aborted, Assigned, Loaded, RankReport, StepDone
from millpond.core.hashing import root_digest
from millpond.core.ids import DpRank, GatewayId, GroupId, RankRef, RequestId
from millpond.core.plan import Assign, TokenOut
from millpond.core.ports import Engine
from millpond.core.request import CachedPrefix, KvIdentity, RequestSpec, SamplingParams
from millpond.serve.node.client import NodeClient
from millpond.serve.node.host_memory import NodeSetup
from millpond.serve.rpc import Network
from millpond.serve.transfer.receiver import HandoffReceiver
from millpond.serve.transfer.sender import HandoffSender
from millpond.serve.workers.rank_kv import RankKv
from millpond.serve.workers.rank_runner import RankRunner, slice_for_rank
from tests.unit.serve.node.rig import Daemon, poll
from tests.unit.store.metadata.shards import TOKEN as POOL_TOKEN

LIMIT_S = 30.0
TOKEN = b"t" * 32
IDENTITY = KvIdentity(root_digest(b"model", b"layout", b"", b""), 1)
NODE = NodeParams(put_slots=8, lease_s=1.0, load_deadline_s=LIMIT_S, pool_retry_s=0.1)


@dataclass
class Group:
    """One group of one rank."""

    runner: RankRunner
    scheduler: GroupScheduler
    events: queue.SimpleQueue[object]
    reports: list[RankReport] = field(default_factory=list)
    loaded: list[Loaded] = field(default_factory=list)

    @property
    def kv(self) -> RankKv:
        assert self.runner.kv is not None
        return self.runner.kv

    @property
    def lost(self) -> list[tuple[str, int]]:
        """What steps told of loads that broke."""
        return [lost for report in self.reports for lost in report.lost]

    def advance(self, event: object) -> None:
        self.scheduler.advance(time.monotonic_ns(), event)

    def take_events(self) -> bool:
        count = 0
        while not self.events.empty():
            event = self.events.get()
            self.loaded += [event] if isinstance(event, Loaded) else []
            self.advance(event)
            count += 1
        return count > 0


@dataclass
class Answer:
    """What one request got."""

    token_ids: array[int]
    num_cached_tokens: int


class KvService:
    """A mixed group, or a prefill and a decode group, on one host."""

    def __init__(
        self,
        stack: ExitStack,
        folder: Path,
        network: Network,
        snapshots: int,
        metadata: tuple[str, ...],
        load_deadline_s: float,
    ) -> None:
        self._stack, self.folder, self.network = stack, folder, network
        self._snapshots, self._metadata = snapshots, metadata
        self._load_deadline_s = load_deadline_s
        self._num_lives = self._num_put_before = 0
        self.groups: dict[str, Group] = {}
        self.answers: dict[str, list[TokenOut]] = {}
        self._open: set[str] = set()

    def start_daemon(self, engine: Engine, num_slots: int = 64) -> Daemon:
        self._num_lives += 1
        self._num_put_before += self.num_put
        layout = engine.layout
        setup = NodeSetup(
            host="h0",
            epoch=self._num_lives,
            layout=layout,
            arena_folder=self.folder,
            arena_name="h0",
            arena_bytes=num_slots * (layout.block_bytes + 4096) + 16 * 4096,
            snapshot_bytes=self._snapshots * layout.state_bytes,
            metadata=self._metadata,
            token=POOL_TOKEN,
            params=NODE,
        )
        self.daemon = Daemon(self.folder, setup, self.network)
        self._stack.callback(self.daemon.end)
        return self.daemon

    def connect(self, name: str, engine: Engine, post: Callable[[object], None]) -> NodeClient:
        """A rank's line to the daemon; the caller stops it."""
        return NodeClient(
            self.network,
            self.daemon.endpoint,
            name,
            1,
            engine.layout,
            NODE.put_slots,
            post,
            lease_s=NODE.lease_s,
        )

    def add_group(
        self,
        name: str,
        role: GroupRole,
        engine: Engine,
        params: GroupParams | None = None,
        num_drafts: int = 0,
    ) -> Group:
        events: queue.SimpleQueue[object] = queue.SimpleQueue()
        transfer = TransferParams(shm_dir=str(self.folder))
        sender = HandoffSender(engine, TOKEN, transfer, events.put) if role is GroupRole.PREFILL else None
        receiver = None
        if role is GroupRole.DECODE:
            receiver = HandoffReceiver(engine, f"unix:{self.folder / name}", TOKEN, transfer, events.put)
        node = self.connect(f"{name}-0", engine, events.put)
        rows_ready = sender.rows_ready if sender is not None else lambda *_: None
        kv = RankKv(engine, node, self._load_deadline_s, rows_ready)
        runner = RankRunner(DpRank(0), engine, sender, receiver, kv)
        self._stack.callback(runner.stop)
        poll(lambda: node.num_free_slots > 0, "a lease")
        scheduler = GroupScheduler(
            GroupId(name), role, (runner.info,), engine.max_model_len, params or GroupParams()
        )
        self.groups[name] = Group(runner, scheduler, events)
        return self.groups[name]

    def submit(self, name: str, prompt_ids: array[int], max_tokens: int, **more: object) -> None:
        cached = (len(prompt_ids) - 1) // 128 * 128
        spec = RequestSpec(
            RequestId(name),
            0,
            GatewayId("g"),
            "g",
            prompt_ids,
            SamplingParams(max_tokens=max_tokens, seed=0, temperature=0.0),
            kv=IDENTITY,
            cached=CachedPrefix(cached) if cached else None,
        )
        spec = replace(spec, **more)
        refs = [RankRef(GroupId(group), DpRank(0)) for group in self.groups]
        address = list(self.groups.values())[-1].runner.info.data_address
        for group in self.groups.values():
            group.advance(Assigned(Assign(spec, refs[0], refs[-1], address)))
        self.answers[name] = []
        self._open.add(name)

    def abort(self, name: str) -> None:
        for group in self.groups.values():
            group.advance(Aborted(RequestId(name), 0))
        self._open.discard(name)

    def run(self) -> dict[str, Answer]:
        """Serve until every submitted request has ended."""
        limit = time.monotonic() + LIMIT_S
        while self._open:
            states = [group.scheduler.views() for group in self.groups.values()]
            assert time.monotonic() < limit, f"{self._open} did not end: {states}"
            has_worked = [self.turn(group) for group in self.groups.values()]
            if not any(has_worked):
                time.sleep(0.001)  # an event is on its way; the loop has a deadline
        require_sound([group.scheduler for group in self.groups.values()])
        return {name: _answer(tokens) for name, tokens in self.answers.items() if tokens}

    def turn(self, group: Group) -> bool:
        """One round of a group's loop; whether there was anything to do."""
        has_event = group.take_events()
        plan = group.scheduler.next_plan(time.monotonic_ns())
        if plan is None:
            return has_event
        for _, token in plan.outputs:
            self.answers[token.request_id].append(token)
            if token.finish is not None:
                self._open.discard(token.request_id)
        report = group.runner.carry_out(slice_for_rank(plan, DpRank(0)))
        if report is not None:
            group.reports.append(report)
            group.advance(StepDone(plan.step, (report,)))
        require_sound([group.scheduler])
        return True

    def ask(self, name: str, prompt_ids: array[int], max_tokens: int, **more: object) -> Answer:
        """Serve one request."""
        self.submit(name, prompt_ids, max_tokens, **more)
        return self.run()[name]

    def settle(self) -> None:
        """Run until everything that was computed has been taken in by the daemon, and nothing is held."""
        for group in self.groups.values():
            group.take_events()
        counts = self.daemon.daemon.counts
        poll(lambda: counts.puts + counts.puts_known + counts.puts_skipped == self.num_put, "puts")
        self.daemon.check()

    @property
    def num_put(self) -> int:
        """Blocks that ranks handed to this life of the daemon."""
        return (
            sum(group.kv.persister.stats.num_blocks for group in self.groups.values()) - self._num_put_before
        )


def _answer(tokens: list[TokenOut]) -> Answer:
    return Answer(array("i", [token.token_id for token in tokens]), tokens[0].num_cached_tokens)


@contextmanager
def kv_service(
    snapshots: int = 20, metadata: tuple[str, ...] = (), load_deadline_s: float = NODE.load_deadline_s
) -> Iterator[KvService]:
    """Nothing is started yet. Without metadata there is no pool."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        network = stack.enter_context(Network())
        yield KvService(
            stack.enter_context(ExitStack()), folder, network, snapshots, metadata, load_deadline_s
        )
