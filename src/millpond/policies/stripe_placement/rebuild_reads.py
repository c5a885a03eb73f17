"""Which survivors a rebuild reads, so that it loads them equally.

A lost shard needs k of the k + m - 1 survivors of its stripe, so every stripe may skip some. Which ones is
chosen such that no node reads more than its part. Stripes of one group take turns through a cycle of choices,
because a table has few groups and whole numbers of them would not balance.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from millpond.core.extents import NodeId
from millpond.core.pool_map import PlacementEpoch

CYCLE = 12
"""Choices per group."""

_PASSES = 50


@dataclass(frozen=True, slots=True)
class RebuildReads:
    """Who is read when one node is lost."""

    sources: Mapping[int, tuple[tuple[int, ...], ...]]
    """Group -> cycle of choices, each the k shards to read. Groups without the node are absent."""
    unreadable: tuple[int, ...]
    """Groups with fewer than k shards on other nodes: nothing can be rebuilt there."""

    def shards(self, group: int, ordinal: int) -> tuple[int, ...]:
        """Shards to read for the `ordinal`-th stripe of a group that is rebuilt."""
        cycle = self.sources[group]
        return cycle[ordinal % len(cycle)]


def plan_rebuild_reads(epoch: PlacementEpoch, lost: NodeId) -> RebuildReads:
    """Choose the survivors to read for every group that has shards on the lost node.

    Args:
        epoch: The placement.
        lost: A node.

    Returns:
        For each affected group a cycle of choices.

    Guarantees:
        Deterministic. Reads per node and virtual point are level up to what the groups allow.
    """
    survivors: dict[int, tuple[int, ...]] = {}
    unreadable: list[int] = []
    for group, points in enumerate(epoch.groups):
        rest = tuple(shard for shard, point in enumerate(points) if epoch.points[point] != lost)
        if len(rest) < epoch.k:
            unreadable.append(group)
        elif len(rest) < len(points):
            survivors[group] = rest
    owner = {g: [epoch.points[p] for p in epoch.groups[g]] for g in survivors}
    weights = {node: epoch.points.count(node) for node in set(epoch.points)}
    skipped = _choose_skips(survivors, owner, weights, epoch.k)
    return RebuildReads(
        {
            group: tuple(tuple(s for s in rest if s not in skip) for skip in skipped[group])
            for group, rest in survivors.items()
        },
        tuple(unreadable),
    )


def _choose_skips(
    survivors: Mapping[int, tuple[int, ...]],
    owner: Mapping[int, Sequence[NodeId]],
    weights: Mapping[NodeId, int],
    k: int,
) -> dict[int, list[tuple[int, ...]]]:
    """Skip the most loaded survivors, again and again until no choice can be bettered."""
    load = dict.fromkeys(weights, 0.0)
    for group, rest in survivors.items():
        for shard in rest:
            load[owner[group][shard]] += CYCLE / weights[owner[group][shard]]
    skips: dict[int, list[tuple[int, ...]]] = {group: [()] * CYCLE for group in survivors}
    for _ in range(_PASSES):
        has_changed = False
        for turn in range(CYCLE):
            for group, rest in survivors.items():
                nodes = owner[group]
                old = skips[group][turn]
                for shard in old:
                    load[nodes[shard]] += 1 / weights[nodes[shard]]
                # On a tie the old choice stays, or two groups would swap forever.
                ranked = sorted(rest, key=lambda s: (-load[nodes[s]], s not in old, s))
                new = tuple(sorted(ranked[: len(rest) - k]))
                for shard in new:
                    load[nodes[shard]] -= 1 / weights[nodes[shard]]
                skips[group][turn] = new
                has_changed |= new != old
        if not has_changed:
            break
    return skips


def reads_by_node(epoch: PlacementEpoch, lost: NodeId, plan: RebuildReads) -> dict[NodeId, float]:
    """Shards that each other node reads per virtual point, over one cycle of every affected group."""
    reads = {node: 0.0 for node in epoch.points if node != lost}
    weights = {node: epoch.points.count(node) for node in reads}
    for group, cycle in plan.sources.items():
        for choice in cycle:
            for shard in choice:
                node = epoch.points[epoch.groups[group][shard]]
                reads[node] += CYCLE / len(cycle) / weights[node]
    return reads
