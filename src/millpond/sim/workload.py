"""When requests come, and how long they are."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path

from millpond.core.chance import Chance
from millpond.core.errors import ConfigError
from millpond.core.request import StateRestore, TokenIds, token_ids
from millpond.core.units import MILLISECOND_NS, SECOND_NS, ceil_div
from millpond.sim.sim_engine import VOCAB_SIZE

PIECE_TOKENS = 512


@dataclass(frozen=True, slots=True)
class Arrival:
    """One request of a workload."""

    time_ns: int
    num_prompt_tokens: int
    num_output_tokens: int
    priority: int = 0
    piece_ids: tuple[int, ...] = ()
    """Names of the prompt's pieces of 512 tokens, in order: equal names, equal tokens. What lies behind them
    is nobody else's."""

    def prompt_ids(self, number: int) -> TokenIds:
        """Make the prompt of the request of this number; int32, `num_prompt_tokens` ids."""
        ids = token_ids((number + i) % VOCAB_SIZE for i in range(self.num_prompt_tokens))
        for index, piece in enumerate(self.piece_ids[: ceil_div(self.num_prompt_tokens, PIECE_TOKENS)]):
            begin = index * PIECE_TOKENS
            end = min(begin + PIECE_TOKENS, self.num_prompt_tokens)
            ids[begin:end] = token_ids((piece * 7_919 + i) % VOCAB_SIZE for i in range(end - begin))
        return ids


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


def conversations(
    chance: Chance, num_sessions: int, rate_per_s: float, num_turns: int, num_new_tokens: int, num_output: int
) -> list[Session]:
    """Make sessions of equal turns that begin with exponential gaps. `rate_per_s` > 0, `num_turns` >= 1."""
    turns = ((num_new_tokens, num_output),) * num_turns
    begins = poisson(chance, num_sessions, rate_per_s, num_new_tokens, num_output)
    return [Session(arrival.time_ns, turns) for arrival in begins]


def read_trace(path: Path) -> list[Arrival]:
    """Read a trace in the Mooncake form: one JSON object a line with `timestamp` in milliseconds,
    `input_length` and `output_length`, and `hash_ids` if it tells which prompts begin alike; other fields are
    ignored.

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
                pieces = tuple(map(int, row.get("hash_ids", ())))
                arrival = Arrival(
                    time_ns, int(row["input_length"]), int(row["output_length"]), piece_ids=pieces
                )
            except (ValueError, KeyError, TypeError, AttributeError) as error:
                raise ConfigError(f"{path.name}, line {number}: not a trace entry: {error!r}") from error
            if arrival.time_ns < 0 or arrival.num_prompt_tokens < 1 or arrival.num_output_tokens < 1:
                raise ConfigError(f"{path.name}, line {number}: times must be >= 0 and lengths >= 1")
            arrivals.append(arrival)
    return sorted(arrivals, key=lambda arrival: arrival.time_ns)
