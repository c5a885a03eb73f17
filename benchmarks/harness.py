"""Levels, results and the measuring protocol of all benchmarks (see the head of levels.toml).

A benchmark is a module with `run(quick: bool, only: frozenset[str]) -> Result`. It measures what it is
asked for; `report` compares that with `levels.toml`. Ratios come from interleaved pairs, `A B A B ...`, so
that what else the machine does hits both sides alike; the same protocol with A against A tells how far
two equal sides may seem apart.
"""

from __future__ import annotations

import os
import platform
import statistics
import sys
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

LEVELS_FILE = Path(__file__).with_name("levels.toml")
NUM_PAIRS = 9
REPEAT_FACTOR = 4
"""Times more pairs when a level is missed by less than the A/A spread."""

Measure = Callable[[], float]


@dataclass(frozen=True, slots=True)
class Level:
    """One line of `levels.toml`."""

    id: str
    op: str
    """`>=` or `<=`."""
    target: float
    full_only: bool = False
    """Not measured with --quick."""

    def is_met_by(self, value: float) -> bool:
        """Whether a value reaches the level."""
        return value >= self.target if self.op == ">=" else value <= self.target


@dataclass(frozen=True, slots=True)
class Measured:
    """A measured value, or None with the reason why it could not be measured."""

    value: float | None
    note: str = ""


@dataclass(frozen=True, slots=True)
class Result:
    """What a benchmark found."""

    measured: Mapping[str, Measured] = field(default_factory=dict[str, Measured])
    """By id of the level."""
    figures: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """Whatever else is worth telling; JSON values."""


@dataclass(frozen=True, slots=True)
class Ratio:
    """Median of paired ratios and the half-width of its 95 % interval."""

    median: float
    spread: float
    pairs: tuple[tuple[float, float], ...]
    """(ours, theirs) as measured."""


def load_levels(benchmark: str) -> dict[str, Level]:
    """Levels of one benchmark, by id."""
    table = tomllib.loads(LEVELS_FILE.read_text(encoding="utf-8"))[benchmark]
    return {level_id: Level(level_id, **fields) for level_id, fields in table.items()}


def is_wanted(level: Level, *, quick: bool, only: frozenset[str]) -> bool:
    """Whether a run is to measure a level."""
    return (not only or level.id in only) and not (quick and level.full_only)


def paired_ratio(ours: Measure, theirs: Measure, num_pairs: int = NUM_PAIRS, what: str = "") -> Ratio:
    """Measure two sides in turn and return ours / theirs.

    Args:
        ours: Runs our side once and returns its figure, > 0.
        theirs: Same for the other side.
        num_pairs: Pairs, >= 2; both sides run once more before, unmeasured, to warm up.
        what: Named in the progress on stderr.
    """
    ours()
    theirs()
    pairs: list[tuple[float, float]] = []
    for index in range(num_pairs):
        # Every other pair runs in reverse, or a drift of the machine would favour the side that goes first.
        if index % 2:
            other = theirs()
            pairs.append((ours(), other))
        else:
            pairs.append((ours(), theirs()))
        tell(f"{what}: pair {index + 1} of {num_pairs}, ratio {pairs[-1][0] / pairs[-1][1]:.3f}")
    ratios = [mine / other for mine, other in pairs]
    return Ratio(statistics.median(ratios), _median_spread(ratios), tuple(pairs))


def compare(
    level: Level, ours: Measure, theirs: Measure, aa_spread: float, num_pairs: int = NUM_PAIRS
) -> Measured:
    """Measure the ratio that a level is about; a near miss is measured once more, with four times the pairs."""
    ratio = paired_ratio(ours, theirs, num_pairs, level.id)
    miss = abs(ratio.median - level.target)
    if level.is_met_by(ratio.median) or miss >= aa_spread:
        return Measured(ratio.median)
    ratio = paired_ratio(ours, theirs, REPEAT_FACTOR * num_pairs, level.id)
    return Measured(ratio.median, f"spread {aa_spread:.3f}")


def aa_spread(side: Measure, num_pairs: int = NUM_PAIRS) -> float:
    """How far apart one side seems from itself under the protocol."""
    ratio = paired_ratio(side, side, num_pairs, "A against A")
    return max(abs(ratio.median - 1), ratio.spread)


def report(benchmark: str, result: Result, *, quick: bool, only: frozenset[str]) -> dict[str, Any]:
    """The JSON object that a run prints as its last line."""
    rows: list[dict[str, Any]] = []
    for level in load_levels(benchmark).values():
        if only and level.id not in only:
            continue
        measured = result.measured.get(level.id)
        if measured is None:
            measured = Measured(None, "full run only" if quick and level.full_only else "not measured")
        rows.append(
            {
                "id": level.id,
                "value": measured.value,
                "op": level.op,
                "target": level.target,
                "ok": measured.value is not None and level.is_met_by(measured.value),
                "note": measured.note,
            }
        )
    return {
        "benchmark": benchmark,
        "quick": quick,
        "machine": describe_machine(),
        "figures": dict(result.figures),
        "levels": rows,
    }


def describe_machine() -> dict[str, Any]:
    """What the figures depend on."""
    cpu = Path("/proc/cpuinfo").read_text(encoding="utf-8") if Path("/proc/cpuinfo").exists() else ""
    models = [line.split(":", 1)[1].strip() for line in cpu.splitlines() if line.startswith("model name")]
    return {
        "cpu": models[0] if models else platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gb": round(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 1e9, 1),
        "python": platform.python_version(),
        "system": platform.system(),
        "load_1min": round(os.getloadavg()[0], 2),
    }


def tell(text: str) -> None:
    """Print progress; standard output is for the result."""
    print(text, file=sys.stderr, flush=True)


def _median_spread(ratios: list[float]) -> float:
    """Half-width of the 95 % interval of a median: 1.57 IQR / sqrt(n). Source: McGill et al., 1978."""
    quarters = statistics.quantiles(ratios, n=4)
    return 1.57 * (quarters[2] - quarters[0]) / len(ratios) ** 0.5
