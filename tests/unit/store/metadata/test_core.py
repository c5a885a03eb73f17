"""What one metadata shard answers: races, refusals, malformed messages, expiry."""

from __future__ import annotations

import pytest

from millpond.core.errors import InvalidRequest, OverloadError, QuotaExceeded
from millpond.core.extents import TenantId
from millpond.core.pool_map import PoolMap
from millpond.core.units import SECOND_NS
from millpond.policies.metadata_shard import ShardTable
from millpond.store.index import BlockIndex
from millpond.store.metadata.core import HOUR_S, MetadataCore, MetadataParams
from millpond.store.metadata.quotas import QuotaBook, TenantQuota
from millpond.store.net.messages import (
    LEASE_HELD,
    Commit,
    Done,
    Evict,
    Hello,
    Location,
    Matched,
    Message,
    Pin,
    Reserve,
    Touch,
)
from tests.unit.store.metadata.names import ROOT, commit, digests, hashes, match, reserve

UNIX_S = 10**9
CHAIN = digests(range(40))


class Shard:
    def __init__(self, quota: TenantQuota | None = None, params: MetadataParams | None = None) -> None:
        self.core = MetadataCore(
            params or MetadataParams(k=1, m=0), BlockIndex(1 << 14), QuotaBook(quota or TenantQuota())
        )
        self.now_s = 0

    def ask(self, message: Message, payload: bytes = b"") -> Message:
        answer = self.core.handle(message, payload, self.now_s * SECOND_NS, UNIX_S + self.now_s)
        self.core.check()
        return answer

    def wait(self, seconds: int) -> None:
        self.now_s += seconds
        self.core.tick(self.now_s * SECOND_NS, UNIX_S + self.now_s)
        self.core.check()


def test_of_two_writers_one_gets_the_lease_and_the_first_commit_wins():
    shard = Shard()
    assert shard.ask(reserve(CHAIN, 0, 8, holder=1)).lease_ns == (30 * SECOND_NS,)
    assert shard.ask(reserve(CHAIN, 0, 8, holder=2)).lease_ns == (LEASE_HELD,)
    assert shard.ask(reserve(CHAIN, 0, 8, holder=1)).lease_ns == (30 * SECOND_NS,), "asking again renews"
    shard.wait(31)
    assert shard.core.num_leases == 0
    assert shard.ask(reserve(CHAIN, 0, 8, holder=2)).lease_ns == (30 * SECOND_NS,)
    assert shard.ask(*commit(CHAIN, 0, 8, nonce=11, holder=1)) == Done(1), "late, but first"
    assert shard.ask(*commit(CHAIN, 0, 8, nonce=12, holder=2)) == Done(0)
    assert shard.ask(reserve(CHAIN, 0, 8, holder=3)).lease_ns == (0,), "it exists"
    assert shard.core.counts.lost_races == 1
    assert shard.ask(match(), hashes(CHAIN)).extents[0].nonce == 11
    assert shard.core.num_leases == 0


def test_a_match_says_everything_about_each_extent():
    shard = Shard()
    message, payload = commit(CHAIN, 0, 8, nonce=2**64 - 1, missing=0b100000000001)
    location = Location(CHAIN[7], 8, 0xFFFF, 2**32 - 1, 2**64 - 1, 0b100000000001, 1)
    shard.ask(Commit(1, ROOT, location, 0, message.parent, 1024, 0), payload)
    shard.ask(*commit(CHAIN, 8, 13, nonce=2))
    second = Location(CHAIN[12], 5, 0, 0, 2)
    assert shard.ask(match(), hashes(CHAIN)) == Matched(13, (location, second), (0, 8))
    assert shard.ask(match(), hashes(CHAIN[:10])) == Matched(10, (location, second), (0, 8))
    assert shard.ask(match(), b"") == Matched(0, (), ())
    assert shard.ask(Touch(1, ROOT), hashes(CHAIN)) == Done(13)


@pytest.mark.parametrize(
    ("message", "payload"),
    [
        (match(), b"x" * 15),
        (match(), b"x" * 16 * 65),
        (Hello(1, "x"), b""),
        (Reserve(1, ((b"short", 1),), (1,), 0), b""),
        (Reserve(1, ((CHAIN[0], 0),), (1,), 0), b""),
        (Reserve(1, ((CHAIN[0], 256),), (1,), 0), b""),
        (Reserve(1, ((CHAIN[0], 1),), (), 0), b""),
        (Reserve(1, ((CHAIN[0], 1),), (-1,), 0), b""),
        (Reserve(2**32, ((CHAIN[0], 1),), (1,), 0), b""),
        (commit(CHAIN, 0, 8, 1)[0], b""),
        (commit(CHAIN, 0, 8, 1)[0], hashes(CHAIN[:7])),
        (commit(CHAIN, 0, 8, 1)[0], hashes(CHAIN[1:9])),
        (commit(CHAIN, 0, 8, 1)[0], hashes(CHAIN[1:8])),
        (Commit(1, ROOT, Location(b"x" * 16, 1, 0, 0, 1), 0, b"", 1, 0), b"x" * 16),
        (Commit(1, ROOT, Location(CHAIN[0], 1, 2**16, 0, 1), 0, b"", 1, 0), hashes(CHAIN[:1])),
        (Commit(1, ROOT, Location(CHAIN[0], 1, 0, 2**32, 1), 0, b"", 1, 0), hashes(CHAIN[:1])),
        (Commit(1, ROOT, Location(CHAIN[0], 1, 0, 0, 2**64), 0, b"", 1, 0), hashes(CHAIN[:1])),
        (Commit(1, ROOT, Location(CHAIN[0], 1, 0, 0, -1), 0, b"", 1, 0), hashes(CHAIN[:1])),
        (Commit(1, ROOT, Location(CHAIN[0], 1, 0, 0, 1, 2**16), 0, b"", 1, 0), hashes(CHAIN[:1])),
        (Commit(2**32, ROOT, Location(CHAIN[0], 1, 0, 0, 1), 0, b"", 1, 0), hashes(CHAIN[:1])),
        (Commit(1, ROOT, Location(CHAIN[0], 1, 0, 0, 1), 2**32, b"", 1, 0), hashes(CHAIN[:1])),
        (Commit(1, ROOT, Location(CHAIN[0], 1, 0, 0, 1), 0, b"", -1, 0), hashes(CHAIN[:1])),
        (Pin(1, ((b"short", 1),), 0, 1), b""),
    ],
)
def test_what_makes_no_sense_is_refused_and_changes_nothing(message: Message, payload: bytes):
    shard = Shard(params=MetadataParams(max_chain_blocks=64))
    with pytest.raises(InvalidRequest) as refused:
        shard.ask(message, payload)
    assert refused.value.code == "bad_request"
    assert (shard.core.index.num_extents, shard.core.num_leases, shard.core.num_pins) == (0, 0, 0)
    assert shard.ask(*commit(CHAIN, 0, 8, nonce=1)) == Done(1)


def test_a_refused_batch_leaves_no_lease_behind():
    shard = Shard(TenantQuota(max_mib=1))
    names = ((CHAIN[7], 8), (CHAIN[15], 8))
    with pytest.raises(QuotaExceeded):
        shard.ask(Reserve(1, names, (600 * 1024, 600 * 1024), 5))
    assert shard.core.num_leases == 0
    assert shard.core.quotas.reserved_kib(TenantId(1)) == 0
    assert shard.core.counts.quota_refusals == 1


def test_a_tenant_over_its_cap_loses_its_own_oldest_leaves_and_no_copies():
    shard = Shard(TenantQuota(max_mib=1))
    shard.ask(*commit(CHAIN, 0, 8, nonce=1, kib=400))
    shard.ask(*commit(CHAIN, 8, 16, nonce=2, kib=400))
    shard.ask(*commit(CHAIN, 16, 24, nonce=3, kib=0))
    other = digests((7, 7))
    shard.ask(*commit(other, 0, 2, nonce=4, tenant=2, kib=900))
    new = digests((8, 8))
    assert shard.ask(reserve(new, 0, 2, holder=1, kib=500)).lease_ns[0]
    assert shard.ask(match(), hashes(CHAIN)).num_blocks == 8, "the deeper one of equal age went"
    assert shard.ask(match(), hashes(other)).num_blocks == 2
    assert shard.core.index.num_extents == 3, "what is charged elsewhere frees nothing here"
    shard.ask(Pin(1, ((CHAIN[7], 8),), 1, 50 * SECOND_NS))
    with pytest.raises(QuotaExceeded):
        shard.ask(reserve(digests((9, 9)), 0, 2, holder=1, kib=500))
    assert shard.ask(match(), hashes(CHAIN)).num_blocks == 8, "pinned"


def test_a_write_rate_lets_bursts_of_ten_seconds_pass():
    shard = Shard(TenantQuota(write_mib_s=1.0))
    assert shard.ask(reserve(CHAIN, 0, 8, holder=1, kib=10 * 1024)).lease_ns[0]
    with pytest.raises(QuotaExceeded):
        shard.ask(reserve(CHAIN, 8, 16, holder=1, kib=1024))
    shard.wait(1)
    assert shard.ask(reserve(CHAIN, 8, 16, holder=1, kib=1024)).lease_ns[0]


def test_pins_end_by_time_by_release_and_with_their_tenant():
    shard = Shard()
    shard.ask(*commit(CHAIN, 0, 8, nonce=1))
    name = (CHAIN[7], 8)
    assert shard.ask(Pin(1, (name, (CHAIN[8], 8)), 1, 10**18)) == Done(1)
    shard.wait(61)
    assert shard.core.num_pins == 0, "no pin is longer than a minute"
    shard.ask(Pin(2, (name,), 1, 10 * SECOND_NS))
    shard.core.drop_tenant(TenantId(2))
    assert shard.core.num_pins == 0
    assert shard.ask(match(), hashes(CHAIN)).num_blocks == 8, "another tenant's data stays"


def test_extents_expire_a_day_after_their_last_match_and_pinned_ones_later():
    shard = Shard(params=MetadataParams(max_pin_s=10**6))
    shard.ask(*commit(CHAIN, 0, 8, nonce=1))
    shard.ask(*commit(CHAIN, 8, 16, nonce=2))
    shard.wait(20 * HOUR_S)
    assert shard.ask(match(), hashes(CHAIN[:8])).num_blocks == 8
    shard.wait(6 * HOUR_S)
    assert shard.ask(match(), hashes(CHAIN)).num_blocks == 8
    shard.ask(Pin(1, ((CHAIN[7], 8),), 1, 30 * HOUR_S * SECOND_NS))
    shard.wait(26 * HOUR_S)
    assert shard.core.index.num_extents == 1
    shard.wait(6 * HOUR_S)
    assert shard.core.index.num_extents == 0
    assert shard.core.counts.expired_extents == 2


def test_evicting_from_the_middle_of_a_chain_keeps_its_beginning():
    shard = Shard()
    for nonce, begin in enumerate(range(0, 32, 8)):
        shard.ask(*commit(CHAIN, begin, begin + 8, nonce=nonce))
    assert shard.ask(Evict(1, ROOT, 16), hashes(CHAIN)) == Done(2)
    assert shard.ask(match(), hashes(CHAIN)).num_blocks == 16
    assert shard.ask(Evict(1, ROOT, -5), hashes(CHAIN)) == Done(2)


def test_a_full_index_refuses_and_goes_on_matching():
    shard = Shard()
    shard.core.index = BlockIndex(1024)
    done: list[list[bytes]] = []

    def fill() -> None:
        for seed in range(100_000):
            chain = digests((seed, 1, 2))
            shard.core.handle(*commit(chain, 0, 3, nonce=seed), 0, UNIX_S)
            done.append(chain)

    with pytest.raises(OverloadError):
        fill()
    shard.core.check()
    assert shard.ask(match(), hashes(done[-1])).num_blocks == 3


def test_look_ups_are_counted_by_the_block_that_could_spread_them():
    shard = Shard()
    shard.core.shards = ShardTable(PoolMap(1, (), (), ("a:1", "b:1")))
    for length in (4, 8, 9, 20):
        shard.ask(match(), hashes(CHAIN[:length]))
    assert dict(shard.core.lookups) == {(CHAIN[0][:16], CHAIN[7][:16]): 2}
