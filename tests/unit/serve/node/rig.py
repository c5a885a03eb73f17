"""Node daemons in threads of this process, over a pool of real sockets, and ranks that speak with them."""

from __future__ import annotations

import subprocess
import sys
import tempfile
import threading
import time
from array import array
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TypeVar

import numpy as np

from millpond.config.node_params import NodeParams
from millpond.core.events import Loaded
from millpond.core.extents import NodeId
from millpond.core.ids import DpRank, RequestId
from millpond.core.kv_layout import KvLayout, StatePart
from millpond.core.node_messages import Load
from millpond.core.plan import LoadStart
from millpond.core.request import KvIdentity
from millpond.policies.spill import SpillParams
from millpond.serve.node.client import NodeClient
from millpond.serve.node.daemon import NodeDaemon
from millpond.serve.node.host_memory import HostMemory, NodeSetup
from millpond.serve.node.node_load import NodeLoad
from millpond.serve.rpc import Connected, Dealer, Network, Router
from millpond.store.chain import BlockChain
from tests.unit.store.metadata.shards import TOKEN, shards
from tests.unit.store.pool_cluster import LAYOUT, bytes_of, chain_of, pool_map
from tests.unit.store.shard_peer import ShardPeer

STATE_BYTES = 1000
STATEFUL = replace(LAYOUT, state=(StatePart(0, "window", STATE_BYTES, True),))
PARAMS = NodeParams(
    put_slots=8, lease_s=1.0, flush_s=5.0, pool_retry_s=0.1, spill=SpillParams(idle_s=0.2, retry_s=0.2)
)
ENDPOINT = "node.sock"
Got = TypeVar("Got")


def poll(condition: Callable[[], object], what: str, deadline_s: float = 60.0) -> None:
    end_ns = time.monotonic_ns() + int(deadline_s * 1e9)
    while not condition():
        assert time.monotonic_ns() < end_ns, f"not within {deadline_s} s: {what}"
        time.sleep(0.005)  # the interval of a poll with a deadline


def chain(num_blocks: int, first_id: int = 0, layout: KvLayout = LAYOUT) -> BlockChain:
    """Chain of the tokens `first_id, first_id + 1, ...`."""
    assert layout.rows == LAYOUT.rows
    return chain_of(num_blocks, first_id=first_id)


def identity(of: BlockChain) -> KvIdentity:
    return KvIdentity(of.root, int(of.tenant))


def tokens(num_blocks: int, first_id: int = 0) -> array[int]:
    return array("i", range(first_id, first_id + 128 * num_blocks))


class Daemon:
    """One node daemon in a thread."""

    def __init__(self, folder: Path, setup: NodeSetup, network: Network) -> None:
        self.memory = HostMemory(setup)
        self._router = Router(network, f"ipc://{folder / f'{setup.host}.{ENDPOINT}'}")
        self.endpoint = self._router.endpoint
        self.daemon = NodeDaemon(self.memory, self._router, setup.params)
        self._setup = setup
        self._stopping = threading.Event()
        self.failure: BaseException | None = None
        self._problems: list[list[str]] = []
        self._asked = 0
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        try:
            self.daemon.run(self._stopping.is_set, self._on_tick)
            assert self.daemon.stop(), "threads did not end"
        except BaseException as error:
            self.failure = error
            raise

    def _on_tick(self) -> None:
        while len(self._problems) < self._asked:
            self._problems.append(self.daemon.check())

    def check(self) -> None:
        """The daemon's laws hold now."""
        self._asked += 1
        asked = self._asked
        poll(lambda: len(self._problems) >= asked or self.failure is not None, "a check")
        assert self.failure is None, self.failure
        assert self._problems[asked - 1] == []
        self.memory.loader.check()

    def num_free(self) -> int:
        """Slots that are free or could be."""
        level = self.memory.level
        with level.lock:
            return level.blocks.num_available

    def end(self) -> None:
        if not self._thread.is_alive() and self._stopping.is_set():
            return
        self._stopping.set()
        self._thread.join()
        self._router.close()
        assert self.memory.close(self._setup.params.flush_s), "threads did not end"
        assert self.failure is None, self.failure


@dataclass
class Rank:
    """A rank's client, and the events that it posted."""

    client: NodeClient
    events: list[object] = field(default_factory=list)
    num_requests: int = 0

    def wait_up(self, daemon: Daemon, num_slots: int = 0) -> None:
        """Wait for a lease of this life of the daemon, and for put slots."""
        epoch = daemon.memory.arena.epoch
        poll(lambda: self.client.epoch == epoch and self.client.num_free_slots >= num_slots, "a lease")

    def put(
        self,
        of: BlockChain,
        begin: int = 0,
        end: int | None = None,
        *,
        request: str = "put",
        is_approximate: bool = False,
    ) -> None:
        """Write blocks into slots and hand them over, as far as slots come."""
        end = len(of.digests) if end is None else end
        for index in range(begin, end):
            poll(
                partial(self._put_one, of, index, request, is_approximate=is_approximate),
                f"a slot for block {index}",
            )

    def _put_one(self, of: BlockChain, index: int, request: str, *, is_approximate: bool) -> bool:
        slot = self.client.take_slot()
        if slot is None:
            return False
        slot.view[:] = bytes_of(of.digests[index])
        digests = of.digests[: index + 1]
        self.client.put(
            RequestId(request), 0, identity(of), index, digests, [slot], is_approximate=is_approximate
        )
        return True

    def order(
        self, num_blocks: int, first_id: int = 0, *, deadline_s: float = 20.0, wants_state: bool = False
    ) -> RequestId:
        """Order a load; returns its request."""
        self.num_requests += 1
        name = RequestId(f"r{self.num_requests}")
        order = LoadStart(
            name,
            0,
            DpRank(0),
            identity(chain(num_blocks, first_id)),
            tokens(num_blocks, first_id),
            b"",
            wants_state,
        )
        self.client.load(order, time.monotonic_ns() + int(deadline_s * 1e9))
        return name

    def answer(self, request: RequestId) -> Loaded:
        """Wait for `Loaded`."""

        def found() -> list[Loaded]:
            events = [event for event in list(self.events) if isinstance(event, Loaded)]
            return [event for event in events if event.request_id == request]

        poll(found, f"Loaded of {request}")
        assert len(found()) == 1
        return found()[0]

    def finish(self, request: RequestId) -> NodeLoad:
        """Wait until no more rows will come."""
        self.answer(request)
        load = self.client.load_of(request, 0)
        assert load is not None
        poll(lambda: load.num_blocks is not None, f"the end of {request}")
        return load

    def read(self, num_blocks: int, first_id: int = 0) -> int:
        """Load a chain, check every byte, give it back; returns the blocks that came."""
        request = self.order(num_blocks, first_id)
        load = self.finish(request)
        count = check_bytes(load, chain(num_blocks, first_id))
        self.client.end(request, 0)
        return count


def check_bytes(load: NodeLoad, of: BlockChain) -> int:
    """Check every byte of the blocks that came, row by row as an engine reads them; returns how many."""
    count = load.num_blocks or 0
    assert load.num_valid(0, count) == count
    begin = 0
    for row in range(len(LAYOUT.rows)):
        assert load.rows_ready(row) == count
        if not count:
            continue
        memory = np.asarray(load.row_memory(row))
        end = begin + LAYOUT.rows[row].num_bytes
        for index in range(count):
            expected = bytes_of(of.digests[index])[begin:end]
            assert np.array_equal(memory[load.slots[index]], expected), f"row {row} of block {index}"
        begin = end
    return count


@dataclass
class Rig:
    """Hosts over one pool, and their ranks."""

    folder: Path
    network: Network
    peers: dict[NodeId, ShardPeer]
    metadata: tuple[str, ...]
    stack: ExitStack
    num_lives: int = 0
    num_ranks: int = 0

    def start(
        self,
        host: str = "h0",
        *,
        num_slots: int = 64,
        layout: KvLayout = LAYOUT,
        params: NodeParams = PARAMS,
        pool: bool = True,
        snapshots: int = 20,
    ) -> Daemon:
        self.num_lives += 1
        setup = NodeSetup(
            host=host,
            epoch=self.num_lives,
            layout=layout,
            arena_folder=self.folder,
            arena_name=host,
            arena_bytes=num_slots * (layout.block_bytes + 40) + 5 * 4096,
            snapshot_bytes=snapshots * STATE_BYTES,
            metadata=self.metadata if pool else (),
            token=TOKEN,
            params=params,
        )
        daemon = Daemon(self.folder, setup, self.network)
        self.stack.callback(daemon.end)
        return daemon

    def rank(
        self, daemon: Daemon, *, layout: KvLayout = LAYOUT, num_put_slots: int = 8, lease_s: float = 1.0
    ) -> Rank:
        self.num_ranks += 1
        events: list[object] = []
        client = NodeClient(
            self.network,
            daemon.endpoint,
            f"p0-{self.num_ranks}",
            1,
            layout,
            num_put_slots,
            events.append,
            lease_s=lease_s,
        )
        self.stack.callback(client.stop)
        rank = Rank(client, events)
        rank.wait_up(daemon)
        return rank


@contextmanager
def rig(folder: Path) -> Iterator[Rig]:
    """A pool of eight nodes and one metadata shard."""
    with ExitStack() as stack:
        peers = {NodeId(f"s{index}"): ShardPeer(f"s{index}", TOKEN) for index in range(8)}
        made = stack.enter_context(shards(folder, pool_map=pool_map(peers)))
        for peer in peers.values():  # first: the metadata waits for those that do not list their records
            stack.callback(peer.close)
        # Socket paths are limited to 107 bytes, which pytest's own folders may exceed.
        sockets = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        network = stack.enter_context(Network())
        addresses = tuple(server.address for server in made.servers)
        yield Rig(sockets, network, peers, addresses, stack.enter_context(ExitStack()))


class RawPeer:
    """A peer that says what a test wants, when it wants."""

    def __init__(self, made: Rig, daemon: Daemon, name: str = "raw-0") -> None:
        self._dealer = Dealer(made.network, daemon.endpoint, name)
        made.stack.callback(self._dealer.close)
        self.received: list[object] = []
        self.expect(Connected)

    def send(self, message: object) -> None:
        assert self._dealer.send(message)

    def expect(self, kind: type[Got], deadline_s: float = 20.0) -> Got:
        """Wait for the next message of a kind; others stay in `received`."""

        def take() -> bool:
            while (message := self._dealer.recv()) is not None:
                self.received.append(message)
            return any(isinstance(message, kind) for message in self.received)

        poll(take, f"a {kind.__name__}", deadline_s)
        found = next(message for message in self.received if isinstance(message, kind))
        self.received.remove(found)
        return found

    def load(self, of: BlockChain, number: int, *, located: bytes = b"", deadline_s: float = 20.0) -> Load:
        """Ask for a load."""
        order = Load(
            RequestId(f"raw{number}"),
            0,
            identity(of),
            b"".join(of.digests),
            located,
            time.monotonic_ns() + int(deadline_s * 1e9),
            number=number,
        )
        self.send(order)
        return order


@contextmanager
def living_process() -> Iterator[subprocess.Popen[bytes]]:
    """A process that lives until it is killed."""
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        yield process
    finally:
        process.kill()
        process.communicate()
