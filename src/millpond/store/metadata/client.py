"""`MetadataClient`: the metadata of a pool behind its shards, as `MetadataPort` (kvstore 2.12).

    match     the shard that the chain picks; for a while after its prefix became popular also those that it
              picked before, if that one does not know all of it: what they know is then told to it
    commit    the extent's shard, which charges it; if it begins above depth d, then all others get a copy
    the rest  the extent's shard, or all of them for what was copied

The map that says who is asked may be old: a shard that is not the right one says so, and is asked once more
under the newest map.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

import structlog

from millpond.core.errors import MillpondError, PoolError, StaleEpoch, TransferFailed
from millpond.core.hashing import BLOCK_HASH_BYTES
from millpond.core.pool_map import PoolMap
from millpond.core.units import SECOND_NS
from millpond.policies.metadata_shard import ShardTable
from millpond.store.metadata.checkpoint import decode_map, encode_map
from millpond.store.metadata.shard_link import ShardLink, ShardLinkParams
from millpond.store.net.connection import error_of
from millpond.store.net.messages import (
    LEASE_HELD,
    Abort,
    Commit,
    Done,
    DropTenant,
    Evict,
    Failed,
    Forget,
    MapAnswer,
    MapQuery,
    MapUpdate,
    Match,
    Matched,
    Message,
    MetadataStatus,
    MetadataStatusQuery,
    Pin,
    Reserve,
    Reserved,
    SetQuota,
    Unpin,
)

log = structlog.get_logger(__name__)

MOVING_S = 600.0
MAP_S = 1.0
"""How long one shard may take to send its map while there are others to ask."""
_Naming: TypeAlias = Reserve | Abort | Pin | Unpin
"""Requests that name extents of one chain, which may belong to several shards."""


@dataclass
class ClientCounts:
    """Since the start."""

    redirects: int = 0
    """Matches that a shard sent elsewhere because our map was old."""
    moved: int = 0
    """Extents told to the shard that knows their chain now."""
    copies_lost: int = 0
    """Copies of shallow extents that a shard did not take."""


@dataclass(frozen=True)
class _View:
    """A map and the ways to its shards."""

    pool_map: PoolMap
    table: ShardTable
    links: tuple[ShardLink, ...]

    def depth(self, prefix: bytes) -> int:
        return self.table.depth_of(prefix[:BLOCK_HASH_BYTES])

    def owner_of(self, digest: bytes, prefix: bytes) -> int:
        """Shard of an extent: that of its chain as far as the extent's end."""
        if len(self.links) == 1 or not prefix:
            return 0
        return self.table.owner(prefix[: _end_of(digest[:BLOCK_HASH_BYTES], prefix)])


class MetadataClient:
    """See module. Thread-safe.

    Args:
        addresses: Metadata shards, any that are known; the map names the others.
        name: Ours, for their logs.
        token: Cluster token.
        link: Parameters of the connections.
        moving_s: How long chains whose depth grew are also looked for where they were. Who comes back later
            computes again; without an end the old shard would stay as busy as before.
    """

    def __init__(
        self,
        addresses: Sequence[str],
        *,
        name: str,
        token: str = "",
        link: ShardLinkParams | None = None,
        moving_s: float = MOVING_S,
    ) -> None:
        self.counts = ClientCounts()
        self._seeds = tuple(addresses)
        self._make_link: Callable[[str], ShardLink] = lambda address: ShardLink(
            address, name=name, token=token, params=link or ShardLinkParams()
        )
        self._links: dict[str, ShardLink] = {}
        self._lock = threading.Lock()
        self._view: _View | None = None
        self._newer_exists = False
        self._moving_ns = int(moving_s * SECOND_NS)
        self._moved_ns: dict[bytes, int] = {}
        """Block 0 of a popular prefix -> when we heard that its depth grew."""

    def call(self, request: Message, payload: bytes = b"", *, prefix: bytes, deadline_ns: int) -> Message:
        """See `MetadataPort`."""
        view = self._current(deadline_ns)
        match request:
            case Match():
                return self._match(view, request, payload, deadline_ns)
            case Reserve():
                return self._reserve(view, request, prefix, deadline_ns)
            case Commit():
                return self._commit(view, request, payload, prefix, deadline_ns)
            case Abort() | Pin() | Unpin():
                parts = _split(view, request, prefix)
                answers = [self._ask(view, shard, part, b"", deadline_ns) for shard, part, _ in parts]
                return Done(sum(_count(answer) for answer in answers))
            case Forget():
                owner = view.owner_of(request.location.digest, prefix)
                return self._ask_copies(view, request, b"", prefix, owner, deadline_ns)
            case Evict():
                owner = view.table.owner(prefix)
                return self._ask_copies(view, request, payload, prefix, owner, deadline_ns)
            case _:
                return self._ask(view, view.table.owner(prefix), request, payload, deadline_ns)

    def pool_map(self, *, deadline_ns: int) -> PoolMap:
        """See `MetadataPort`."""
        return self._refresh(deadline_ns).pool_map

    def ask_directory(
        self, request: Message, payload: bytes = b"", *, deadline_ns: int
    ) -> tuple[Message, bytes]:
        """Ask shard 0 who keeps what in memory, or tell it; see `store.remote_directory`.

        Needs no pool map: then the first address that we were given is asked.

        Raises:
            PoolError: What it answered instead.
            TransientError: It did not answer.
        """
        view = self._view
        link = view.links[0] if view is not None else self._link(self._seeds[0])
        answer, content = link.ask(request, payload, deadline_ns=deadline_ns)
        return _raised(answer), content

    def update_map(self, pool_map: PoolMap, *, deadline_ns: int) -> bool:
        """Give all shards a newer map; whether shard 0, which decides, took it.

        Raises:
            TransientError: A shard does not answer.
        """
        packed = encode_map(pool_map)
        links = [self._link(address) for address in pool_map.metadata or self._seeds]
        taken = [
            _raised(link.ask(MapUpdate(pool_map.version), packed, deadline_ns=deadline_ns)[0])
            for link in links
        ]
        self._newer_exists = True
        return bool(_count(taken[0]))

    def statuses(self, *, deadline_ns: int) -> dict[str, MetadataStatus | MillpondError]:
        """State of each shard by address, or why there is none."""
        found: dict[str, MetadataStatus | MillpondError] = {}
        for link in self._current(deadline_ns).links:
            try:
                answer = _raised(link.ask(MetadataStatusQuery(), deadline_ns=deadline_ns)[0])
            except MillpondError as error:
                found[link.address] = error
            else:
                if isinstance(answer, MetadataStatus):
                    found[link.address] = answer
        return found

    def set_quota(
        self,
        tenant: int,
        *,
        max_mib: int = 0,
        write_mib_s: float = 0.0,
        max_pinned_mib: int = 0,
        deadline_ns: int,
    ) -> None:
        """Limit what a tenant may store; each shard enforces its part. 0: no limit.

        Raises:
            PoolError, TransientError: A shard refuses or does not answer; others may have taken it.
        """
        view = self._current(deadline_ns)
        n = len(view.links)
        quota = SetQuota(tenant, -(-max_mib // n), write_mib_s / n, -(-max_pinned_mib // n))
        for shard in range(n):
            self._ask(view, shard, quota, b"", deadline_ns)

    def drop_tenant(self, tenant: int, *, deadline_ns: int) -> int:
        """Forget everything that a tenant wrote, for good; how many extents, copies included.

        Raises:
            PoolError, TransientError: A shard refuses or does not answer; others may have forgotten it.
        """
        view = self._current(deadline_ns)
        answers = [
            self._ask(view, shard, DropTenant(tenant), b"", deadline_ns) for shard in range(len(view.links))
        ]
        return sum(_count(answer) for answer in answers)

    def close(self) -> None:
        """Close all connections."""
        with self._lock:
            links = list(self._links.values())
        for link in links:
            link.close()

    # --- requests ----------------------------------------------------------------------------

    def _match(self, view: _View, request: Match, chain: bytes, deadline_ns: int) -> Message:
        if not chain:
            return Matched(0, (), ())
        try:
            best = self._ask_match(view, None, request, chain, deadline_ns)
        except StaleEpoch:
            self.counts.redirects += 1
            view = self._refresh(deadline_ns)
            best = self._ask_match(view, None, request, chain, deadline_ns)
        if best.num_blocks * BLOCK_HASH_BYTES < len(chain) and self._has_moved(chain[:BLOCK_HASH_BYTES]):
            best = self._match_before(view, request, chain, best, deadline_ns)
        return best

    def _has_moved(self, first: bytes) -> bool:
        heard_ns = self._moved_ns.get(first)
        return heard_ns is not None and time.monotonic_ns() - heard_ns < self._moving_ns

    def _match_before(
        self, view: _View, request: Match, chain: bytes, best: Matched, deadline_ns: int
    ) -> Matched:
        """Ask the shards that knew the chain before its depth grew; tell its shard what they know more."""
        owner, *others = view.table.in_order(chain)
        known = best.num_blocks
        for shard in others:
            try:
                answer = self._ask_match(view, shard, request, chain, deadline_ns)
            except MillpondError as error:
                log.info("previous shard not asked", address=view.links[shard].address, code=error.code)
                continue
            if answer.num_blocks > best.num_blocks:
                best = answer
        for location, begin in zip(best.extents, best.begins, strict=True):
            end = begin + location.num_blocks
            hashes = chain[begin * BLOCK_HASH_BYTES : end * BLOCK_HASH_BYTES]
            if (
                end <= known
                or end > best.num_blocks
                or not location.digest.startswith(hashes[-BLOCK_HASH_BYTES:])
            ):
                continue
            commit = Commit(request.tenant, request.root, location, begin, b"", 0, 0)
            try:
                self.counts.moved += _count(self._ask(view, owner, commit, hashes, deadline_ns))
            except MillpondError as error:
                log.info("extent not moved", code=error.code)
        return best

    def _ask_match(
        self, view: _View, shard: int | None, request: Match, chain: bytes, deadline_ns: int
    ) -> Matched:
        request = Match(request.tenant, request.root, view.pool_map.version, request.window)
        if shard is None:
            shard = view.table.owner(chain)
        answer = self._ask(view, shard, request, chain, deadline_ns)
        if not isinstance(answer, Matched):
            raise TransferFailed(f"match is answered with {type(answer).__name__}", code="pool.answer")
        if answer.map_version > view.pool_map.version:
            self._newer_exists = True
        return answer

    def _reserve(self, view: _View, request: Reserve, prefix: bytes, deadline_ns: int) -> Reserved:
        lease_ns = [LEASE_HELD] * len(request.extents)  # nothing is known of it, so not that it exists
        given: list[tuple[int, _Naming]] = []
        try:
            for shard, part, places in _split(view, request, prefix):
                answer = self._ask(view, shard, part, b"", deadline_ns)
                if isinstance(answer, Reserved):
                    given.append((shard, part))
                    for place, lease in zip(places, answer.lease_ns, strict=True):
                        lease_ns[place] = lease
        except MillpondError:
            for shard, part in given:  # all or nothing
                self._ask(view, shard, Abort(part.tenant, part.extents, part.holder), b"", deadline_ns)
            raise
        return Reserved(tuple(lease_ns))

    def _commit(
        self, view: _View, request: Commit, hashes: bytes, prefix: bytes, deadline_ns: int
    ) -> Message:
        owner = view.owner_of(request.location.digest, prefix)
        answer = self._ask(view, owner, request, hashes, deadline_ns)
        if _count(answer) and request.first_block < view.depth(prefix):
            # The copies are charged to nobody, and lost ones cost hits only.
            copy = Commit(
                request.tenant, request.root, request.location, request.first_block, request.parent, 0, 0
            )
            for shard in range(len(view.links)):
                if shard != owner:
                    self._ask_copy(view, shard, copy, hashes, deadline_ns)
        return answer

    def _ask_copies(
        self,
        view: _View,
        request: Forget | Evict,
        payload: bytes,
        prefix: bytes,
        owner: int,
        deadline_ns: int,
    ) -> Message:
        """Ask the owner; and all others if they have copies."""
        answer = self._ask(view, owner, request, payload, deadline_ns)
        if request.first_block < view.depth(prefix):
            for shard in range(len(view.links)):
                if shard != owner:
                    self._ask_copy(view, shard, request, payload, deadline_ns)
        return answer

    def _ask_copy(self, view: _View, shard: int, request: Message, payload: bytes, deadline_ns: int) -> None:
        try:
            self._ask(view, shard, request, payload, deadline_ns)
        except MillpondError as error:
            self.counts.copies_lost += 1
            log.info("copy not kept up", address=view.links[shard].address, code=error.code)

    def _ask(self, view: _View, shard: int, request: Message, payload: bytes, deadline_ns: int) -> Message:
        answer, _ = view.links[shard].ask(request, payload, deadline_ns=deadline_ns)
        if isinstance(answer, Failed) and answer.map_version > view.pool_map.version:
            self._newer_exists = True
        return _raised(answer)

    # --- map ---------------------------------------------------------------------------------

    def _current(self, deadline_ns: int) -> _View:
        """The map as known, fetched if there is none or a newer one was heard of."""
        view = self._view
        if view is None:
            return self._refresh(deadline_ns)
        if self._newer_exists:
            try:
                return self._refresh(deadline_ns)
            except (MillpondError, PoolError) as error:
                log.info("map not refreshed", code=error.code)
        return view

    def _refresh(self, deadline_ns: int) -> _View:
        """Fetch the map from the first shard that has one; the newest of it and the known one."""
        self._newer_exists = False
        known = self._view.pool_map if self._view is not None else None
        addresses = dict.fromkeys((*(known.metadata if known else ()), *self._seeds))
        last: MillpondError = TransferFailed("no metadata shard is known", code="pool.no_metadata")
        for left, address in zip(range(len(addresses), 0, -1), addresses, strict=True):
            soon_ns = time.monotonic_ns() + int(MAP_S * SECOND_NS)
            try:
                answer, packed = self._link(address).ask(
                    MapQuery(), deadline_ns=min(deadline_ns, soon_ns) if left > 1 else deadline_ns
                )
                if isinstance(_raised(answer), MapAnswer) and packed:
                    return self._install(decode_map(packed))
                last = TransferFailed(f"{address} has no pool map yet", code="pool.no_map")
            except MillpondError as error:
                last = error
        raise last

    def _install(self, pool_map: PoolMap) -> _View:
        with self._lock:
            if self._view is not None and self._view.pool_map.version >= pool_map.version:
                return self._view
        shards = pool_map.metadata or self._seeds
        table = ShardTable(replace(pool_map, metadata=shards))
        view = _View(pool_map, table, tuple(self._link(address) for address in shards))
        with self._lock:
            if self._view is None or self._view.pool_map.version < pool_map.version:
                known = self._view.pool_map.depths if self._view is not None else ()
                grown = set(pool_map.depths) - set(known)
                self._moved_ns |= dict.fromkeys((first for first, _ in grown), time.monotonic_ns())
                self._view = view
            return self._view

    def _link(self, address: str) -> ShardLink:
        with self._lock:
            return self._links.setdefault(address, self._make_link(address))


def _raised(answer: Message) -> Message:
    if isinstance(answer, Failed):
        raise error_of(answer)
    return answer


def _count(answer: Message) -> int:
    return answer.count if isinstance(answer, Done) else 0


def _split(view: _View, request: _Naming, prefix: bytes) -> Iterable[tuple[int, _Naming, list[int]]]:
    """The request as its shards get it: (shard, part, places of its extents in the whole)."""
    places: dict[int, list[int]] = {}
    for place, (digest, _) in enumerate(request.extents):
        places.setdefault(view.owner_of(digest, prefix), []).append(place)
    for shard, own in places.items():
        extents = tuple(request.extents[place] for place in own)
        if isinstance(request, Reserve):
            num_bytes = tuple(request.num_bytes[place] for place in own)
            part = Reserve(request.tenant, extents, num_bytes, request.holder)
        elif isinstance(request, Pin):
            part = Pin(request.tenant, extents, request.holder, request.ttl_ns)
        elif isinstance(request, Abort):
            part = Abort(request.tenant, extents, request.holder)
        else:
            part = Unpin(request.tenant, extents, request.holder)
        yield shard, part, own


def _end_of(block_hash: bytes, prefix: bytes) -> int:
    """Where a block ends in a chain of hashes; the end of the chain if it is not in it."""
    at = prefix.find(block_hash)
    while at >= 0 and at % BLOCK_HASH_BYTES:
        at = prefix.find(block_hash, at + 1)
    return at + BLOCK_HASH_BYTES if at >= 0 else len(prefix)
