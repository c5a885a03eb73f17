"""Group tables for racks, unequal nodes and any number of shards: greedy, one point after the other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from millpond.core.chance import Chance
from millpond.core.errors import InvariantBroken
from millpond.core.units import ceil_div
from millpond.policies.stripe_placement.designs import Groups, balance_roles

GROUPS_PER_POINT = 4
"""Shards of each role per point: more even out the pairs, fewer keep the table small."""

_TRIES = 200


@dataclass(frozen=True, slots=True)
class Point:
    """One place in the table that a shard can have."""

    node: int
    rack: int


def build_groups(points: Sequence[Point], width: int, *, allow_shared: bool = False) -> Groups:
    """Build groups in which all points, roles and pairs occur about equally often.

    No group has two points of one node, or more points of a rack than it must: ceil(width / racks).

    Args:
        points: At least `width`.
        width: Shards per group.
        allow_shared: If there are fewer nodes than shards, let a node have as many of a group as it must.

    Returns:
        `GROUPS_PER_POINT` groups per point.

    Guarantees:
        Deterministic on every platform. Points are used equally often unless the limits forbid it: a
        node with more than one `width`-th of all points, or a rack with more than its part.
    """
    num_points = len(points)
    num_groups = num_points * GROUPS_PER_POINT
    node = np.array([p.node for p in points])
    rack = np.array([p.rack for p in points])
    num_nodes, num_racks = int(node.max()) + 1, int(rack.max()) + 1
    node_limit = ceil_div(width, num_nodes) if allow_shared else 1
    rack_limit = ceil_div(width, num_racks)
    chance = Chance(num_points, "stripe_placement")
    used = np.zeros(num_points, np.int64)
    pairs = np.zeros((num_points, num_points), np.int64)
    groups: list[list[int]] = []
    while len(groups) < num_groups:
        for _ in range(_TRIES):
            group = _pick_group(width, used, pairs, node, rack, node_limit, rack_limit, chance)
            if len(group) == width:
                break
        else:
            raise InvariantBroken(f"no group of {width} among {num_nodes} nodes in {num_racks} racks")
        used[group] += 1
        pairs[np.ix_(group, group)] += 1
        groups.append(group)
    return balance_roles(groups, num_points)


def _pick_group(
    width: int,
    used: np.ndarray,
    pairs: np.ndarray,
    node: np.ndarray,
    rack: np.ndarray,
    node_limit: int,
    rack_limit: int,
    chance: Chance,
) -> list[int]:
    """Pick the least used points, of those the ones that have met the group least; ties by chance."""
    group: list[int] = []
    met = np.zeros(len(used), np.int64)
    on_node = np.zeros(int(node.max()) + 1, np.int64)
    in_rack = np.zeros(int(rack.max()) + 1, np.int64)
    is_free = np.ones(len(used), bool)
    for _ in range(width):
        can = is_free & (on_node[node] < node_limit) & (in_rack[rack] < rack_limit)
        if not can.any():
            break
        # A point that has met the group too often costs more than one step of use.
        least = int(used[can].min())
        can &= used <= least
        fewest = int(met[can].min())
        choices = np.flatnonzero(can & (met == fewest))
        point = int(choices[chance.below(len(choices))])
        group.append(point)
        is_free[point] = False
        on_node[node[point]] += 1
        in_rack[rack[point]] += 1
        met += pairs[point]
    return group
