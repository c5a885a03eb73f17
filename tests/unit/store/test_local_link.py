from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from benchmarks.pool_nodes import SlowFiles
from millpond.core.errors import ConfigError, DeadlineExceeded, ExtentAbsent
from millpond.core.extents import NodeId
from millpond.core.pool_map import PlacementEpoch, PoolMap, StorageNodeInfo
from millpond.core.units import SECOND_NS
from millpond.store.clock import SystemClock
from millpond.store.extent_get import GetEnd
from millpond.store.files import CachedFiles
from millpond.store.local_metadata import LocalMetadata
from millpond.store.metadata.core import MetadataCore
from millpond.store.net.local_link import CachedReads, LocalLink
from millpond.store.net.messages import ReadShard
from millpond.store.net.node_link import NodeLink, NodeLinkParams
from millpond.store.net.peer import ServerParams
from millpond.store.net.server import NodeServer
from millpond.store.node import Calendar, StorageNode
from millpond.store.pool import Pool
from millpond.store.target import Target, TargetParams
from tests.unit.store.pool_cluster import LAYOUT, SETTINGS, Cluster, chain_of, soon


def start_node(name: str, folder: Path) -> NodeServer:
    calendar = Calendar(SystemClock())
    files = SlowFiles(folder, 0.0, 0.0, 0.0, seed=0)
    target = Target(files, TargetParams(capacity_bytes=1 << 30), now_s=calendar.now_s())
    node = StorageNode(name, [target], calendar=calendar)
    server = NodeServer(node, "127.0.0.1:0", token="t", boot=1, params=ServerParams())
    server.start()
    return server


@pytest.fixture
def servers(tmp_path: Path) -> Iterator[dict[NodeId, NodeServer]]:
    started = {NodeId(f"s{index}"): start_node(f"s{index}", tmp_path / f"s{index}") for index in range(6)}
    yield started
    for server in started.values():
        assert server.stop(10)


def make_pool(servers: dict[NodeId, NodeServer], folder: Path | None, metadata: MetadataCore) -> Cluster:
    """A client that reads the nodes' folders below `folder`, or over their connections."""
    names = tuple(servers)
    groups = tuple(tuple((first + shard) % 6 for shard in range(6)) for first in range(6))
    nodes = tuple(
        StorageNodeInfo(name, server.address, path=str(folder / name) if folder else "")
        for name, server in servers.items()
    )
    pool_map = PoolMap(1, nodes, (PlacementEpoch(0, 4, 2, names, groups),), ())
    pool = Pool(LAYOUT, LocalMetadata(metadata, pool_map), name="test", token="t", settings=SETTINGS)
    return Cluster({}, None, pool)


@pytest.mark.parametrize("is_local", [False, True])
def test_real_nodes_and_metadata_give_back_what_they_got(
    servers: dict[NodeId, NodeServer], tmp_path: Path, is_local: bool
):
    made = make_pool(servers, tmp_path if is_local else None, MetadataCore())
    with made.pool:
        chain = chain_of(70)
        made.put(chain)
        for num_blocks in (70, 64, 33, 5):
            shorter = replace(chain, digests=chain.digests[:num_blocks])
            hit, result = made.read(shorter)
            assert hit.num_blocks == result.num_blocks == num_blocks
        sent = sum(server.read_bytes for server in servers.values())
        assert (sent == 0) == is_local


def test_folders_are_read_when_the_processes_are_gone(servers: dict[NodeId, NodeServer], tmp_path: Path):
    made = make_pool(servers, tmp_path, MetadataCore())
    with made.pool:
        chain = chain_of(40)
        made.put(chain)
        for server in servers.values():
            server.stop(10)
        assert made.read(chain)[1].num_blocks == 40


def test_folders_that_are_not_there_are_read_over_the_connection(
    servers: dict[NodeId, NodeServer], tmp_path: Path
):
    made = make_pool(servers, tmp_path / "elsewhere", MetadataCore())
    with made.pool:
        chain = chain_of(40)
        made.put(chain)
        assert made.read(chain)[1].num_blocks == 40


def test_what_is_not_in_the_folder_is_absent(servers: dict[NodeId, NodeServer], tmp_path: Path):
    made = make_pool(servers, tmp_path, MetadataCore())
    with made.pool:
        chain = chain_of(8)
        made.put(chain)
        hit = made.pool.match(chain)
        for server in servers.values():
            for target in server.node.targets:
                assert target.num_shards
                target.upkeep(now_s=SystemClock().unix_s())
        other = make_pool(servers, tmp_path, MetadataCore())
        location = hit.extents[0].location
        fields = {name: getattr(location, name) for name in location.__struct_fields__} | {"nonce": 1}
        lying = replace(hit.extents[0], location=type(location)(**fields))
        with other.pool:
            _, result = lying, other.pool.get(replace(hit, extents=(lying,)), Silent(), deadline_ns=soon())
        assert result.ends == (GetEnd.LOST,)
        assert result.gone == (0,)


class Silent:
    def on_rows(self, ready: object) -> None:
        raise AssertionError("nothing can be right here")

    def on_shortened(self, num_blocks: int, reason: GetEnd) -> None:
        assert num_blocks == 0


@contextmanager
def link_to(servers: dict[NodeId, NodeServer], tmp_path: Path) -> Iterator[LocalLink]:
    server = servers[NodeId("s0")]
    info = StorageNodeInfo(NodeId("s0"), server.address, path=str(tmp_path / "s0"))
    cached = CachedReads()
    link = LocalLink(NodeLink(info, name="test", token="t", params=NodeLinkParams()), cached)
    try:
        yield link
    finally:
        cached.close()
        link.close()


def test_a_read_that_was_given_up_is_never_written(servers: dict[NodeId, NodeServer], tmp_path: Path):
    """The landing is entered, the read is cancelled, then the copy would begin: it must not."""
    made = make_pool(servers, tmp_path, MetadataCore())
    with made.pool:
        chain = chain_of(8)
        made.put(chain)
        location = made.pool.match(chain).extents[0].location
        epoch_nodes = [f"s{(location.group + shard) % 6}" for shard in range(6)]
    with link_to(servers, tmp_path) as link:
        query = ReadShard(location.digest, 8, epoch_nodes.index("s0"), location.nonce, 0, 4, 8)
        place = np.full(1 << 20, 7, np.uint8)
        entered, go_on = threading.Event(), threading.Event()

        def landing(message: object, num_bytes: int) -> list[memoryview]:
            entered.set()
            assert go_on.wait(10)
            return [memoryview(place)[:4096], memoryview(place)[4096:num_bytes]]

        call = link.start(query, deadline_ns=soon(), landing=landing)
        assert entered.wait(10)
        link.cancel(call)
        go_on.set()
        with pytest.raises(DeadlineExceeded):
            call.result()
        second = link.start(replace_shard(query), deadline_ns=soon(), landing=landing)
        assert second.wait(soon())
        with pytest.raises(ExtentAbsent):
            second.result()
        assert (place == 7).all()


def replace_shard(query: ReadShard) -> ReadShard:
    return ReadShard(query.digest, query.num_blocks, (query.shard + 1) % 6, query.nonce, 0, 4, 8)


def test_a_cancel_does_not_wait_for_the_drive(
    servers: dict[NodeId, NodeServer], tmp_path: Path, wait_until: Callable[..., None]
):
    blocked = threading.Event()
    with link_to(servers, tmp_path) as link, ExitStack() as stack:
        stack.callback(blocked.set)
        query = ReadShard(bytes(32), 8, 0, 1, 0, 4, 8)
        first = link.start(query, deadline_ns=soon(), on_done=lambda _: blocked.wait(10))
        waiting = [link.start(query, deadline_ns=soon()) for _ in range(3)]
        began_ns = time.monotonic_ns()
        for call in waiting:
            link.cancel(call)
        assert time.monotonic_ns() - began_ns < 5e9
        assert all(call.done for call in waiting)
        blocked.set()
        wait_until(lambda: first.done, "the reader goes on")


def test_what_is_in_memory_does_not_wait_for_a_drive_that_hangs(
    servers: dict[NodeId, NodeServer], tmp_path: Path
):
    made = make_pool(servers, tmp_path, MetadataCore())
    with made.pool:
        made.put(chain_of(8))
        location = made.pool.match(chain_of(8)).extents[0].location
        shard = next(shard for shard in range(6) if (location.group + shard) % 6 == 0)
    query = ReadShard(location.digest, 8, shard, location.nonce, 0, 4, 8)
    place = np.zeros(1 << 20, np.uint8)

    def landing(message: object, num_bytes: int) -> list[memoryview]:
        return [memoryview(place)[:4096], memoryview(place)[4096:num_bytes]]

    hangs = threading.Event()
    with link_to(servers, tmp_path) as link, ExitStack() as stack:
        known = link.start(query, deadline_ns=soon(), landing=landing)
        assert known.wait(soon())
        wanted = known.result(), place.copy()
        if not is_cached_told(tmp_path / "s0"):
            pytest.skip("this file system cannot tell what is in memory")
        stack.callback(hangs.set)
        entered = threading.Event()

        def hang(call: object) -> None:
            entered.set()
            hangs.wait(10)

        link.start(replace_shard(query), deadline_ns=soon(), landing=landing, on_done=hang)
        assert entered.wait(10)
        place[:] = 0
        second = link.start(query, deadline_ns=soon(), landing=landing)
        assert second.wait(time.monotonic_ns() + 5 * SECOND_NS)
        assert second.result() == wanted[0]
        assert (place == wanted[1]).all()


def is_cached_told(folder: Path) -> bool:
    files = CachedFiles(folder, create=False)
    file = files.open("generations")
    try:
        return files.read_into(file, 0, memoryview(bytearray(8))) == 8
    except BlockingIOError:
        return False
    finally:
        files.close(file)
        files.close_folder()


def test_a_writer_with_a_home_writes_whole_extents_to_it_alone(
    servers: dict[NodeId, NodeServer], tmp_path: Path
):
    """Preset `local-affinity`: k = 1, m = 0, a group per node."""
    names = tuple(servers)
    nodes = tuple(StorageNodeInfo(name, server.address) for name, server in servers.items())
    groups = tuple((point,) for point in range(6))
    pool_map = PoolMap(1, nodes, (PlacementEpoch(0, 1, 0, names, groups),), ())
    at_home = replace(SETTINGS, pool=replace(SETTINGS.pool, home="s2"))
    with Pool(LAYOUT, LocalMetadata(MetadataCore(), pool_map), name="t", token="t", settings=at_home) as pool:
        made = Cluster({}, None, pool)
        chain = chain_of(70)
        made.put(chain)
        assert made.read(chain)[1].num_blocks == 70
    shards = {name: server.status().num_shards for name, server in servers.items()}
    assert shards == {name: 3 if name == "s2" else 0 for name in names}
    nowhere = replace(SETTINGS, pool=replace(SETTINGS.pool, home="s9"))
    with pytest.raises(ConfigError):
        Pool(LAYOUT, LocalMetadata(MetadataCore(), pool_map), name="t", token="t", settings=nowhere)
