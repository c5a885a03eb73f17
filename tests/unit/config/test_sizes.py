"""Sizes and rates as people write them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from millpond.config.sizes import format_rate, format_size, parse_rate, parse_size


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [
        ("1 B", 1),
        ("4KiB", 4096),
        ("4 kb", 4000),
        ("1.5 GiB", 3 << 29),
        ("2 TB", 2 * 10**12),
        (" 7 MiB ", 7 << 20),
    ],
)
def test_sizes(text: str, num_bytes: int):
    assert parse_size(text) == num_bytes


@pytest.mark.parametrize("text", ["", "5", "GiB", "-1 GiB", "1 GiBs", "1 bit/s", "1e3 B", "0.3 B", "1 GiB 2"])
def test_what_is_no_size_is_refused(text: str):
    with pytest.raises(ValueError, match=r"write a size|not a whole number"):
        parse_size(text)


def test_rates_are_decimal_bits():
    assert parse_rate("400 Mbit/s") == 400_000_000
    assert parse_rate("3.2 Gbit/s") == 3_200_000_000
    with pytest.raises(ValueError, match="write a rate"):
        parse_rate("400 MiB")


@given(st.integers(0, 1 << 50))
def test_format_and_parse_are_inverse(value: int):
    assert parse_size(format_size(value)) == value
    assert parse_rate(format_rate(value)) == value
