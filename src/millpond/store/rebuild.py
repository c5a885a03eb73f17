"""`Rebuild`: makes shards again that their nodes have lost (kvstore 2.7).

What is used most recently comes first, and what expires soon is left out: for a cache, a stripe that is not
repaired is only a miss later. Reads are spread over the survivors as placement plans them and keep to a rate.
Nothing is remembered but on the nodes, so a rebuild that was killed is simply begun again.
"""

from __future__ import annotations

import queue
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import structlog

from millpond.core.errors import ExtentLost, TransferFailed
from millpond.core.extents import NodeId
from millpond.core.pool_map import PoolMap
from millpond.core.units import MIB, SECOND_NS
from millpond.policies.pacing import RatePacer
from millpond.policies.stripe_placement import plan_rebuild_reads
from millpond.store.net.node_link import NodePort
from millpond.store.shard_census import Census, StripeCensus, shard_nodes, take_census
from millpond.store.stripe_repair import RepairJob, StripeRepairer

log = structlog.get_logger(__name__)

HOUR_S = 3600


@dataclass(frozen=True, slots=True)
class RebuildParams:
    """How a rebuild goes."""

    read_mib_s: float = 400.0
    """Read from all survivors together; about a tenth of what they can do. 0: no limit."""
    num_workers: int = 2
    """Stripes at once."""
    ttl_s: int = 24 * HOUR_S
    """How long the nodes keep records that are not used."""
    min_left_s: int = 2 * HOUR_S
    """Stripes that expire sooner are left out."""
    stripe_s: float = 30.0
    """Deadline of one stripe."""


@dataclass(slots=True)
class RebuildProgress:
    """How far a rebuild is. Stripes, if nothing else is said."""

    total: int = 0
    """That lack shards on nodes that answer."""
    rebuilt: int = 0
    lost: int = 0
    """Fewer than k shards are left."""
    expiring: int = 0
    """Left out: they expire soon."""
    failed: int = 0
    """Could not be read or stored now; another rebuild may do it."""
    read_bytes: int = 0
    written_bytes: int = 0

    @property
    def done(self) -> int:
        """That nothing more will be done about."""
        return self.rebuilt + self.lost + self.expiring + self.failed


class Rebuild:
    """See module. `run` is called once; `stop` from any thread.

    Args:
        links: Way to each node; one whose node does not answer fails quickly.
        pool_map: Placement.
        node: The node that lost shards and is back, empty or not; None: whatever is missing anywhere.
        params: Parameters.
        unix_s: Calendar time.
    """

    def __init__(
        self,
        links: Mapping[NodeId, NodePort],
        pool_map: PoolMap,
        node: NodeId | None,
        *,
        params: RebuildParams | None = None,
        unix_s: Callable[[], int],
    ) -> None:
        self.progress = RebuildProgress()
        self.reads: Counter[NodeId] = Counter()
        """Shards that the jobs ask of each node."""
        self._links = links
        self._epochs = {epoch.epoch: epoch for epoch in pool_map.epochs}
        self._pool_map = pool_map
        self._node = node
        self._params = params or RebuildParams()
        self._unix_s = unix_s
        self._pacer = RatePacer(self._params.read_mib_s * MIB)
        self._lock = threading.Lock()
        self._stopping = threading.Event()

    def stop(self) -> None:
        """End after the stripes that are being made."""
        self._stopping.set()

    def run(self) -> RebuildProgress:
        """Rebuild.

        Raises:
            MillpondError: The node itself cannot be listed.
        """
        census = take_census(self._links, self._pool_map)
        if self._node is not None and self._node in census.silent:
            raise TransferFailed(f"{self._node} does not answer", code="pool.unreachable")
        jobs: queue.SimpleQueue[tuple[RepairJob, int]] = queue.SimpleQueue()
        for job in self._plan(census):
            jobs.put(job)
        failures: list[BaseException] = []
        workers = [
            threading.Thread(target=self._work, args=(jobs, failures), name=f"rebuild {index}")
            for index in range(self._params.num_workers)
        ]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
        if failures:
            raise failures[0]
        return self.progress

    def _plan(self, census: Census) -> Iterable[tuple[RepairJob, int]]:
        """Jobs, what was used last first, each with the bytes that it reads."""
        silent = set(census.silent)
        plans = {
            number: plan_rebuild_reads(epoch, self._node)
            for number, epoch in self._epochs.items()
            if self._node is not None and self._node in epoch.points
        }
        turns: Counter[tuple[int, int]] = Counter()
        now_s = self._unix_s()
        for found in sorted(census.stripes.values(), key=lambda found: found.used_s, reverse=True):
            epoch = self._epochs[found.stripe.epoch]
            nodes = shard_nodes(self._epochs, found.stripe)
            wanted = tuple(
                shard
                for shard, node in enumerate(nodes)
                if not found.present >> shard & 1
                and node not in silent
                and (self._node is None or node == self._node)
            )
            if not wanted:
                continue
            self.progress.total += 1
            if found.present.bit_count() < epoch.k:
                # Shards on nodes that are silent may be whole, but are of no use now.
                if silent.isdisjoint(nodes):
                    self.progress.lost += 1
                else:
                    self.progress.failed += 1
                continue
            if found.used_s + self._params.ttl_s - now_s < self._params.min_left_s:
                self.progress.expiring += 1
                continue
            place = (found.stripe.epoch, found.stripe.group)
            plan = plans.get(found.stripe.epoch)
            first: tuple[int, ...] = ()
            if plan is not None and found.stripe.group in plan.sources:
                first = plan.shards(found.stripe.group, turns[place])
                turns[place] += 1
            sources = _sources(found, first)
            self.reads.update(nodes[shard] for shard in sources[: epoch.k])
            yield (
                RepairJob(found.extent, found.stripe, nodes, wanted, sources),
                found.record_bytes * epoch.k,
            )

    def _work(self, jobs: queue.SimpleQueue[tuple[RepairJob, int]], failures: list[BaseException]) -> None:
        try:
            repairer = StripeRepairer(self._links)
            while not self._stopping.is_set() and not failures:
                try:
                    job, read_bytes = jobs.get_nowait()
                except queue.Empty:
                    return
                with self._lock:
                    wait_ns = self._pacer.wait_ns(time.monotonic_ns(), read_bytes)
                if self._stopping.wait(wait_ns / SECOND_NS):
                    return
                self._do(repairer, job)
        except BaseException as error:  # a bug: the caller raises it
            failures.append(error)
            raise

    def _do(self, repairer: StripeRepairer, job: RepairJob) -> None:
        deadline_ns = time.monotonic_ns() + int(self._params.stripe_s * SECOND_NS)
        progress = self.progress
        try:
            result = repairer.repair(job, deadline_ns=deadline_ns)
        except ExtentLost as error:
            log.info("stripe not rebuilt", code=error.code, error=error.message)
            with self._lock:
                progress.failed += 1
            return
        with self._lock:
            progress.read_bytes += result.read_bytes
            progress.written_bytes += result.written_bytes
            if result.unreachable:
                progress.failed += 1
            else:
                progress.rebuilt += 1


def _sources(found: StripeCensus, first: tuple[int, ...]) -> tuple[int, ...]:
    """Shards that are there, the planned ones first."""
    planned = [shard for shard in first if found.present >> shard & 1]
    others = [
        shard
        for shard in range(found.present.bit_length())
        if found.present >> shard & 1 and shard not in planned
    ]
    return (*planned, *others)
