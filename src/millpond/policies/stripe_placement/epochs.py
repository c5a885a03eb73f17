"""Placement epochs: a table for the nodes there are, and a new one when they change.

An epoch is never changed. Joining and leaving add one, which takes the writes from then on; stripes of older
epochs stay where they are until they expire, so that no change of membership copies anything.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import reduce
from math import gcd

from millpond.core.errors import InvalidRequest
from millpond.core.extents import NodeId
from millpond.core.pool_map import PlacementEpoch, PoolMap, StorageNodeInfo
from millpond.core.units import ceil_div
from millpond.policies.stripe_placement.build import Point, build_groups
from millpond.policies.stripe_placement.designs import (
    TABLE_WIDTH,
    Groups,
    known_design,
    transversal_design,
)

MAX_LIVE_EPOCHS = 4
MAX_EPOCH = 0xFFFF
MAX_POINTS = 512
"""Virtual points of one table; weights are relative, so small ones do."""


def make_epoch(
    number: int, nodes: Sequence[StorageNodeInfo], k: int, m: int, *, allow_shared: bool = False
) -> PlacementEpoch:
    """Make a placement table.

    Args:
        number: Of the epoch.
        nodes: Those that are to take writes; their order does not matter.
        k: Data shards.
        m: Parity shards.
        allow_shared: With fewer nodes than shards, put several shards of a stripe on one node. The loss of
            that node then loses them all: for one host, not for a service.

    Returns:
        The epoch. No group has two shards on one node, nor two in one rack if there are as many racks as
        shards; with fewer racks each has at most its part, rounded up.

    Raises:
        InvalidRequest: Too few nodes, or weights that do not fit.

    Guarantees:
        Deterministic: equal nodes give equal tables on every platform.
    """
    width = k + m
    names = {node.node for node in nodes}
    if k < 1 or m < 0 or len(names) != len(nodes) or any(node.weight < 1 for node in nodes):
        raise InvalidRequest("nodes need distinct names and weights of at least 1", code="pool.nodes")
    if not nodes or (len(nodes) < width and not allow_shared):
        raise InvalidRequest(
            f"{len(nodes)} storage nodes for {k}+{m} shards; allow several shards of a stripe per node, "
            "or use a smaller code",
            code="pool.nodes",
        )
    if not 0 <= number <= MAX_EPOCH:
        raise InvalidRequest(f"epoch {number}", code="pool.epochs")
    points, groups = _table(nodes, width)
    return PlacementEpoch(number, k, m, points, groups)


def _table(nodes: Sequence[StorageNodeInfo], width: int) -> tuple[tuple[NodeId, ...], Groups]:
    ordered = _interleave_racks(nodes)
    racks = {rack: i for i, rack in enumerate(sorted({node.rack for node in nodes}))}
    divisor = reduce(gcd, (node.weight for node in nodes))
    copies = ceil_div(width, len(nodes))  # with fewer nodes than shards each needs several places
    weights = [node.weight // divisor * copies for node in ordered]
    if sum(weights) > MAX_POINTS:
        raise InvalidRequest(
            f"weights add up to {sum(weights)} points, at most {MAX_POINTS}", code="pool.nodes"
        )
    if set(weights) == {1} and width == TABLE_WIDTH:
        known = known_design(len(nodes)) if len(racks) == 1 else None
        if len(racks) == TABLE_WIDTH and _are_equal(nodes):
            known = transversal_design(len(nodes) // TABLE_WIDTH)
        if known is not None:
            return tuple(node.node for node in ordered), known
    # Place after place, so that the places of a node lie apart and equal tables come of equal nodes.
    chosen = [i for turn in range(max(weights)) for i, weight in enumerate(weights) if turn < weight]
    points = [Point(i, racks[ordered[i].rack]) for i in chosen]
    groups = build_groups(points, width, allow_shared=len(nodes) < width)
    return tuple(ordered[i].node for i in chosen), groups


def _interleave_racks(nodes: Sequence[StorageNodeInfo]) -> list[StorageNodeInfo]:
    """First nodes of all racks, then the second ones: point p is in rack p mod racks if they are equal."""
    by_rack: dict[str, list[StorageNodeInfo]] = {}
    for node in sorted(nodes, key=lambda n: n.node):
        by_rack.setdefault(node.rack, []).append(node)
    longest = max(len(members) for members in by_rack.values())
    return [by_rack[rack][i] for i in range(longest) for rack in sorted(by_rack) if i < len(by_rack[rack])]


def _are_equal(nodes: Sequence[StorageNodeInfo]) -> bool:
    racks = [node.rack for node in nodes]
    return len({racks.count(rack) for rack in racks}) == 1


def add_epoch(
    pool_map: PoolMap, nodes: Sequence[StorageNodeInfo], k: int, m: int, *, allow_shared: bool = False
) -> PoolMap:
    """Let these nodes take the writes from now on. Nodes that older epochs name stay in the map.

    Raises:
        InvalidRequest: As `make_epoch`; an address or rack of a known node differs in a way that would
            renumber it; or four epochs are live: wait until the oldest has expired.
    """
    if len(pool_map.epochs) >= MAX_LIVE_EPOCHS:
        raise InvalidRequest(
            f"{MAX_LIVE_EPOCHS} placement epochs are live; the oldest has to expire first", code="pool.epochs"
        )
    number = pool_map.epochs[-1].epoch + 1 if pool_map.epochs else 0
    epoch = make_epoch(number, nodes, k, m, allow_shared=allow_shared)
    known = {node.node: node for node in pool_map.nodes}
    for node in nodes:
        old = known.get(node.node)
        if old is not None and old.address != node.address:
            raise InvalidRequest(
                f"{node.node} was at {old.address}; another machine needs another name", code="pool.nodes"
            )
        known[node.node] = node
    return replace(
        pool_map,
        version=pool_map.version + 1,
        nodes=tuple(known[name] for name in sorted(known)),
        epochs=(*pool_map.epochs, epoch),
    )


def retire_epochs(pool_map: PoolMap, oldest_live: int) -> PoolMap:
    """Drop the epochs before `oldest_live`, and the nodes that no other epoch names.

    The last epoch always stays. Call it when everything that was written under them has expired.
    """
    epochs = tuple(
        epoch for epoch in pool_map.epochs if epoch.epoch >= oldest_live or epoch is pool_map.epochs[-1]
    )
    if epochs == pool_map.epochs:
        return pool_map
    named = {node for epoch in epochs for node in epoch.points}
    nodes = tuple(node for node in pool_map.nodes if node.node in named)
    return replace(pool_map, version=pool_map.version + 1, nodes=nodes, epochs=epochs)
