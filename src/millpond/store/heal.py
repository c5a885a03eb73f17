"""`Healer`: read repair (kvstore 2.7). Takes the orders that reads leave in `Pool.heals`.

A shard that is absent or damaged is made again on its node. If the node is gone and the extent is read again
and again, the extent is written anew, under the placement of today. All else ages out.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import structlog

from millpond.control.extent_write import WriteEnd
from millpond.core.errors import ExtentLost, MillpondError, StaleEpoch
from millpond.core.extents import ExtentId
from millpond.core.units import SECOND_NS
from millpond.store.chain import BlockChain, Hit, HitExtent
from millpond.store.extent_get import GetEnd, RowsReady
from millpond.store.pool import HealOrder, Pool
from millpond.store.shard_census import shard_nodes
from millpond.store.stripe import Block, copy_rows_out
from millpond.store.stripe_repair import RepairJob, StripeRepairer

log = structlog.get_logger(__name__)

_MAX_REMEMBERED = 65_536


@dataclass(frozen=True, slots=True)
class HealParams:
    """What is healed."""

    hot_reads: int = 2
    """An extent whose shard cannot be put back is written anew when so many reads missed the shard."""
    extent_s: float = 10.0
    """Deadline of one extent."""


@dataclass(slots=True)
class HealCounts:
    """Since the start."""

    orders: int = 0
    healed: int = 0
    """Shards put back."""
    rewritten: int = 0
    """Extents written anew."""
    lost: int = 0
    """Stripes with fewer than k whole shards."""
    left: int = 0
    """Orders for extents that are not read often enough, or that only part of is known."""


class Healer:
    """See module. One thread, the owner's: it calls `run` about once a second.

    Args:
        pool: Whose reads are repaired.
        params: Parameters.
    """

    def __init__(self, pool: Pool, params: HealParams | None = None) -> None:
        self.counts = HealCounts()
        self._pool = pool
        self._params = params or HealParams()
        self._repairer = StripeRepairer(pool.links)
        self._misses: Counter[tuple[bytes, int, int]] = Counter()
        """(digest, nonce, shard) -> reads that missed a shard whose node did not take it back."""

    def run(self, *, max_orders: int = 64) -> int:
        """Carry out orders that have come; how many."""
        orders: dict[tuple[bytes, int, int], HealOrder] = {}
        for _ in range(max_orders):
            try:
                order = self._pool.heals.popleft()
            except IndexError:
                break
            key = (order.digest, order.stripe.nonce, order.shard)
            orders[key] = order  # a read leaves one for each group of rows
        for key, order in orders.items():
            self.counts.orders += 1
            self._misses[key] += 1
            if self._heal(order):
                del self._misses[key]
        if len(self._misses) > _MAX_REMEMBERED:
            self._misses.clear()
        return len(orders)

    def _heal(self, order: HealOrder) -> bool:
        """Whether nothing more need be done about it."""
        deadline_ns = time.monotonic_ns() + int(self._params.extent_s * SECOND_NS)
        job = self._job(order)
        if job is not None:
            try:
                result = self._repairer.repair(job, deadline_ns=deadline_ns)
            except ExtentLost as error:
                self.counts.lost += 1
                log.info("extent lost", code=error.code, error=error.message)
                return True
            if not result.unreachable:
                self.counts.healed += 1
                return True
        key = (order.digest, order.stripe.nonce, order.shard)
        if self._misses[key] < self._params.hot_reads or order.chain is None or order.hit is None:
            self.counts.left += 1
            return False
        is_rewritten = rewrite_extent(self._pool, order.chain, order.hit, deadline_ns=deadline_ns)
        self.counts.rewritten += is_rewritten
        self.counts.left += not is_rewritten
        return is_rewritten

    def _job(self, order: HealOrder) -> RepairJob | None:
        """The repair of one shard; None if the pool's newest placement does without its node."""
        pool_map = self._pool.pool_map
        epochs = {epoch.epoch: epoch for epoch in pool_map.epochs}
        try:
            nodes = shard_nodes(epochs, order.stripe)
        except StaleEpoch:
            return None
        if nodes[order.shard] not in pool_map.epochs[-1].points:
            return None
        others = tuple(shard for shard in range(len(nodes)) if shard != order.shard)
        extent = ExtentId(order.digest, order.num_blocks)
        return RepairJob(extent, order.stripe, nodes, (order.shard,), others)


def rewrite_extent(pool: Pool, chain: BlockChain, part: HitExtent, *, deadline_ns: int) -> bool:
    """Write an extent anew, as a stripe of the newest placement; whether that was done.

    If it ends half way, the extent is known nowhere and is a miss.
    """
    if part.num_blocks != part.location.num_blocks:
        return False  # the reader's chain ends inside it: the rest of its blocks has no name here
    layout = pool.layout
    sink = _ExtentSink(part, [np.empty(layout.block_bytes, np.uint8) for _ in range(part.num_blocks)])
    try:
        result = pool.get(Hit(chain, part.end, (part,)), sink, deadline_ns=deadline_ns, is_use=False)
        if result.ends != (GetEnd.WHOLE,) or not pool.forget(chain, part):
            return False
        cut = BlockChain(chain.tenant, chain.root, chain.digests[: part.end])
        (written,) = pool.put(
            cut, part.begin, sink.blocks, deadline_ns=deadline_ns, lineage=part.location.lineage
        )
    except MillpondError as error:
        log.warning("extent not written anew", code=error.code, error=error.message)
        return False
    return written.result == WriteEnd.PUBLISHED


class _ExtentSink:
    """Takes the blocks of one extent."""

    def __init__(self, part: HitExtent, blocks: Sequence[Block]) -> None:
        self.blocks = blocks
        self._part = part

    def on_rows(self, ready: RowsReady) -> None:
        """See `RowSink`."""
        copy_rows_out(ready.shape, ready.buffer, ready.begin_row, ready.end_row, self.blocks)

    def on_shortened(self, num_blocks: int, reason: GetEnd) -> None:
        """See `RowSink`."""
