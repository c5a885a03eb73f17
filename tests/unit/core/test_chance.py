"""Named deterministic streams."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from millpond.core.chance import Chance
from millpond.core.errors import InvariantBroken


def test_stream_is_splitmix64() -> None:
    # First outputs of the published reference code for state 1234567.
    chance = Chance(0, "any")
    chance._state = 1234567
    assert [chance.u64() for _ in range(3)] == [
        6457827717110365317,
        3203168211198807973,
        9817491932198370423,
    ]


def test_stream_is_fixed_for_all_time() -> None:
    chance = Chance(7, "encoder.pick")
    assert [chance.below(1000) for _ in range(6)] == [402, 749, 116, 770, 130, 176]


@given(st.integers(0, 2**63), st.text(max_size=8))
def test_same_seed_and_name_give_the_same_stream(seed: int, name: str) -> None:
    left, right = Chance(seed, name), Chance(seed, name)
    assert [left.u64() for _ in range(4)] == [right.u64() for _ in range(4)]


def test_seed_and_name_both_choose_the_stream() -> None:
    streams = [Chance(1, "a"), Chance(1, "b"), Chance(2, "a"), Chance(1, "a/b")]
    assert len({stream.u64() for stream in streams}) == len(streams)


@given(st.integers(1, 1 << 64), st.integers(0, 100))
def test_below_stays_in_range(bound: int, seed: int) -> None:
    assert 0 <= Chance(seed, "range").below(bound) < bound


def test_draws_are_even() -> None:
    chance = Chance(3, "even")
    counts = Counter(chance.below(6) for _ in range(6000))
    chi_square = sum((counts[side] - 1000) ** 2 / 1000 for side in range(6))
    assert chi_square < 20.5  # 99.9 % point for 5 degrees of freedom
    mean = sum(chance.uniform() for _ in range(6000)) / 6000
    assert abs(mean - 0.5) < 0.013  # 3.5 standard errors


@pytest.mark.parametrize("bound", [0, -1, (1 << 64) + 1])
def test_impossible_bounds_are_refused(bound: int) -> None:
    with pytest.raises(InvariantBroken):
        Chance(0, "x").below(bound)
