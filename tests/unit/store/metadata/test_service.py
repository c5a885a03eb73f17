"""Metadata shards on their ports and the client in front of them."""

from __future__ import annotations

import socket
import threading
from dataclasses import replace
from pathlib import Path

import pytest

from millpond.core.errors import (
    BadFrame,
    DataError,
    MillpondError,
    QuotaExceeded,
    TransferFailed,
    TransientError,
    Unauthorized,
)
from millpond.core.pool_map import PoolMap
from millpond.policies.metadata_shard import ShardTable
from millpond.store.clock import SystemClock
from millpond.store.files import DiskFiles
from millpond.store.metadata.client import MetadataClient
from millpond.store.metadata.server import MetadataServer, MetadataServerParams
from millpond.store.net.messages import (
    LEASE_HELD,
    Abort,
    Done,
    Evict,
    Forget,
    Matched,
    MetadataStatus,
    Pin,
    Touch,
    Unpin,
)
from tests.unit.store.metadata.names import ROOT, commit, digests, hashes, match, reserve
from tests.unit.store.metadata.shards import TOKEN, Shards, shards, stop, wait_until
from tests.unit.store.net.peers import within

CHAINS = [digests((seed, *range(40))) for seed in range(60)]


def put(made: Shards, chain: list[bytes], begin: int, end: int, nonce: int, **more: int) -> int:
    message, payload = commit(chain, begin, end, nonce, **more)
    return made.client.call(message, payload, prefix=hashes(chain), deadline_ns=within(10)).count


def find(made: Shards, chain: list[bytes]) -> Matched:
    answer = made.client.call(match(), hashes(chain), prefix=hashes(chain), deadline_ns=within(10))
    assert isinstance(answer, Matched)
    return answer


def statuses(made: Shards) -> list[MetadataStatus]:
    found = list(made.client.statuses(deadline_ns=within(10)).values())
    assert all(isinstance(status, MetadataStatus) for status in found), found
    return found


@pytest.mark.parametrize("count", [1, 3])
def test_every_request_reaches_its_shard(tmp_path: Path, count: int):
    with shards(tmp_path, count) as made:
        for nonce, chain in enumerate(CHAINS):
            prefix, name = hashes(chain), (chain[23], 8)
            given = made.client.call(reserve(chain, 16, 24, holder=5), prefix=prefix, deadline_ns=within(10))
            assert given.lease_ns[0] > 0
            assert [put(made, chain, at, at + 8, 10 * nonce + at // 8, holder=5) for at in (0, 8, 16)] == [
                1
            ] * 3
            assert put(made, chain, 0, 8, 7777) == 0, "the first writer wins"
            assert find(made, chain).num_blocks == 24
            assert [location.nonce for location in find(made, chain).extents] == [
                10 * nonce + i for i in range(3)
            ]
            ask = made.client.call
            assert ask(Touch(1, ROOT), prefix, prefix=prefix, deadline_ns=within(10)) == Done(24)
            assert ask(Pin(1, (name,), 5, 10**10), prefix=prefix, deadline_ns=within(10)) == Done(1)
            assert ask(Unpin(1, (name,), 5), prefix=prefix, deadline_ns=within(10)) == Done(1)
            last = find(made, chain).extents[2]
            assert ask(Forget(1, ROOT, last, 16), prefix=prefix, deadline_ns=within(10)) == Done(1)
            assert find(made, chain).num_blocks == 16
        assert sum(status.num_leases + status.num_pins for status in statuses(made)) == 0
        assert all(status.counts["matches"] > 0 for status in statuses(made)), "all shards have work"
        chain = CHAINS[0]
        evict = Evict(1, ROOT, 0)
        assert made.client.call(evict, hashes(chain), prefix=hashes(chain), deadline_ns=within(10)).count == 2
        assert find(made, chain).num_blocks == 0


def test_what_begins_above_depth_d_is_on_every_shard_and_charged_once(tmp_path: Path):
    with shards(tmp_path, 3) as made:
        shared = digests(range(6))
        assert put(made, shared, 0, 6, 1, kib=100) == 1
        longer = [digests((*range(6), 1000 + seed, *range(20))) for seed in range(30)]
        for chain in longer:
            assert find(made, chain).num_blocks == 6
        assert [status.num_extents for status in statuses(made)] == [1, 1, 1]
        assert sum(kib for status in statuses(made) for _, kib, _ in status.tenants) == 120
        where = find(made, shared).extents[0]
        forget = Forget(1, ROOT, where, 0)
        assert made.client.call(forget, prefix=hashes(longer[0]), deadline_ns=within(10)).count == 1
        assert [status.num_extents for status in statuses(made)] == [0, 0, 0]


def test_a_batch_over_several_shards_is_given_all_or_nothing(tmp_path: Path):
    with shards(tmp_path, 3) as made:
        chain = digests(range(40))
        batch = replace_extents(reserve(chain, 0, 1, holder=1), [(chain[i], 1) for i in range(20)], 1024)
        given = made.client.call(batch, prefix=hashes(chain), deadline_ns=within(10))
        assert len(given.lease_ns) == 20
        assert all(given.lease_ns)
        assert [status.num_leases > 0 for status in statuses(made)].count(True) >= 2
        other = replace_extents(reserve(chain, 0, 1, holder=2), list(batch.extents), 1024)
        held = made.client.call(other, prefix=hashes(chain), deadline_ns=within(10))
        assert held.lease_ns == (LEASE_HELD,) * 20
        abort = Abort(1, batch.extents, 1)
        assert made.client.call(abort, prefix=hashes(chain), deadline_ns=within(10)) == Done(20)
        made.client.set_quota(1, max_mib=3, deadline_ns=within(10))
        big = replace_extents(batch, list(batch.extents), 200 * 1024)
        with pytest.raises(QuotaExceeded):
            made.client.call(big, prefix=hashes(chain), deadline_ns=within(10))
        assert sum(status.num_leases for status in statuses(made)) == 0


def replace_extents(message, names: list[tuple[bytes, int]], num_bytes: int):
    return type(message)(message.tenant, tuple(names), (num_bytes,) * len(names), message.holder)


def test_a_popular_prefix_deepens_and_its_chains_move_by_use(tmp_path: Path):
    params = MetadataServerParams(report_s=0.0)
    with shards(tmp_path, 4, params=params) as made:
        chains = [digests((*range(30), 500 + seed, *range(20))) for seed in range(40)]
        for nonce, chain in enumerate(chains):
            for at in range(0, 48, 8):
                put(made, chain, at, at + 8, nonce * 100 + at)

        def is_spread() -> bool:
            for chain in chains:
                assert find(made, chain).num_blocks == 48, "nothing is lost on the way"
            depths = dict(made.client.pool_map(deadline_ns=within(10)).depths)
            return depths == {chains[0][0][:16]: 32}

        wait_until(is_spread, "depth 32", 60)
        for chain in chains:
            assert find(made, chain).num_blocks == 48
        moved = made.client.counts.moved
        made.client.close()
        made.client = MetadataClient(made.pool_map.metadata, name="later", token=TOKEN, moving_s=0)
        before = [status.counts["matches"] for status in statuses(made)]
        for _ in range(5):
            for chain in chains:
                assert find(made, chain).num_blocks == 48
        asked = [s.counts["matches"] - b for s, b in zip(statuses(made), before, strict=True)]
        assert moved > 0
        assert min(asked) > 0
        assert sum(asked) == 200, "everything has moved: nobody needs to ask twice"
        wait_until(lambda: {s.map_version for s in statuses(made)} == {3}, "all shards have the map")


def test_a_client_with_an_old_map_is_redirected_once(tmp_path: Path):
    with shards(tmp_path, 4) as made:
        chain = digests((3, *range(60)))
        old, new = ShardTable(made.pool_map), replace(made.pool_map, version=2, depths=((chain[0][:16], 32),))
        chain = next(
            c
            for seed in range(1000)
            if old.owner(hashes(c := digests((3, *range(20), seed, *range(30)))))
            != ShardTable(new).owner(hashes(c))
        )
        assert find(made, chain).num_blocks == 0
        other = MetadataClient(made.pool_map.metadata, name="other", token=TOKEN)
        other.update_map(new, deadline_ns=within(10))
        message, payload = commit(chain, 0, 8, 1)
        other.call(message, payload, prefix=hashes(chain), deadline_ns=within(10))
        other.close()
        assert find(made, chain).num_blocks == 8
        assert made.client.counts.redirects == 1
        assert find(made, chain).num_blocks == 8
        assert made.client.counts.redirects == 1
        assert made.client.update_map(made.pool_map, deadline_ns=within(10)) is False, (
            "older maps are refused"
        )


def test_quotas_and_dropped_tenants_hold_over_a_restart(tmp_path: Path):
    with shards(tmp_path, 1) as made:
        made.client.set_quota(1, max_mib=1, deadline_ns=within(10))
        put(made, CHAINS[0], 0, 8, 1, tenant=2)
        put(made, CHAINS[1], 0, 8, 2)
        assert made.client.drop_tenant(2, deadline_ns=within(10)) == 1
        assert find(made, CHAINS[0]).num_blocks == 0
    with shards(tmp_path, 1, pool_map=PoolMap(2, (), (), ())) as made:
        assert find(made, CHAINS[0]).num_blocks == 0
        assert find(made, CHAINS[1]).num_blocks == 8
        big = reserve(CHAINS[2], 0, 8, holder=1, kib=2000)
        with pytest.raises(QuotaExceeded):
            made.client.call(big, prefix=hashes(CHAINS[2]), deadline_ns=within(10))


def test_leases_and_pins_end_while_nobody_asks(tmp_path: Path):
    with shards(tmp_path) as made:
        put(made, CHAINS[0], 0, 8, 1)
        prefix = hashes(CHAINS[0])
        made.client.call(Pin(1, ((CHAINS[0][7], 8),), 1, 10**18), prefix=prefix, deadline_ns=within(10))
        made.client.call(reserve(CHAINS[0], 8, 16, holder=1), prefix=prefix, deadline_ns=within(10))
        (status,) = statuses(made)
        assert (status.num_leases, status.num_pins) == (1, 1)
        made.clock.ahead_s += 100
        wait_until(lambda: statuses(made)[0].num_leases + statuses(made)[0].num_pins == 0, "both over")


def test_threads_that_race_for_one_extent_get_one_winner(tmp_path: Path):
    with shards(tmp_path, 2) as made:
        wins: list[int] = []

        def write(holder: int) -> None:
            for round_number, chain in enumerate(CHAINS[:20]):
                if put(made, chain, 0, 8, nonce=holder * 1000 + round_number, holder=holder):
                    wins.append(round_number)

        threads = [threading.Thread(target=write, args=(holder,)) for holder in range(1, 5)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert sorted(wins) == list(range(20))


@pytest.mark.parametrize(
    ("request_", "payload"),
    [
        (match(), b"x" * 17),
        (commit(CHAINS[0], 0, 8, 1)[0], b""),
        (commit(CHAINS[0], 0, 8, 1)[0], b"x" * 128),
        (replace_extents(reserve(CHAINS[0], 0, 8, holder=1), [(b"short", 1)], 1), b""),
    ],
)
def test_malformed_requests_get_a_typed_error_and_the_connection_goes_on(tmp_path: Path, request_, payload):
    with shards(tmp_path) as made:
        with pytest.raises(BadFrame) as refused:
            made.client.call(request_, payload, prefix=payload or b"x" * 16, deadline_ns=within(10))
        assert refused.value.code == "store.bad_request"
        assert put(made, CHAINS[0], 0, 8, 1) == 1
        assert made.servers[0].num_refused_peers == 0


@pytest.mark.parametrize(
    "garbage",
    [
        b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
        b"\0" * 64,
        b"MPST\xff\xff" + b"\0" * 40,
        b"MPST\x01\x00\x01\x00" + b"\xff" * 16,
    ],
)
def test_garbage_on_the_port_ends_its_connection_only(tmp_path: Path, garbage: bytes):
    with shards(tmp_path) as made:
        host, port = made.servers[0].address.split(":")
        with socket.create_connection((host, int(port)), timeout=10) as peer:
            peer.sendall(garbage)
            while peer.recv(4096):
                pass
        wait_until(lambda: made.servers[0].num_refused_peers == 1, "counted")
        assert put(made, CHAINS[0], 0, 8, 1) == 1


def test_a_wrong_token_is_refused(tmp_path: Path):
    with shards(tmp_path) as made:
        stranger = MetadataClient(made.pool_map.metadata, name="stranger", token="guess")
        with pytest.raises(Unauthorized):
            stranger.pool_map(deadline_ns=within(10))
        stranger.close()


def test_a_shard_that_is_away_costs_a_typed_error_and_its_chains_only(tmp_path: Path):
    with shards(tmp_path, 3) as made:
        for nonce, chain in enumerate(CHAINS):
            put(made, chain, 0, 8, nonce)
            put(made, chain, 8, 16, 1000 + nonce)
        stop(made.servers[1])
        table = ShardTable(made.pool_map)
        for chain in CHAINS:
            if table.owner(hashes(chain)) == 1:
                with pytest.raises(TransientError):
                    find(made, chain)
            else:
                assert find(made, chain).num_blocks == 16
        answers = made.client.statuses(deadline_ns=within(10))
        assert [isinstance(answer, MillpondError) for answer in answers.values()] == [False, True, False]


def test_a_shard_without_a_map_says_so(tmp_path: Path):
    server = MetadataServer(DiskFiles(tmp_path), "127.0.0.1:0", name="m0", token=TOKEN, clock=SystemClock())
    server.start()
    client = MetadataClient([server.address], name="test", token=TOKEN)
    try:
        with pytest.raises(TransferFailed, match="no pool map"):
            client.pool_map(deadline_ns=within(10))
        client.update_map(PoolMap(4, (), (), (server.address,)), deadline_ns=within(10))
        assert client.pool_map(deadline_ns=within(10)).version == 4
    finally:
        client.close()
        stop(server)


def test_nobody_there_is_a_transient_error():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
    client = MetadataClient([address], name="test")
    with pytest.raises((TransientError, DataError)):
        client.pool_map(deadline_ns=within(5))
    client.close()
