"""How evenly the survivors of a lost node are read when its shards are made again."""

from __future__ import annotations

from millpond.core.extents import NodeId
from millpond.core.pool_map import StorageNodeInfo
from millpond.policies.stripe_placement import make_epoch, report_placement

NODE_COUNTS = (13, 16, 24, 34, 50, 100)


def rebuild_read_max_over_mean(num_nodes: int) -> float:
    """Reads of the busiest survivor over the mean; one survivor of each stripe is skipped."""
    nodes = [StorageNodeInfo(NodeId(f"s{index}"), "") for index in range(num_nodes)]
    return report_placement(make_epoch(0, nodes, 10, 2)).rebuild_max_over_mean
