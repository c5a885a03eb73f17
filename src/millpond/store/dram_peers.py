"""`DramPeers`: reads blocks from other hosts' memory.

Pointers into memory are hints: the host proves what it gives, and a block that has left its slot is told so.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import structlog

from millpond.core.errors import ChecksumMismatch, DataError, DeadlineExceeded, MillpondError
from millpond.core.extents import NodeId
from millpond.core.pool_map import StorageNodeInfo
from millpond.store.codec.checksum import checksum
from millpond.store.dram_directory import Directory, DramPlace
from millpond.store.net.connection import Call
from millpond.store.net.messages import Message, PeerBlock, PeerRead
from millpond.store.net.node_link import NodeLink, NodeLinkParams
from millpond.store.stripe import Block

log = structlog.get_logger(__name__)


@dataclass(slots=True)
class PeerCounts:
    """Since the start."""

    failed: int = 0
    """Blocks that another host seemed to have and did not give: it was not reached, or the block had left,
    was damaged or late."""


@dataclass(frozen=True, slots=True)
class PeerCall:
    """A block on its way from another host's memory."""

    link: NodeLink
    call: Call
    out: Block
    counts: PeerCounts

    @property
    def lineage(self) -> int:
        """Of the block, after `finish` was True. 1: computed downstream of an approximate replay."""
        answer = self.call.result().message
        return answer.lineage if isinstance(answer, PeerBlock) else 0

    def cancel(self) -> None:
        """Give up, from any thread: `finish` returns at once, and `out` is not written any more."""
        self.link.cancel(self.call)
        # A link that was closed meanwhile has nobody to tell.
        self.call.finish(DeadlineExceeded("no answer in time", code="dram.deadline"))

    def wait(self, deadline_ns: int) -> bool:
        """Wait; whether there is an answer, good or bad."""
        return self.call.wait(deadline_ns)

    def finish(self, *, deadline_ns: int) -> bool:
        """Wait, and prove what came. If False, `out` is garbage and is not written any more."""
        if not self.call.wait(deadline_ns):
            self.cancel()
        try:
            answer = self.call.result().message
            if not isinstance(answer, PeerBlock) or checksum(self.out.data) != answer.checksum:
                raise ChecksumMismatch("a block changed on its way", code="dram.checksum")
        except MillpondError as error:
            log.info("block not read from memory", host=self.link.info.node, code=error.code)
            self.counts.failed += 1
            return False
        return True


class DramPeers:
    """Reads other hosts' memory. Thread-safe; owns its connections.

    Args:
        directory: Knows their addresses.
        name: Ours, for their logs.
        token: Cluster token.
        params: Of the connections.
    """

    def __init__(
        self, directory: Directory, *, name: str, token: str, params: NodeLinkParams | None = None
    ) -> None:
        self.counts = PeerCounts()
        self._directory = directory
        self._name = name
        self._token = token
        self._params = params or NodeLinkParams()
        self._links: dict[str, NodeLink] = {}
        """By address."""

    def start(
        self, place: DramPlace, block_hash: bytes, out: Block, *, deadline_ns: int, up_ns: int | None = None
    ) -> PeerCall | None:
        """Begin to read a block into `out`; None if its host cannot be asked.

        Args:
            place: Where it is.
            block_hash: Its name.
            out: One block.
            deadline_ns: For the answer, on the monotonic clock.
            up_ns: Until when to wait for a connection that is being made, if not so long.
        """
        host = self._directory.host(place.host)
        if host is None or host.epoch != place.epoch:
            self.counts.failed += 1
            return None
        link = self._link(place.host, host.address, deadline_ns if up_ns is None else up_ns)
        query = PeerRead(place.epoch, block_hash, place.ref.slot, place.ref.generation)
        try:
            call = link.start(
                query,
                deadline_ns=deadline_ns,
                landing=lambda message, num_bytes: _landing(query, message, num_bytes, out),
            )
        except MillpondError:
            self.counts.failed += 1
            return None
        return PeerCall(link, call, out, self.counts)

    def close(self) -> None:
        """Close all connections."""
        for link in self._links.values():
            link.close()

    def _link(self, host: str, address: str, deadline_ns: int) -> NodeLink:
        link = self._links.get(address)
        if link is None:
            info = StorageNodeInfo(NodeId(host), address)
            made = NodeLink(info, name=self._name, token=self._token, params=self._params)
            link = self._links.setdefault(address, made)
            link.dial()
        if not link.is_up:
            link.wait_up(deadline_ns=deadline_ns)  # if somebody dials
        return link


def _landing(query: PeerRead, message: Message, num_bytes: int, out: Block) -> Sequence[memoryview]:
    wanted = (query.block_hash, query.generation, out.nbytes)
    if not isinstance(message, PeerBlock) or (message.block_hash, message.generation, num_bytes) != wanted:
        raise DataError("the answer is another block", code="dram.answer")
    return (out.data,)
