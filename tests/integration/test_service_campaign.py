"""Random deaths and departures under load, on real processes: `make soak S=service N=rounds`."""

from __future__ import annotations

import os
import random
import signal
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from tests.integration.conftest import Service, wait_until
from tests.integration.test_service_life import body_of, read_stream, run_streams

NUM_STREAMS = 12
SHORT_ROUNDS = 3


def leave_early(url: str, body: dict[str, object], num_lines: int) -> None:
    """Read a few lines of a stream and go."""
    with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=60) as answer:
        for _, _line in zip(range(num_lines), answer.iter_lines(), strict=False):
            pass


def disturb(service: Service, chance: random.Random) -> None:
    """Kill one process, or stop a worker for a moment."""
    if chance.random() < 0.3:
        pid = service.pid(chance.choice(["p0", "d0"]))
        os.kill(pid, signal.SIGSTOP)
        threading.Timer(chance.random() * 2, os.kill, (pid, signal.SIGCONT)).start()
    elif chance.random() < 0.3:
        os.kill(service.pid_of_role("controller"), signal.SIGKILL)
    else:
        service.kill(chance.choice(["p0", "d0"]))


@pytest.mark.campaign("service")
def test_campaign_service_loses_nothing(
    start_service: Callable[..., Service], synthetic_toml: str, num_rounds: int
) -> None:
    service = start_service(synthetic_toml)
    expected = [read_stream(service.url, body_of(index, max_tokens=120)) for index in range(NUM_STREAMS)]
    for seed in range(num_rounds or SHORT_ROUNDS):
        chance = random.Random(seed)
        with ThreadPoolExecutor(2 * NUM_STREAMS) as pool:
            streams = [
                pool.submit(read_stream, service.url, body_of(index, max_tokens=120))
                for index in range(NUM_STREAMS)
            ]
            leavers = [
                pool.submit(leave_early, service.url, body_of(index, 2000), chance.randrange(30))
                for index in range(NUM_STREAMS // 2)
            ]
            service.wait_busy()
            disturb(service, chance)
            assert [stream.result(timeout=180) for stream in streams] == expected, f"seed {seed}"
            for leaver in leavers:
                leaver.result(timeout=180)
        service.wait_empty(60)


@pytest.mark.timeout(300)
def test_a_silent_worker_is_replaced(start_service: Callable[..., Service], synthetic_toml: str) -> None:
    service = start_service(synthetic_toml + "[dispatch]\nlease_s = 2.0\n")
    undisturbed = run_streams(service, max_tokens=200)
    stopped = service.pid("d0")
    disturbed = run_streams(service, lambda: os.kill(stopped, signal.SIGSTOP), max_tokens=200)
    assert disturbed == undisturbed
    wait_until(lambda: service.pid("d0") != stopped, 60, "another process leads d0")
    service.wait_empty(60)
