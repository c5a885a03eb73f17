"""Group tables for racks, unequal nodes and any number of shards: greedy, one point after the other."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

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
    num_nodes, num_racks = len({p.node for p in points}), len({p.rack for p in points})
    node_limit = ceil_div(width, num_nodes) if allow_shared else 1
    rack_limit = ceil_div(width, num_racks)
    chance = Chance(num_points, "stripe_placement")
    used = [0] * num_points
    pairs = [[0] * num_points for _ in range(num_points)]
    groups: list[list[int]] = []
    while len(groups) < num_groups:
        for _ in range(_TRIES):
            group = _pick_group(points, width, used, pairs, node_limit, rack_limit, chance)
            if len(group) == width:
                break
        else:
            raise InvariantBroken(f"no group of {width} among {num_nodes} nodes in {num_racks} racks")
        for point in group:
            used[point] += 1
            for other in group:
                pairs[point][other] += 1
        groups.append(group)
    return balance_roles(groups, num_points)


def _pick_group(
    points: Sequence[Point],
    width: int,
    used: Sequence[int],
    pairs: Sequence[Sequence[int]],
    node_limit: int,
    rack_limit: int,
    chance: Chance,
) -> list[int]:
    """Pick the least used points, of those the ones that have met the group least; ties by chance."""
    group: list[int] = []
    met = [0] * len(points)
    on_node: Counter[int] = Counter()
    in_rack: Counter[int] = Counter()
    for _ in range(width):
        can = [
            i
            for i, point in enumerate(points)
            if on_node[point.node] < node_limit and in_rack[point.rack] < rack_limit and i not in group
        ]
        if not can:
            break
        best = min((used[i], met[i]) for i in can)
        choices = [i for i in can if (used[i], met[i]) == best]
        picked = choices[chance.below(len(choices))]
        group.append(picked)
        on_node[points[picked].node] += 1
        in_rack[points[picked].rack] += 1
        met = [before + more for before, more in zip(met, pairs[picked], strict=True)]
    return group
