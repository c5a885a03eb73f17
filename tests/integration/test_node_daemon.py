"""A node daemon in its own process over a pool of processes: killed, restarted, and left by its ranks."""

from __future__ import annotations

import signal
import subprocess
import sys
import tempfile
import time
from array import array
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest

from millpond.config.load import load_config
from millpond.config.pool_description import load_pool_description
from millpond.core.events import Loaded, Telemetry
from millpond.core.extents import TenantId, window_blocks
from millpond.core.hashing import HashChain, root_digest
from millpond.core.ids import DpRank, RequestId
from millpond.core.kv_layout import KvLayout
from millpond.core.plan import LoadStart
from millpond.core.request import KvIdentity
from millpond.core.units import MIB
from millpond.engine.kv_identity import configured_layout
from millpond.serve.node.client import NodeClient
from millpond.serve.node.node_load import NodeLoad
from millpond.serve.rpc import Network, Router
from millpond.serve.run_folder import PoolAccess, RunFolder, control_endpoint, make_run_folder
from millpond.store.local_pool import LocalPool
from millpond.store.net.messages import Match, Matched
from tests.integration.conftest import SHM, wait_until

LEASE_S = 1.0
CONFIG = f"""
[engine]
model = "synthetic"
[node]
lease_s = {LEASE_S}
put_slots = 8
pool_retry_s = 0.2
spill = {{ idle_s = 0.5 }}
[[host]]
name = "h0"
arena = "8 MiB"
dram = "24 MiB"
"""
NUM_BLOCKS = 40
HOLDER = """
import sys, time
from pathlib import Path
from tests.integration.test_node_daemon import NUM_BLOCKS, RunFolder, connected

with connected(RunFolder(Path(sys.argv[1])), "holder-0") as rank:
    rank.wait_slots()
    print(rank.load(NUM_BLOCKS).num_blocks, flush=True)
    time.sleep(600)
"""


def content(digest: bytes, layout: KvLayout) -> np.ndarray:
    return np.resize(np.frombuffer(digest, np.uint8), layout.block_bytes)


class Rank:
    """A rank without an engine."""

    def __init__(self, folder: RunFolder, network: Network, identity: str, incarnation: int) -> None:
        config = folder.load_config()
        self.layout = configured_layout(config.engine, config.synthetic)
        self.events: list[object] = []
        self.client = NodeClient(
            network,
            folder.socket("node-h0"),
            identity,
            incarnation,
            self.layout,
            config.node.put_slots,
            self.events.append,
            lease_s=config.node.lease_s,
        )
        self.kv = KvIdentity(root_digest(b"model", self.layout.fingerprint, b"", b""), 1)
        self.num_loads = 0

    def wait_slots(self, after_epoch: int = 0) -> None:
        wait_until(
            lambda: self.client.epoch > after_epoch and self.client.num_free_slots > 0, 60, "put slots"
        )

    def digests(self, num_blocks: int) -> list[bytes]:
        chain = HashChain(self.kv.root)
        chain.extend(array("i", range(128 * num_blocks)))
        return chain.digests

    def put(self, num_blocks: int) -> None:
        digests = self.digests(num_blocks)
        for index in range(num_blocks):
            self.wait_slots()
            slot = self.client.take_slot()
            assert slot is not None
            slot.view[:] = content(digests[index], self.layout)
            self.client.put(RequestId("put"), 0, self.kv, index, digests[: index + 1], [slot])

    def load(self, num_blocks: int) -> NodeLoad:
        """Load and check every byte; the load stays held."""
        self.num_loads += 1
        request = RequestId(f"load{self.num_loads}")
        token_ids = array("i", range(128 * num_blocks))
        order = LoadStart(request, 0, DpRank(0), self.kv, token_ids, b"", wants_state=False)
        self.client.load(order, time.monotonic_ns() + 20 * 10**9)
        load = self.client.load_of(request, 0)
        assert load is not None
        wait_until(lambda: load.is_answered and load.num_blocks is not None, 60, "the end of a load")
        assert [event for event in self.events if isinstance(event, Loaded)][-1].request_id == request
        digests, begin = self.digests(num_blocks), 0
        for row in range(len(self.layout.rows) if load.num_blocks else 0):
            memory, end = np.asarray(load.row_memory(row)), begin + self.layout.rows[row].num_bytes
            for index in range(load.num_blocks or 0):
                expected = content(digests[index], self.layout)[begin:end]
                assert np.array_equal(memory[load.slots[index]], expected)
            begin = end
        return load


@contextmanager
def connected(folder: RunFolder, identity: str, incarnation: int = 1) -> Iterator[Rank]:
    with Network(folder.load_keys()) as network:
        rank = Rank(folder, network, identity, incarnation)
        try:
            yield rank
        finally:
            rank.client.stop()


class Node:
    """The daemon's process."""

    def __init__(self, folder: RunFolder, log: Path) -> None:
        command = [sys.executable, "-m", "millpond.cli.main", "node-daemon"]
        command += ["--host", "h0", "--run-dir", str(folder.path)]
        with log.open("ab") as out:
            self.process = subprocess.Popen(command, stdout=out, stderr=out, stdin=subprocess.DEVNULL)
        self.log = log

    def end(self, number: signal.Signals = signal.SIGTERM) -> int:
        if self.process.poll() is None:
            self.process.send_signal(number)
        return self.process.wait(60)


class Controller:
    """Listens to what the daemon counts."""

    def __init__(self, folder: RunFolder, network: Network) -> None:
        self._router = Router(network, control_endpoint(folder.load_config(), folder))
        self.values: dict[str, float] = {}
        self.incarnation = 0

    def value(self, name: str) -> float:
        """The newest value of a metric; -1 before there is one."""
        while (received := self._router.recv()) is not None:
            peer, telemetry = received
            assert peer == "node-h0"
            assert isinstance(telemetry, Telemetry)
            self.values, self.incarnation = dict(telemetry.values), telemetry.incarnation
        return self.values.get(f"millpond_node_{name}", -1)

    def close(self) -> None:
        self._router.close()


@contextmanager
def holding(folder: RunFolder) -> Iterator[subprocess.Popen[bytes]]:
    """A rank's process that holds a load and put slots until it is killed."""
    command = [sys.executable, "-c", HOLDER, str(folder.path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stdin=subprocess.DEVNULL) as holder:
        try:
            assert holder.stdout is not None
            assert holder.stdout.readline() == f"{NUM_BLOCKS}\n".encode()
            yield holder
        finally:
            holder.kill()


@dataclass
class Service:
    """A pool of processes, and the run folder of a service over it."""

    folder: RunFolder
    pool: LocalPool
    controller: Controller
    log: Path
    stack: ExitStack

    def start(self) -> Node:
        node = Node(self.folder, self.log)
        self.stack.callback(node.end, signal.SIGKILL)
        return node

    def num_on_disk(self, rank: Rank) -> int:
        """Leading blocks of the test's chain that the pool has."""
        names = b"".join(digest[:16] for digest in rank.digests(NUM_BLOCKS))
        window = window_blocks(rank.layout)
        match = Match(TenantId(rank.kv.tenant), rank.kv.root[:16], 0, window)
        assert self.pool.metadata is not None
        deadline_ns = time.monotonic_ns() + 10 * 10**9
        answer = self.pool.metadata.call(match, names, prefix=names, deadline_ns=deadline_ns)
        assert isinstance(answer, Matched)
        return answer.num_blocks


@pytest.fixture
def service(tmp_path: Path) -> Iterator[Service]:
    with ExitStack() as stack:
        run = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="mp-")))
        shm = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="mp-", dir=SHM)))
        file = run / "service.toml"
        file.write_text(CONFIG)
        settings = (f"supervise.run_dir={run / 'run'}", f"transfer.shm_dir={shm}")
        folder = make_run_folder(load_config(file, settings).config)
        made = load_pool_description("pooled")
        storage = tuple(replace(node, targets=4, capacity=256 * MIB) for node in made.storage[:1])
        description = replace(
            made, storage=storage, placement=replace(made.placement, data_shards=4, parity_shards=2)
        )
        pool = stack.enter_context(LocalPool(description, tmp_path / "pool", token="secret"))
        folder.write_pool_access(PoolAccess(pool.metadata_addresses, "secret"))
        network = stack.enter_context(Network(folder.load_keys()))
        controller = Controller(folder, network)
        stack.callback(controller.close)
        with ExitStack() as processes:
            yield Service(folder, pool, controller, tmp_path / "node.log", processes)


def test_what_was_written_behind_survives_a_killed_daemon(service: Service):
    node = service.start()
    with connected(service.folder, "p0-0") as rank:
        rank.wait_slots()
        rank.put(NUM_BLOCKS)
        wait_until(lambda: service.controller.value("puts_total") == NUM_BLOCKS, 60, "puts")
        assert rank.load(NUM_BLOCKS).num_blocks == NUM_BLOCKS
        epoch = rank.client.epoch
        wait_until(lambda: service.num_on_disk(rank) == NUM_BLOCKS, 60, "everything is on disk")
        node.end(signal.SIGKILL)
        node = service.start()
        rank.wait_slots(after_epoch=epoch)
        with connected(service.folder, "p1-0") as other:
            other.wait_slots()
            wait_until(lambda: service.controller.value("pool_open") == 1, 60, "the pool")
            assert other.load(NUM_BLOCKS).num_blocks == NUM_BLOCKS
            wait_until(
                lambda: service.controller.value("blocks_loaded_total:pool") == NUM_BLOCKS, 60, "counts"
            )
    assert node.end() == 0, service.log.read_text()[-4000:]
    left = list(Path(service.folder.load_config().transfer.shm_dir).iterdir())
    assert left == []


def test_a_killed_rank_holds_nothing_soon_and_a_frozen_daemon_is_left_and_found_again(service: Service):
    node = service.start()
    with connected(service.folder, "p0-0") as rank:
        rank.wait_slots()
        rank.put(NUM_BLOCKS)
        value = service.controller.value
        with holding(service.folder) as holder:
            wait_until(lambda: value("slots_lent") == 16 and value("slots_pinned") == NUM_BLOCKS, 60, "held")
            holder.kill()
            wait_until(
                lambda: value("slots_lent") == 8 and value("slots_pinned") == 0, 10 * LEASE_S, "given back"
            )
        held = rank.load(NUM_BLOCKS)
        assert held.num_valid(0, NUM_BLOCKS) == NUM_BLOCKS
        node.process.send_signal(signal.SIGSTOP)
        wait_until(lambda: rank.client.epoch == 0, 10 * LEASE_S, "the lease is over")
        assert held.num_valid(0, NUM_BLOCKS) == 0
        assert rank.client.take_slot() is None
        node.process.send_signal(signal.SIGCONT)
        rank.wait_slots()
        assert rank.load(NUM_BLOCKS).num_blocks == NUM_BLOCKS
        wait_until(lambda: value("slots_lent") == 8 and value("slots_pinned") == NUM_BLOCKS, 60, "one lease")
    assert node.end() == 0, service.log.read_text()[-4000:]
