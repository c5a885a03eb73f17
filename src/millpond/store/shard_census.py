"""Which shards of which stripes the storage nodes have, as they themselves list it.

The truth about the pool: an extent that the metadata knows and the nodes do not have is a miss, one that the
nodes have and the metadata does not know is garbage until it expires.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import structlog

from millpond.core.errors import DataError, MillpondError, StaleEpoch
from millpond.core.extents import ExtentId, NodeId, StripeId
from millpond.core.pool_map import PlacementEpoch, PoolMap
from millpond.core.units import SECOND_NS
from millpond.store.net.messages import ListShards, ShardList
from millpond.store.net.node_link import NodePort
from millpond.store.record import RecordHeader, parse_header

log = structlog.get_logger(__name__)

PAGE_HEADERS = 512
PAGE_S = 10.0
"""How long a node may take to list so many."""


@dataclass(slots=True)
class StripeCensus:
    """One write of an extent."""

    extent: ExtentId
    stripe: StripeId
    record_bytes: int
    """Of each shard."""
    present: int = 0
    """Bit j: shard j was listed by the node that placement names for it."""
    used_s: int = 0
    """Calendar time of the last use or, if there was none, of the write."""


@dataclass(slots=True)
class Census:
    """What was found."""

    stripes: dict[tuple[ExtentId, int], StripeCensus] = field(default_factory=dict)
    """By extent and nonce."""
    silent: tuple[NodeId, ...] = ()
    """Nodes that could not be listed to their end: what they have may be there or not."""
    num_misplaced: int = 0
    """Shards on a node that placement does not name for them, or of an epoch that is over."""


@dataclass(frozen=True, slots=True)
class ListedShard:
    """One record of a node."""

    header: RecordHeader
    last_read_s: int
    """0: not since the node's start."""


def list_shards(link: NodePort, *, first_cursor: int = 0) -> Iterator[ListedShard]:
    """All records of a node.

    Raises:
        MillpondError: The node does not answer, or not as it should.
    """
    cursor = first_cursor
    while True:
        deadline_ns = time.monotonic_ns() + int(PAGE_S * SECOND_NS)
        call = link.start(ListShards(cursor, PAGE_HEADERS), deadline_ns=deadline_ns)
        if not call.wait(deadline_ns):
            link.cancel(call)
        answer = call.result()
        page = answer.message
        if not isinstance(page, ShardList) or sum(page.header_bytes) != answer.payload.nbytes:
            raise DataError("no list of shards", code="pool.answer")
        begin = 0
        for index, size in enumerate(page.header_bytes):
            last_read_s = page.last_read_s[index] if index < len(page.last_read_s) else 0
            yield ListedShard(parse_header(answer.payload[begin : begin + size]), last_read_s)
            begin += size
        if not page.next_cursor:
            return
        cursor = page.next_cursor


def take_census(links: Mapping[NodeId, NodePort], pool_map: PoolMap) -> Census:
    """List all nodes; those that do not answer are named in the result."""
    census = Census()
    epochs = {epoch.epoch: epoch for epoch in pool_map.epochs}
    silent: list[NodeId] = []
    for node, link in links.items():
        try:
            for listed in list_shards(link):
                _count(census, epochs, node, listed)
        except MillpondError as error:
            log.info("storage node not listed", node=node, code=error.code, error=error.message)
            silent.append(node)
    census.silent = tuple(silent)
    return census


def shard_nodes(epochs: Mapping[int, PlacementEpoch], stripe: StripeId) -> tuple[NodeId, ...]:
    """Node of each shard of a stripe.

    Raises:
        StaleEpoch: The map does not have its placement.
    """
    epoch = epochs.get(stripe.epoch)
    if epoch is None or stripe.group >= len(epoch.groups):
        raise StaleEpoch(f"no placement {stripe.epoch}, group {stripe.group}", code="pool.stale_epoch")
    return tuple(epoch.points[point] for point in epoch.groups[stripe.group])


def _count(census: Census, epochs: Mapping[int, PlacementEpoch], node: NodeId, listed: ListedShard) -> None:
    header = listed.header
    try:
        is_at_home = shard_nodes(epochs, header.stripe)[header.shard] == node
    except (StaleEpoch, IndexError):
        is_at_home = False
    if not is_at_home:
        census.num_misplaced += 1
        return
    key = (header.extent, header.stripe.nonce)
    found = census.stripes.get(key)
    if found is None:
        found = StripeCensus(header.extent, header.stripe, header.record_bytes)
        census.stripes[key] = found
    found.present |= 1 << header.shard
    found.used_s = max(found.used_s, header.created_s, listed.last_read_s)
