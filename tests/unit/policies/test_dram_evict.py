"""Eviction orders against plain models; what resists a scan and what does not."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from millpond.core.errors import ConfigError
from millpond.policies.dram_evict import EvictionOrder, make_order

NAMES = ["lru", "s3fifo"]


def name(index: int) -> bytes:
    return index.to_bytes(16, "big")


@pytest.mark.parametrize("order_name", NAMES)
@given(steps=st.lists(st.tuples(st.sampled_from("itdp"), st.integers(0, 12)), max_size=80))
def test_an_order_holds_exactly_what_was_put_in_and_not_taken_out(
    order_name: str, steps: list[tuple[str, int]]
) -> None:
    order = make_order(order_name, capacity=6)
    held: set[bytes] = set()
    for step, index in steps:
        block = name(index)
        match step:
            case "i" if block not in held:
                order.insert(block)
                held.add(block)
            case "t":
                order.touch(block)
            case "d":
                order.discard(block)
                held.discard(block)
            case "p":
                popped = order.pop()
                assert (popped is None) == (not held)
                assert popped is None or popped in held
                held.discard(popped or b"")
            case _:
                continue
        assert len(order) == len(held)
    assert {order.pop() for _ in range(len(held))} == held
    assert order.pop() is None


@given(steps=st.lists(st.tuples(st.booleans(), st.integers(0, 8)), max_size=60))
def test_lru_is_a_list_sorted_by_last_use(steps: list[tuple[bool, int]]) -> None:
    order, model = make_order("lru", 8), list[bytes]()
    for is_pop, index in steps:
        if is_pop:
            assert order.pop() == (model.pop(0) if model else None)
        elif name(index) in model:
            order.touch(name(index))
            model.append(model.pop(model.index(name(index))))
        else:
            order.insert(name(index))
            model.append(name(index))


def hits(order: EvictionOrder, capacity: int, reads: list[int]) -> int:
    held: set[bytes] = set()
    count = 0
    for index in reads:
        block = name(index)
        if block in held:
            order.touch(block)
            count += 1
            continue
        if len(held) == capacity:
            victim = order.pop()
            assert victim is not None
            held.remove(victim)
        order.insert(block)
        held.add(block)
    return count


def test_a_scan_empties_lru_and_leaves_s3fifo_its_busy_blocks() -> None:
    busy = list(range(50))
    scan = list(range(1000, 1400))
    reads = busy * 4 + scan + busy
    alone = len(busy) * 3
    assert hits(make_order("lru", 100), 100, reads) == alone
    assert hits(make_order("s3fifo", 100), 100, reads) == alone + len(busy)


def test_what_comes_back_soon_after_it_left_goes_to_the_main_queue() -> None:
    order = make_order("s3fifo", 10)
    for index in range(3):
        order.insert(name(index))
    assert order.pop() == name(0)
    order.insert(name(0))  # remembered
    for index in range(3, 9):
        order.insert(name(index))
    assert [order.pop() for _ in range(8)] == [name(i) for i in range(1, 9)]
    assert order.pop() == name(0)


def test_an_unknown_order_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="lru, s3fifo"):
        make_order("belady", 10)
