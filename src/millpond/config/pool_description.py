"""What a KV pool is made of: hosts, storage nodes, and how extents are coded and placed (interfaces A.7).

A description is a TOML file, or one of the presets that come with the package (docs/adr/0005).
"""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from enum import StrEnum
from importlib.resources import files
from pathlib import Path

from millpond.config.schema import check, check_record
from millpond.config.topology import HostSpec, StorageSpec
from millpond.core.errors import ConfigError

PRESETS = ("pooled", "local-affinity")


class GroupKind(StrEnum):
    """Which nodes share the shards of an extent."""

    SPREAD = "spread"
    """As many different ones as there are."""
    HOST = "host"
    """One: each extent lies whole on the host of its writer."""


@dataclass(frozen=True, slots=True)
class PoolPlacementParams:
    """Section `[pool]`: coding, placement and metadata of the pool."""

    data_shards: int = 10
    """k: shards that an extent is cut into."""
    parity_shards: int = 2
    """m: shards that may be lost."""
    groups: GroupKind = GroupKind.SPREAD
    """`spread`: over the nodes, by block designs; `host`: on the node of the writer's host."""
    metadata_shards: int = 1
    """Processes that know where extents are."""


@dataclass(frozen=True, slots=True)
class PoolDescription:
    """The pool part of a config file."""

    hosts: tuple[HostSpec, ...]
    storage: tuple[StorageSpec, ...]
    placement: PoolPlacementParams

    def host(self, name: str) -> HostSpec:
        """The host of that name; the names were checked."""
        return next(host for host in self.hosts if host.name == name)


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
    placement: PoolPlacementParams = check_record(PoolPlacementParams, "pool", data.pop("pool", {}))
    config = check(data)
    description = PoolDescription(config.hosts, config.storage, placement)
    _check_sense(description)
    return description


def _check_sense(description: PoolDescription) -> None:
    hosts = [host.name for host in description.hosts]
    nodes = [node.name for node in description.storage]
    placement = description.placement
    for kind, names in (("host", hosts), ("storage", nodes)):
        if len(set(names)) < len(names):
            raise ConfigError(f"{kind}: two have one name", param=kind)
    if not nodes:
        raise ConfigError("storage: a pool needs at least one [[storage]] node", param="storage")
    for index, node in enumerate(description.storage):
        if node.host not in hosts:
            raise ConfigError(f"storage[{index}].host = {node.host!r}: no such host", param="storage")
        if not node.targets or not node.capacity:
            raise ConfigError(f"storage[{index}]: needs targets and capacity", param="storage")
    if not 1 <= placement.data_shards <= 32 or placement.parity_shards > 4:
        raise ConfigError("pool: 1 to 32 data shards and at most 4 parity shards", param="pool")
    if placement.groups is GroupKind.HOST and placement.data_shards + placement.parity_shards > 1:
        raise ConfigError(
            'pool.groups = "host" keeps extents whole: data_shards = 1, parity_shards = 0',
            param="pool.groups",
        )
    if not placement.metadata_shards:
        raise ConfigError("pool.metadata_shards must be at least 1", param="pool.metadata_shards")
