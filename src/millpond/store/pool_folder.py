"""`PoolFolder`: where a pool keeps everything if all its processes run on this machine.

addresses.json    address of every process; the same over restarts, so that saved maps stay true
token             cluster token, readable by this user only
map.json          the pool map that metadata shards start with
lock              held by whoever runs the pool
s0/t0 ... m0      data of the storage nodes' targets and of the metadata shards
"""

from __future__ import annotations

import fcntl
import os
import secrets
import shutil
import socket
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from millpond.config.pool_params import GroupKind
from millpond.config.topology import StorageSpec
from millpond.core.errors import ConfigError, InvalidRequest
from millpond.core.extents import NodeId
from millpond.core.pool_map import PlacementEpoch, PoolMap, StorageNodeInfo
from millpond.policies.stripe_placement import add_epoch, make_epoch
from millpond.store.files import DiskFiles
from millpond.store.metadata.checkpoint import load_map
from millpond.store.net.daemon import TargetSpec

if TYPE_CHECKING:
    from millpond.config.pool_description import PoolDescription

TOKEN_BYTES = 32
LOOPBACK = "127.0.0.1"


@dataclass(frozen=True, slots=True)
class PoolFolder:
    """See module."""

    path: Path

    @property
    def address_file(self) -> Path:
        """Addresses by name: `s0` ... the storage nodes, `m0` ... the metadata shards."""
        return self.path / "addresses.json"

    @property
    def token_file(self) -> Path:
        """The cluster token."""
        return self.path / "token"

    @property
    def map_file(self) -> Path:
        """What metadata shards are started with."""
        return self.path / "map.json"

    def data(self, name: str) -> Path:
        """Data of one process."""
        return self.path / name

    def targets(self, node: StorageSpec) -> tuple[TargetSpec, ...]:
        """Folders of a storage node, and what each may fill."""
        size = node.capacity // node.targets
        return tuple(TargetSpec(self.data(node.name) / f"t{index}", size) for index in range(node.targets))

    @contextmanager
    def claimed(self) -> Iterator[None]:
        """Be the only one who runs this pool, or removes it, while the block runs; makes the folder.

        Raises:
            ConfigError: Somebody else is, or the folder cannot be made.
        """
        try:
            self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
            lock = os.open(self.path / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise ConfigError(f"cannot keep a KV pool in {self.path}: {error.strerror}") from error
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            yield
        except BlockingIOError as error:
            raise ConfigError(
                f"a running service keeps its KV pool in {self.path}; stop it, or use another folder",
                param="supervise.state_dir",
            ) from error
        finally:
            os.close(lock)

    def clear(self) -> int:
        """Remove all that the pool holds, and what was chosen for it; how many bytes. Claim it first."""
        num_bytes = used_bytes(self.path)
        for entry in self.path.iterdir():
            if entry.is_dir():
                shutil.rmtree(entry)
            elif entry.name != "lock":
                entry.unlink()
        return num_bytes

    def addresses(self) -> dict[str, str]:
        """Addresses that were chosen, empty in a new folder.

        Raises:
            ConfigError: The file is damaged.
        """
        try:
            return msgspec.json.decode(self.address_file.read_bytes(), type=dict[str, str])
        except FileNotFoundError:
            return {}
        except msgspec.DecodeError as error:
            raise ConfigError(f"{self.address_file}: {error}; remove it to have new ones chosen") from error

    def token(self) -> str:
        """The cluster token.

        Raises:
            ConfigError: There is none.
        """
        try:
            return self.token_file.read_text(encoding="utf-8").strip()
        except OSError as error:
            raise ConfigError(f"no KV pool in {self.path}: {error.strerror}") from error

    def metadata_addresses(self) -> tuple[str, ...]:
        """Addresses of the metadata shards, as they were started last.

        Raises:
            ConfigError: No pool was ever started here.
        """
        try:
            return msgspec.json.decode(self.map_file.read_bytes(), type=PoolMap).metadata
        except OSError as error:
            raise ConfigError(f"no KV pool in {self.path}: {error.strerror}") from error
        except msgspec.DecodeError as error:
            raise ConfigError(f"{self.map_file}: {error}; the next start writes it anew") from error

    def prepare(
        self, description: PoolDescription, *, token: str | None = None, reads_locally: bool, loopback: bool
    ) -> dict[str, str]:
        """Choose what is not chosen yet and write the map: then the processes can be started in any order.

        Args:
            description: Of the pool.
            token: None: the one that is there, or a new random one.
            reads_locally: Clients read the nodes' folders themselves.
            loopback: Everything listens on 127.0.0.1, whatever the hosts' addresses are.

        Returns:
            Addresses by name.

        Raises:
            ConfigError: The folder is of another pool.
            InvalidRequest: The nodes do not fit the code.
        """
        self._write_token(token)
        hosts = dict.fromkeys(description.shard_names, LOOPBACK) | {
            node.name: LOOPBACK for node in description.storage
        }
        if not loopback:
            hosts |= dict.fromkeys(description.shard_names, description.hosts[0].snic)
            hosts |= {node.name: description.host(node.host).snic for node in description.storage}
        addresses = choose_addresses(hosts, self.addresses())
        self.address_file.write_bytes(msgspec.json.encode(addresses))
        pool_map = self._map(description, addresses, reads_locally=reads_locally)
        self.map_file.write_bytes(msgspec.json.encode(pool_map))
        return addresses

    def _write_token(self, token: str | None) -> None:
        if token is None and self.token_file.exists():
            return
        descriptor = os.open(self.token_file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with os.fdopen(descriptor, "w") as file:
            file.write(secrets.token_hex(TOKEN_BYTES) if token is None else token)

    def _map(
        self, description: PoolDescription, addresses: Mapping[str, str], *, reads_locally: bool
    ) -> PoolMap:
        """The newest map that a shard has saved, with the addresses of today; the first one if none has."""
        nodes = tuple(
            StorageNodeInfo(
                NodeId(node.name),
                addresses[node.name],
                path=str(self.data(node.name)) if reads_locally else "",
            )
            for node in description.storage
        )
        shards = tuple(addresses[name] for name in description.shard_names)
        saved = [found for name in description.shard_names if (found := self._saved_map(name)) is not None]
        if not saved:
            return PoolMap(1, nodes, (first_epoch(description, nodes),), shards)
        newest = max(saved, key=lambda each: each.version)
        present = {info.node: info for info in nodes}
        kept = tuple(present.pop(info.node, info) for info in newest.nodes)
        fresh = replace(newest, version=newest.version + 1, nodes=(*kept, *present.values()), metadata=shards)
        return self._with_epoch_for(fresh, description, nodes)

    def _with_epoch_for(
        self, pool_map: PoolMap, description: PoolDescription, nodes: Sequence[StorageNodeInfo]
    ) -> PoolMap:
        """The map, with one more placement if the description has other nodes or another code."""
        placement, last = description.placement, pool_map.epochs[-1]
        named = {node for epoch in pool_map.epochs for node in epoch.points}
        is_same_code = (last.k, last.m) == (placement.data_shards, placement.parity_shards)
        if is_same_code and {info.node for info in nodes} == named:
            return pool_map
        try:
            if placement.groups is GroupKind.HOST:
                raise InvalidRequest("extents of single hosts do not move", code="pool.epochs")
            return add_epoch(
                pool_map, nodes, placement.data_shards, placement.parity_shards, allow_shared=True
            )
        except InvalidRequest as error:
            raise ConfigError(
                f"the KV pool in {self.path} was made for other storage nodes or another code:"
                f" {error.message}; `millpond pool drop --all` makes room for a new one",
                param="storage",
            ) from error

    def _saved_map(self, shard: str) -> PoolMap | None:
        if not self.data(shard).is_dir():
            return None
        files = DiskFiles(self.data(shard))
        try:
            return load_map(files)
        finally:
            files.close_folder()


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


def choose_addresses(hosts: Mapping[str, str], known: Mapping[str, str]) -> dict[str, str]:
    """An address for each process that can be listened on now; the known one where that is so.

    Args:
        hosts: IP address by name of the process.
        known: Addresses of an earlier start.

    Raises:
        ConfigError: A host's address is not one of this machine.
    """
    taken: list[socket.socket] = []
    try:
        return {name: _claim(host, known.get(name, ""), taken) for name, host in hosts.items()}
    finally:
        for listener in taken:
            listener.close()


def _claim(host: str, known: str, taken: list[socket.socket]) -> str:
    """Bind the known address of a process, or a free port; the socket stays bound in `taken`."""
    known_host, _, port = known.rpartition(":")
    for choice in (int(port), 0) if known_host == host and port.isdecimal() else (0,):
        try:
            taken.append(socket.create_server((host, choice)))
        except OSError as error:
            if choice:
                continue  # somebody else has it now
            raise ConfigError(f"cannot listen on {host}: {error.strerror}", param="host") from error
        return f"{host}:{taken[-1].getsockname()[1]}"
    raise ConfigError(f"cannot listen on {host}", param="host")


def used_bytes(folder: Path) -> int:
    """Bytes of the disk that the files under a folder take; those that vanish meanwhile count nothing."""
    total = 0
    for path, _, names in os.walk(folder):
        for name in names:
            try:
                total += os.stat(os.path.join(path, name)).st_blocks * 512
            except FileNotFoundError:
                continue
    return total
