"""`TieredReader`: reads a chain from wherever its blocks are: this host's memory, another's, the disks.

Pointers into memory are hints. A block that has left its slot is looked up once more, and then comes from the
disks, where it was written before it left.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import structlog

from millpond.core.errors import ChecksumMismatch, DataError, MillpondError
from millpond.core.extents import NodeId
from millpond.core.hashing import BLOCK_HASH_BYTES
from millpond.core.pool_map import StorageNodeInfo
from millpond.store.chain import BlockChain, Hit
from millpond.store.codec.checksum import checksum
from millpond.store.dram import DramLevel
from millpond.store.dram_directory import DramDirectory, DramPlace
from millpond.store.extent_get import BlockSink, GetEnd
from millpond.store.net.connection import Call
from millpond.store.net.messages import Message, PeerBlock, PeerRead
from millpond.store.net.node_link import NodeLink, NodeLinkParams
from millpond.store.pool import Pool
from millpond.store.stripe import Block

log = structlog.get_logger(__name__)

_TRIES = 2
"""Of memory, before the disks are asked."""


@dataclass(frozen=True, slots=True)
class TieredResult:
    """How much of a chain was read, and from where."""

    num_blocks: int
    """Leading blocks that are right and whole."""
    num_local: int
    num_peer: int
    num_pool: int


@dataclass(frozen=True, slots=True)
class PeerCall:
    """A block on its way from another host's memory."""

    link: NodeLink
    call: Call
    out: Block

    def finish(self, *, deadline_ns: int) -> bool:
        """Wait, and prove what came. If False, `out` is garbage and is not written any more."""
        if not self.call.wait(deadline_ns):
            self.link.cancel(self.call)
        try:
            answer = self.call.result().message
            if not isinstance(answer, PeerBlock) or checksum(self.out.data) != answer.checksum:
                raise ChecksumMismatch("a block changed on its way", code="dram.checksum")
        except MillpondError as error:
            log.info("block not read from memory", host=self.link.info.node, code=error.code)
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
        self, directory: DramDirectory, *, name: str, token: str, params: NodeLinkParams | None = None
    ) -> None:
        self._directory = directory
        self._name = name
        self._token = token
        self._params = params or NodeLinkParams()
        self._links: dict[str, NodeLink] = {}
        """By address."""

    def start(self, place: DramPlace, block_hash: bytes, out: Block, *, deadline_ns: int) -> PeerCall | None:
        """Begin to read a block into `out`; None if its host cannot be asked."""
        host = self._directory.host(place.host)
        if host is None or host.epoch != place.epoch:
            return None
        link = self._link(place.host, host.address, deadline_ns)
        query = PeerRead(place.epoch, block_hash, place.ref.slot, place.ref.generation)
        try:
            call = link.start(
                query,
                deadline_ns=deadline_ns,
                landing=lambda message, num_bytes: _landing(query, message, num_bytes, out),
            )
        except MillpondError:
            return None
        return PeerCall(link, call, out)

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
            link.wait_up(deadline_ns=deadline_ns)
        return link


def _landing(query: PeerRead, message: Message, num_bytes: int, out: Block) -> Sequence[memoryview]:
    wanted = (query.block_hash, query.generation, out.nbytes)
    if not isinstance(message, PeerBlock) or (message.block_hash, message.generation, num_bytes) != wanted:
        raise DataError("the answer is another block", code="dram.answer")
    return (out.data,)


class TieredReader:
    """See module. Thread-safe.

    Args:
        level: This host's memory.
        directory: Which other host has what.
        peers: Reads from them.
        pool: The disks.
    """

    def __init__(self, level: DramLevel, directory: DramDirectory, peers: DramPeers, pool: Pool) -> None:
        self._level = level
        self._directory = directory
        self._peers = peers
        self._pool = pool

    def match(self, chain: BlockChain) -> int:
        """How many leading blocks the memories and the disks together seem to have.

        Raises:
            TransientError: The metadata does not answer.
        """
        num_blocks = self._num_in_memory(chain)
        if num_blocks == len(chain.digests):
            return num_blocks
        on_disk = self._pool.match(chain).num_blocks
        if on_disk <= num_blocks:
            return num_blocks
        rest = replace(chain, digests=chain.digests[on_disk:])
        return on_disk + self._num_in_memory(rest)

    def read(self, chain: BlockChain, blocks: Sequence[Block], *, deadline_ns: int) -> TieredResult:
        """Read the leading blocks of a chain.

        Args:
            chain: At least as long as `blocks`.
            blocks: One `[block bytes]` array per block wanted.
            deadline_ns: When to stop, on the monotonic clock.

        Returns:
            The valid prefix. Blocks behind it may hold anything.
        """
        wanted = replace(chain, digests=chain.digests[: len(blocks)])
        names = [digest[:BLOCK_HASH_BYTES] for digest in wanted.digests]
        missing = list(range(len(blocks)))
        counts = [0, 0]
        for _ in range(_TRIES):
            left = [index for index in missing if not self._level.read(names[index], blocks[index])]
            counts[0] += len(missing) - len(left)
            missing = self._read_peers(names, blocks, left, deadline_ns)
            counts[1] += len(left) - len(missing)
            if not missing:
                break
        from_pool = self._read_pool(wanted, blocks, missing, deadline_ns) if missing else set[int]()
        gap = next((index for index in missing if index not in from_pool), len(blocks))
        self._level.touch(replace(wanted, digests=wanted.digests[:gap]))
        return TieredResult(gap, counts[0], counts[1], len(from_pool))

    def _num_in_memory(self, chain: BlockChain) -> int:
        places = self._directory.find(chain.hashes)
        for index, (place, digest) in enumerate(zip(places, chain.digests, strict=True)):
            if place is None and not self._level.holds(digest[:BLOCK_HASH_BYTES]):
                return index
        return len(places)

    def _read_peers(
        self, names: Sequence[bytes], blocks: Sequence[Block], wanted: Sequence[int], deadline_ns: int
    ) -> list[int]:
        """Read what other hosts have, all at once; returns what they did not give."""
        places = self._directory.find(b"".join(names[index] for index in wanted))
        missing: list[int] = []
        calls: list[tuple[int, PeerCall]] = []
        for index, place in zip(wanted, places, strict=True):
            call = None
            if place is not None:
                call = self._peers.start(place, names[index], blocks[index], deadline_ns=deadline_ns)
            if call is None:
                missing.append(index)
            else:
                calls.append((index, call))
        missing += [index for index, call in calls if not call.finish(deadline_ns=deadline_ns)]
        return sorted(missing)

    def _read_pool(
        self, chain: BlockChain, blocks: Sequence[Block], wanted: Sequence[int], deadline_ns: int
    ) -> set[int]:
        """Read the extents with the blocks wanted, and keep these in memory; returns what came."""
        try:
            hit = self._pool.match(chain, deadline_ns=deadline_ns)
        except MillpondError as error:
            log.info("disks not asked", code=error.code)
            return set()
        parts = tuple(part for part in hit.extents if any(part.begin <= index < part.end for index in wanted))
        if not parts:
            return set()
        result = self._pool.get(Hit(chain, parts[-1].end, parts), BlockSink(blocks), deadline_ns=deadline_ns)
        came: set[int] = set()
        for part, end in zip(parts, result.ends, strict=True):
            if end == GetEnd.WHOLE:
                came.update(index for index in wanted if part.begin <= index < part.end)
                self._level.keep(chain, part.begin, blocks[part.begin : part.end])
        return came
