"""Endurance: the figures of a known server, and a budget that keeps to a rating."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from millpond.store.wear import (
    DAY_S,
    DriveSpec,
    WearBudget,
    dwpd_used,
    fill_s,
    max_write_bytes_per_s,
)

TB = 10**12
SERVER = DriveSpec(capacity_bytes=int(20 * 30.78 * TB), dwpd=1.0)
RATE = 5e9


def test_known_server_wears_07_drives_a_day_and_is_full_in_34_hours():
    assert dwpd_used(RATE, SERVER.capacity_bytes) == pytest.approx(0.70, abs=0.005)
    assert fill_s(RATE, SERVER.capacity_bytes) / 3600 == pytest.approx(34, abs=0.5)


@pytest.mark.parametrize(("amplification", "years"), [(1.05, 6.8), (1.3, 5.5), (2, 3.6)])
def test_known_server_lives_that_many_years(amplification: float, years: float):
    assert SERVER.lifetime_years(RATE, amplification) == pytest.approx(years, abs=0.05)


def test_known_server_keeps_72_hours_only_below_24_gb_a_second():
    assert max_write_bytes_per_s(SERVER.capacity_bytes, 72 * 3600) == pytest.approx(2.4e9, rel=0.015)


def test_a_budget_refills_over_a_day_and_never_beyond():
    budget = WearBudget(1000.0, now_s=0)
    budget.spend(900, 0)
    assert budget.level(0) == pytest.approx(0.1)
    assert budget.level(DAY_S / 2) == pytest.approx(0.6)
    assert budget.level(10 * DAY_S) == 1.0


def test_a_clock_that_goes_back_refills_nothing():
    budget = WearBudget(1000.0, now_s=DAY_S)
    budget.spend(1000, DAY_S)
    assert budget.level(0) == 0.0
    assert budget.level(DAY_S) == 0.0


@given(st.lists(st.tuples(st.integers(1, 4000), st.integers(0, 5000)), max_size=200))
def test_what_a_full_bucket_admits_is_bounded_by_the_rating(writes: list[tuple[int, int]]):
    per_day = SERVER.budget_bytes_per_day(1.05) / 1e12
    budget = WearBudget(per_day, now_s=0)
    now_s, written = 0, 0.0
    for wait_s, num_bytes in writes:
        now_s += wait_s
        if budget.level(now_s) > 0:
            budget.spend(num_bytes, now_s)
            written += num_bytes
        assert written <= per_day * (1 + now_s / DAY_S) + 5000
