"""Counts the golden tensors that the tests compare, over all workers, and refuses a hollow run."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.golden.goldens import NUM_COMPARED, SHARED

_LEAST = 400
_total = {"tensors": 0}


def _is_whole_run(config: pytest.Config) -> bool:
    here = Path(__file__).parent
    places = [(config.invocation_params.dir / arg.split("::")[0]).resolve() for arg in config.args]
    picks = config.option.keyword or config.option.markexpr or getattr(config.option, "lf", False)
    return not picks and any(place in (here, *here.parents) for place in places if place.is_dir())


def pytest_testnodedown(node: object, error: object) -> None:
    _total["tensors"] += getattr(node, "workeroutput", {}).get("golden_tensors", 0)


@pytest.hookimpl(tryfirst=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    config = session.config
    if hasattr(config, "workeroutput"):
        config.workeroutput["golden_tensors"] = NUM_COMPARED["tensors"]
        return
    _total["tensors"] += NUM_COMPARED["tensors"]
    if SHARED.is_dir() and _is_whole_run(config) and _total["tensors"] < _LEAST and session.exitstatus == 0:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


@pytest.hookimpl(trylast=True)
def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    too_few = f", fewer than {_LEAST}" if _total["tensors"] < _LEAST else ""
    terminalreporter.write_line(f"{_total['tensors']} golden tensors compared{too_few}")
