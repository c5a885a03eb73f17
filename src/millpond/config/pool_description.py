"""What a KV pool is made of: hosts, storage nodes, and how extents are coded and placed (interfaces A.7).

A description is part of a service's config, a TOML file of its own, or one of the presets that come with the
package (docs/adr/0005).
"""

from __future__ import annotations

import tomllib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib.resources import files
from pathlib import Path

from millpond.config.pool_params import GroupKind, PoolPlacementParams
from millpond.config.schema import check
from millpond.config.sections import Config
from millpond.config.topology import HostSpec, StorageSpec
from millpond.core.errors import ConfigError
from millpond.core.units import MIB

PRESETS = ("pooled", "local-affinity")
MIN_TARGET_BYTES = 3 * MIB
"""A target holds at least three segments of at least 1 MiB."""


@dataclass(frozen=True, slots=True)
class PoolDescription:
    """The pool part of a config file."""

    hosts: tuple[HostSpec, ...]
    storage: tuple[StorageSpec, ...]
    placement: PoolPlacementParams

    def host(self, name: str) -> HostSpec:
        """The host of that name; the names were checked."""
        return next(host for host in self.hosts if host.name == name)

    @property
    def shard_names(self) -> tuple[str, ...]:
        """Names of the metadata shards."""
        return tuple(f"m{index}" for index in range(self.placement.metadata_shards))

    @property
    def num_targets(self) -> int:
        """Targets of all nodes."""
        return sum(node.targets for node in self.storage)

    @property
    def capacity_bytes(self) -> int:
        """What all nodes may fill."""
        return sum(node.capacity for node in self.storage)


def describe_pool(
    hosts: Sequence[HostSpec], storage: Sequence[StorageSpec], placement: PoolPlacementParams
) -> PoolDescription:
    """Put nodes without a host on the first one, and check that it all makes sense.

    Raises:
        ConfigError: The first thing that does not.
    """
    if not hosts:
        raise ConfigError("host: a pool needs at least one [[host]]", param="host")
    placed = tuple(replace(node, host=node.host or hosts[0].name) for node in storage)
    description = PoolDescription(tuple(hosts), placed, placement)
    _check_sense(description)
    return description


def pool_of(config: Config) -> PoolDescription:
    """The pool of a resolved config."""
    return PoolDescription(config.hosts, config.storage, config.pool)


def load_pool_description(source: str) -> PoolDescription:
    """Load a description.

    Args:
        source: Name of a preset, or path of a TOML file with `[[host]]`, `[[storage]]` and `[pool]`.

    Raises:
        ConfigError: The file cannot be read, or something in it is wrong.
    """
    try:
        if source in PRESETS:
            text = (files("millpond.config") / "presets" / f"{source}.toml").read_text(encoding="utf-8")
        else:
            text = Path(source).read_text(encoding="utf-8")
        data = tomllib.loads(text)
    except OSError as error:
        raise ConfigError(
            f"cannot read {source}: {error.strerror}; presets are {', '.join(PRESETS)}"
        ) from error
    except (UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"{source}: {error}") from error
    data.setdefault("storage", [])  # a pool says what it is made of; only a service has a default one
    config = check(data)
    return describe_pool(config.hosts, config.storage, config.pool)


def _check_sense(description: PoolDescription) -> None:
    for kind, names in (
        ("host", [host.name for host in description.hosts]),
        ("storage", [*description.shard_names, *(node.name for node in description.storage)]),
    ):
        if len(set(names)) < len(names):
            raise ConfigError(f"{kind}: two have one name", param=kind)
    if not description.storage:
        raise ConfigError("storage: a pool needs at least one [[storage]] node", param="storage")
    for index, node in enumerate(description.storage):
        _check_node(f"storage[{index}]", node, [host.name for host in description.hosts])
    _check_placement(description.placement)


def _check_node(path: str, node: StorageSpec, hosts: Sequence[str]) -> None:
    if node.host not in hosts:
        raise ConfigError(f"{path}.host = {node.host!r}: no such host", param=f"{path}.host")
    if not node.targets:
        raise ConfigError(f"{path}.targets = 0: must be at least 1", param=f"{path}.targets")
    if node.capacity < node.targets * MIN_TARGET_BYTES:
        raise ConfigError(
            f"{path}.capacity = {node.capacity}: must be at least {MIN_TARGET_BYTES} for each of its"
            f" {node.targets} targets",
            param=f"{path}.capacity",
        )


def _check_placement(placement: PoolPlacementParams) -> None:
    if not 1 <= placement.data_shards <= 32 or placement.parity_shards > 4:
        raise ConfigError("pool: 1 to 32 data shards and at most 4 parity shards", param="pool")
    if placement.groups is GroupKind.HOST and placement.data_shards + placement.parity_shards > 1:
        raise ConfigError(
            'pool.groups = "host" keeps extents whole: data_shards = 1, parity_shards = 0',
            param="pool.groups",
        )
    if not placement.metadata_shards:
        raise ConfigError("pool.metadata_shards must be at least 1", param="pool.metadata_shards")
