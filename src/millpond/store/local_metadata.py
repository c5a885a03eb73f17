"""`LocalMetadata`: the metadata of a pool inside the process of its only client."""

from __future__ import annotations

import threading

from millpond.core.pool_map import PoolMap
from millpond.store.clock import Clock, SystemClock
from millpond.store.metadata.core import MetadataCore
from millpond.store.net.messages import Message


class LocalMetadata:
    """`MetadataPort` over a `MetadataCore` of this process. Thread-safe; keeps nothing on disk.

    Args:
        core: Not to be used elsewhere meanwhile.
        pool_map: Of the pool.
        clock: For leases and expiry.
    """

    def __init__(self, core: MetadataCore, pool_map: PoolMap, clock: Clock | None = None) -> None:
        self._core = core
        self._map = pool_map
        self._clock = clock or SystemClock()
        self._lock = threading.Lock()

    def call(self, request: Message, payload: bytes = b"", *, prefix: bytes, deadline_ns: int) -> Message:
        """See `MetadataPort`."""
        with self._lock:
            now_ns, unix_s = self._clock.monotonic_ns(), self._clock.unix_s()
            self._core.tick(now_ns, unix_s)
            return self._core.handle(request, payload, now_ns, unix_s)

    def pool_map(self, *, deadline_ns: int) -> PoolMap:
        """See `MetadataPort`."""
        return self._map
