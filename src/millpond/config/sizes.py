"""Sizes and rates as people write them: `1 GiB`, `400 Mbit/s`."""

from __future__ import annotations

import re

_BYTES_BY_UNIT = {
    "B": 1,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
    "KIB": 1 << 10,
    "MIB": 1 << 20,
    "GIB": 1 << 30,
    "TIB": 1 << 40,
}
_BITS_BY_UNIT = {"BIT/S": 1, "KBIT/S": 10**3, "MBIT/S": 10**6, "GBIT/S": 10**9, "TBIT/S": 10**12}
_QUANTITY = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z/]+)\s*")


def parse_size(text: str) -> int:
    """Bytes of a text such as `64 KiB` or `1.5 GB`.

    Raises:
        ValueError: It is not a size.
    """
    return _parse(text, _BYTES_BY_UNIT, "a size such as 512 MiB or 2 GB")


def parse_rate(text: str) -> int:
    """Bits per second of a text such as `400 Mbit/s`.

    Raises:
        ValueError: It is not a rate.
    """
    return _parse(text, _BITS_BY_UNIT, "a rate such as 400 Mbit/s")


def format_size(num_bytes: int) -> str:
    """The shortest exact text of a size, with binary units."""
    return _format(
        num_bytes, (("TiB", 1 << 40), ("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10), ("B", 1))
    )


def format_rate(bits_per_s: int) -> str:
    """The shortest exact text of a rate."""
    return _format(
        bits_per_s,
        (("Tbit/s", 10**12), ("Gbit/s", 10**9), ("Mbit/s", 10**6), ("kbit/s", 10**3), ("bit/s", 1)),
    )


def _parse(text: str, factor_by_unit: dict[str, int], expected: str) -> int:
    match = _QUANTITY.fullmatch(text)
    factor = factor_by_unit.get(match[2].upper()) if match else None
    if match is None or factor is None:
        raise ValueError(f"write {expected}")
    value = float(match[1]) * factor
    if value != int(value):
        raise ValueError(f"{text} is not a whole number")
    return int(value)


def _format(value: int, units: tuple[tuple[str, int], ...]) -> str:
    name, factor = next((unit for unit in units if value and value % unit[1] == 0), units[-1])
    return f"{value // factor} {name}"
