"""What the pool's client needs from the metadata, in process or over TCP."""

from __future__ import annotations

from typing import Protocol

from millpond.core.pool_map import PoolMap
from millpond.store.net.messages import Message


class MetadataPort(Protocol):
    """The metadata of the pool: an object in this process, or a connection to its shards."""

    def call(self, request: Message, payload: bytes = b"", *, prefix: bytes, deadline_ns: int) -> Message:
        """Ask and wait for the answer.

        Args:
            request: `Match`, `Reserve`, `Commit`, `Abort`, `Forget`, `Pin`, `Unpin`, `Touch` or `Evict`.
            payload: As the message says.
            prefix: 16-byte hashes of the chain from block 0 on, as many as are known: they choose the shard.
            deadline_ns: On the monotonic clock.

        Returns:
            The answer that the message names; never `Failed`.

        Raises:
            PoolError: What the metadata answered instead.
            TransientError: It did not answer.
        """
        ...

    def pool_map(self, *, deadline_ns: int) -> PoolMap:
        """The newest map of the pool.

        Raises:
            TransientError: The metadata did not answer.
        """
        ...
