"""Endurance of drives: what a write rate costs, and a budget that keeps to the rating."""

from __future__ import annotations

from dataclasses import dataclass

DAY_S = 86_400
YEAR_S = 365 * DAY_S
BUDGET_SHARE = 0.9
"""Of the rating; the rest is for what the file system and the drive write themselves."""


@dataclass(frozen=True, slots=True)
class DriveSpec:
    """What a drive, or all drives of a node together, are made for."""

    capacity_bytes: int
    dwpd: float
    """Drive writes per day for the whole warranty."""
    warranty_years: float = 5.0

    def lifetime_years(self, write_bytes_per_s: float, write_amplification: float) -> float:
        """Years until the rated bytes are written, at a rate as the host sees it."""
        rated_bytes = self.capacity_bytes * self.dwpd * self.warranty_years * YEAR_S / DAY_S
        return rated_bytes / (write_bytes_per_s * write_amplification * YEAR_S)

    def budget_bytes_per_day(self, write_amplification: float) -> float:
        """Bytes a day that the host may write."""
        return self.capacity_bytes * self.dwpd * BUDGET_SHARE / write_amplification


def dwpd_used(write_bytes_per_s: float, capacity_bytes: int) -> float:
    """Drive writes per day of a write rate."""
    return write_bytes_per_s * DAY_S / capacity_bytes


def fill_s(write_bytes_per_s: float, capacity_bytes: int) -> float:
    """Seconds until a write rate has filled the capacity: the retention it allows."""
    return capacity_bytes / write_bytes_per_s


def max_write_bytes_per_s(capacity_bytes: int, retention_s: float) -> float:
    """The largest mean write rate at which data lives for `retention_s`."""
    return capacity_bytes / retention_s


class WearBudget:
    """Token bucket of bytes that holds one day's budget. Full at the start.

    Args:
        bytes_per_day: What flows in.
        now_s: Seconds on the clock that `level` and `spend` use.
    """

    def __init__(self, bytes_per_day: float, now_s: float) -> None:
        self._bytes_per_day = bytes_per_day
        self._left = bytes_per_day
        self._then_s = now_s

    def level(self, now_s: float) -> float:
        """What is left, 0 to 1."""
        if now_s > self._then_s:
            self._left += (now_s - self._then_s) * self._bytes_per_day / DAY_S
            self._left = min(self._left, self._bytes_per_day)
            self._then_s = now_s
        return max(0.0, self._left / self._bytes_per_day)

    def spend(self, num_bytes: int, now_s: float) -> None:
        """Count bytes that were written. May go below zero: the bytes are on the disk already."""
        self.level(now_s)
        self._left -= num_bytes
