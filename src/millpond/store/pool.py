"""`Pool`: put, get and match blocks of KV in the erasure-coded pool (kvstore 2.15).

A library: it needs the metadata (`MetadataPort`), the storage nodes named in the pool map, and memory for the
stripes on their way. Identity and tenant stand in the chain; whoever makes chains decides who shares what.
"""

from __future__ import annotations

import itertools
import secrets
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from types import TracebackType
from typing import Self

import structlog

from millpond.control.extent_read import ShardOutcome
from millpond.core.errors import (
    InvalidRequest,
    InvariantBroken,
    MillpondError,
)
from millpond.core.extents import NodeId, StripeId, window_blocks
from millpond.core.kv_layout import KvLayout
from millpond.core.pool_map import PoolMap, StorageNodeInfo
from millpond.core.units import MILLISECOND_NS, SECOND_NS
from millpond.store.buffers import BufferPool
from millpond.store.chain import BlockChain, Hit, HitExtent, cut_at_windows, hit_of
from millpond.store.clock import Clock, SystemClock
from millpond.store.extent_get import ExtentGet, GetResult, ReadTools, RowOrder, RowSink
from millpond.store.extent_put import ExtentPuts, PutRequest, PutResult, WriteTools
from millpond.store.extent_verify import verify_extent
from millpond.store.net.client import ShardClient, StripeRead
from millpond.store.net.local_link import CachedReads, LocalLink
from millpond.store.net.messages import (
    Done,
    Evict,
    Forget,
    Match,
    Matched,
    Pin,
    Touch,
    Unpin,
)
from millpond.store.net.node_link import NodeLink, NodePort
from millpond.store.payload import payload_shape
from millpond.store.pool_get import PoolGet, Prefetch
from millpond.store.pool_settings import PoolSettings
from millpond.store.ports import MetadataPort
from millpond.store.stripe import Block
from millpond.store.stripe_buffer import stripe_bytes
from millpond.store.stripe_plans import StripePlans

log = structlog.get_logger(__name__)

_GRACE_NS = 100 * MILLISECOND_NS
"""After its deadline, a get may take so long to have lost extents forgotten."""

OpenNode = Callable[[StorageNodeInfo], NodePort]


@dataclass(frozen=True, slots=True)
class HealOrder:
    """A shard that should be there is not, or is damaged."""

    stripe: StripeId
    digest: bytes
    num_blocks: int
    shard: int
    outcome: ShardOutcome
    chain: BlockChain | None = None
    """What was read when it was found."""
    hit: HitExtent | None = None
    """The extent in that chain."""


class Pool:
    """See module. Thread-safe; a context manager.

    Args:
        layout: Of the blocks; part of every chain's root.
        metadata: Of the pool; stays the caller's.
        name: Ours, for the logs of the nodes.
        token: Cluster token.
        settings: Parameters.
        clock: For dates in records.
        open_node: Makes the way to a node; by default a TCP connection, or its folders if the map names them.

    Raises:
        TransientError: The metadata does not answer.
        ConfigError: No group of the pool takes our writes.
    """

    def __init__(
        self,
        layout: KvLayout,
        metadata: MetadataPort,
        *,
        name: str,
        token: str = "",
        settings: PoolSettings | None = None,
        clock: Clock | None = None,
        open_node: OpenNode | None = None,
    ) -> None:
        self._layout = layout
        self._metadata = metadata
        self._settings = settings = settings or PoolSettings()
        self._open_node = open_node or (lambda info: self._open_link(info, name, token))
        self._clock = clock or SystemClock()
        self._nonce_base = secrets.randbits(32) << 32
        self._plans = self._fetch_plans()
        self._links: dict[NodeId, NodePort] = {}
        self._nonces = itertools.count()
        self._holder = secrets.randbits(64)
        self.heals: deque[HealOrder] = deque(maxlen=4096)
        """What reads found to be absent or corrupt, newest last; a rebuilder takes from the left."""
        self.window = window_blocks(layout)
        """Blocks of a full extent."""
        largest = payload_shape(self._plans.largest_shape(self.window))
        self._buffers = BufferPool(settings.pool.num_buffers, stripe_bytes(largest))
        self._cached_reads = CachedReads()
        self._connect(time.monotonic_ns() + int(settings.pool.open_s * SECOND_NS))
        self._client = ShardClient(self._links, settings.pick, settings.window, self._on_heal)
        self._senders = ThreadPoolExecutor(settings.pool.num_senders, "send shard")
        self._prefetches = ThreadPoolExecutor(settings.pool.num_prefetches, "prefetch")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def layout(self) -> KvLayout:
        """Of the blocks."""
        return self._layout

    @property
    def links(self) -> Mapping[NodeId, NodePort]:
        """Way to each node."""
        return self._links

    @property
    def pool_map(self) -> PoolMap:
        """The newest map that is known."""
        return self._plans.pool_map

    @property
    def client(self) -> ShardClient:
        """Coded reads: counts, and what is known of the nodes."""
        return self._client

    @property
    def num_free_buffers(self) -> int:
        """Of `PoolParams.num_buffers`: how many nobody uses."""
        return self._buffers.num_free

    def match(self, chain: BlockChain, *, deadline_ns: int | None = None) -> Hit:
        """Longest prefix of a chain that the pool seems to have.

        Raises:
            TransientError: The metadata does not answer.
        """
        answer = self._metadata.call(
            Match(chain.tenant, chain.domain, self._plans.pool_map.version, self.window),
            chain.hashes,
            prefix=chain.hashes,
            deadline_ns=deadline_ns or self._soon_ns(),
        )
        if not isinstance(answer, Matched):
            raise InvariantBroken(f"match is answered with {answer}")
        return hit_of(chain, answer)

    def get(
        self,
        hit: Hit,
        sink: RowSink,
        *,
        deadline_ns: int,
        order: RowOrder = RowOrder.EXTENTS,
        is_use: bool = True,
    ) -> GetResult:
        """Read a hit into a sink.

        Args:
            hit: What `match` found.
            sink: Takes the rows, in order, each verified.
            deadline_ns: When to stop, on the monotonic clock.
            order: What comes first.
            is_use: False for upkeep: the records do not live longer by it, and nothing is to be healed.

        Returns:
            How many leading blocks of the chain were delivered whole, and why not more. What the pool has
            lost is forgotten by the metadata, so that the next match does not find it.
        """
        return self.begin_get(hit, sink, deadline_ns=deadline_ns, order=order, is_use=is_use).run()

    def begin_get(
        self,
        hit: Hit,
        sink: RowSink,
        *,
        deadline_ns: int,
        order: RowOrder = RowOrder.EXTENTS,
        is_use: bool = True,
    ) -> PoolGet:
        """Prepare a `get` that its caller runs, and that others may cancel."""
        if not all(self._plans.knows(part.stripe) for part in hit.extents):
            self._refresh_quietly(deadline_ns)
        tools = ReadTools(
            self._client, self._buffers, self._plans.plan_of, self._settings.pool.min_piece_kib * 1024
        )
        get = ExtentGet(tools, hit, sink, deadline_ns=deadline_ns, order=order, is_use=is_use)
        return PoolGet(get, lambda result: self._forget_gone(hit, result, deadline_ns))

    def prefetch(
        self, hit: Hit, sink: RowSink, *, deadline_ns: int, order: RowOrder = RowOrder.ROWS
    ) -> Prefetch:
        """Read a hit in the background; see `get`. The sink is called by another thread."""
        get = self.begin_get(hit, sink, deadline_ns=deadline_ns, order=order)
        return Prefetch(get, self._prefetches.submit(get.run))

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
        """Write blocks, cut into extents at the windows of their chain.

        Args:
            chain: Has at least the blocks written.
            first_block: Index in the chain of the first one.
            blocks: Each `[block bytes]`, uint8.
            deadline_ns: When to give up what is not written.
            lineage: 1: computed downstream of an approximate replay.
            expiry_class: Class of the segments.

        Returns:
            One result per extent. An extent that exists or that another writer is writing costs nothing; of
            the latter nobody knows whether it will exist.

        Raises:
            InvalidRequest: No blocks, blocks of a wrong size, or more than the chain has.
            QuotaExceeded: The tenant may not write so much.
            TransientError: The metadata does not answer.
        """
        end = first_block + len(blocks)
        if not blocks or first_block < 0 or end > len(chain.digests):
            raise InvalidRequest(
                f"blocks [{first_block}, {end}) of a chain of {len(chain.digests)}", code="pool.blocks"
            )
        if any(block.nbytes != self._layout.block_bytes for block in blocks):
            raise InvalidRequest(f"a block is not {self._layout.block_bytes} bytes", code="pool.blocks")
        ranges = tuple(cut_at_windows(first_block, end, self.window))
        tools = WriteTools(
            links=self._links,
            buffers=self._buffers,
            metadata=self._metadata,
            senders=self._senders,
            new_stripe=lambda: self._plans.new_stripe(self._nonces, self._client.reads.health.ejected),
            plan_of=self._plans.plan_of,
            holder=secrets.randbits(64),
            unix_s=self._clock.unix_s,
            params=self._settings.write,
        )
        request = PutRequest(chain, ranges, blocks, lineage, expiry_class)
        return ExtentPuts(tools, request, deadline_ns=deadline_ns).run()

    def pin(self, hit: Hit, ttl_ns: int) -> int:
        """Keep a hit from being dropped for a while, best effort; how many extents are pinned."""
        names = tuple((part.location.digest, part.location.num_blocks) for part in hit.extents)
        return self._count(Pin(hit.chain.tenant, names, self._holder, ttl_ns), b"", hit.chain)

    def release(self, hit: Hit) -> None:
        """End the pins of a hit before their time."""
        names = tuple((part.location.digest, part.location.num_blocks) for part in hit.extents)
        self._count(Unpin(hit.chain.tenant, names, self._holder), b"", hit.chain)

    def touch(self, chain: BlockChain) -> int:
        """Count a chain as used now, to its root; how many of its blocks are known."""
        return self._count(Touch(chain.tenant, chain.domain), chain.hashes, chain)

    def evict(self, chain: BlockChain, first_block: int = 0) -> int:
        """Forget a chain from a block on; how many extents. Their bytes go with their segments."""
        return self._count(Evict(chain.tenant, chain.domain, first_block), chain.hashes, chain)

    def forget(self, chain: BlockChain, part: HitExtent, *, deadline_ns: int | None = None) -> bool:
        """Let the metadata forget one extent if it still lies where the hit said; whether it did.

        Raises:
            TransientError: The metadata does not answer.
        """
        prefix = chain.hashes_of(0, part.end)
        request = Forget(chain.tenant, chain.domain, part.location, part.begin, prefix)
        return self._count(request, b"", chain, deadline_ns) > 0

    def verify(self, hit: Hit, *, deadline_ns: int) -> list[tuple[ShardOutcome, ...]]:
        """Read and check every shard of a hit; per extent the outcome of each shard."""
        outcomes: list[tuple[ShardOutcome, ...]] = []
        for part in hit.extents:
            plan = self._plans.plan_of(part.stripe, part.location.num_blocks)
            outcomes.append(
                verify_extent(self._links, self._buffers, plan, hit, part, deadline_ns=deadline_ns)
            )
        return outcomes

    def refresh_map(self, *, deadline_ns: int | None = None) -> PoolMap:
        """Fetch the newest map and connect to the nodes that are new in it.

        Raises:
            TransientError: The metadata does not answer.
        """
        self._plans = self._fetch_plans(deadline_ns)
        self._connect(time.monotonic_ns())
        return self._plans.pool_map

    def close(self) -> None:
        """Cancel what is on its way and close all connections."""
        self._client.close()
        self._prefetches.shutdown(wait=True, cancel_futures=True)
        self._senders.shutdown(wait=True, cancel_futures=False)
        self._cached_reads.close()
        for link in self._links.values():
            link.close()

    def _forget_gone(self, hit: Hit, result: GetResult, deadline_ns: int) -> None:
        """Let the metadata forget what a get found lost, in the time that is left of it and a little more."""
        until_ns = min(self._soon_ns(), max(deadline_ns, time.monotonic_ns() + _GRACE_NS))
        for index in result.gone:
            try:
                self.forget(hit.chain, hit.extents[index], deadline_ns=until_ns)
            except MillpondError as error:
                log.info("lost extent not forgotten", code=error.code)

    def _count(
        self,
        request: Pin | Unpin | Touch | Evict | Forget,
        payload: bytes,
        chain: BlockChain,
        deadline_ns: int | None = None,
    ) -> int:
        answer = self._metadata.call(
            request, payload, prefix=chain.hashes, deadline_ns=deadline_ns or self._soon_ns()
        )
        return answer.count if isinstance(answer, Done) else 0

    def _fetch_plans(self, deadline_ns: int | None = None) -> StripePlans:
        pool_map = self._metadata.pool_map(deadline_ns=deadline_ns or self._soon_ns())
        home = self._settings.pool.home
        return StripePlans(self._layout, pool_map, nonce_base=self._nonce_base, home=home)

    def _connect(self, deadline_ns: int) -> None:
        for info in self._plans.pool_map.nodes:
            if info.node not in self._links:
                self._links[info.node] = self._open_node(info)
        links = [link.link if isinstance(link, LocalLink) else link for link in self._links.values()]
        dialled = [link for link in links if isinstance(link, NodeLink)]
        for link in dialled:
            link.dial()
        for link in dialled:
            link.wait_up(deadline_ns=deadline_ns)

    def _open_link(self, info: StorageNodeInfo, name: str, token: str) -> NodePort:
        """A node on this host is read from its folders, any other over its connection."""
        link = NodeLink(info, name=name, token=token, params=self._settings.link)
        return LocalLink(link, self._cached_reads) if info.path else link

    def _refresh_quietly(self, deadline_ns: int) -> None:
        try:
            self.refresh_map(deadline_ns=min(deadline_ns, self._soon_ns()))
        except MillpondError as error:
            log.info("pool map not refreshed", code=error.code)

    def _on_heal(self, read: StripeRead, shard: int, outcome: ShardOutcome) -> None:
        part = read.part
        if part.chain is None:
            return  # upkeep
        self.heals.append(
            HealOrder(
                part.stripe,
                part.extent.digest,
                part.extent.num_blocks,
                shard,
                outcome,
                part.chain,
                part.hit,
            )
        )

    def _soon_ns(self) -> int:
        return time.monotonic_ns() + int(self._settings.pool.metadata_s * SECOND_NS)
