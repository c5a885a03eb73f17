"""`PoolAdmin`: what an operator does with a running pool, as calls; `millpond pool` prints them."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Self

from millpond.core.errors import InvalidRequest, MillpondError, StaleEpoch
from millpond.core.extents import NodeId
from millpond.core.pool_map import PoolMap, StorageNodeInfo
from millpond.core.units import SECOND_NS
from millpond.policies.stripe_placement import add_epoch
from millpond.store.clock import SystemClock
from millpond.store.metadata.client import MetadataClient
from millpond.store.net.messages import MetadataStatus, NodeStatus, NodeStatusQuery
from millpond.store.net.node_link import NodeLink, NodeLinkParams
from millpond.store.rebuild import Rebuild, RebuildParams
from millpond.store.scrub import Scrub, ScrubParams
from millpond.store.shard_census import take_census

CALL_S = 10
"""Deadline of each question."""


@dataclass(frozen=True, slots=True)
class PoolStatus:
    """Every process of a pool: what it says, or why it does not."""

    pool_map: PoolMap
    nodes: dict[NodeId, NodeStatus | MillpondError]
    metadata: dict[str, MetadataStatus | MillpondError]

    @property
    def is_healthy(self) -> bool:
        """Whether all answer, take writes and have all their drives."""
        nodes = all(
            isinstance(node, NodeStatus) and node.accepts_writes and not node.targets_failed
            for node in self.nodes.values()
        )
        return nodes and all(isinstance(shard, MetadataStatus) for shard in self.metadata.values())


@dataclass(frozen=True, slots=True)
class PoolCheck:
    """Stripes that the nodes have, by what is left of them."""

    whole: int
    degraded: int
    """Lack shards, and can be read."""
    lost: int
    """Cannot be read, as far as is known: nodes that are silent may have the rest."""
    misplaced: int
    """Shards that no placement explains."""
    silent: tuple[NodeId, ...]


class PoolAdmin:
    """See module. A context manager.

    Args:
        addresses: Metadata shards.
        token: Cluster token.

    Raises:
        TransientError: No metadata shard answers.
        Unauthorized: Another token.
    """

    def __init__(self, addresses: Sequence[str], token: str) -> None:
        self.token = token
        self.metadata = MetadataClient(addresses, name="pool admin", token=token)
        self.links: dict[NodeId, NodeLink] = {}
        try:
            self.pool_map = self.metadata.pool_map(deadline_ns=_soon_ns())
        except BaseException:
            self.metadata.close()
            raise
        self._connect()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close all connections."""
        for link in self.links.values():
            link.close()
        self.metadata.close()

    def status(self) -> PoolStatus:
        """Ask every process."""
        nodes = {node: self._ask_node(link) for node, link in self.links.items()}
        return PoolStatus(self.pool_map, nodes, self.metadata.statuses(deadline_ns=_soon_ns()))

    def check(self) -> PoolCheck:
        """Compare what all nodes list with what placement wants; no data is read."""
        census = take_census(self.links, self.pool_map)
        epochs = {epoch.epoch: epoch for epoch in self.pool_map.epochs}
        whole = lost = 0
        for found in census.stripes.values():
            epoch, count = epochs[found.stripe.epoch], found.present.bit_count()
            whole += count == epoch.k + epoch.m
            lost += count < epoch.k
        degraded = len(census.stripes) - whole - lost
        return PoolCheck(whole, degraded, lost, census.num_misplaced, census.silent)

    def num_shards(self, nodes: Sequence[NodeId]) -> int:
        """Records of these nodes, as far as they answer."""
        states = [self._ask_node(self.links[node]) for node in nodes]
        return sum(state.num_shards for state in states if isinstance(state, NodeStatus))

    def scrub(self, params: ScrubParams) -> Scrub:
        """Prepare a scrub."""
        return Scrub(self.links, self.pool_map, params)

    def rebuild(self, node: str | None, params: RebuildParams) -> Rebuild:
        """Prepare a rebuild of a node, or of whatever is missing.

        Raises:
            InvalidRequest: No such node.
        """
        chosen = self.known(node) if node else None
        return Rebuild(self.links, self.pool_map, chosen, params=params, unix_s=SystemClock().unix_s)

    def drain(self, node: str) -> PoolMap:
        """Let a node take no writes any more: a new placement without it. What it has stays readable.

        Returns:
            The new map. Once its data has expired, the node can be switched off.

        Raises:
            InvalidRequest: No such node, or the others are too few.
            StaleEpoch: Somebody else changed the map meanwhile.
        """
        self.known(node)
        last = self.pool_map.epochs[-1]
        in_use = set(last.points) - {node}
        if len(in_use) == len(set(last.points)):
            raise InvalidRequest(f"{node} takes no writes as it is", code="pool.nodes")
        rest: list[StorageNodeInfo] = [info for info in self.pool_map.nodes if info.node in in_use]
        is_shared = len(set(last.points)) < last.k + last.m
        drained = add_epoch(self.pool_map, rest, last.k, last.m, allow_shared=is_shared)
        if not self.metadata.update_map(drained, deadline_ns=_soon_ns()):
            raise StaleEpoch("the pool map was changed meanwhile: look again", code="pool.stale_map")
        self.pool_map = drained
        return drained

    def drop(self, tenant: int) -> int:
        """Forget all that a tenant wrote; how many extents. Their bytes go with their segments."""
        return self.metadata.drop_tenant(tenant, deadline_ns=_soon_ns())

    def known(self, node: str) -> NodeId:
        """A node by its name.

        Raises:
            InvalidRequest: No such node.
        """
        if node not in self.links:
            raise InvalidRequest(
                f"no storage node {node!r}: {', '.join(sorted(self.links))}", code="pool.nodes"
            )
        return NodeId(node)

    def _connect(self) -> None:
        for info in self.pool_map.nodes:
            link = NodeLink(info, name="pool admin", token=self.token, params=NodeLinkParams())
            self.links[info.node] = link
            link.dial()
        for link in self.links.values():
            link.wait_up(deadline_ns=_soon_ns())

    @staticmethod
    def _ask_node(link: NodeLink) -> NodeStatus | MillpondError:
        deadline_ns = _soon_ns()
        try:
            call = link.start(NodeStatusQuery(), deadline_ns=deadline_ns)
            if not call.wait(deadline_ns):
                link.cancel(call)
            answer = call.result().message
        except MillpondError as error:
            return error
        if isinstance(answer, NodeStatus):
            return answer
        return InvalidRequest("answers something else", code="pool.answer")


def _soon_ns() -> int:
    return time.monotonic_ns() + CALL_S * SECOND_NS
