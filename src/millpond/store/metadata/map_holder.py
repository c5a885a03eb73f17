"""`MapHolder`: the pool map as one metadata shard has it, and what follows from it.

Shard 0 decides: it deepens popular prefixes and takes the operator's changes. The others report to it what
they were asked, and get newer maps with its answers.
"""

from __future__ import annotations

import threading
from collections import Counter
from dataclasses import dataclass, replace
from functools import cached_property

import structlog

from millpond.core.pool_map import PoolMap
from millpond.policies.metadata_shard import LookupKey, ShardTable, deepened
from millpond.store.files import Files
from millpond.store.metadata.checkpoint import encode_map, save_map

log = structlog.get_logger(__name__)


@dataclass(frozen=True)
class MapView:
    """A pool map, and what one shard derives from it. Without a map, version 0."""

    pool_map: PoolMap | None
    address: str
    """Under which the map names this shard."""

    @property
    def version(self) -> int:
        """Of the map."""
        return self.pool_map.version if self.pool_map is not None else 0

    @cached_property
    def table(self) -> ShardTable | None:
        """Chain -> shard."""
        return ShardTable(self.pool_map) if self.pool_map is not None and self.pool_map.metadata else None

    @cached_property
    def index(self) -> int | None:
        """Ours among the shards; None if the map does not name us."""
        names = self.pool_map.metadata if self.pool_map is not None else ()
        return names.index(self.address) if self.address in names else None

    @property
    def leader(self) -> str:
        """Address of shard 0, empty if we are it or nothing is known."""
        if self.pool_map is None or not self.pool_map.metadata or self.index == 0:
            return ""
        return self.pool_map.metadata[0]

    @cached_property
    def packed(self) -> bytes:
        """As `MapAnswer` carries it; empty without a map."""
        return encode_map(self.pool_map) if self.pool_map is not None else b""

    def is_misdirected(self, hashes: bytes) -> bool:
        """Whether another shard should have been asked for this chain."""
        table, index = self.table, self.index
        return bool(hashes) and table is not None and index is not None and table.owner(hashes) != index


class MapHolder:
    """See module. Thread-safe.

    Args:
        pool_map: What was saved or given; None: nothing is known yet.
        address: Under which the map names this shard.
        files: Keeps the map over a restart.
    """

    def __init__(self, pool_map: PoolMap | None, address: str, files: Files) -> None:
        self.view = MapView(pool_map, address)
        self._files = files
        self._lock = threading.Lock()
        self._reports: Counter[LookupKey] = Counter()
        self._total = 0

    def update(self, pool_map: PoolMap) -> bool:
        """Take a newer map; whether it is newer.

        Raises:
            OSError: It could not be kept; it counts nevertheless.
        """
        with self._lock:
            if pool_map.version <= self.view.version:
                return False
            self.view = MapView(pool_map, self.view.address)
            save_map(self._files, pool_map)
        log.info("pool map", version=pool_map.version)
        return True

    def add_report(self, lookups: Counter[LookupKey], total: int) -> None:
        """Count what a shard was asked since it last reported. For shard 0."""
        with self._lock:
            self._reports.update(lookups)
            self._total += total

    def deepen(self) -> bool:
        """End the window: spread what was too popular in it; whether anything was. For shard 0.

        Raises:
            OSError: As `update`.
        """
        with self._lock:
            reports, total = self._reports, self._total
            self._reports, self._total = Counter(), 0
            pool_map = self.view.pool_map
        if pool_map is None:
            return False
        grown = deepened(pool_map, reports, total)
        if not grown:
            return False
        depths = dict(pool_map.depths) | grown
        return self.update(
            replace(pool_map, version=pool_map.version + 1, depths=tuple(sorted(depths.items())))
        )
