from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np
import pytest

from millpond.control.extent_read import ShardOutcome
from millpond.control.extent_write import ExtentWriteParams, WriteEnd
from millpond.core.errors import (
    DeadlineExceeded,
    InvalidRequest,
    InvariantBroken,
    TransferFailed,
    TransientError,
)
from millpond.core.extents import ExtentId
from millpond.store.chain import cut_at_windows
from millpond.store.extent_get import BlockSink, GetEnd, RowOrder, RowsReady
from tests.unit.store.pool_cluster import (
    LAYOUT,
    SETTINGS,
    Cluster,
    blocks_of,
    bytes_of,
    chain_of,
    cluster,
    empty_blocks,
    soon,
)


@pytest.fixture
def made() -> Iterator[Cluster]:
    with cluster() as running:
        yield running


class Recorder(BlockSink):
    """Notes the order in which rows come."""

    def __init__(self, blocks: list[np.ndarray]) -> None:
        super().__init__(blocks)
        self.seen: list[tuple[int, int]] = []
        self.shortened: list[tuple[int, GetEnd]] = []

    def on_rows(self, ready: RowsReady) -> None:
        super().on_rows(ready)
        self.seen += [(row, ready.begin_block) for row in range(ready.begin_row, ready.end_row)]

    def on_shortened(self, num_blocks: int, reason: GetEnd) -> None:
        self.shortened.append((num_blocks, reason))


def test_what_was_put_is_matched_and_read(made: Cluster):
    chain = chain_of(70)
    results = made.put(chain)
    assert [(r.begin, r.end, r.result) for r in results] == [
        (0, 32, WriteEnd.PUBLISHED),
        (32, 64, WriteEnd.PUBLISHED),
        (64, 70, WriteEnd.PUBLISHED),
    ]
    hit, result = made.read(chain)
    assert hit.num_blocks == result.num_blocks == 70
    assert set(result.ends) == {GetEnd.WHOLE}


def test_extents_are_cut_at_windows():
    assert cut_at_windows(0, 70, 32) == [(0, 32), (32, 64), (64, 70)]
    assert cut_at_windows(5, 32, 32) == [(5, 32)]
    assert cut_at_windows(31, 34, 32) == [(31, 32), (32, 34)]
    assert cut_at_windows(3, 5, 1) == [(3, 4), (4, 5)]


def test_a_partial_hit_reads_and_proves_only_its_columns(made: Cluster):
    chain = chain_of(32)
    made.put(chain)
    for num_blocks in (1, 5, 17, 31):
        shorter = replace(chain, digests=chain.digests[:num_blocks])
        hit, result = made.read(shorter)
        assert hit.num_blocks == result.num_blocks == num_blocks
    other = chain_of(64)
    forked = replace(chain, digests=(*chain.digests[:10], *other.digests[40:44]))
    assert made.read(forked)[1].num_blocks == 10


def test_a_second_writer_sends_nothing(made: Cluster):
    chain = chain_of(8)
    made.put(chain)
    num_records = sum(len(peer.records) for peer in made.peers.values())
    assert [r.result for r in made.put(chain)] == [WriteEnd.EXISTS]
    assert sum(len(peer.records) for peer in made.peers.values()) == num_records


def test_rows_come_in_the_order_asked_for(made: Cluster):
    chain = chain_of(96)
    made.put(chain)
    hit = made.pool.match(chain)
    for order, key in ((RowOrder.ROWS, lambda pair: pair), (RowOrder.EXTENTS, lambda pair: pair[::-1])):
        sink = Recorder(empty_blocks(96))
        made.pool.get(hit, sink, deadline_ns=soon(), order=order)
        assert sink.seen == sorted(sink.seen, key=key)
        assert len(sink.seen) == 4 * 3


def test_rows_come_in_order_also_if_there_are_more_extents_than_buffers(made: Cluster):
    chain = chain_of(320)
    made.put(chain)
    hit = made.pool.match(chain)
    assert len(hit.extents) == 10 > SETTINGS.pool.num_buffers
    blocks = empty_blocks(320)
    sink = Recorder(blocks)
    result = made.pool.get(hit, sink, deadline_ns=soon(), order=RowOrder.ROWS)
    assert result.num_blocks == 320
    assert sink.seen == sorted(sink.seen)
    assert all(np.array_equal(b, bytes_of(d)) for b, d in zip(blocks, chain.digests, strict=True))
    lost = hit.extents[7].extent.digest
    for peer in made.peers.values():
        peer.records = {key: body for key, body in peer.records.items() if key[0] != lost}
    result = made.pool.get(hit, Recorder(blocks), deadline_ns=soon(), order=RowOrder.ROWS)
    assert result.num_blocks == 7 * 32
    assert result.gone == (7,)


def test_another_tenant_or_salt_finds_nothing(made: Cluster):
    made.put(chain_of(8))
    assert made.pool.match(chain_of(8, tenant=8)).num_blocks == 0
    assert made.pool.match(chain_of(8, salt=b"x")).num_blocks == 0


@pytest.mark.parametrize("num_dead", [1, 2])
def test_any_two_nodes_may_be_dead(made: Cluster, num_dead: int):
    chains = [chain_of(40, first_id=100 * index) for index in range(4)]
    for chain in chains:
        made.put(chain)
    for name in list(made.peers)[:num_dead]:
        made.peers[name].close()
    for chain in chains:
        assert made.read(chain)[1].num_blocks == 40


def test_three_dead_nodes_shorten_the_hit_but_nothing_is_forgotten(made: Cluster):
    chain = chain_of(32)
    made.put(chain)
    location = next(iter(made.metadata.extents.values()))
    group = made.metadata.map.epochs[0].groups[location.group]
    for point in group[:3]:
        made.peers[made.metadata.map.epochs[0].points[point]].close()
    hit, result = made.read(chain)
    assert (hit.num_blocks, result.num_blocks, result.ends) == (32, 0, (GetEnd.LOST,))
    assert made.metadata.extents, "the nodes may come back"


def test_a_corrupt_payload_is_an_erasure_and_is_reported(made: Cluster, wait_until: Callable[..., None]):
    chain = chain_of(32)
    made.put(chain)
    bad = list(made.peers.values())[2]
    bad.faults.flip_payload = True

    def is_found() -> bool:
        assert made.read(chain)[1].num_blocks == 32
        return bool(made.pool.heals)

    if bad.name in nodes_of(made):
        wait_until(is_found, "a read that does not leave this shard out", 20)
    assert {order.outcome for order in made.pool.heals} <= {ShardOutcome.CORRUPT}
    outcomes = made.pool.verify(made.pool.match(chain), deadline_ns=soon())[0]
    assert outcomes.count(ShardOutcome.CORRUPT) == int(bad.name in nodes_of(made))


def nodes_of(made: Cluster) -> list[str]:
    location = next(iter(made.metadata.extents.values()))
    epoch = made.metadata.map.epochs[0]
    return [epoch.points[point] for point in epoch.groups[location.group]]


@pytest.mark.parametrize("fault", ["flip_payload", "wrong_shard", "short"])
def test_two_lying_nodes_never_give_wrong_bytes(made: Cluster, fault: str, wait_until: Callable[..., None]):
    chains = [chain_of(32, first_id=7000 * index) for index in range(3)]
    for chain in chains:
        made.put(chain)
    wait_until(lambda: sum(len(p.records) for p in made.peers.values()) == 18, "every shard is stored")
    for peer in list(made.peers.values())[:2]:
        setattr(peer.faults, fault, True)
    for chain in chains:
        assert made.read(chain)[1].num_blocks == 32


def test_three_lying_nodes_give_a_shorter_hit(made: Cluster):
    chain = chain_of(32)
    made.put(chain)
    for name in nodes_of(made)[:3]:
        made.peers[name].faults.flip_payload = True
    assert made.read(chain)[1].ends == (GetEnd.LOST,)


def test_lost_extents_are_forgotten_and_can_be_written_again(made: Cluster):
    chain = chain_of(64)
    made.put(chain)
    lost = made.pool.match(chain).extents[1]
    for peer in made.peers.values():
        for key in [key for key in peer.records if key[0] == lost.location.digest]:
            del peer.records[key]
    hit, result = made.read(chain)
    assert (hit.num_blocks, result.num_blocks) == (64, 32)
    assert result.gone == (1,)
    assert made.pool.match(chain).num_blocks == 32
    made.put(chain, 32, 64)
    assert made.read(chain)[1].num_blocks == 64


def test_a_silent_metadata_does_not_hold_up_a_get_that_found_losses():
    chain = chain_of(128)
    patient = replace(SETTINGS.pool, metadata_s=15.0)  # what each of four calls would wait
    with cluster(pool=patient) as made:
        made.put(chain)
        hit = made.pool.match(chain)
        for peer in made.peers.values():
            peer.records.clear()
        made.metadata.is_silent = True
        began_ns = time.monotonic_ns()
        result = made.pool.get(hit, Recorder(empty_blocks(128)), deadline_ns=soon(0.2))
        assert time.monotonic_ns() - began_ns < 10e9
        made.metadata.is_silent = False
    assert len(result.gone) > 0
    assert result.num_blocks == 0


def test_a_metadata_that_falls_silent_during_a_put_does_not_hold_it_up(made: Cluster):
    """Each of its leases is given back, or left to expire, soon after the deadline."""
    chain = chain_of(256)
    for peer in made.peers.values():
        peer.faults.is_silent = True
    silence = threading.Timer(0.1, setattr, (made.metadata, "is_silent", True))
    silence.start()
    began_ns = time.monotonic_ns()
    results = made.pool.put(chain, 0, blocks_of(chain), deadline_ns=soon(0.4))
    silence.join()
    assert time.monotonic_ns() - began_ns < 6e9  # eight leases, each given a second, would take 8 s
    assert {result.result for result in results} == {WriteEnd.LATE}


def test_a_shard_of_another_write_is_not_accepted(made: Cluster):
    """Two writers of one extent: shards of the loser never mix with those of the winner."""
    chain = chain_of(8)
    made.put(chain)
    (key, location), *_ = made.metadata.extents.items()
    for peer in made.peers.values():
        for name in list(peer.records):
            peer.records[(*name[:3], name[3] + 1)] = peer.records.pop(name)
    made.metadata._forget(key[0], key[1], location)
    forged = type(location)(*[*list_of(location)[:4], location.nonce + 1])
    made.metadata.extents[key] = forged
    made.metadata.blocks = {
        (key[0], key[1], digest[:16]): [(0, column, forged)] for column, digest in enumerate(chain.digests)
    }
    assert made.read(chain)[1].num_blocks == 0


def list_of(message: object) -> list:
    return [getattr(message, field) for field in message.__struct_fields__]


@pytest.mark.parametrize(
    "change",
    [
        {"lineage": 1},
        {"num_blocks": 7},
        {"digest": bytes(32)},
        {"group": 99},
        {"nonce": 1},
    ],
)
def test_a_location_that_lies_gives_nothing(made: Cluster, change: dict[str, object]):
    chain = chain_of(8)
    made.put(chain)
    hit = made.pool.match(chain)
    part = hit.extents[0]
    fields = dict(zip(part.location.__struct_fields__, list_of(part.location), strict=True)) | change
    lying = replace(part, location=type(part.location)(**fields))
    result = made.pool.get(replace(hit, extents=(lying,)), BlockSink(empty_blocks(8)), deadline_ns=soon())
    assert result.num_blocks == 0
    assert result.ends[0] in {GetEnd.LOST, GetEnd.STALE}


def test_an_unknown_epoch_is_stale(made: Cluster):
    chain = chain_of(8)
    made.put(chain)
    hit = made.pool.match(chain)
    location = hit.extents[0].location
    fields = dict(zip(location.__struct_fields__, list_of(location), strict=True)) | {"epoch": 9}
    lying = replace(hit.extents[0], location=type(location)(**fields))
    result = made.pool.get(replace(hit, extents=(lying,)), BlockSink(empty_blocks(8)), deadline_ns=soon())
    assert result.ends == (GetEnd.STALE,)


def test_a_silent_node_is_hedged_around(made: Cluster):
    chain = chain_of(32)
    made.put(chain)
    made.peers[nodes_of(made)[0]].faults.is_silent = True
    made.peers[nodes_of(made)[1]].faults.is_silent = True
    for _ in range(5):
        assert made.read(chain)[1].num_blocks == 32
    assert made.pool.client.reads.counts.hedges > 0


def test_at_the_deadline_the_prefix_that_is_there_counts(made: Cluster):
    chain = chain_of(64)
    made.put(chain, 0, 32)
    made.put(chain, 32, 64)
    late = made.pool.match(chain).extents[1].location
    epoch = made.metadata.map.epochs[0]
    names = [epoch.points[point] for point in epoch.groups[late.group]]
    for name in names[:2]:
        for key in [key for key in made.peers[name].records if key[0] == late.digest]:
            del made.peers[name].records[key]
    made.peers[names[2]].faults.is_silent = True
    began_ns = time.monotonic_ns()
    sink = Recorder(empty_blocks(64))
    result = made.pool.get(made.pool.match(chain), sink, deadline_ns=soon(0.5))
    assert time.monotonic_ns() - began_ns < 5e9
    assert result.num_blocks == 32
    assert sink.shortened == [(32, GetEnd.LATE)]
    assert result.ends == (GetEnd.WHOLE, GetEnd.LATE)


def test_a_dead_pool_ends_at_the_deadline(made: Cluster):
    chain = chain_of(32)
    made.put(chain)
    for peer in made.peers.values():
        peer.faults.is_silent = True
    began_ns = time.monotonic_ns()
    _, result = made.read(chain, deadline_ns=soon(0.3))
    assert result.ends == (GetEnd.LATE,)
    assert 0.3e9 <= time.monotonic_ns() - began_ns < 3e9


def test_one_refusing_node_is_noted_as_missing(made: Cluster):
    next(iter(made.peers.values())).faults.refuse_puts = True
    chains = [chain_of(4, first_id=100_000 * index) for index in range(4)]
    for chain in chains:
        assert [r.result for r in made.put(chain)] == [WriteEnd.PUBLISHED]
        assert made.read(chain)[1].num_blocks == 4
    missing = [location.missing for location in made.metadata.extents.values()]
    assert all(bits.bit_count() <= 1 for bits in missing)
    assert any(missing)


def test_two_refusing_nodes_publish_nothing(made: Cluster):
    for peer in made.peers.values():
        peer.faults.refuse_puts = True
    assert [r.result for r in made.put(chain_of(40))] == [WriteEnd.REFUSED] * 2
    assert not made.metadata.extents
    assert not made.metadata.leases, "given back, so that another writer need not wait"


def test_two_writers_at_once_write_it_once(made: Cluster):
    chain, results = chain_of(40), []
    threads = [threading.Thread(target=lambda: results.extend(made.put(chain))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    ends = [r.result for r in results]
    assert ends.count(WriteEnd.PUBLISHED) == 2
    assert set(ends) <= {WriteEnd.PUBLISHED, WriteEnd.EXISTS, WriteEnd.HELD}
    assert made.read(chain)[1].num_blocks == 40


def test_metadata_that_is_down_is_a_typed_error(made: Cluster):
    chain = chain_of(8)
    made.metadata.is_down = True
    with pytest.raises(TransientError):
        made.pool.match(chain)
    with pytest.raises(TransientError):
        made.put(chain)
    assert not any(peer.records for peer in made.peers.values())


def test_bad_blocks_are_refused_before_anything_is_sent(made: Cluster):
    chain = chain_of(2)
    good = blocks_of(chain)
    for blocks in ([], good * 2, [good[0], good[1][:-1]], [good[0], np.zeros(0, np.uint8)]):
        with pytest.raises(InvalidRequest):
            made.pool.put(chain, 0, blocks, deadline_ns=soon())
    with pytest.raises(InvalidRequest):
        replace(chain, digests=(b"short",))
    assert not made.metadata.leases
    assert not any(peer.records for peer in made.peers.values())


def test_a_node_that_comes_back_is_used_again(made: Cluster, wait_until: Callable[..., None]):
    chain = chain_of(32)
    made.put(chain)
    for peer in made.peers.values():
        for stream in list(peer._streams):
            stream.shutdown()
    wait_until(lambda: made.read(chain)[1].num_blocks == 32, "connections are made again")


def test_prefetch_runs_beside_and_can_be_cancelled(made: Cluster):
    chain = chain_of(64)
    made.put(chain)
    blocks = empty_blocks(64)
    prefetch = made.pool.prefetch(made.pool.match(chain), BlockSink(blocks), deadline_ns=soon())
    assert prefetch.result(deadline_ns=soon()).num_blocks == 64
    assert all(np.array_equal(b, bytes_of(d)) for b, d in zip(blocks, chain.digests, strict=True))
    for peer in made.peers.values():
        peer.faults.is_silent = True
    stuck = made.pool.prefetch(made.pool.match(chain), BlockSink(blocks), deadline_ns=soon(60))
    stuck.cancel()
    assert stuck.result(deadline_ns=soon()).num_blocks == 0


def test_pins_touch_and_evict(made: Cluster):
    chain = chain_of(64)
    made.put(chain)
    hit = made.pool.match(chain)
    assert made.pool.pin(hit, 10**9) == 2
    made.pool.release(hit)
    assert not made.metadata.pins
    assert made.pool.touch(chain) == 64
    assert made.pool.evict(chain, 32) == 1
    assert made.pool.match(chain).num_blocks == 32


def test_verify_names_every_bad_shard(made: Cluster):
    chain = chain_of(8)
    made.put(chain)
    names = nodes_of(made)
    made.peers[names[1]].faults.flip_payload = True
    made.peers[names[3]].records.clear()
    made.peers[names[5]].close()
    outcomes = made.pool.verify(made.pool.match(chain), deadline_ns=soon(2))
    valid = ShardOutcome.VALID
    assert outcomes == [
        (valid, ShardOutcome.CORRUPT, valid, ShardOutcome.ABSENT, valid, ShardOutcome.UNREACHABLE)
    ]


def test_a_window_of_two_shards_still_reads_everything():
    window = replace(SETTINGS.window, max_in_flight_bytes=2 * 40_000)
    with cluster(window=window) as made:
        chain = chain_of(64)
        made.put(chain)
        assert made.read(chain)[1].num_blocks == 64


def test_writes_go_on_with_few_buffers_and_a_silent_metadata_ends_them():
    with cluster(write=ExtentWriteParams(deadline_s=1.0)) as made:
        chain = chain_of(32 * 20)
        assert {r.result for r in made.put(chain)} == {WriteEnd.PUBLISHED}
        assert made.read(chain)[1].num_blocks == 640


def test_the_name_of_an_extent_is_its_last_block():
    chain = chain_of(3)
    assert chain.extent(0, 3) == ExtentId(chain.digests[2], 3)
    assert chain.parent(0) == chain.root
    assert LAYOUT.block_bytes == 16384


def test_closing_ends_what_runs_and_what_waits(made: Cluster):
    chain = chain_of(64)
    made.put(chain)
    for peer in made.peers.values():
        peer.faults.is_silent = True
    hit = made.pool.match(chain)
    sink = BlockSink(empty_blocks(64))
    stuck = [made.pool.prefetch(hit, sink, deadline_ns=soon(60)) for _ in range(4)]
    with pytest.raises(DeadlineExceeded):
        stuck[0].result(deadline_ns=soon(0.05))
    began_ns = time.monotonic_ns()
    made.pool.close()
    assert time.monotonic_ns() - began_ns < 20e9
    ends = []
    for prefetch in stuck:
        try:
            ends.append(prefetch.result(deadline_ns=soon()).num_blocks)
        except TransferFailed:
            ends.append(0)
    assert ends == [0] * 4


def test_a_read_that_waits_for_a_buffer_can_be_cancelled(made: Cluster):
    chain = chain_of(64)
    made.put(chain)
    hit = made.pool.match(chain)
    held = [made.pool._buffers.take(deadline_ns=soon()) for _ in range(SETTINGS.pool.num_buffers)]
    prefetch = made.pool.prefetch(hit, BlockSink(empty_blocks(64)), deadline_ns=soon(60))
    late = made.pool.get(hit, BlockSink(empty_blocks(64)), deadline_ns=soon(0.2))
    assert late.ends == (GetEnd.LATE, GetEnd.BEHIND)
    prefetch.cancel()
    assert prefetch.result(deadline_ns=soon()).ends == (GetEnd.CANCELLED, GetEnd.BEHIND)
    for lease in held:
        lease.release()
    with pytest.raises(InvariantBroken):
        held[0].hold()
