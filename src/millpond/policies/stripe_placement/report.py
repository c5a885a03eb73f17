"""How even a placement is, in the figures that an operator looks at."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import combinations

from millpond.core.extents import NodeId
from millpond.core.pool_map import PlacementEpoch
from millpond.policies.stripe_placement.rebuild_reads import plan_rebuild_reads, reads_by_node

_MAX_NODES_TRIED = 16


@dataclass(frozen=True, slots=True)
class PlacementReport:
    """Spread of a placement table. Pairs are of points of different nodes."""

    num_nodes: int
    num_points: int
    num_groups: int
    shards_per_point: tuple[int, int]
    """Fewest and most groups of one point."""
    shards_per_role: tuple[int, int]
    """Fewest and most groups in which one point has one and the same shard."""
    groups_per_pair: tuple[int, int]
    """Fewest and most groups in which two points meet."""
    max_shards_per_rack: int
    """Most shards of one group in one rack."""
    rebuild_max_over_mean: float
    """Worst over the nodes tried: most loaded survivor to the mean, in reads per point."""
    num_nodes_tried: int


def report_placement(epoch: PlacementEpoch, racks: Mapping[NodeId, str] | None = None) -> PlacementReport:
    """Measure a placement table.

    Args:
        epoch: The table.
        racks: Rack of each node; None: all in one.
    """
    points, groups = epoch.points, epoch.groups
    num_points = len(points)
    shards = Counter(point for group in groups for point in group)
    roles = Counter((point, shard) for group in groups for shard, point in enumerate(group))
    pairs = Counter(pair for group in groups for pair in combinations(sorted(group), 2))
    nodes = sorted(set(points))
    tried = nodes[:: -(-len(nodes) // _MAX_NODES_TRIED)]
    rack_of = racks or dict.fromkeys(nodes, "")
    return PlacementReport(
        num_nodes=len(nodes),
        num_points=num_points,
        num_groups=len(groups),
        shards_per_point=_spread(shards[point] for point in range(num_points)),
        shards_per_role=_spread(
            roles[point, shard] for point in range(num_points) for shard in range(epoch.k + epoch.m)
        ),
        groups_per_pair=_spread(
            pairs[pair] for pair in combinations(range(num_points), 2) if points[pair[0]] != points[pair[1]]
        ),
        max_shards_per_rack=max(
            max(Counter(rack_of[points[point]] for point in group).values()) for group in groups
        ),
        rebuild_max_over_mean=max(_imbalance(epoch, node) for node in tried),
        num_nodes_tried=len(tried),
    )


def _spread(counts: Iterable[int]) -> tuple[int, int]:
    values = list(counts) or [0]
    return min(values), max(values)


def _imbalance(epoch: PlacementEpoch, lost: NodeId) -> float:
    reads = list(reads_by_node(epoch, lost, plan_rebuild_reads(epoch, lost)).values())
    mean = sum(reads) / len(reads) if reads else 0.0
    return max(reads) / mean if mean else 1.0
