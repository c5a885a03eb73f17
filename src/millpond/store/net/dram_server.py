"""`DramServer`: lets other hosts read this host's DRAM level (interfaces A.6, PeerRead).

A request is answered by the thread of its connection: reading memory does not wait for anything.
"""

from __future__ import annotations

import time

import numpy as np

from millpond.core.errors import MillpondError
from millpond.core.units import SECOND_NS
from millpond.store.dram_arena import DramArena, SlotRef
from millpond.store.net.framing import VERSION, Head
from millpond.store.net.listener import Listener
from millpond.store.net.messages import (
    CancelRead,
    Failed,
    Hello,
    NodeStatus,
    NodeStatusQuery,
    PeerBlock,
    PeerRead,
)
from millpond.store.net.peer import Peer, ServerParams


class DramServer:
    """Serves an arena until `stop`.

    Args:
        arena: Stays the caller's, who closes it after `stop`.
        host: Name of this host.
        address: `host:port`; port 0 takes a free one.
        token: Cluster token that peers must have.
        params: Bounds.

    Raises:
        ConfigError: The address cannot be bound.
    """

    def __init__(
        self, arena: DramArena, host: str, address: str, *, token: str, params: ServerParams | None = None
    ) -> None:
        self.failure: BaseException | None = None
        """A bug that ended a thread; the process should end too."""
        self.num_reads = 0
        self.num_stale = 0
        """Reads of blocks that had left."""
        self._arena = arena
        self._host = host
        hello = Hello(VERSION, host, token, arena.epoch)
        self._listener = Listener(address, hello, params or ServerParams(), self._answer, self._fail)

    @property
    def address(self) -> str:
        """Where it listens."""
        return self._listener.address

    def start(self) -> None:
        """Begin to serve."""
        self._listener.start()

    def stop(self, deadline_s: float) -> bool:
        """End all connections; whether all threads ended in time."""
        return self._listener.stop(time.monotonic_ns() + int(deadline_s * SECOND_NS))

    def _answer(self, peer: Peer, head: Head) -> None:
        peer.frames.skip(head.payload_bytes, peer.frames.frame_deadline_ns())
        message = head.message
        if isinstance(message, CancelRead):
            return  # what was asked before is answered already
        if isinstance(message, NodeStatusQuery):
            peer.answer(head.request, self._status())
        elif not isinstance(message, PeerRead):
            peer.answer(head.request, Failed("bad_request", f"memory does not do {type(message).__name__}"))
        elif message.epoch != self._arena.epoch:
            self.num_stale += 1
            peer.answer(head.request, Failed("stale", "the host was restarted"))
        else:
            self._read(peer, head.request, message)

    def _read(self, peer: Peer, request: int, query: PeerRead) -> None:
        block = np.empty(self._arena.block_bytes, np.uint8)
        try:
            ref = SlotRef(query.slot, query.generation)
            lineage = self._arena.lineage(ref)
            found = self._arena.read(ref, query.block_hash, block)
        except MillpondError as error:
            # A damaged block is as good as gone; its owner drops it when it comes across it.
            self.num_stale += 1
            peer.answer(request, Failed("stale", error.message))
            return
        self.num_reads += 1
        answer = PeerBlock(query.block_hash, query.generation, found, lineage)
        peer.answer(request, answer, [block.data])

    def _status(self) -> NodeStatus:
        arena = self._arena
        size, used = arena.num_slots * arena.block_bytes, arena.num_slots - arena.num_free
        read_bytes = self.num_reads * arena.block_bytes
        return NodeStatus(
            node=self._host,
            boot=arena.epoch,
            capacity_bytes=size,
            used_bytes=used * arena.block_bytes,
            num_shards=0,
            targets_failed=(),
            accepts_writes=False,
            written_bytes=0,
            read_bytes=read_bytes,
            queued_reads=0,
        )

    def _fail(self, error: BaseException) -> None:
        self.failure = error
