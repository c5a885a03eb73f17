"""A pool of real storage nodes in this process, on folders of a test, with a dict of metadata."""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from millpond.core.extents import NodeId
from millpond.core.pool_map import PoolMap, StorageNodeInfo
from millpond.policies.retention import RetentionParams
from millpond.policies.stripe_placement import add_epoch
from millpond.store.files import DiskFiles
from millpond.store.net.node_link import NodeLinkParams
from millpond.store.net.peer import ServerParams
from millpond.store.net.server import NodeServer
from millpond.store.node import Calendar, StorageNode
from millpond.store.pool import Pool
from millpond.store.target import Target, TargetParams
from tests.unit.store.dict_metadata import DictMetadata
from tests.unit.store.pool_cluster import LAYOUT, SETTINGS, Cluster, K, M

MIB = 1 << 20
START_S = 1_800_000_000


class HandClock:
    """Time that the test moves."""

    def __init__(self) -> None:
        self.now_s = START_S

    def monotonic_ns(self) -> int:
        return self.now_s * 10**9

    def unix_s(self) -> int:
        return self.now_s


class Node:
    """One storage node; `stop`, `wipe` and `start` it at will."""

    def __init__(self, name: str, folder: Path, clock: HandClock) -> None:
        self.name = NodeId(name)
        self.folder = folder
        self.address = "127.0.0.1:0"
        self._clock = clock
        self._server: NodeServer | None = None
        self.start()

    @property
    def is_running(self) -> bool:
        return self._server is not None

    @property
    def server(self) -> NodeServer:
        assert self._server is not None
        return self._server

    def start(self) -> None:
        calendar = Calendar(self._clock)
        params = TargetParams(64 * MIB, retention=RetentionParams())
        target = Target(DiskFiles(self.folder), params, now_s=calendar.now_s())
        node = StorageNode(self.name, [target], calendar=calendar)
        self._server = NodeServer(node, self.address, token="t", boot=1, params=ServerParams())
        self._server.start()
        self.address = self._server.address

    def stop(self) -> None:
        server, self._server = self._server, None
        if server is not None:
            assert server.stop(20)
            assert server.failure is None

    def wipe(self) -> None:
        """Come back with an empty drive."""
        self.stop()
        shutil.rmtree(self.folder)
        self.start()

    def flip(self, position: float) -> None:
        """Flip a bit of the records on disk, at a place between 0 and 1 of the first segment."""
        self.stop()
        segment = min(self.folder.glob("*.seg"))
        data = bytearray(segment.read_bytes())
        data[int(len(data) * position)] ^= 16
        segment.write_bytes(data)
        self.start()


@dataclass
class NodeCluster(Cluster):
    nodes: dict[NodeId, Node]
    clock: HandClock
    stack: ExitStack

    def reconnect(self) -> None:
        """A new client, which knows nothing of the nodes' past."""
        self.pool.close()
        self.pool = self.stack.enter_context(self.connect())

    def wait_up(self, deadline_s: float = 60.0) -> None:
        """Wait until all nodes that run can be reached again."""
        end = time.monotonic() + deadline_s
        running = [name for name, node in self.nodes.items() if node.is_running]
        while not all(self.pool.links[name].is_up for name in running):
            assert time.monotonic() < end, "a node is not reached"
            for name in running:
                self.pool.links[name].dial()
            time.sleep(0.005)

    def connect(self) -> Pool:
        link = NodeLinkParams(min_redial_ms=1, max_redial_s=0.01)
        return Pool(
            LAYOUT,
            self.metadata,
            name="test",
            token="t",
            settings=replace(SETTINGS, link=link),
            clock=self.clock,
        )


@contextmanager
def node_cluster(folder: Path, num_nodes: int = 8) -> Iterator[NodeCluster]:
    clock = HandClock()
    with ExitStack() as stack:
        nodes: dict[NodeId, Node] = {}
        for index in range(num_nodes):
            node = Node(f"s{index}", folder / f"s{index}", clock)
            stack.callback(node.stop)
            nodes[node.name] = node
        infos = [StorageNodeInfo(node.name, node.address) for node in nodes.values()]
        metadata = DictMetadata(add_epoch(PoolMap(0, (), (), ()), infos, K, M))
        made = NodeCluster({}, metadata, None, nodes, clock, stack)  # type: ignore[arg-type]
        made.pool = stack.enter_context(made.connect())
        yield made
