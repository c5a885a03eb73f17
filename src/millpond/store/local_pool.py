"""`LocalPool`: the processes of a small pool on this machine, for tests, benchmarks and trying things out.

Storage nodes and metadata shards run as they do in a cluster, and talk over loopback. One node with several
targets stands for several: with fewer nodes than shards, a node holds several shards of an extent.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Self

import msgspec

from millpond.config.pool_description import GroupKind, PoolDescription
from millpond.core.errors import ConfigError, TransientError
from millpond.core.extents import NodeId
from millpond.core.pool_map import PlacementEpoch, PoolMap, StorageNodeInfo
from millpond.core.units import SECOND_NS
from millpond.policies.stripe_placement import make_epoch
from millpond.store.child_process import ChildProcess
from millpond.store.metadata.client import MetadataClient

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
        self._folder = folder
        self._options = {"metadata": tuple(metadata_options), "storage-node": tuple(storage_options)}
        self.processes: dict[str, ChildProcess] = {}
        """By name: `s0` ... as described, `m0` ... the metadata shards."""
        folder.mkdir(parents=True, exist_ok=True)
        self._address_file = folder / "addresses.json"
        self.addresses: dict[str, str] = _read_addresses(self._address_file)
        """The same over restarts: metadata shards are told apart by them."""
        self._token_file = folder / "token"
        self._token_file.write_text(token)
        self.metadata: MetadataClient | None = None
        try:
            names = [node.name for node in description.storage]
            names += [f"m{index}" for index in range(description.placement.metadata_shards)]
            for name in names:
                self._launch(name)
            self._await(names)
            self._address_file.write_bytes(msgspec.json.encode(self.addresses))
            shards = self.metadata_addresses
            self.metadata = MetadataClient(shards, name="local pool", token=token)
            self._publish(self.metadata, shards, reads_locally)
        except BaseException:
            self.kill()
            raise

    @property
    def metadata_addresses(self) -> tuple[str, ...]:
        """Of all metadata shards: what a `MetadataClient` needs."""
        count = self.description.placement.metadata_shards
        return tuple(self.addresses[f"m{index}"] for index in range(count))

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

    def _is_metadata(self, name: str) -> bool:
        return name not in {node.name for node in self.description.storage}

    def _launch(self, name: str) -> None:
        command = "metadata" if self._is_metadata(name) else "storage-node"
        arguments = [command, "--name", name, "--token-file", str(self._token_file)]
        arguments += ["--listen", self.addresses.get(name, "127.0.0.1:0")]
        if command == "metadata":
            arguments += ["--data", str(self._folder / name)]
        else:
            spec = next(node for node in self.description.storage if node.name == name)
            for index in range(spec.targets):
                size = spec.capacity // spec.targets
                arguments += ["--target", f"{self._folder / name / f't{index}'}:{size} B"]
        self.processes[name] = ChildProcess([*arguments, *self._options[command]], name)

    def _await(self, names: Sequence[str]) -> None:
        deadline_ns = time.monotonic_ns() + READY_S * SECOND_NS
        for name in names:
            self.addresses[name] = self.processes[name].wait_address(deadline_ns)

    def _publish(self, metadata: MetadataClient, shards: tuple[str, ...], reads_locally: bool) -> None:
        """Give the shards the map; one that they saved stays, under the addresses of today."""
        deadline_ns = time.monotonic_ns() + READY_S * SECOND_NS
        nodes = tuple(
            StorageNodeInfo(
                NodeId(node.name),
                self.addresses[node.name],
                path=str(self._folder / node.name) if reads_locally else "",
            )
            for node in self.description.storage
        )
        try:
            saved = metadata.pool_map(deadline_ns=deadline_ns)
            fresh = replace(saved, version=saved.version + 1, nodes=nodes, metadata=shards)
        except TransientError:
            epoch = first_epoch(self.description, nodes)
            fresh = PoolMap(1, nodes, (epoch,), shards)
        if not metadata.update_map(fresh, deadline_ns=deadline_ns):
            raise ConfigError("the metadata shards have a newer map than this pool")


def _read_addresses(path: Path) -> dict[str, str]:
    try:
        return msgspec.json.decode(path.read_bytes(), type=dict[str, str])
    except FileNotFoundError:
        return {}
    except msgspec.DecodeError as error:
        raise ConfigError(f"{path}: {error}") from error


def first_epoch(description: PoolDescription, nodes: Sequence[StorageNodeInfo]) -> PlacementEpoch:
    """Placement of a new pool.

    Raises:
        InvalidRequest: The nodes do not fit the code.
    """
    placement = description.placement
    if placement.groups is GroupKind.HOST:
        names = tuple(node.node for node in nodes)
        return PlacementEpoch(0, 1, 0, names, tuple((point,) for point in range(len(names))))
    return make_epoch(0, nodes, placement.data_shards, placement.parity_shards, allow_shared=True)
