"""Block pool and allocator: free + owned = total, and three answers to "does it fit"."""

from __future__ import annotations

import pytest

from millpond.control.block_pool import BlockPool
from millpond.control.kv_allocator import KvAllocator
from millpond.core.blocks import Fit
from millpond.core.errors import InvariantBroken
from millpond.core.ids import NULL_BLOCK
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
