"""One metadata shard against a dict: leases, commits, matches, pins, quotas and time in any order."""

from __future__ import annotations

from dataclasses import dataclass

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from millpond.core.errors import QuotaExceeded
from millpond.core.extents import TenantId
from millpond.core.units import SECOND_NS
from millpond.store.index import BlockIndex
from millpond.store.metadata.core import HOUR_S, MetadataCore, MetadataParams
from millpond.store.metadata.quotas import QuotaBook, TenantQuota, stored_kib
from millpond.store.net.messages import LEASE_HELD, Abort, Done, Evict, Forget, Location, Matched, Pin, Unpin
from tests.unit.store.metadata.names import ROOT, WINDOW, commit, digests, hashes, match, reserve

MAX_BLOCKS = 24
PATHS = [tuple(range(MAX_BLOCKS)), (*range(5), *range(100, 119)), (*range(12), *range(200, 212))]
CHAINS = [digests(path) for path in PATHS]
HOLDERS, TENANTS = st.integers(1, 3), st.integers(1, 2)
PARAMS = MetadataParams(ttl_hours=4, max_pin_s=10**6, k=1, m=0)
QUOTA = TenantQuota(max_mib=1, max_pinned_mib=1)
KIB = st.sampled_from([1, 10, 300, 500, 1500])


@dataclass
class Extent:
    chain: list[bytes]
    begin: int
    end: int
    tenant: int
    kib: int
    hour: int
    location: Location

    @property
    def name(self) -> tuple[bytes, int]:
        return self.chain[self.end - 1], self.end - self.begin


class MetadataMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.core = MetadataCore(PARAMS, BlockIndex(1 << 16), QuotaBook(QUOTA))
        self.now_ns, self.unix_s = 0, 10**9
        self.owner: dict[bytes, int] = {}
        """Block -> nonce of the extent that it points to."""
        self.extents: dict[int, Extent] = {}
        """Live ones, by nonce."""
        self.leases: dict[tuple[bytes, int], tuple[int, int, int, int]] = {}
        """Extent -> (holder, tenant, KiB, end)."""
        self.pins: dict[tuple[bytes, int], dict[tuple[int, int], int]] = {}
        self.nonce = 0

    @property
    def hour(self) -> int:
        return self.unix_s // HOUR_S & 0xFFFF

    def ask(self, message, payload: bytes = b""):
        return self.core.handle(message, payload, self.now_ns, self.unix_s)

    def used_kib(self, tenant: int) -> int:
        return sum(e.kib for e in self.extents.values() if e.tenant == tenant)

    def live_pins(self, name: tuple[bytes, int]) -> dict[tuple[int, int], int]:
        return self.pins.get(name, {})

    def forget(self, nonce: int) -> None:
        gone = self.extents.pop(nonce)
        self.pins.pop(gone.name, None)
        self.owner = {block: other for block, other in self.owner.items() if other != nonce}

    def find(self, digest: bytes) -> Extent | None:
        return self.extents.get(self.owner.get(digest[:16], -1))

    def note_evictions(self, tenant: int) -> None:
        """Quota evictions may only hit the tenant's own, unpinned, oldest extents."""
        slots = [self.core.index.entry(slot) for slot in self.core.index.slots().tolist()]
        left = {entry.stripe.nonce for entry in slots}
        gone = [self.extents[nonce] for nonce in set(self.extents) - left]
        kept = [self.extents[n] for n in left if self.extents[n].tenant == tenant]
        kept = [e for e in kept if not self.live_pins(e.name)]
        for extent in gone:
            assert extent.tenant == tenant
            assert not self.live_pins(extent.name)
            assert all((extent.hour, -extent.begin) <= (other.hour, -other.begin) for other in kept)
            self.forget(extent.location.nonce)

    @rule(chain=st.sampled_from(CHAINS), begin=st.integers(0, MAX_BLOCKS - 1), length=st.integers(1, WINDOW),
          holder=HOLDERS, tenant=TENANTS, kib=KIB)  # fmt: skip
    def reserve(self, chain, begin: int, length: int, holder: int, tenant: int, kib: int) -> None:
        end = min(begin + length, MAX_BLOCKS)
        name = chain[end - 1], end - begin
        there = self.find(chain[end - 1])
        lease = self.leases.get(name)
        taken = lease is not None and lease[3] > self.now_ns and lease[:2] != (holder, tenant)
        try:
            (given,) = self.ask(reserve(chain, begin, end, holder=holder, tenant=tenant, kib=kib)).lease_ns
        except QuotaExceeded:
            self.note_evictions(tenant)
            self.leases.pop(name, None)
            assert not taken
            reserved = sum(item[2] for item in self.leases.values() if item[1] == tenant)
            pinned = sum(
                e.kib for e in self.extents.values() if e.tenant == tenant and self.live_pins(e.name)
            )
            assert kib + reserved + pinned > QUOTA.max_mib * 1024 or kib > QUOTA.max_mib * 1024
            return
        self.note_evictions(tenant)
        exists = there is not None and there.end - there.begin >= end - begin
        assert (given == 0) == exists
        assert (given == LEASE_HELD) == (taken and not exists)
        if given > 0:
            self.leases[name] = (holder, tenant, kib, self.now_ns + given)
            total = self.used_kib(tenant) + sum(x[2] for x in self.leases.values() if x[1] == tenant)
            assert total <= QUOTA.max_mib * 1024

    @rule(pick=st.integers(0, 100))
    def commit_a_lease(self, pick: int) -> None:
        if not self.leases:
            return
        name, (holder, tenant, kib, _) = sorted(self.leases.items())[pick % len(self.leases)]
        chain = next(chain for chain in CHAINS if name[0] in chain)
        end = chain.index(name[0]) + 1
        self.commit(chain, end - name[1], end, holder, tenant, kib)

    @rule(chain=st.sampled_from(CHAINS), begin=st.integers(0, MAX_BLOCKS - 1), length=st.integers(1, WINDOW),
          holder=HOLDERS, tenant=TENANTS)  # fmt: skip
    def commit_without_a_lease(self, chain, begin: int, length: int, holder: int, tenant: int) -> None:
        self.commit(chain, begin, min(begin + length, MAX_BLOCKS), holder, tenant, 10)

    def commit(self, chain, begin: int, end: int, holder: int, tenant: int, kib: int) -> None:
        self.nonce += 1
        name = chain[end - 1], end - begin
        message, payload = commit(chain, begin, end, self.nonce, holder=holder, tenant=tenant, kib=kib)
        lease = self.leases.get(name)
        if lease is not None and lease[0] == holder:
            del self.leases[name]
        won = []
        for digest in chain[begin:end]:
            other = self.find(digest)
            if other is None or other.end - other.begin < end - begin:
                won.append(digest[:16])
        assert self.ask(message, payload) == Done(int(bool(won)))
        if not won:
            return
        self.extents[self.nonce] = Extent(
            chain, begin, end, tenant, stored_kib(kib * 1024, 1, 0), self.hour, message.location
        )
        self.owner.update(dict.fromkeys(won, self.nonce))
        for nonce in set(self.extents) - set(self.owner.values()):
            del self.extents[nonce]  # superseded; its pins end by time
        if won[-1] == chain[end - 1][:16]:
            assert self.ask(message, payload) == Done(1), "asked again because the answer was lost"

    @rule(chain=st.sampled_from(CHAINS), length=st.integers(1, MAX_BLOCKS))
    def match(self, chain, length: int) -> None:
        answer = self.ask(match(), hashes(chain[:length]))
        assert isinstance(answer, Matched)
        known = next((i for i in range(length) if chain[i][:16] not in self.owner), length)
        assert answer.num_blocks >= known
        covered = 0
        for location, begin in zip(answer.extents, answer.begins, strict=True):
            extent = self.extents[location.nonce]
            assert extent.location == location
            assert extent.begin == begin <= covered
            own = extent.chain[begin : extent.end]
            while covered < min(extent.end, answer.num_blocks) and own[covered - begin] == chain[covered]:
                covered += 1
            extent.hour = self.hour
        assert covered == answer.num_blocks <= length

    @rule(pick=st.integers(0, 100), tenant=TENANTS, holder=HOLDERS, ttl_s=st.sampled_from([1, 100, 10**5]))
    def pin(self, pick: int, tenant: int, holder: int, ttl_s: int) -> None:
        if not self.extents:
            return
        extent = list(self.extents.values())[pick % len(self.extents)]
        found = self.find(extent.name[0])
        held = sum(
            e.kib for name, pins in self.pins.items() if any(who[0] == tenant for who in pins)
            if (e := self.find(name[0])) is not None
        )  # fmt: skip
        answer = self.ask(Pin(tenant, (extent.name,), holder, ttl_s * SECOND_NS))
        fits = held + extent.kib <= QUOTA.max_pinned_mib * 1024
        assert answer.count == int(found is not None and found.name == extent.name and fits)
        if answer.count:
            ends_ns = self.now_ns + ttl_s * SECOND_NS
            self.pins.setdefault(extent.name, {})[tenant, holder] = ends_ns

    @rule(pick=st.integers(0, 100), tenant=TENANTS, holder=HOLDERS)
    def unpin(self, pick: int, tenant: int, holder: int) -> None:
        if not self.extents:
            return
        name = list(self.extents.values())[pick % len(self.extents)].name
        had = self.pins.get(name, {}).pop((tenant, holder), None)
        if not self.pins.get(name):
            self.pins.pop(name, None)
        assert self.ask(Unpin(tenant, (name,), holder)).count == int(had is not None)

    @rule(pick=st.integers(0, 100), holder=HOLDERS)
    def abort(self, pick: int, holder: int) -> None:
        if not self.leases:
            return
        name, lease = sorted(self.leases.items())[pick % len(self.leases)]
        own = lease[0] == holder
        assert self.ask(Abort(lease[1], (name,), holder)) == Done(int(own))
        if own:
            del self.leases[name]

    @rule(pick=st.integers(0, 100), other=st.booleans())
    def forget_location(self, pick: int, other: bool) -> None:
        if not self.extents:
            return
        extent = list(self.extents.values())[pick % len(self.extents)]
        where = extent.location
        if other:
            where = Location(where.digest, where.num_blocks, where.epoch, where.group, where.nonce + 10**6)
        found = self.find(extent.name[0])
        hit = not other and found is extent
        assert self.ask(Forget(extent.tenant, ROOT, where, extent.begin)) == Done(int(hit))
        if hit:
            self.forget(extent.location.nonce)

    @rule(chain=st.sampled_from(CHAINS), first=st.integers(0, MAX_BLOCKS))
    def evict(self, chain, first: int) -> None:
        doomed = {self.owner[d[:16]] for d in chain[first:] if d[:16] in self.owner}
        assert self.ask(Evict(1, ROOT, first), hashes(chain)) == Done(len(doomed))
        for nonce in doomed:
            self.forget(nonce)

    @rule(tenant=TENANTS)
    def drop_tenant(self, tenant: int) -> None:
        doomed = [nonce for nonce, extent in self.extents.items() if extent.tenant == tenant]
        assert self.core.drop_tenant(TenantId(tenant)) == len(doomed)
        for nonce in doomed:
            self.forget(nonce)
        self.leases = {name: lease for name, lease in self.leases.items() if lease[1] != tenant}
        for name, holders in list(self.pins.items()):
            self.pins[name] = {who: end for who, end in holders.items() if who[0] != tenant}
            if not self.pins[name]:
                del self.pins[name]

    @rule(seconds=st.sampled_from([1, 20, 100, 2 * HOUR_S, 6 * HOUR_S]))
    def pass_time(self, seconds: int) -> None:
        self.now_ns += seconds * SECOND_NS
        self.unix_s += seconds
        ran = self.now_ns >= self.core._next_expiry_ns
        self.core.tick(self.now_ns, self.unix_s)
        self.leases = {name: lease for name, lease in self.leases.items() if lease[3] > self.now_ns}
        for name, holders in list(self.pins.items()):
            self.pins[name] = {who: end for who, end in holders.items() if end > self.now_ns}
            if not self.pins[name]:
                del self.pins[name]
        if ran:
            for nonce, extent in list(self.extents.items()):
                if (self.hour - extent.hour) & 0xFFFF > PARAMS.ttl_hours and extent.name not in self.pins:
                    self.forget(nonce)

    @rule()
    def restart_from_a_checkpoint(self) -> None:
        """Leases and pins are lost, what is stored and charged is not."""
        index = BlockIndex.restore(self.core.index.save(), 1 << 16)
        self.core = MetadataCore(PARAMS, index, QuotaBook(QUOTA))
        self.leases, self.pins = {}, {}

    @invariant()
    def what_is_charged_exists_and_nothing_leaks(self) -> None:
        self.core.check()
        assert self.core.index.num_extents == len(self.extents)
        assert self.core.num_leases == len(self.leases)
        assert self.core.num_pins == sum(map(len, self.pins.values()))
        for tenant in (1, 2):
            assert self.core.quotas.used_kib(TenantId(tenant)) == self.used_kib(tenant)
            held = sum(lease[2] for lease in self.leases.values() if lease[1] == tenant)
            assert self.core.quotas.reserved_kib(TenantId(tenant)) == held


TestMetadataMachine = MetadataMachine.TestCase
TestMetadataMachine.settings = settings(max_examples=120, stateful_step_count=40, deadline=None)
