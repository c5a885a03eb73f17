"""`IndexRebuild`: fills a shard's index from the records of the storage nodes (kvstore 2.12).

All nodes are listed in turn, a page each, so that the shards of a stripe, which were written together, come
by together; an extent is taken when enough of them were seen to read it. A record does not say how its chain
begins, which picks the metadata shard: with several shards the parents are followed, and what has none is
left out, as no match could reach it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import structlog

from millpond.core.errors import DataError, MillpondError
from millpond.core.extents import ExtentId, StripeId, TenantId
from millpond.core.hashing import BLOCK_HASH_BYTES
from millpond.core.pool_map import StorageNodeInfo
from millpond.core.units import SECOND_NS
from millpond.policies.metadata_shard import ShardTable
from millpond.store.index import BlockIndex, ExtentEntry
from millpond.store.metadata.map_holder import MapHolder
from millpond.store.net.connection import Connection
from millpond.store.net.messages import Commit, ListShards, Location, ShardList
from millpond.store.record import RecordHeader, parse_header

log = structlog.get_logger(__name__)

PAGE_HEADERS = 512
PAGE_S = 10
PATIENCE_S = 60
"""How long a node that does not answer is tried again."""
PAUSE_S = 0.5

Take = Callable[[RecordHeader, int], None]
"""(header of an extent, bytes to charge for it; 0: another shard charges it)."""


@dataclass(slots=True)
class _Listing:
    """One node on its way."""

    info: StorageNodeInfo
    cursor: int = 0
    link: Connection | None = None
    is_done: bool = False


class IndexRebuild:
    """See module. Runs in a thread of its own.

    Args:
        maps: Names the nodes and the shards.
        take: Gets every extent that belongs to this shard; any number of times.
        knows: Whether the index holds an extent already, in this stripe.
        name: Ours, for the nodes' logs.
        token: Cluster token.
        stopping: Ends the rebuild.
    """

    def __init__(
        self,
        maps: MapHolder,
        take: Take,
        knows: Callable[[RecordHeader], bool],
        *,
        name: str,
        token: str,
        stopping: threading.Event,
    ) -> None:
        self.num_left = 0
        """Nodes whose records have not all been read."""
        self.num_taken = 0
        self._maps = maps
        self._take = take
        self._knows = knows
        self._name, self._token = name, token
        self._stopping = stopping
        self._seen: dict[tuple[ExtentId, int], int] = {}
        """(extent, nonce) -> bit j: shard j, of stripes that too few shards were seen of."""
        self._router: _Router | None = None

    def run(self) -> None:
        """Read all nodes of the map, once there is one; those that do not answer for a minute are left."""
        self.num_left = 1
        while (view := self._maps.view).table is None or view.pool_map is None:
            if self._stopping.wait(PAUSE_S):
                return
        if view.table.num_shards > 1:
            self._router = _Router(view.table, view.index or 0)
        listings = [_Listing(info) for info in view.pool_map.nodes]
        try:
            self._read_all(listings)
        finally:
            self._seen.clear()
            self._router = None
            for listing in listings:
                if listing.link is not None:
                    listing.link.close()
        for listing in listings:
            if not listing.is_done:
                log.warning("records not read", node=listing.info.node)
        log.info("index rebuilt", num_extents=self.num_taken, num_nodes_left=self.num_left)

    def _read_all(self, listings: list[_Listing]) -> None:
        patience_ns = 0
        while not self._stopping.is_set():
            for listing in listings:
                if not listing.is_done:
                    self._read_page(listing)
            left = [listing for listing in listings if not listing.is_done]
            self.num_left = len(left)
            if not left:
                return
            now_ns = time.monotonic_ns()
            if any(listing.link is not None for listing in left) or not patience_ns:
                patience_ns = now_ns + PATIENCE_S * SECOND_NS
            elif now_ns > patience_ns:
                return
            else:
                self._stopping.wait(PAUSE_S)

    def _read_page(self, listing: _Listing) -> None:
        deadline_ns = time.monotonic_ns() + PAGE_S * SECOND_NS
        try:
            if listing.link is None:
                listing.link = Connection(
                    listing.info.address, name=self._name, token=self._token, deadline_ns=deadline_ns
                )
            answer = listing.link.call(ListShards(listing.cursor, PAGE_HEADERS), deadline_ns=deadline_ns)
            if not isinstance(answer.message, ShardList):
                raise DataError("no list of shards", code="pool.answer")
        except MillpondError as error:
            log.info("storage node not listed", node=listing.info.node, code=error.code)
            if listing.link is not None:
                listing.link.close()
                listing.link = None
            return
        for header in _headers(answer.message, answer.payload):
            self._see(header)
        listing.cursor = answer.message.next_cursor
        listing.is_done = not listing.cursor

    def _see(self, header: RecordHeader) -> None:
        key = (header.extent, header.stripe.nonce)
        if key not in self._seen and self._knows(header):
            return
        shards = self._seen.get(key, 0) | 1 << header.shard
        if shards.bit_count() < header.shape.k:
            self._seen[key] = shards
            return
        self._seen.pop(key, None)
        ready = [(header, True)] if self._router is None else self._router.add(header)
        for known, is_charged in ready:
            self._take(known, known.shape.k * known.payload_bytes if is_charged else 0)
            self.num_taken += 1


class _Router:
    """Which extents belong to this shard, found by following parents.

    The routes of all extents of the pool lie in a `BlockIndex`, as its records have room for them: the depth
    of the chain as first block, the block that picks the shard as nonce.
    """

    def __init__(self, table: ShardTable, index: int) -> None:
        self._table = table
        self._index = index
        self._routes = BlockIndex()
        self._orphans: dict[bytes, list[RecordHeader]] = {}
        """Hash of the block before -> extents whose chains are not known yet."""

    def add(self, header: RecordHeader) -> list[tuple[RecordHeader, bool]]:
        """Extents whose chains are known now and that belong here; whether each is charged here."""
        ours: list[tuple[RecordHeader, bool]] = []
        todo = [header]
        while todo:
            header = todo.pop()
            route = self._route(header)
            if route is None:
                self._orphans.setdefault(header.parent[:BLOCK_HASH_BYTES], []).append(header)
                continue
            depth, key = route
            is_owner = self._table.pick(key) == self._index
            if is_owner or header.first_block < depth:
                ours.append((header, is_owner))
            stripe = StripeId(0, 0, int.from_bytes(key[:8], "little"))
            entry = ExtentEntry(header.extent, stripe, depth, 0, False, TenantId(0), 0, 0)
            self._routes.insert(entry, header.hashes)
            for block in _blocks(header.hashes):
                todo += self._orphans.pop(block, [])
        return ours

    def _route(self, header: RecordHeader) -> tuple[int, bytes] | None:
        """(depth, block that picks the shard) of an extent's chain."""
        first, end = header.first_block, header.first_block + header.num_blocks
        key = b""
        if first == 0:
            depth = self._table.depth_of(header.hashes[:BLOCK_HASH_BYTES])
        else:
            slot = self._routes.find(header.parent[:BLOCK_HASH_BYTES])
            if slot < 0:
                return None
            parent = self._routes.entry(slot)
            depth, key = parent.first_block, parent.stripe.nonce.to_bytes(8, "little")
        if first < depth:  # else it is the parent's
            last = min(depth, end) - first
            key = header.hashes[(last - 1) * BLOCK_HASH_BYTES : last * BLOCK_HASH_BYTES]
        return depth, key


def commit_of(header: RecordHeader, num_bytes: int) -> Commit:
    """The message that publishes an extent, as its writer sent it."""
    stripe = header.stripe
    location = Location(
        header.extent.digest,
        header.num_blocks,
        stripe.epoch,
        stripe.group,
        stripe.nonce,
        lineage=header.lineage,
    )
    return Commit(header.tenant, header.root, location, header.first_block, header.parent, num_bytes, 0)


def _blocks(hashes: bytes) -> Iterator[bytes]:
    return (hashes[at : at + BLOCK_HASH_BYTES] for at in range(0, len(hashes), BLOCK_HASH_BYTES))


def _headers(message: ShardList, payload: memoryview) -> Iterator[RecordHeader]:
    begin = 0
    for size in message.header_bytes:
        try:
            yield parse_header(payload[begin : begin + size])
        except DataError as error:
            log.warning("damaged header", code=error.code)
        begin += size
