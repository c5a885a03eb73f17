"""Retention: what lives on, and who gives way when the wear budget is low."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from millpond.policies.retention import (
    LAST_LEVEL,
    LOW_CLASSES,
    LOW_LEVEL,
    BlockClass,
    RetentionParams,
    admits,
    is_worth_copying,
)

CLASSES = st.sampled_from(BlockClass)
SHARES = st.floats(0, 1)
DRAWS = st.floats(0, 1, exclude_max=True)


@given(CLASSES, st.floats(LOW_LEVEL, 1), DRAWS)
def test_everything_is_admitted_while_the_budget_lasts(block_class: BlockClass, level: float, draw: float):
    assert admits(block_class, level=level, draw=draw)


@given(CLASSES, DRAWS)
def test_nothing_is_admitted_when_it_is_used_up(block_class: BlockClass, draw: float):
    assert not admits(block_class, level=0.0, draw=draw)


@given(CLASSES, CLASSES, SHARES, DRAWS)
def test_a_low_class_is_never_admitted_where_a_higher_one_is_not(
    low: BlockClass, high: BlockClass, level: float, draw: float
):
    if low in LOW_CLASSES and high not in LOW_CLASSES and admits(low, level=level, draw=draw):
        assert admits(high, level=level, draw=draw)


@given(CLASSES, SHARES, SHARES, DRAWS)
def test_more_budget_never_admits_less(block_class: BlockClass, a: float, b: float, draw: float):
    if admits(block_class, level=min(a, b), draw=draw):
        assert admits(block_class, level=max(a, b), draw=draw)


def test_the_admitted_share_follows_the_level():
    draws = [i / 1000 for i in range(1000)]
    low = sum(admits(BlockClass.REASONING, level=LOW_LEVEL / 2, draw=draw) for draw in draws)
    assert low == 500
    turns = sum(admits(BlockClass.TURN, level=LAST_LEVEL / 4, draw=draw) for draw in draws)
    assert turns == 250


def test_classes_have_their_numbers_for_ever():
    assert [(one.name, one.value) for one in BlockClass] == [
        ("TURN", 0),
        ("PROMPT", 1),
        ("REASONING", 2),
        ("SUB_AGENT", 3),
        ("ONE_SHOT", 4),
    ]


@given(st.integers(1, 10**6), st.integers(0, 10**6))
def test_a_read_in_the_second_half_of_a_life_counts(ttl_s: int, ago_s: int):
    worth = is_worth_copying(last_read_s=10**7 - ago_s, ttl_s=ttl_s, now_s=10**7)
    assert worth == (ago_s <= ttl_s / 2)


def test_one_shot_blocks_live_two_hours_and_the_rest_a_day():
    params = RetentionParams()
    assert {one: params.ttl_of(one) // 3600 for one in BlockClass} == {
        BlockClass.TURN: 24,
        BlockClass.PROMPT: 24,
        BlockClass.REASONING: 24,
        BlockClass.SUB_AGENT: 24,
        BlockClass.ONE_SHOT: 2,
    }
    assert params.partition_s(24 * 3600) == 3600
    assert params.partition_s(1) == 1
