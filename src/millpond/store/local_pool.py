"""`LocalPool`: the processes of a small pool on this machine, for tests, benchmarks and trying things out.

Storage nodes and metadata shards run as they do in a cluster, and talk over loopback. One node with several
targets stands for several: with fewer nodes than shards, a node holds several shards of an extent.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from millpond.config.pool_description import PoolDescription
from millpond.core.units import SECOND_NS
from millpond.store.child_process import ChildProcess
from millpond.store.metadata.client import MetadataClient
from millpond.store.pool_folder import PoolFolder

READY_S = 60


class LocalPool:
    """Started by the constructor, ended by `close`. A context manager.

    Args:
        description: Hosts' addresses are ignored: everything listens on 127.0.0.1.
        folder: For the data of all processes; what is in it is found again.
        token: Cluster token.
        reads_locally: Clients read the nodes' folders themselves.
        metadata_options: More arguments of `millpond metadata`.
        storage_options: More arguments of `millpond storage-node`.

    Raises:
        ConfigError: A process refused to start, or the folder is of another pool.
        DeadlineExceeded: One did not start in a minute.
    """

    def __init__(
        self,
        description: PoolDescription,
        folder: Path,
        *,
        token: str = "",
        reads_locally: bool = False,
        metadata_options: Sequence[str] = (),
        storage_options: Sequence[str] = (),
    ) -> None:
        self.description = description
        self.token = token
        self.folder = PoolFolder(folder)
        self._options = {"metadata": tuple(metadata_options), "storage-node": tuple(storage_options)}
        self.processes: dict[str, ChildProcess] = {}
        """By name: `s0` ... as described, `m0` ... the metadata shards."""
        folder.mkdir(parents=True, exist_ok=True)
        self.addresses = self.folder.prepare(
            description, token=token, reads_locally=reads_locally, loopback=True
        )
        self.metadata: MetadataClient | None = None
        try:
            names = [*(node.name for node in description.storage), *description.shard_names]
            for name in names:
                self._launch(name)
            self._await(names)
            self.metadata = MetadataClient(self.metadata_addresses, name="local pool", token=token)
        except BaseException:
            self.kill()
            raise

    @property
    def metadata_addresses(self) -> tuple[str, ...]:
        """Of all metadata shards: what a `MetadataClient` needs."""
        return tuple(self.addresses[name] for name in self.description.shard_names)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def kill_one(self, name: str, number: signal.Signals = signal.SIGKILL) -> None:
        """Send a signal to one process; if it ends by it, wait until it has."""
        self.processes[name].end(number)
        if number in {signal.SIGKILL, signal.SIGTERM}:
            self.processes[name].wait(READY_S)

    def restart(self, name: str) -> None:
        """Start one process again that has ended, on its old port and with its data.

        Raises:
            ConfigError, DeadlineExceeded: It did not start.
        """
        self._launch(name)
        self._await([name])

    def close(self, stop_s: float = 30.0) -> dict[str, int]:
        """Let all processes seal and sync what they have and end; exit status of each."""
        if self.metadata is not None:
            self.metadata.close()
        for process in self.processes.values():
            process.end(signal.SIGCONT)  # it may be stopped on purpose
            process.end(signal.SIGTERM)
        return {name: process.wait(stop_s) for name, process in self.processes.items()}

    def kill(self) -> None:
        """End everything at once."""
        if self.metadata is not None:
            self.metadata.close()
        for process in self.processes.values():
            process.end(signal.SIGKILL)
        for process in self.processes.values():
            process.wait(READY_S)

    def _launch(self, name: str) -> None:
        is_metadata = name in self.description.shard_names
        command = "metadata" if is_metadata else "storage-node"
        arguments = [command, "--name", name, "--token-file", str(self.folder.token_file)]
        arguments += ["--listen", self.addresses[name]]
        if is_metadata:
            arguments += ["--data", str(self.folder.data(name)), "--map", str(self.folder.map_file)]
        else:
            spec = next(node for node in self.description.storage if node.name == name)
            for target in self.folder.targets(spec):
                arguments += ["--target", f"{target.path}:{target.capacity_bytes} B"]
        self.processes[name] = ChildProcess([*arguments, *self._options[command]], name)

    def _await(self, names: Sequence[str]) -> None:
        deadline_ns = time.monotonic_ns() + READY_S * SECOND_NS
        for name in names:
            self.processes[name].wait_address(deadline_ns)
