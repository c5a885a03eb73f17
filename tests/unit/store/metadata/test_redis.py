"""The metadata in a real Redis answers as our own shard does."""

from __future__ import annotations

import random
import shutil
import subprocess
import sys
from collections.abc import Iterator

import pytest

from millpond.core.errors import ConfigError, InvalidRequest, QuotaExceeded, TransferFailed
from millpond.core.pool_map import PoolMap
from millpond.core.units import SECOND_NS
from millpond.store.index import BlockIndex
from millpond.store.metadata.core import HOUR_S, MetadataCore, MetadataParams
from millpond.store.metadata.quotas import QuotaBook, TenantQuota
from millpond.store.metadata.redis_backend import RedisMetadata
from millpond.store.net.messages import (
    LEASE_HELD,
    Abort,
    Done,
    Evict,
    Forget,
    Matched,
    Message,
    Pin,
    Touch,
    Unpin,
)
from tests.unit.store.metadata.names import ROOT, commit, digests, hashes, match, reserve
from tests.unit.store.metadata.shards import MovedClock, wait_until
from tests.unit.store.net.peers import within

PARAMS = MetadataParams(k=1, m=0, ttl_hours=4)
CHAIN = digests(range(40))


@pytest.fixture(scope="module")
def redis_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    program = shutil.which("redis-server")
    if program is None:
        pytest.skip("no redis-server on this machine")
    pytest.importorskip("redis", reason="the extra `redis` is not installed")
    folder = tmp_path_factory.mktemp("redis")
    path = folder / "socket"
    options = ["--port", "0", "--unixsocket", str(path), "--save", "", "--dir", str(folder)]
    process = subprocess.Popen([program, *options], stdout=subprocess.DEVNULL)
    try:
        wait_until(path.exists, "redis-server listens")
        yield f"unix://{path}"
    finally:
        process.terminate()
        process.wait(20)


class Shard:
    def __init__(self, url: str, name: str, max_tenant_mib: int = 0) -> None:
        self.clock = MovedClock()
        self.redis = RedisMetadata(
            url, PARAMS, max_tenant_mib=max_tenant_mib, prefix=f"{name}:", clock=self.clock
        )

    def ask(self, message: Message, payload: bytes = b"") -> Message:
        return self.redis.call(message, payload, prefix=b"", deadline_ns=within(10))


@pytest.fixture
def shard(redis_url: str, request: pytest.FixtureRequest) -> Iterator[Shard]:
    made = Shard(redis_url, request.node.name)
    yield made
    made.redis.close()


@pytest.mark.parametrize("seed", range(4))
def test_answers_equal_our_own_shards(shard: Shard, seed: int):
    chance = random.Random(seed)
    core = MetadataCore(PARAMS, BlockIndex(1 << 14), QuotaBook(TenantQuota()))
    chains = [digests((*range(shared), 100 + shared, *range(40))) for shared in (0, 3, 8, 12, 20, 20)]
    leases: dict[tuple[bytes, int], int] = {}
    committed: set[int] = set()
    for nonce in range(300):
        chain, begin = chance.choice(chains), 8 * chance.randrange(4)
        end, holder, kib = begin + chance.randint(1, 8), chance.randint(1, 2), chance.randint(1, 50)
        kind = chance.randrange(4)
        if kind == 0:
            message, payload = reserve(chain, begin, end, holder=holder, kib=kib), b""
            leases[chain[end - 1], end - begin] = holder
        elif kind == 1:
            message, payload = commit(chain, begin, end, nonce, holder=holder, kib=kib)
        elif kind == 2:
            message, payload = match(), hashes(chain[: chance.randint(1, 30)])
        else:
            name = chance.choice([*leases, (chain[end - 1], end - begin)])
            message, payload = Abort(1, (name,), holder), b""
        ours, theirs = core.handle(message, payload, 0, 0), shard.ask(message, payload)
        if isinstance(ours, Matched) and isinstance(theirs, Matched):
            # Where extents overlap, either may serve; how far they reach is one thing.
            assert theirs.num_blocks == ours.num_blocks
            assert {location.nonce for location in theirs.extents} <= committed
        else:
            assert theirs == ours, (nonce, message)
        if kind == 1 and ours == Done(1):
            committed.add(nonce)
    core.check()
    assert shard.redis.charged_kib(1) == core.quotas.tenants()[1]


def test_leases_pins_and_extents_end_by_time(shard: Shard):
    assert shard.ask(reserve(CHAIN, 0, 8, holder=1)).lease_ns == (30 * SECOND_NS,)
    assert shard.ask(reserve(CHAIN, 0, 8, holder=2)).lease_ns == (LEASE_HELD,)
    shard.clock.ahead_s += 31
    assert shard.ask(reserve(CHAIN, 8, 16, holder=2)).lease_ns[0], "asking for anything ends what is over"
    assert shard.redis.charged_kib(1) == (0, 10)
    shard.ask(*commit(CHAIN, 0, 8, nonce=1))
    shard.ask(*commit(CHAIN, 8, 16, nonce=2, holder=2))
    assert shard.ask(reserve(CHAIN, 8, 16, holder=1)).lease_ns == (0,), "it exists"
    shard.clock.ahead_s += 3 * HOUR_S
    assert shard.ask(Touch(1, ROOT), hashes(CHAIN[:8])) == Done(8)
    shard.clock.ahead_s += 2 * HOUR_S
    assert shard.ask(match(), hashes(CHAIN)).num_blocks == 8
    shard.clock.ahead_s += 5 * HOUR_S
    assert shard.ask(match(), hashes(CHAIN)).num_blocks == 0
    shard.ask(reserve(CHAIN, 0, 8, holder=1))
    assert shard.redis.charged_kib(1) == (0, 10)


def test_quotas_evict_the_tenants_own_oldest_but_no_pinned_ones(redis_url: str):
    shard = Shard(redis_url, "quotas", max_tenant_mib=1)
    shard.ask(*commit(CHAIN, 0, 8, nonce=1, kib=400))
    shard.clock.ahead_s += 10
    shard.ask(*commit(CHAIN, 8, 16, nonce=2, kib=400))
    pin = Pin(1, ((CHAIN[7], 8), (CHAIN[30], 8)), 5, 50 * SECOND_NS)
    assert shard.ask(pin) == Done(1)
    assert shard.ask(reserve(digests((5,)), 0, 1, holder=1, kib=500)).lease_ns[0]
    assert shard.ask(match(), hashes(CHAIN)).num_blocks == 8
    with pytest.raises(QuotaExceeded):
        shard.ask(reserve(digests((6,)), 0, 1, holder=1, kib=500))
    assert shard.ask(Unpin(1, pin.extents, 5)) == Done(1)
    assert shard.ask(reserve(digests((6,)), 0, 1, holder=1, kib=500)).lease_ns[0]
    shard.redis.set_quota(1, 5)
    assert shard.ask(reserve(digests((7,)), 0, 1, holder=1, kib=3000)).lease_ns[0]
    shard.redis.close()


def test_forget_and_evict(shard: Shard):
    for nonce, begin in enumerate(range(0, 32, 8)):
        shard.ask(*commit(CHAIN, begin, begin + 8, nonce=nonce))
    found = shard.ask(match(), hashes(CHAIN))
    assert isinstance(found, Matched)
    first, second = found.extents[:2]
    assert shard.ask(Forget(1, ROOT, second, 8)) == Done(1)
    assert shard.ask(Forget(1, ROOT, second, 8)) == Done(0)
    assert shard.ask(match(), hashes(CHAIN)).extents == (first,)
    assert shard.ask(Evict(1, ROOT, 0), hashes(CHAIN)) == Done(3)
    assert shard.redis.charged_kib(1) == (0, 0)


def test_maps_refusals_and_a_redis_that_is_away(shard: Shard):
    with pytest.raises(TransferFailed, match="no pool map"):
        shard.redis.pool_map(deadline_ns=within(10))
    shard.redis.update_map(PoolMap(3, (), (), ()))
    assert shard.redis.pool_map(deadline_ns=within(10)).version == 3
    for message, payload in (
        (match(), b"x" * 15),
        (commit(CHAIN, 0, 8, 1)[0], hashes(CHAIN[1:9])),
        (Pin(1, ((b"short", 1),), 1, 1), b""),
    ):
        with pytest.raises(InvalidRequest):
            shard.ask(message, payload)
    away = RedisMetadata("unix:///nowhere/socket")
    with pytest.raises(TransferFailed, match="Redis"):
        away.pool_map(deadline_ns=within(10))


def test_without_the_package_the_extra_is_named(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "redis", None)
    with pytest.raises(ConfigError, match=r"millpond\[redis\]"):
        RedisMetadata("redis://localhost")
