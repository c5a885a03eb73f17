"""A shard's index from records: each shard takes its own extents, in whatever order they come."""

from __future__ import annotations

import random
import threading
from dataclasses import replace
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st

from millpond.core.extents import ExtentId, StripeId
from millpond.core.pool_map import PoolMap
from millpond.policies.metadata_shard import ShardTable
from millpond.store.metadata.rebuild import IndexRebuild, _Router, commit_of
from millpond.store.record import RecordHeader
from tests.unit.store.metadata.names import digests, hashes
from tests.unit.store.records import make_record

SHARDS = tuple(f"10.0.0.{i}:7000" for i in range(4))
SHARED = tuple(range(20))


def header(chain: list[bytes], begin: int, end: int, nonce: int) -> RecordHeader:
    base = make_record(0, num_blocks=end - begin).header
    return replace(
        base,
        extent=ExtentId(chain[end - 1], end - begin),
        stripe=StripeId(0, 0, nonce),
        hashes=hashes(chain[begin:end]),
        first_block=begin,
        parent=chain[begin - 1] if begin else bytes(32),
    )


def extents_of(seeds: range) -> list[tuple[list[bytes], RecordHeader]]:
    """Chains that share 20 blocks, cut at multiples of 8."""
    made = []
    for seed in seeds:
        chain = digests((*SHARED, 1000 + seed, *range(11)))
        made += [(chain, header(chain, at, at + 8, seed * 10 + at // 8)) for at in range(0, 32, 8)]
    return made


@given(st.randoms(use_true_random=False), st.sampled_from([8, 16, 32]))
@settings(deadline=None, max_examples=20)
def test_every_shard_takes_its_own_and_one_charges(order: random.Random, depth: int):
    made = extents_of(range(12))
    first = digests(SHARED)[0][:16]
    table = ShardTable(PoolMap(1, (), (), SHARDS, depths=((first, depth),) if depth > 8 else ()))
    headers = [head for _, head in made]
    order.shuffle(headers)
    taken: dict[ExtentId, set[int]] = {}
    charged: dict[ExtentId, set[int]] = {}
    for shard in range(4):
        router = _Router(table, shard)
        for head in headers:
            for known, is_charged in router.add(head):
                taken.setdefault(known.extent, set()).add(shard)
                if is_charged:
                    charged.setdefault(known.extent, set()).add(shard)
    for chain, head in made:
        end = head.first_block + 8
        owner = table.owner(hashes(chain[:end]))
        shallow = head.first_block < depth
        assert taken[head.extent] == (set(range(4)) if shallow else {owner})
        assert charged[head.extent] == {owner}


def test_what_no_match_could_reach_is_left_out():
    made = extents_of(range(3))
    table = ShardTable(PoolMap(1, (), (), SHARDS))
    for shard in range(4):
        router = _Router(table, shard)
        assert [router.add(head) for _, head in made if head.first_block == 24] == [[], [], []]


def test_an_extent_is_taken_when_enough_shards_were_seen_and_charged_its_own_size(tmp_path: Path):
    taken: list[tuple[ExtentId, int]] = []
    rebuild = IndexRebuild(
        None,
        lambda head, num_bytes: taken.append((head.extent, num_bytes)),
        lambda head: any(extent == head.extent for extent, _ in taken),
        name="m0",
        token="",
        stopping=threading.Event(),
    )
    chain = digests(range(16))
    large, small = header(chain, 0, 8, 1), header(chain, 8, 11, 2)
    for shard in range(9):
        rebuild._see(replace(large, shard=shard))
        rebuild._see(replace(large, shard=shard))
        rebuild._see(replace(small, shard=shard))
    assert taken == []
    rebuild._see(replace(large, shard=11, stripe=StripeId(0, 0, 99)))
    assert taken == [], "shards of another stripe do not count"
    for shard in (9, 10, 11):
        rebuild._see(replace(large, shard=shard))
        rebuild._see(replace(small, shard=shard))
    assert taken == [(large.extent, 10 * large.payload_bytes), (small.extent, 10 * small.payload_bytes)]


def test_the_router_gives_each_orphan_its_own_header():
    table = ShardTable(PoolMap(1, (), (), SHARDS))
    chain = digests(range(16))
    parent, child = header(chain, 0, 8, 1), header(chain, 8, 11, 2)
    router = _Router(table, table.owner(hashes(chain)))
    assert router.add(child) == []
    assert [known for known, _ in router.add(parent)] == [parent, child]


def test_the_commit_of_a_record_names_what_its_writer_named():
    head = replace(header(digests(range(8)), 0, 8, 77), tenant=5, lineage=1)
    commit = commit_of(head, 1000)
    where = commit.location
    assert (where.digest, where.num_blocks, where.nonce, where.lineage) == (head.extent.digest, 8, 77, 1)
    assert (commit.tenant, commit.num_bytes, commit.first_block) == (5, 1000, 0)
