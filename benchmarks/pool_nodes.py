"""Storage nodes for benchmarks and tests: real ones, with a disk that can be made slow or stall.

    python -m benchmarks.pool_nodes --folder DIR --host 127.0.0.1 --first 0 --count 1 --read-ms 2

Prints the addresses as JSON and serves until its standard input ends.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

from millpond.core.chance import Chance
from millpond.core.extents import NodeId
from millpond.core.pool_map import PlacementEpoch, PoolMap, StorageNodeInfo
from millpond.core.units import GIB
from millpond.store.clock import SystemClock
from millpond.store.files import DiskFiles
from millpond.store.net.peer import ServerParams
from millpond.store.net.server import NodeServer
from millpond.store.node import Calendar, StorageNode
from millpond.store.target import Target, TargetParams

START_S = 60
STOP_S = 10
_PAYLOAD_BYTES = 8192
"""Reads of headers are shorter and not slowed down."""


class SlowFiles(DiskFiles):
    """A disk with a service time, and rare stalls."""

    def __init__(self, path: Path, read_s: float, stall_ratio: float, stall_s: float, seed: int) -> None:
        super().__init__(path)
        self._read_s = read_s
        self._stall_ratio = stall_ratio
        self._stall_s = stall_s
        self._chance = Chance(seed, "stalls")

    def read_into(self, file: int, offset: int, view: memoryview) -> int:
        """Read, after as long as the disk takes."""
        if view.nbytes > _PAYLOAD_BYTES:
            stalls = self._chance.uniform() < self._stall_ratio
            wait_s = self._read_s + (self._stall_s if stalls else 0.0)
            if wait_s:
                time.sleep(wait_s)
        return super().read_into(file, offset, view)


@dataclass(frozen=True, slots=True)
class NodeSpeed:
    """How one node reads."""

    read_ms: float = 0.0
    stall_ratio: float = 0.0
    stall_ms: float = 0.0


class NodeProcesses:
    """Node processes of this run, ended with it. A context manager.

    Args:
        folder: For their data.
        speeds: One process per entry.
        per_process: Nodes in each process.
        prefix: Command that runs a command somewhere else, for example in a network namespace.
        host: Address to listen on.
        stop_s: How long they may take to seal and sync what they have when they end.
    """

    def __init__(
        self,
        folder: Path,
        speeds: Sequence[NodeSpeed],
        *,
        per_process: int = 1,
        prefix: Sequence[str] = (),
        host: str = "127.0.0.1",
        stop_s: float = STOP_S,
    ) -> None:
        self._stop_s = stop_s
        self.processes: list[subprocess.Popen[str]] = []
        self.infos: list[StorageNodeInfo] = []
        try:
            for index, speed in enumerate(speeds):
                argv = [*prefix, sys.executable, "-m", "benchmarks.pool_nodes", "--folder", str(folder)]
                argv += ["--host", host, "--first", str(index * per_process), "--count", str(per_process)]
                argv += ["--read-ms", str(speed.read_ms), "--stall-ratio", str(speed.stall_ratio)]
                argv += ["--stall-ms", str(speed.stall_ms), "--stop-s", str(stop_s)]
                pipe = subprocess.PIPE
                self.processes.append(subprocess.Popen(argv, stdin=pipe, stdout=pipe, text=True))
            for process in self.processes:
                if process.stdout is None:
                    raise RuntimeError("no pipe")
                for address in json.loads(process.stdout.readline()):
                    self.infos.append(StorageNodeInfo(NodeId(f"s{len(self.infos)}"), address))
        except BaseException:
            self.close()
            raise

    def pool_map(self, k: int = 10, m: int = 2) -> PoolMap:
        """Map in which group g begins at node g."""
        names = tuple(info.node for info in self.infos)
        groups = tuple(
            tuple((first + shard) % len(names) for shard in range(k + m)) for first in range(len(names))
        )
        return PoolMap(1, tuple(self.infos), (PlacementEpoch(0, k, m, names, groups),), ())

    def end(self) -> None:
        """Let them seal, sync and end.

        Raises:
            RuntimeError: One of them did not, or had ended before.
        """
        self.close()
        if any(process.returncode for process in self.processes):
            raise RuntimeError(f"nodes ended with {[process.returncode for process in self.processes]}")

    def close(self) -> None:
        """End them."""
        for process in self.processes:
            for pipe in (process.stdin, process.stdout):
                if pipe is not None:
                    with suppress(BrokenPipeError):
                        pipe.close()
        for process in self.processes:
            try:
                process.wait(self._stop_s + 2)
            except subprocess.TimeoutExpired:
                process.kill()  # it may be stopped on purpose
                process.wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def main() -> None:
    """Serve some nodes until standard input ends."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--count", type=int, default=1)
    parser.add_argument("--read-ms", type=float, default=0.0)
    parser.add_argument("--stall-ratio", type=float, default=0.0)
    parser.add_argument("--stall-ms", type=float, default=0.0)
    parser.add_argument("--stop-s", type=float, default=STOP_S)
    chosen = parser.parse_args()
    clock = SystemClock()
    calendar = Calendar(clock)
    servers: list[NodeServer] = []
    for index in range(chosen.first, chosen.first + chosen.count):
        files = SlowFiles(
            chosen.folder / f"s{index}",
            chosen.read_ms / 1e3,
            chosen.stall_ratio,
            chosen.stall_ms / 1e3,
            seed=index,
        )
        target = Target(files, TargetParams(capacity_bytes=4 * GIB), now_s=calendar.now_s())
        node = StorageNode(f"s{index}", [target], calendar=calendar)
        server = NodeServer(
            node, f"{chosen.host}:0", token="", boot=clock.unix_s(), params=ServerParams(workers_per_target=8)
        )
        server.start()
        servers.append(server)
    print(json.dumps([server.address for server in servers]), flush=True)
    sys.stdin.read()
    has_sealed = [server.stop(chosen.stop_s) for server in servers]
    if not all(has_sealed):
        raise SystemExit("not everything is sealed")


if __name__ == "__main__":
    main()
