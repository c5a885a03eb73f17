"""Rules that hold for every test: one thread per process, derandomised properties, waits with a deadline."""

from __future__ import annotations

import os
import time
from collections.abc import Callable

import pytest
from hypothesis import HealthCheck, settings

# Before anything imports numpy or torch: OpenMP threads that outnumber the cores spin against each other.
os.environ.setdefault("OMP_NUM_THREADS", "1")

settings.register_profile(
    "ci", derandomize=True, deadline=None, suppress_health_check=[HealthCheck.too_slow], print_blob=True
)
settings.register_profile("campaign", deadline=None, max_examples=2000)
settings.load_profile("ci")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--rounds", type=int, default=0, help="length of campaigns; 0 is the 20-second form (make soak N=...)"
    )


@pytest.fixture
def num_rounds(request: pytest.FixtureRequest) -> int:
    """Rounds a campaign runs; 0 means its short form."""
    return request.config.getoption("--rounds")


@pytest.fixture
def wait_until() -> Callable[..., None]:
    """Poll a condition until it holds; fail, naming it, when the deadline passes."""

    def wait(condition: Callable[[], object], what: str, deadline_s: float = 10.0) -> None:
        end_ns = time.monotonic_ns() + int(deadline_s * 1e9)
        while not condition():
            if time.monotonic_ns() > end_ns:
                pytest.fail(f"not within {deadline_s} s: {what}")
            time.sleep(0.005)

    return wait
