"""The Gumbel field: fixed for all time, equal to its plain twin, and Gumbel distributed."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from millpond.engine.gumbel import (
    MIN_GUMBEL,
    GumbelField,
    field_start,
    gumbel,
    gumbel_ref,
    least_bits,
)

# Made once with integer arithmetic in plain Python. A change changes every sampled text in the world.
GOLDEN_STARTS = {
    (0, 0, 0): 0x238275BC38FCBE91,
    (1, 0, 0): 0xB18A02F46D8D86C3,
    (0, 1, 0): 0x44E5B98100C67FB0,
    (0, 0, 1): 0x2F32A78496C67C60,
    (2**63 - 1, 15, 2**20): 0x5183E3FB96760FFB,
}
GOLDEN_BITS = {
    (42, 0, 17): {0: 0x23E7CE5341A2B, 1: 0x6AAC603E58346, 2: 0xDA88FE60ED81B, 49151: 0xE2EDFBD46331C}
}

SEEDS = st.integers(0, 2**63 - 1)


@pytest.mark.parametrize("counter", GOLDEN_STARTS)
def test_starts_are_fixed_for_all_time(counter: tuple[int, int, int]) -> None:
    assert field_start(*counter) == GOLDEN_STARTS[counter]


@pytest.mark.parametrize("counter", GOLDEN_BITS)
def test_bits_are_fixed_for_all_time(counter: tuple[int, int, int]) -> None:
    bits = GumbelField(49152).bits(field_start(*counter))
    assert {token: int(bits[token]) for token in GOLDEN_BITS[counter]} == GOLDEN_BITS[counter]


@given(seed=SEEDS, choice=st.integers(0, 100), position=st.integers(0, 2**21), vocab=st.integers(1, 300))
def test_field_equals_its_twin(seed: int, choice: int, position: int, vocab: int) -> None:
    field = GumbelField(vocab)
    start = field_start(seed, choice, position)
    noise = gumbel(field.bits(start))
    for token in {0, vocab // 2, vocab - 1}:
        assert noise[token] == pytest.approx(gumbel_ref(seed, choice, position, token), rel=1e-14)
    some = np.array([vocab - 1, 0, vocab // 2])
    assert np.array_equal(gumbel(field.bits_of(start, some)), noise[some])


@given(st.integers(0, 2**52 - 1))
def test_every_bit_pattern_gives_a_finite_value(bits: int) -> None:
    value = gumbel(np.array([0, bits, 2**52 - 1], np.uint64))
    assert np.isfinite(value).all()
    assert value[0] == pytest.approx(MIN_GUMBEL)
    assert value[0] <= value[1] <= value[2] < 37


@given(st.floats(-60, 60))
def test_least_bits_never_drop_a_value_that_reaches_the_noise(noise: float) -> None:
    border = int(least_bits(noise))
    below = np.array([bits for bits in range(border - 3, border) if bits >= 0], np.uint64)
    assert (gumbel(below) < noise).all()


def test_values_are_gumbel_distributed() -> None:
    field = GumbelField(1000)
    values = np.sort(
        np.concatenate([gumbel(field.bits(field_start(9, 2, position))) for position in range(100)])
    )
    exact = np.exp(-np.exp(-values))
    ranks = (np.arange(len(values)) + 0.5) / len(values)
    assert np.abs(exact - ranks).max() < 1.95 / math.sqrt(len(values))  # Kolmogorov-Smirnov, 99.9 %


@pytest.mark.parametrize("axis", ["seed", "choice", "position", "token"])
def test_neighbours_in_the_field_are_uncorrelated(axis: str) -> None:
    field = GumbelField(4001)
    step = {"seed": (1, 0, 0), "choice": (0, 1, 0), "position": (0, 0, 1), "token": (0, 0, 0)}[axis]
    here = gumbel(field.bits(field_start(5, 1, 7)))
    there = gumbel(field.bits(field_start(*(a + b for a, b in zip((5, 1, 7), step, strict=True)))))
    shift = 1 if axis == "token" else 0
    correlation = np.corrcoef(here[: len(here) - shift], there[shift:])[0, 1]
    assert abs(correlation) < 3.3 / math.sqrt(4000)  # 99.9 %
