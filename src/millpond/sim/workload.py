"""When requests come, and how long they are."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path

from millpond.core.chance import Chance
from millpond.core.errors import ConfigError
from millpond.core.request import StateRestore
from millpond.core.units import MILLISECOND_NS, SECOND_NS


@dataclass(frozen=True, slots=True)
class Arrival:
    """One request of a workload."""

    time_ns: int
    num_prompt_tokens: int
    num_output_tokens: int
    priority: int = 0


@dataclass(frozen=True, slots=True)
class Session:
    """Requests of one client, each of which repeats all that was said before."""

    time_ns: int
    turns: tuple[tuple[int, int], ...]
    """(new prompt tokens, output tokens) of each, at least one."""
    pause_s: float = 0.0
    """From the end of a turn to the next one."""
    state_restore: StateRestore = StateRestore.REPLAY


def poisson(
    chance: Chance, num_requests: int, rate_per_s: float, num_prompt_tokens: int, num_output_tokens: int
) -> list[Arrival]:
    """Make requests of one size with exponential gaps. `rate_per_s` > 0."""
    arrivals: list[Arrival] = []
    time_ns = 0
    for _ in range(num_requests):
        time_ns += int(-math.log(1.0 - chance.uniform()) / rate_per_s * SECOND_NS)
        arrivals.append(Arrival(time_ns, num_prompt_tokens, num_output_tokens))
    return arrivals


def read_trace(path: Path) -> list[Arrival]:
    """Read a trace in the Mooncake form: one JSON object a line with `timestamp` in milliseconds,
    `input_length` and `output_length`; other fields are ignored.

    Raises:
        ConfigError: A line is not of that form.
    """
    arrivals: list[Arrival] = []
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
                time_ns = round(float(row["timestamp"]) * MILLISECOND_NS)
                arrival = Arrival(time_ns, int(row["input_length"]), int(row["output_length"]))
            except (ValueError, KeyError, TypeError) as error:
                raise ConfigError(f"{path.name}, line {number}: not a trace entry: {error!r}") from error
            if arrival.time_ns < 0 or arrival.num_prompt_tokens < 1 or arrival.num_output_tokens < 1:
                raise ConfigError(f"{path.name}, line {number}: times must be >= 0 and lengths >= 1")
            arrivals.append(arrival)
    return sorted(arrivals, key=lambda arrival: arrival.time_ns)
