"""How far a long transfer of bytes has come, told to whoever wants to show it."""

from __future__ import annotations

from collections.abc import Callable

ShowProgress = Callable[[int, int], None]
"""Told the bytes done and the bytes in all, after each piece."""


def show_nothing(num_done: int, num_total: int) -> None:
    """Default where nobody watches."""


class ByteCounter:
    """Adds up pieces."""

    def __init__(self, num_total: int, show: ShowProgress) -> None:
        self._num_done = 0
        self._num_total = num_total
        self._show = show

    def advance(self, num_bytes: int) -> None:
        """Count a piece that is done."""
        self._num_done += num_bytes
        self._show(self._num_done, self._num_total)
