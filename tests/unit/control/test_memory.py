"""Block pool and allocator: free + owned = total, and three answers to "does it fit"."""

from __future__ import annotations

from itertools import product

import pytest

from millpond.control.block_pool import BlockPool
from millpond.control.kv_allocator import KvAllocator
from millpond.core.blocks import Fit
from millpond.core.errors import InvariantBroken
from millpond.core.events import RankInfo
from millpond.core.ids import NULL_BLOCK, DpRank
from millpond.core.sequence import make_sequence
from tests.sim.making import P0, make_assign, make_spec


def sequence(name="a", num_prompt=10):
    return make_sequence(make_assign(make_spec(name, num_prompt)), P0, arrival=1)


def test_pool_hands_out_every_block_once_and_never_the_null_block():
    pool = BlockPool(5)
    blocks = pool.take(5, "a")
    assert sorted(blocks) == [1, 2, 3, 4, 5]
    assert NULL_BLOCK not in blocks
    assert pool.num_free == 0


def test_pool_reuses_the_block_that_was_free_longest():
    pool = BlockPool(3)
    first = pool.take(1, "a")
    pool.give_back(first, "a")
    assert pool.take(3, "b") == [2, 3, 1]


def test_pool_refuses_more_than_it_has_and_changes_nothing():
    pool = BlockPool(2)
    with pytest.raises(InvariantBroken):
        pool.take(3, "a")
    assert pool.num_free == 2
    assert pool.check() == []


@pytest.mark.parametrize("owner", ["b", "nobody"])
def test_pool_refuses_blocks_of_another_owner(owner):
    pool = BlockPool(2)
    blocks = pool.take(1, "a")
    with pytest.raises(InvariantBroken):
        pool.give_back(blocks, owner)
    assert pool.num_free == 1


def test_pool_refuses_a_block_twice():
    pool = BlockPool(2)
    blocks = pool.take(1, "a")
    pool.give_back(blocks, "a")
    with pytest.raises(InvariantBroken):
        pool.give_back(blocks, "a")


def test_pool_check_finds_a_lost_block():
    pool = BlockPool(2)
    pool._free.pop()
    assert pool.check() == ["1 free + 0 owned != 2 blocks"]


def test_pool_check_finds_a_block_that_is_free_and_owned():
    pool = BlockPool(2)
    pool.take(1, "a")
    pool._free[0] = 1
    assert pool.check() == ["a block is free and owned"]


@pytest.mark.parametrize(
    ("num_tokens", "reserve", "answer"),
    [
        (1, 0, Fit.OK),
        (256, 0, Fit.OK),
        (257, 0, Fit.LATER),
        (128, 1, Fit.OK),
        (129, 1, Fit.LATER),
        (512, 0, Fit.LATER),
        (513, 0, Fit.NEVER),
        (512, 99, Fit.LATER),
    ],
)
def test_allocator_answers(num_tokens, reserve, answer):
    memory = KvAllocator(num_blocks=4, num_slots=2)
    memory.grant(sequence(num_prompt=256), 256)
    assert memory.fits(num_tokens, reserve) is answer


def test_allocator_without_a_free_slot_says_later_and_without_slots_never():
    memory = KvAllocator(num_blocks=4, num_slots=1)
    memory.grant(sequence(), 10)
    assert memory.fits(1) is Fit.LATER
    assert KvAllocator(num_blocks=4, num_slots=0).fits(1) is Fit.NEVER


def test_allocator_grants_blocks_and_slot_together_and_takes_both_back():
    memory = KvAllocator(num_blocks=4, num_slots=2)
    one = sequence(num_prompt=200)
    memory.grant(one, 200)
    assert len(one.kv.block_table) == 2
    assert one.holds_memory
    memory.release(one)
    memory.release(one)
    assert (memory.num_free_blocks, memory.num_free_slots) == (4, 2)
    assert memory.check() == []
    assert not one.holds_memory


def test_allocator_grows_by_what_is_missing_and_never_in_part():
    memory = KvAllocator(num_blocks=3, num_slots=1)
    one = sequence(num_prompt=128)
    memory.grant(one, 128)
    assert memory.grow(one, 128) == ()
    assert memory.grow(one, 129) == (2,)
    assert memory.grow(one, 600) is None
    assert memory.num_free_blocks == 1
    assert one.kv.block_table == [1, 2]


def test_allocator_refuses_a_second_grant():
    memory = KvAllocator(num_blocks=3, num_slots=2)
    one = sequence()
    memory.grant(one, 10)
    with pytest.raises(InvariantBroken):
        memory.grant(one, 10)


def test_refused_grant_changes_nothing():
    memory = KvAllocator(num_blocks=3, num_slots=2)
    with pytest.raises(InvariantBroken):
        memory.grant(sequence(num_prompt=1000), 1000)
    assert (memory.num_free_blocks, memory.num_free_slots) == (3, 2)
    assert memory.check() == []


# --- sequences larger than the block memory ---------------------------------------------------


@pytest.mark.parametrize(
    ("num_blocks", "answer"),
    [(4, Fit.OK), (5, Fit.OK), (6, Fit.OK), (9, Fit.OK), (12, Fit.OK), (13, Fit.NEVER)],
)
def test_what_the_blocks_cannot_hold_may_live_in_home_blocks(num_blocks, answer):
    memory = KvAllocator(num_blocks=4, num_slots=2, num_home_blocks=20, num_rows=3)
    assert memory.fits(num_blocks * 128) is answer
    assert KvAllocator(4, 2, num_home_blocks=8, num_rows=3).fits(num_blocks * 128) is (
        Fit.OK if num_blocks <= 8 else Fit.NEVER
    )


def test_most_tokens_of_a_rank_are_those_that_its_allocator_takes():
    for num_blocks, num_home, num_rows in product((1, 3, 7), (0, 2, 8, 40), (1, 2, 5)):
        info = RankInfo(DpRank(0), "", num_blocks, 1, num_home_blocks=num_home, num_rows=num_rows)
        memory = KvAllocator(num_blocks, 1, num_home, num_rows)
        assert memory.fits(info.max_tokens) is Fit.OK
        assert memory.fits(info.max_tokens + 1) is Fit.NEVER


def test_a_streamed_sequence_holds_home_blocks_for_all_and_staging_for_a_row_of_each():
    memory = KvAllocator(num_blocks=4, num_slots=2, num_home_blocks=10, num_rows=3)
    large, small = sequence("large", 7 * 128), sequence("small", 128)
    memory.grant(large, 7 * 128)
    assert large.kv.block_table == [5, 6, 7, 8, 9, 10, 11]
    assert large.kv.staging == [1, 2, 3]
    assert (large.kv.num_blocks, large.kv.num_home_blocks) == (3, 7)
    memory.grant(small, 128)
    assert (small.kv.block_table, small.kv.staging) == ([4], [])
    assert memory.fits(1) is Fit.LATER
    with pytest.raises(InvariantBroken):
        memory.grow(large, 8 * 128)
    assert memory.check() == []
    memory.release(large)
    memory.release(small)
    assert (memory.num_free_blocks, memory.num_free_home_blocks, memory.num_free_slots) == (4, 10, 2)
    assert memory.check() == []


def test_a_grant_that_home_blocks_are_missing_for_changes_nothing():
    memory = KvAllocator(num_blocks=4, num_slots=3, num_home_blocks=10, num_rows=6)
    memory.grant(sequence("one", 5 * 128), 5 * 128)
    assert memory.fits(6 * 128) is Fit.LATER
    with pytest.raises(InvariantBroken):
        memory.grant(sequence("two", 6 * 128), 6 * 128)
    assert (memory.num_free_blocks, memory.num_free_home_blocks, memory.num_free_slots) == (3, 5, 2)
    assert memory.check() == []
