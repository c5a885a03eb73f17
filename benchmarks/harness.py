"""How every benchmark measures and reports (header of levels.toml).

Ratios come from interleaved pairs A B A B ...; the figure is the median of the paired ratios. The same
protocol with A against A says how far chance alone moves it.
"""

from __future__ import annotations

import json
import os
import platform
import statistics
import sys
import tomllib
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path

import structlog

NUM_PAIRS = 9
RETRY_FACTOR = 4
_CPU_FLAGS = ("avx2", "avx512f", "avx512_bf16", "amx_bf16")


@dataclass(frozen=True, slots=True)
class Level:
    """One line of levels.toml."""

    id: str
    op: str
    """`>=` or `<=`."""
    target: float
    full_only: bool = False

    def is_met(self, value: float) -> bool:
        """Whether a value reaches the target."""
        return value >= self.target if self.op == ">=" else value <= self.target


@dataclass(frozen=True, slots=True)
class LevelResult:
    """What a benchmark found for one level."""

    id: str
    value: float | None
    op: str
    target: float
    ok: bool
    note: str = ""


@dataclass(frozen=True, slots=True)
class Result:
    """What a benchmark prints as its last line."""

    benchmark: str
    quick: bool
    machine: dict[str, object]
    figures: dict[str, object]
    levels: tuple[LevelResult, ...]

    def to_json(self) -> str:
        """One line of JSON."""
        return json.dumps(asdict(self))


@dataclass(slots=True)
class Report:
    """Collects figures and levels of one run."""

    benchmark: str
    quick: bool
    only: set[str]
    """Level ids to measure; empty means all."""
    figures: dict[str, object] = field(default_factory=dict)
    _levels: dict[str, Level] = field(init=False)
    _results: dict[str, LevelResult] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Read the levels; unknown ids in `only` are an error."""
        self._levels = load_levels(self.benchmark)
        unknown = self.only - set(self._levels)
        if unknown:
            raise SystemExit(
                f"unknown level {', '.join(sorted(unknown))}; known: {', '.join(sorted(self._levels))}"
            )

    def wants(self, *ids: str) -> bool:
        """Whether any of these levels is to be measured in this run."""
        return any(
            (not self.only or i in self.only) and not (self.quick and self._levels[i].full_only) for i in ids
        )

    def add(self, level_id: str, value: float | None, note: str = "") -> None:
        """Record a level's value; None with the reason in `note` where it cannot be measured."""
        level = self._levels[level_id]
        ok = value is not None and level.is_met(value)
        self._results[level_id] = LevelResult(level_id, value, level.op, level.target, ok, note)
        say(f"{level_id}: {'-' if value is None else f'{value:.4g}'} ({level.op} {level.target:g}) {note}")

    def add_ratio(
        self, level_id: str, ours: Callable[[], float], other: Callable[[], float], note: str = ""
    ) -> None:
        """Measure ours / other in pairs and record it; a near miss is measured again, longer.

        Args:
            level_id: The level.
            ours: One measurement of our side, as a rate or as a cost; both sides the same.
            other: One measurement of the other side.
            note: Joined to the level's note.
        """
        level = self._levels[level_id]
        spread = aa_spread(ours)
        self.figures["aa_spread"] = max(spread, float(str(self.figures.get("aa_spread", 0.0))))
        pairs = measure_pairs(ours, other, NUM_PAIRS)
        value = median_ratio(pairs)
        miss = abs(value - level.target) / level.target
        if not level.is_met(value) and miss < spread:
            pairs = measure_pairs(ours, other, NUM_PAIRS * RETRY_FACTOR)
            value = median_ratio(pairs)
            note = f"{note}; spread {spread:.3f}".strip("; ")
        self.figures[level_id] = {
            "ours": statistics.median(mine for mine, _ in pairs),
            "other": statistics.median(theirs for _, theirs in pairs),
        }
        self.add(level_id, value, note)

    def merge(self, part: Report) -> None:
        """Take over what a part of this benchmark measured, in another process."""
        spreads = [report.figures["aa_spread"] for report in (self, part) if "aa_spread" in report.figures]
        self.figures |= part.figures
        if spreads:
            self.figures["aa_spread"] = max(map(float, map(str, spreads)))
        self._results |= part._results

    def finish(self) -> Result:
        """Fill in what was not measured and make the result."""
        for level_id, level in self._levels.items():
            if level_id in self._results:
                continue
            if self.only and level_id not in self.only:
                continue
            why = "full runs only" if self.quick and level.full_only else "not measured"
            self.add(level_id, None, why)
        self.figures.setdefault("aa_spread", None)
        return Result(
            self.benchmark, self.quick, machine_facts(), self.figures, tuple(self._results.values())
        )


def load_levels(benchmark: str) -> dict[str, Level]:
    """Levels of one benchmark from levels.toml."""
    text = Path(__file__).with_name("levels.toml").read_text(encoding="utf-8")
    table = tomllib.loads(text)[benchmark]
    return {level_id: Level(level_id, **record) for level_id, record in table.items()}


Pairs = list[tuple[float, float]]


def measure_pairs(a: Callable[[], float], b: Callable[[], float], count: int) -> Pairs:
    """Measure both sides in turn, A B A B ..."""
    return [(a(), b()) for _ in range(count)]


def median_ratio(pairs: Pairs) -> float:
    """Median of the paired ratios."""
    return statistics.median(mine / other for mine, other in pairs)


def aa_spread(a: Callable[[], float], count: int = NUM_PAIRS) -> float:
    """How far A / A strays from 1: the larger of its median's distance and half its interquartile range."""
    ratios = [mine / other for mine, other in measure_pairs(a, a, count)]
    quartiles = statistics.quantiles(ratios, n=4)
    return max(abs(statistics.median(ratios) - 1), (quartiles[2] - quartiles[0]) / 2)


def say(text: str) -> None:
    """Progress, to stderr."""
    print(text, file=sys.stderr, flush=True)


def machine_facts() -> dict[str, object]:
    """What the figures depend on."""
    lines = _lines("/proc/cpuinfo")
    flags = set(_field(lines, "flags").split())
    memory_kib = _field(_lines("/proc/meminfo"), "MemTotal").split()
    return {
        "cpu": _field(lines, "model name"),
        "cpu_flags": [flag for flag in _CPU_FLAGS if flag in flags],
        "cores": os.cpu_count(),
        "memory_gb": round(int(memory_kib[0]) * 1024 / 1e9, 1) if memory_kib else None,
        "load_average": os.getloadavg(),
        "python": platform.python_version(),
        "system": platform.platform(),
    }


def _lines(path: str) -> list[str]:
    file = Path(path)
    return file.read_text(encoding="utf-8").splitlines() if file.is_file() else []


def _field(lines: Iterable[str], name: str) -> str:
    return next((line.partition(":")[2].strip() for line in lines if line.startswith(name)), "")


def log_to_stderr() -> None:
    """Keep what the library logs out of standard output, which belongs to the result."""
    structlog.configure(logger_factory=structlog.PrintLoggerFactory(sys.stderr))
