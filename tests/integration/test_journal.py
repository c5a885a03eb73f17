"""One brain, two bodies: what the service decided, the simulator decides again, plan for plan."""

from __future__ import annotations

import random
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from millpond.sim.replay import replay
from tests.integration.conftest import Service
from tests.integration.test_service_life import body_of, read_stream

NUM_REQUESTS = 200


@pytest.mark.timeout(300)
def test_journal_of_200_requests_replays_with_equal_plans(
    start_service: Callable[..., Service], synthetic_toml: str, tmp_path: Path
) -> None:
    folder = tmp_path / "journal"
    service = start_service(synthetic_toml, "--journal", str(folder))
    chance = random.Random(5)
    leaves = [chance.random() < 0.2 for _ in range(NUM_REQUESTS)]

    def run_one(index: int) -> None:
        body = body_of(index % 25, max_tokens=1 + index % 40)
        if leaves[index]:
            with httpx.stream("POST", f"{service.url}/v1/completions", json=body, timeout=60) as answer:
                next(answer.iter_lines(), None)
        else:
            read_stream(service.url, body)

    with ThreadPoolExecutor(16) as pool:
        list(pool.map(run_one, range(NUM_REQUESTS)))
    service.kill("p0")
    service.wait_empty(60)
    read_stream(service.url, body_of(0))
    service.stop()
    reports = replay(folder)
    assert all(report.is_equal for report in reports), "\n".join(map(str, reports))
    assert {report.name.split(".")[0] for report in reports} == {"controller", "p0", "d0"}
    assert len(reports) == 4  # p0 lived twice
    assert sum(report.num_plans for report in reports) > NUM_REQUESTS
