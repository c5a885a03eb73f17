"""When to send: arrival times of an open loop."""

from __future__ import annotations

import math
from enum import StrEnum

from millpond.core.chance import Chance
from millpond.core.units import SECOND_NS


class Arrivals(StrEnum):
    """Shape of an open loop's arrivals."""

    POISSON = "poisson"
    """Exponential gaps: independent users."""
    FIXED = "fixed"
    """Equal gaps."""


def arrival_times(kind: Arrivals, rate_per_s: float, num_requests: int, chance: Chance) -> list[int]:
    """Arrival times since the start of the run, ns, ascending; the first request comes at 0.

    Args:
        kind: Shape.
        rate_per_s: Mean requests per second, > 0.
        num_requests: How many.
        chance: Stream to draw the gaps from.
    """
    times_s = [0.0]
    while len(times_s) < num_requests:
        gap = 1.0 if kind is Arrivals.FIXED else -math.log1p(-chance.uniform())
        times_s.append(times_s[-1] + gap / rate_per_s)
    return [round(time_s * SECOND_NS) for time_s in times_s[:num_requests]]
