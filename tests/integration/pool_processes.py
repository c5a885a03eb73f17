"""A pool of storage-node and metadata processes that can be killed, frozen and filled."""

from __future__ import annotations

import os
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Self

from millpond.core.extents import NodeId
from millpond.core.pool_map import PlacementEpoch, PoolMap, StorageNodeInfo
from millpond.store.metadata.daemon import write_map_file

COMMAND = (sys.executable, "-m", "millpond.cli.main")
START_S = 120
NUM_NODES = 12
K, M = 10, 2
SMALL_DISK_MIB = 4
"""Of the nodes with a disk of their own; their capacity says more, so that it fills."""


def why_no_small_disk() -> str:
    """Why a process cannot have a small disk of its own here; empty if it can."""
    tried = subprocess.run(
        _on_small_disk(Path("/mnt"), ["true"]), capture_output=True, text=True, check=False
    )
    return tried.stderr.strip() if tried.returncode else ""


def _on_small_disk(folder: Path, command: Sequence[str]) -> list[str]:
    """Run a command in a mount namespace of its own, in which the folder is a small file system in memory."""
    mount = f'mount -t tmpfs -o size={SMALL_DISK_MIB}m none "$0" && exec "$@"'
    return ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c", mount, str(folder), *command]


@dataclass
class PoolProcess:
    """One process, always at the same address."""

    name: str
    argv: list[str]
    folder: Path
    log: Path
    is_on_small_disk: bool = False
    _running: subprocess.Popen[bytes] | None = field(default=None, repr=False)

    @property
    def pid(self) -> int:
        assert self._running is not None
        return self._running.pid

    def launch(self) -> None:
        assert self._running is None
        with self.log.open("ab") as log:
            self._running = subprocess.Popen(self.argv, stdout=subprocess.PIPE, stderr=log, bufsize=0)

    def wait_up(self) -> None:
        assert self._running is not None
        pipe = self._running.stdout
        assert pipe is not None
        if not select.select([pipe], [], [], START_S)[0] or not pipe.readline():
            raise AssertionError(f"{self.name} did not start: {self.log.read_text()[-2000:]}")

    def start(self) -> None:
        self.launch()
        self.wait_up()

    def kill(self) -> None:
        if self._running is None:
            return
        self._running.kill()
        self._running.wait(START_S)
        if self._running.stdout is not None:
            self._running.stdout.close()
        self._running = None

    def freeze(self) -> None:
        os.kill(self.pid, signal.SIGSTOP)

    def thaw(self) -> None:
        os.kill(self.pid, signal.SIGCONT)

    def assert_alive(self) -> None:
        assert self._running is not None
        assert self._running.poll() is None, f"{self.name} ended: {self.log.read_text()[-2000:]}"

    def fill_disk(self) -> None:
        """Take all room that is left on its small disk."""
        with self._ballast.open("wb", buffering=0) as file:
            piece = bytes(64 * 1024)
            try:
                while file.write(piece):
                    pass
            except OSError:
                pass  # full

    def empty_disk(self) -> None:
        self._ballast.unlink(missing_ok=True)

    @property
    def _ballast(self) -> Path:
        return Path(f"/proc/{self.pid}/root{self.folder}/ballast")


class PoolProcesses:
    """See module. A context manager.

    Args:
        folder: For data and logs.
        node_mib: Capacity of each node.
        num_small_disks: Nodes with a file system of their own, smaller than their capacity.
    """

    def __init__(self, folder: Path, *, node_mib: int, num_small_disks: int = 0) -> None:
        ports = _free_ports(NUM_NODES + 1)
        names = tuple(NodeId(f"s{index}") for index in range(NUM_NODES))
        infos = tuple(StorageNodeInfo(name, f"127.0.0.1:{ports[i]}") for i, name in enumerate(names))
        groups = tuple(
            tuple((first + shard) % NUM_NODES for shard in range(K + M)) for first in range(NUM_NODES)
        )
        self.metadata_address = f"127.0.0.1:{ports[-1]}"
        self.map = PoolMap(1, infos, (PlacementEpoch(0, K, M, names, groups),), (self.metadata_address,))
        self.nodes: list[PoolProcess] = []
        for index, info in enumerate(infos):
            data = folder / info.node
            data.mkdir(parents=True)
            argv = [*COMMAND, "storage-node", "--name", info.node, "--listen", info.address]
            argv += ["--target", f"{data}:{node_mib} MiB"]
            is_small = index < num_small_disks
            if is_small:
                argv = _on_small_disk(data, argv)
            self.nodes.append(PoolProcess(info.node, argv, data, folder / f"{info.node}.log", is_small))
        map_file = folder / "map.json"
        write_map_file(map_file, self.map)
        argv = [*COMMAND, "metadata", "--name", "m0", "--listen", self.metadata_address]
        argv += ["--data", str(folder / "m0"), "--map", str(map_file), "--max-blocks", "65536"]
        argv += ["--checkpoint-s", "2"]
        self.metadata = PoolProcess("m0", argv, folder / "m0", folder / "m0.log")

    def __enter__(self) -> Self:
        try:
            for process in [*self.nodes, self.metadata]:
                process.launch()
            for process in [*self.nodes, self.metadata]:
                process.wait_up()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        for process in [*self.nodes, self.metadata]:
            process.kill()


def _free_ports(count: int) -> list[int]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [one.getsockname()[1] for one in sockets]
    for one in sockets:
        one.close()
    return ports
