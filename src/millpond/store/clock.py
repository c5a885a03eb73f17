"""The clock of the pool's shells: one object, so that tests can move time."""

from __future__ import annotations

import time
from typing import Protocol

from millpond.core.units import SECOND_NS


class Clock(Protocol):
    """Monotonic time for deadlines, calendar time for expiry."""

    def monotonic_ns(self) -> int:
        """Nanoseconds since some start; never goes back."""
        ...

    def unix_s(self) -> int:
        """Seconds since 1970; may jump."""
        ...


class SystemClock:
    """The machine's clocks."""

    def monotonic_ns(self) -> int:
        """See `Clock`."""
        return time.monotonic_ns()

    def unix_s(self) -> int:
        """See `Clock`."""
        return time.time_ns() // SECOND_NS
