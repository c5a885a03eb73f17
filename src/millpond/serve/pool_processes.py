"""The KV pool of a service on this machine: where it lies, how much disk it takes, how clients find it."""

from __future__ import annotations

import dataclasses
import shutil
import socket
from pathlib import Path

from millpond.config.pool_description import pool_of
from millpond.config.sections import Config
from millpond.config.sizes import format_size
from millpond.core.errors import ConfigError
from millpond.core.units import MIB
from millpond.serve.run_folder import POOL_FOLDER, PoolAccess, RunFolder
from millpond.serve.units import hosts_of_ranks
from millpond.store.pool_folder import PoolFolder, used_bytes

PROBE_S = 0.5
FREE_SHARE = 0.9
"""Of what a disk has left, at most so much is taken: the rest is for others."""
MIN_TARGET_BYTES = 16 * MIB
"""Below this a target holds too little to be worth its processes."""


def pool_folder(config: Config) -> PoolFolder:
    """Folder of the pool inside the state folder."""
    return PoolFolder(Path(config.supervise.state_dir) / POOL_FOLDER)


def fit_disk(config: Config) -> tuple[Config, str]:
    """Lower the capacity of the storage nodes to what the disk has; also a warning if that was needed.

    Raises:
        ConfigError: There is no room for a pool at all.
    """
    folder = pool_folder(config).path
    parent = next(path for path in (folder, *folder.parents) if path.exists())
    room = int(shutil.disk_usage(parent).free * FREE_SHARE) + used_bytes(folder)
    wanted = sum(node.capacity for node in config.storage)
    if wanted <= room:
        return config, ""
    shrunk = tuple(
        dataclasses.replace(node, capacity=node.capacity * room // wanted) for node in config.storage
    )
    for index, node in enumerate(shrunk):
        if node.capacity < node.targets * MIN_TARGET_BYTES:
            raise ConfigError(
                f"storage[{index}].capacity = {config.storage[index].capacity}: the disk of {folder} has"
                f" {room} bytes for it; free some, choose another --state-dir, or set pool.enabled = false",
                param=f"storage[{index}].capacity",
            )
    sizes = format_size(room >> 20 << 20), format_size(wanted)
    warning = f"the KV pool gets {sizes[0]} instead of {sizes[1]}: the disk of {folder} has no more"
    return dataclasses.replace(config, storage=shrunk), warning


def describe_pool(config: Config) -> str:
    """One line about the pool, for people."""
    if not config.pool.enabled:
        return "KV pool: none"
    num_targets = sum(node.targets for node in config.storage)
    capacity = format_size(sum(node.capacity for node in config.storage) >> 20 << 20)
    return f"KV pool: {num_targets} targets, {capacity}, in {pool_folder(config).path}"


def prepare_pool(config: Config, folder: RunFolder) -> None:
    """Choose addresses and write map, token and `pool.json`: the pool's processes can start after it.

    Raises:
        ConfigError: The folder is of another pool, or cannot be written.
    """
    description = pool_of(config)
    home = pool_folder(config)
    addresses = home.prepare(description, reads_locally=len(config.hosts) == 1, loopback=False)
    metadata = tuple(addresses[name] for name in description.shard_names)
    folder.write_pool_access(PoolAccess(metadata, home.token()))


def is_pool_up(config: Config, folder: RunFolder) -> bool:
    """Whether all processes of the pool, node daemons included, listen now."""
    if not all((folder.path / f"node-{host}").exists() for host in hosts_of_ranks(config)):
        return False
    for address in pool_folder(config).addresses().values():
        host, _, port = address.rpartition(":")
        try:
            socket.create_connection((host, int(port)), PROBE_S).close()
        except OSError:
            return False
    return True
