"""`LatePool`: the KV pool of a node daemon, which may not be there yet, or never.

A thread opens it as soon as its metadata answers, and looks after it from then on: it puts back what reads
found to be missing, and takes note of new nodes. Until then every call fails like one to a pool that does not
answer, and the daemon serves from memory.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import structlog

from millpond.control.extent_read import ReadCounts
from millpond.core.errors import MillpondError, TransferFailed
from millpond.core.extents import window_blocks
from millpond.core.kv_layout import KvLayout
from millpond.core.units import SECOND_NS
from millpond.store.chain import BlockChain, Hit
from millpond.store.extent_get import GetEnd, GetResult, RowOrder, RowSink
from millpond.store.extent_put import PutResult
from millpond.store.heal import HealCounts, Healer
from millpond.store.pool import Pool
from millpond.store.pool_get import PoolGet
from millpond.store.stripe import Block

REFRESH_NS = 10 * SECOND_NS
"""How old the pool map may become."""
IDLE_S = 1.0
"""Interval of looks at an open pool that is not healed."""

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class _NoGet:
    """A get from a pool that is not there."""

    hit: Hit

    def run(self) -> GetResult:
        return GetResult(0, (GetEnd.LOST,) * len(self.hit.extents), ())

    def cancel(self) -> None:
        """There is nothing to give up."""


class LatePool:
    """See module. Thread-safe.

    Args:
        layout: Of the blocks.
        open_pool: Opens it; raises `MillpondError` while that is not possible. None: there is no pool.
        retry_s: Pause between tries.
        heal_period_s: How often missing shards are put back; 0: never.
    """

    def __init__(
        self,
        layout: KvLayout,
        open_pool: Callable[[], Pool] | None,
        *,
        retry_s: float,
        heal_period_s: float,
    ) -> None:
        self.window = window_blocks(layout)
        """Blocks of a full extent."""
        self.failure: BaseException | None = None
        """A bug that ended the thread; the process should end too."""
        self._open_pool = open_pool
        self._retry_s = retry_s
        self._heal_period_s = heal_period_s
        self.failed_matches = 0
        """Questions that nobody answered, of a pool that is to be there."""
        self.reads = ReadCounts()
        """Of the pool that was opened last."""
        self._pool: Pool | None = None
        self._healer: Healer | None = None
        self._refreshed_ns = 0
        self._is_stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="pool upkeep", daemon=True)

    def start(self) -> None:
        """Begin to look for the pool."""
        if self._open_pool is not None:
            self._thread.start()

    @property
    def is_open(self) -> bool:
        """Whether the pool was found."""
        return self._pool is not None

    @property
    def heals(self) -> HealCounts:
        """What was put back."""
        return self._healer.counts if self._healer is not None else HealCounts()

    def match(self, chain: BlockChain, *, deadline_ns: int | None = None) -> Hit:
        """As `Pool.match`.

        Raises:
            TransientError: The pool is not there, or its metadata does not answer.
        """
        try:
            return self._get_pool().match(chain, deadline_ns=deadline_ns)
        except MillpondError:
            self.failed_matches += self._open_pool is not None
            raise

    def begin_get(
        self, hit: Hit, sink: RowSink, *, deadline_ns: int, order: RowOrder = RowOrder.EXTENTS
    ) -> PoolGet | _NoGet:
        """As `Pool.begin_get`; nothing comes if the pool is not there."""
        pool = self._pool
        if pool is None:
            return _NoGet(hit)
        return pool.begin_get(hit, sink, deadline_ns=deadline_ns, order=order)

    def put(
        self,
        chain: BlockChain,
        first_block: int,
        blocks: Sequence[Block],
        *,
        deadline_ns: int,
        lineage: int = 0,
        expiry_class: int = 0,
    ) -> list[PutResult]:
        """As `Pool.put`.

        Raises:
            MillpondError: As `Pool.put`, or the pool is not there.
        """
        return self._get_pool().put(
            chain, first_block, blocks, deadline_ns=deadline_ns, lineage=lineage, expiry_class=expiry_class
        )

    def close(self) -> None:
        """Cancel what is on its way and close the connections; later calls fail."""
        self._is_stopping.set()
        pool, self._pool = self._pool, None
        if pool is not None:
            pool.close()
        if self._thread.is_alive():
            self._thread.join()

    def _get_pool(self) -> Pool:
        pool = self._pool
        if pool is None:
            raise TransferFailed("the pool is not there", code="pool.closed")
        return pool

    def _run(self) -> None:
        period_s = self._heal_period_s or IDLE_S
        try:
            while not self._is_stopping.is_set():
                if self._pool is None:
                    self._try_open()
                else:
                    self._look_after(self._pool)
                self._is_stopping.wait(self._retry_s if self._pool is None else period_s)
        except BaseException as error:
            self.failure = error
            raise

    def _try_open(self) -> None:
        assert self._open_pool is not None  # noqa: S101 - the thread was not started otherwise
        try:
            pool = self._open_pool()
        except MillpondError as error:
            log.info("node.pool_absent", code=error.code, error=error.message)
            return
        self._healer = Healer(pool) if self._heal_period_s else None
        self._refreshed_ns = time.monotonic_ns()
        self.reads = pool.client.reads.counts
        self._pool = pool
        log.info("node.pool_open", num_nodes=len(pool.links))
        if self._is_stopping.is_set():  # `close` may not have seen it
            pool.close()

    def _look_after(self, pool: Pool) -> None:
        if self._healer is not None:
            self._healer.run()
        if time.monotonic_ns() - self._refreshed_ns < REFRESH_NS:
            return
        self._refreshed_ns = time.monotonic_ns()
        try:
            pool.refresh_map()
        except MillpondError as error:
            log.info("node.map_not_refreshed", code=error.code)
