"""`Scrub`: reads every record of every node and checks every byte, and makes damaged shards again.

One node after the other, each busy with it for a small share of the time only, whatever its drives can do.
Reading for a scrub does not count as use. A scrub that was killed is begun again.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import structlog

from millpond.core.errors import ExtentLost, MillpondError, StaleEpoch
from millpond.core.extents import NodeId
from millpond.core.pool_map import PoolMap
from millpond.core.units import SECOND_NS
from millpond.policies.pacing import DutyPacer
from millpond.store.net.node_link import NodePort
from millpond.store.shard_census import ListedShard, list_shards, shard_nodes
from millpond.store.stripe_repair import RepairJob, StripeRepairer

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class ScrubParams:
    """How a scrub goes."""

    share: float = 0.03
    """Of the time for which a node is busy with it."""
    record_s: float = 10.0
    """Deadline of one record, or of the repair of one stripe."""


@dataclass(slots=True)
class ScrubProgress:
    """How far a scrub is. Records, if nothing else is said."""

    checked: int = 0
    checked_bytes: int = 0
    damaged: int = 0
    healed: int = 0
    unread: int = 0
    """Could not be read now, or left meanwhile."""
    silent_nodes: int = 0
    """Nodes that could not be listed to their end."""


class Scrub:
    """See module. `run` is called once; `stop` from any thread.

    Args:
        links: Way to each node.
        pool_map: Placement: where the other shards of a damaged one are.
        params: Parameters.
    """

    def __init__(
        self, links: Mapping[NodeId, NodePort], pool_map: PoolMap, params: ScrubParams | None = None
    ) -> None:
        self.progress = ScrubProgress()
        self._links = links
        self._epochs = {epoch.epoch: epoch for epoch in pool_map.epochs}
        self._params = params or ScrubParams()
        self._pacer = DutyPacer(self._params.share)
        self._repairer = StripeRepairer(links)
        self._stopping = threading.Event()

    def stop(self) -> None:
        """End after the record that is being read."""
        self._stopping.set()

    def run(self, nodes: Iterable[NodeId]) -> ScrubProgress:
        """Scrub these nodes."""
        for node in nodes:
            try:
                for listed in list_shards(self._links[node]):
                    if self._stopping.is_set():
                        return self.progress
                    self._check(node, listed)
            except MillpondError as error:
                self.progress.silent_nodes += 1
                log.warning("storage node not scrubbed", node=node, code=error.code, error=error.message)
        return self.progress

    def _check(self, node: NodeId, listed: ListedShard) -> None:
        header, progress = listed.header, self.progress
        try:
            nodes = list(shard_nodes(self._epochs, header.stripe))
            nodes[header.shard] = node  # where it is, whatever placement says
        except (StaleEpoch, IndexError):
            progress.unread += 1
            return
        others = tuple(shard for shard in range(len(nodes)) if shard != header.shard)
        job = RepairJob(header.extent, header.stripe, tuple(nodes), (header.shard,), others)
        began_ns = time.monotonic_ns()
        deadline_ns = began_ns + int(self._params.record_s * SECOND_NS)
        is_whole = self._repairer.is_whole(job, header.shard, header.shape, deadline_ns=deadline_ns)
        if is_whole is None:
            progress.unread += 1
        else:
            progress.checked += 1
            progress.checked_bytes += header.record_bytes
            if not is_whole:
                self._heal(job)
        self._stopping.wait(self._pacer.rest_ns(time.monotonic_ns() - began_ns) / SECOND_NS)

    def _heal(self, job: RepairJob) -> None:
        self.progress.damaged += 1
        deadline_ns = time.monotonic_ns() + int(self._params.record_s * SECOND_NS)
        try:
            result = self._repairer.repair(job, deadline_ns=deadline_ns)
        except ExtentLost as error:
            log.warning("damaged shard not healed", code=error.code, error=error.message)
            return
        self.progress.healed += not result.unreachable
