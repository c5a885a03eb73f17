"""Section `[pool]`: whether there is a KV pool, and how its extents are coded and placed."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class GroupKind(StrEnum):
    """Which nodes share the shards of an extent."""

    SPREAD = "spread"
    """As many different ones as there are."""
    HOST = "host"
    """One: each extent lies whole on the host of its writer."""


@dataclass(frozen=True, slots=True)
class PoolPlacementParams:
    """Coding, placement and metadata of the pool."""

    enabled: bool = True
    """Keep KV for later requests, in memory and on disk; without it every prompt is computed whole."""
    data_shards: int = 10
    """k: shards that an extent is cut into."""
    parity_shards: int = 2
    """m: shards that may be lost."""
    groups: GroupKind = GroupKind.SPREAD
    """`spread`: over the nodes, by block designs; `host`: on the node of the writer's host."""
    metadata_shards: int = 1
    """Processes that know where extents are."""
