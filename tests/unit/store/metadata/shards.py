"""Metadata shards and their clock, in this process."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from millpond.core.pool_map import PoolMap
from millpond.core.units import SECOND_NS
from millpond.store.files import DiskFiles
from millpond.store.metadata.client import MetadataClient
from millpond.store.metadata.server import MetadataServer, MetadataServerParams

TOKEN = "secret"


class MovedClock:
    """A clock that tests move; it also goes by itself."""

    def __init__(self) -> None:
        self.ahead_s = 0

    def monotonic_ns(self) -> int:
        return time.monotonic_ns() + self.ahead_s * SECOND_NS

    def unix_s(self) -> int:
        return 10**9 + self.monotonic_ns() // SECOND_NS


def wait_until(is_so: Callable[[], bool], what: str, timeout_s: float = 30.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not is_so():
        assert time.monotonic() < deadline, f"not in time: {what}"
        time.sleep(0.01)


@dataclass
class Shards:
    servers: list[MetadataServer]
    client: MetadataClient
    pool_map: PoolMap
    clock: MovedClock


@contextmanager
def shards(
    folder: Path,
    count: int = 1,
    *,
    params: MetadataServerParams | None = None,
    pool_map: PoolMap | None = None,
) -> Iterator[Shards]:
    clock = MovedClock()
    with ExitStack() as stack:
        servers = []
        for index in range(count):
            files = DiskFiles(folder / f"m{index}")
            stack.callback(files.close_folder)
            server = MetadataServer(
                files, "127.0.0.1:0", name=f"m{index}", token=TOKEN, clock=clock, params=params
            )
            server.start()
            stack.callback(stop, server)
            servers.append(server)
        addresses = tuple(server.address for server in servers)
        base = pool_map or PoolMap(1, (), (), ())
        named = PoolMap(base.version, base.nodes, base.epochs, addresses, base.default_depth, base.depths)
        client = MetadataClient(addresses, name="test", token=TOKEN)
        client.update_map(named, deadline_ns=time.monotonic_ns() + 10 * SECOND_NS)
        made = Shards(servers, client, named, clock)
        try:
            yield made
        finally:
            made.client.close()  # not always the first one


def stop(server: MetadataServer) -> None:
    assert server.stop(20)
    assert server.failure is None
    assert server.num_connections == 0
    server.check()
