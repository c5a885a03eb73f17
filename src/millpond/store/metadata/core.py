"""`MetadataCore`: one metadata shard without its sockets and files.

Time is passed in. One thread. What it says is a hint: nodes and readers prove what they deliver, so a core
that starts empty, or from an old checkpoint, costs hits and never correctness.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from millpond.core.errors import InvalidRequest, QuotaExceeded
from millpond.core.extents import ExtentId, StripeId, TenantId
from millpond.core.hashing import BLOCK_HASH_BYTES, DIGEST_BYTES
from millpond.core.units import SECOND_NS
from millpond.policies.metadata_shard import LookupKey, ShardTable
from millpond.store.index import BlockIndex, ExtentEntry
from millpond.store.metadata.quotas import QuotaBook, stored_kib
from millpond.store.net.messages import (
    LEASE_HELD,
    Abort,
    Commit,
    Done,
    Evict,
    Forget,
    Location,
    Match,
    Matched,
    Message,
    Pin,
    Reserve,
    Reserved,
    Touch,
    Unpin,
)

HOUR_S = 3600
EXPIRY_PERIOD_S = 60
TABLES_PER_TICK = 4
"""A whole sweep of a large index takes a tenth of a second, in which nobody is answered."""

_Name: TypeAlias = tuple[bytes, int]
"""(digest, blocks): an extent as messages name it."""


@dataclass(frozen=True, slots=True)
class MetadataParams:
    """One metadata shard."""

    lease_s: float = 30.0
    """How long a writer may take; then another gets the extent."""
    max_pin_s: float = 60.0
    """No pin lasts longer, whatever was asked."""
    ttl_hours: int = 24
    """Extents that nobody matched for so long are forgotten; matching renews a chain up to its root."""
    max_chain_blocks: int = 1 << 17
    """Of one message: 16 Mi tokens."""
    k: int = 10
    """Data shards, for what tenants are charged."""
    m: int = 2
    """Parity shards."""


@dataclass(slots=True)
class _Lease:
    holder: int
    tenant: TenantId
    num_kib: int
    expires_ns: int


@dataclass
class MetadataCounts:
    """Since the start."""

    matches: int = 0
    matched_blocks: int = 0
    asked_blocks: int = 0
    commits: int = 0
    lost_races: int = 0
    """Commits that found the extent there: its shards were written for nothing."""
    expired_leases: int = 0
    forgotten: int = 0
    """Locations that readers found to be wrong."""
    quota_refusals: int = 0
    quota_evictions: int = 0
    expired_extents: int = 0


@dataclass
class MetadataCore:
    """See module."""

    params: MetadataParams = field(default_factory=MetadataParams)
    index: BlockIndex = field(default_factory=BlockIndex)
    quotas: QuotaBook = field(default_factory=QuotaBook)
    counts: MetadataCounts = field(default_factory=MetadataCounts)
    shards: ShardTable | None = None
    """To count look-ups by what they could be spread by; without it they are not counted."""
    lookups: Counter[LookupKey] = field(default_factory=Counter)
    """Of chains longer than their depth, since somebody last took them (`policies.metadata_shard`)."""
    _leases: dict[_Name, _Lease] = field(default_factory=dict)
    _pins: dict[_Name, dict[tuple[TenantId, int], int]] = field(default_factory=dict)
    """Extent -> (tenant, holder) -> when it ends."""
    _next_expiry_ns: int = 0

    def __post_init__(self) -> None:
        """Charge the tenants for what a restored index holds."""
        self._answers: dict[type[Message], Callable[[Any, bytes, int, int], Message]] = {
            Match: self._match,
            Reserve: self._reserve,
            Commit: self._commit,
            Abort: self._abort,
            Forget: self._forget,
            Pin: self._pin,
            Unpin: self._unpin,
            Touch: self._touch,
            Evict: self._evict,
        }
        for slot in self.index.slots().tolist():
            entry = self.index.entry(slot)
            self.quotas.add(entry.tenant, entry.num_kib)

    @property
    def num_leases(self) -> int:
        """Put leases held, expired ones included until the next `tick`."""
        return len(self._leases)

    @property
    def num_pins(self) -> int:
        """Pins held, expired ones included until the next `tick`."""
        return sum(map(len, self._pins.values()))

    def handle(self, request: Message, payload: bytes, now_ns: int, unix_s: int) -> Message:
        """Answer one request.

        Raises:
            InvalidRequest: The message makes no sense.
            QuotaExceeded: The tenant may not write so much.
            OverloadError: The index is full.
        """
        answer = self._answers.get(type(request))
        if answer is None:
            raise InvalidRequest(f"metadata does not answer {type(request).__name__}", code="bad_request")
        if len(payload) % BLOCK_HASH_BYTES or len(payload) > self.params.max_chain_blocks * BLOCK_HASH_BYTES:
            raise InvalidRequest(f"{len(payload)} bytes are no block hashes", code="bad_request")
        return answer(request, payload, now_ns, unix_s // HOUR_S & 0xFFFF)

    def tick(self, now_ns: int, unix_s: int) -> None:
        """Let what is over end: leases, pins, extents. To be called every second or so, also when idle."""
        for name, lease in [item for item in self._leases.items() if item[1].expires_ns <= now_ns]:
            self._end_lease(name, lease)
            self.counts.expired_leases += 1
        for name, holders in list(self._pins.items()):
            for holder in [holder for holder, ends_ns in holders.items() if ends_ns <= now_ns]:
                del holders[holder]
            if not holders:
                del self._pins[name]
        if now_ns >= self._next_expiry_ns:
            self._next_expiry_ns = now_ns + EXPIRY_PERIOD_S * SECOND_NS
            hour = unix_s // HOUR_S & 0xFFFF
            over = self.index.slots_before(hour, self.params.ttl_hours).tolist()
            expired = [slot for slot in over if not self._is_pinned(slot)]
            self.counts.expired_extents += self._remove(expired)
        self.index.sweep_tables(TABLES_PER_TICK)

    def drop_tenant(self, tenant: TenantId) -> int:
        """Forget everything a tenant was charged for, pins and leases included; how many extents."""
        for name, lease in [item for item in self._leases.items() if item[1].tenant == tenant]:
            self._end_lease(name, lease)
        for holders in self._pins.values():
            for holder in [holder for holder in holders if holder[0] == tenant]:
                del holders[holder]
        return self._remove(self.index.slots_of(tenant).tolist())

    def check(self) -> None:
        """Assert that what the tenants are charged is what exists."""
        used: Counter[TenantId] = Counter()
        reserved: Counter[TenantId] = Counter()
        for slot in self.index.slots().tolist():
            entry = self.index.entry(slot)
            used[entry.tenant] += entry.num_kib
        for lease in self._leases.values():
            reserved[lease.tenant] += lease.num_kib
        for tenant, charged in self.quotas.tenants().items():
            if charged != (used[tenant], reserved[tenant]):
                raise AssertionError(f"{tenant}: {charged} != {(used[tenant], reserved[tenant])}")

    def _match(self, request: Match, payload: bytes, now_ns: int, hour: int) -> Matched:
        self.counts.matches += 1
        self.counts.asked_blocks += len(payload) // BLOCK_HASH_BYTES
        if not payload:
            return Matched(0, (), ())
        if self.shards is not None:
            self._count_lookup(self.shards, payload)
        num_blocks, found = self.index.match(payload, request.window, hour)
        self.counts.matched_blocks += num_blocks
        locations = tuple(Location(*fields) for fields in self.index.location_fields(found[:, 0]))
        return Matched(num_blocks, locations, tuple(found[:, 1].tolist()))

    def _count_lookup(self, shards: ShardTable, hashes: bytes) -> None:
        key = shards.lookup_key(hashes)
        if not hashes.endswith(key[1]):
            self.lookups[key] += 1

    def _touch(self, request: Touch, payload: bytes, now_ns: int, hour: int) -> Done:
        return Done(self.index.match(payload, 1, hour)[0] if payload else 0)

    def _reserve(self, request: Reserve, payload: bytes, now_ns: int, hour: int) -> Reserved:
        names = request.extents
        if len(names) != len(request.num_bytes) or not all(map(_is_name, names)):
            raise InvalidRequest("reserve names no extents, or not the bytes of each", code="bad_request")
        if not _fits(request.tenant, 32) or not all(_fits(size, 40) for size in request.num_bytes):
            raise InvalidRequest("no such tenant, or not so many bytes", code="bad_request")
        given: list[int] = []
        try:
            for name, num_bytes in zip(names, request.num_bytes, strict=True):
                given.append(self._lease(request, name, num_bytes, now_ns, hour))
        except QuotaExceeded:
            self.counts.quota_refusals += 1
            # All or nothing: a refused batch leaves no lease behind.
            self._abort(Abort(request.tenant, names[: len(given)], request.holder), b"", now_ns, hour)
            raise
        return Reserved(tuple(given))

    def _lease(self, request: Reserve, name: _Name, num_bytes: int, now_ns: int, hour: int) -> int:
        """As `Reserved` says it."""
        slot = self.index.find(name[0][:BLOCK_HASH_BYTES])
        if slot >= 0 and self.index.entry(slot).extent.num_blocks >= name[1]:
            return 0
        lease = self._leases.get(name)
        if lease is not None:
            if lease.expires_ns > now_ns and (lease.holder, lease.tenant) != (request.holder, request.tenant):
                return LEASE_HELD
            self._end_lease(name, lease)
        tenant = TenantId(request.tenant)
        num_kib = stored_kib(num_bytes, self.params.k, self.params.m)
        self._make_room(tenant, num_kib)
        self.quotas.reserve(tenant, num_kib, now_ns)
        lease_ns = int(self.params.lease_s * SECOND_NS)
        self._leases[name] = _Lease(request.holder, tenant, num_kib, now_ns + lease_ns)
        return lease_ns

    def _make_room(self, tenant: TenantId, num_kib: int) -> None:
        """Drop the tenant's own oldest extents until it may store so much more."""
        missing = self.quotas.missing_kib(tenant, num_kib)
        if not missing or num_kib > self.quotas.quota(tenant).max_mib * 1024:
            return
        slots = [slot for slot in self.index.slots_of(tenant).tolist() if not self._is_pinned(slot)]
        # Leaves first: of equal age, what lies deeper in its chain.
        entries = sorted(
            ((self.index.entry(slot), slot) for slot in slots),
            key=lambda pair: (pair[0].access_hour, -pair[0].first_block),
        )
        doomed: list[int] = []
        for entry, slot in entries:
            if missing <= 0:
                break
            if not entry.num_kib:
                continue  # a copy that is charged elsewhere
            doomed.append(slot)
            missing -= entry.num_kib
        self.counts.quota_evictions += self._remove(doomed)

    def _commit(self, request: Commit, payload: bytes, now_ns: int, hour: int) -> Done:
        where = request.location
        name = (where.digest, where.num_blocks)
        if not _is_name(name) or payload[-BLOCK_HASH_BYTES:] != where.digest[:BLOCK_HASH_BYTES]:
            raise InvalidRequest("commit without the hashes of its blocks", code="bad_request")
        if len(payload) != where.num_blocks * BLOCK_HASH_BYTES or not _is_in_range(request):
            raise InvalidRequest("commit of an extent that cannot be", code="bad_request")
        lease = self._leases.get(name)
        if lease is not None and lease.holder == request.holder:
            self._end_lease(name, lease)
        tenant = TenantId(request.tenant)
        num_kib = stored_kib(request.num_bytes, self.params.k, self.params.m)
        entry = ExtentEntry(
            extent=ExtentId(*name),
            stripe=StripeId(where.epoch, where.group, where.nonce),
            first_block=request.first_block,
            missing=where.missing,
            approximate=bool(where.lineage),
            tenant=tenant,
            access_hour=hour,
            num_kib=num_kib,
        )
        slot = self.index.find(where.digest[:BLOCK_HASH_BYTES])
        if slot >= 0:
            there = self.index.entry(slot)
            if (there.extent, there.stripe) == (entry.extent, entry.stripe):
                return Done(1)  # asked before: its answer was lost
        insertion = self.index.insert(entry, payload)
        for gone in insertion.superseded:
            self.quotas.remove(gone.tenant, gone.num_kib)
        if insertion.slot < 0:
            self.counts.lost_races += 1
            return Done(0)
        self.quotas.add(tenant, num_kib)
        self.counts.commits += 1
        return Done(1)

    def _abort(self, request: Abort, payload: bytes, now_ns: int, hour: int) -> Done:
        count = 0
        for name in request.extents:
            lease = self._leases.get(name)
            if lease is not None and (lease.holder, lease.tenant) == (request.holder, request.tenant):
                self._end_lease(name, lease)
                count += 1
        return Done(count)

    def _forget(self, request: Forget, payload: bytes, now_ns: int, hour: int) -> Done:
        where = request.location
        if not _is_name((where.digest, where.num_blocks)):
            raise InvalidRequest("forget names no extent", code="bad_request")
        slot = self.index.find(where.digest[:BLOCK_HASH_BYTES])
        if slot < 0:
            return Done(0)
        entry = self.index.entry(slot)
        there = (entry.extent, entry.stripe)
        asked = (
            ExtentId(where.digest, where.num_blocks),
            StripeId(where.epoch, where.group, where.nonce),
        )
        if there != asked:
            return Done(0)
        self.counts.forgotten += 1
        return Done(self._remove([slot]))

    def _pin(self, request: Pin, payload: bytes, now_ns: int, hour: int) -> Done:
        if not all(map(_is_name, request.extents)):
            raise InvalidRequest("pin names no extents", code="bad_request")
        ends_ns = now_ns + min(max(request.ttl_ns, 0), int(self.params.max_pin_s * SECOND_NS))
        limit_kib = self.quotas.quota(TenantId(request.tenant)).max_pinned_mib * 1024
        pinned_kib = self._pinned_kib(TenantId(request.tenant)) if limit_kib else 0
        count = 0
        for name in request.extents:
            slot = self.index.find(name[0][:BLOCK_HASH_BYTES])
            if slot < 0 or self.index.entry(slot).extent != ExtentId(*name):
                continue
            pinned_kib += self.index.entry(slot).num_kib
            if limit_kib and pinned_kib > limit_kib:
                break
            holders = self._pins.setdefault(name, {})
            holders[TenantId(request.tenant), request.holder] = ends_ns
            count += 1
        return Done(count)

    def _unpin(self, request: Unpin, payload: bytes, now_ns: int, hour: int) -> Done:
        count = 0
        for name in request.extents:
            holders = self._pins.get(name, {})
            if holders.pop((TenantId(request.tenant), request.holder), None) is not None:
                count += 1
            if not holders:
                self._pins.pop(name, None)
        return Done(count)

    def _evict(self, request: Evict, payload: bytes, now_ns: int, hour: int) -> Done:
        slots: set[int] = set()
        for begin in range(max(0, request.first_block) * BLOCK_HASH_BYTES, len(payload), BLOCK_HASH_BYTES):
            slot = self.index.find(payload[begin : begin + BLOCK_HASH_BYTES])
            if slot >= 0:
                slots.add(slot)
        return Done(self._remove(sorted(slots)))

    def _remove(self, slots: Iterable[int]) -> int:
        count = 0
        for slot in slots:
            entry = self.index.entry(slot)
            self._pins.pop((entry.extent.digest, entry.extent.num_blocks), None)
            self.quotas.remove(entry.tenant, entry.num_kib)
            self.index.remove(slot)
            count += 1
        return count

    def _end_lease(self, name: _Name, lease: _Lease) -> None:
        del self._leases[name]
        self.quotas.unreserve(lease.tenant, lease.num_kib)

    def _is_pinned(self, slot: int) -> bool:
        extent = self.index.entry(slot).extent
        return (extent.digest, extent.num_blocks) in self._pins

    def _pinned_kib(self, tenant: TenantId) -> int:
        total = 0
        for name, holders in self._pins.items():
            if any(holder[0] == tenant for holder in holders):
                slot = self.index.find(name[0][:BLOCK_HASH_BYTES])
                total += self.index.entry(slot).num_kib if slot >= 0 else 0
        return total


def _is_name(name: _Name) -> bool:
    return len(name[0]) == DIGEST_BYTES and 1 <= name[1] <= 0xFF


def _fits(value: int, num_bits: int) -> bool:
    return 0 <= value < 1 << num_bits


def _is_in_range(request: Commit) -> bool:
    where = request.location
    return (
        _fits(request.tenant, 32)
        and _fits(request.first_block, 32)
        and _fits(request.num_bytes, 40)
        and _fits(where.epoch, 16)
        and _fits(where.group, 32)
        and _fits(where.nonce, 64)
        and _fits(where.missing, 16)
    )
