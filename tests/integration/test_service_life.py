"""The whole service as real processes: equal texts split and unsplit, deaths, cancels, drain."""

from __future__ import annotations

import json
import os
import signal
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from tests.integration.conftest import Service, wait_until

NUM_STREAMS = 20
MIXED = '[[group]]\nname = "m0"\nrole = "mixed"\n'


def body_of(index: int, max_tokens: int = 60, model: str = "synthetic") -> dict[str, object]:
    """One completion request; prompts differ in length and content."""
    prompt = f"stream {index}: " + "the mill turns while water is in the pond. " * (1 + index % 7)
    return {
        "model": model,
        "prompt": prompt,
        "max_tokens": max_tokens,
        "ignore_eos": True,
        "temperature": 0.8,
        "seed": index,
        "stream": True,
    }


def read_stream(url: str, body: dict[str, object], on_event: Callable[[], None] = lambda: None) -> str:
    """Return the text of one streamed completion; fail on anything but a clean end."""
    text = ""
    with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=120) as answer:
        assert answer.status_code == 200, answer.read()
        finish = None
        for line in answer.iter_lines():
            if not line.startswith("data: "):
                assert line == "", line
                continue
            if line == "data: [DONE]":
                assert finish is not None
                return text
            event = json.loads(line.removeprefix("data: "))
            assert "error" not in event, event
            for choice in event["choices"]:
                text += choice["text"]
                finish = choice["finish_reason"] or finish
            on_event()
    raise AssertionError(f"the stream ended without [DONE] after {text!r}")


def run_streams(
    service: Service,
    disturb: Callable[[], None] | None = None,
    max_tokens: int = 60,
    model: str = "synthetic",
    num_begun: int = NUM_STREAMS,
) -> list[str]:
    """Run all streams at once; call `disturb` when `num_begun` of them have begun."""
    begun = [threading.Event() for _ in range(NUM_STREAMS)]
    with ThreadPoolExecutor(NUM_STREAMS) as pool:
        streams = [
            pool.submit(read_stream, service.url, body_of(i, max_tokens, model), begun[i].set)
            for i in range(NUM_STREAMS)
        ]
        if disturb is not None:
            wait_until(lambda: sum(event.is_set() for event in begun) >= num_begun, 60, "streams begin")
            disturb()
        return [stream.result(timeout=180) for stream in streams]


@pytest.mark.timeout(300)
def test_split_and_unsplit_services_give_equal_texts(
    start_service: Callable[..., Service], synthetic_toml: str
) -> None:
    split = start_service(synthetic_toml)
    split_texts = run_streams(split)
    split.wait_empty()
    split.stop()
    unsplit = start_service(synthetic_toml + MIXED)
    assert run_streams(unsplit) == split_texts
    unsplit.wait_empty()


@pytest.mark.timeout(300)
@pytest.mark.parametrize("victim", ["p0", "d0"])
def test_bug_24_streams_survive_kill_9_of_a_worker(
    start_service: Callable[..., Service], synthetic_toml: str, victim: str
) -> None:
    service = start_service(synthetic_toml)
    undisturbed = run_streams(service, max_tokens=200)
    service.wait_empty()
    assert run_streams(service, lambda: service.kill(victim), max_tokens=200) == undisturbed
    service.wait_empty(30)


@pytest.mark.timeout(300)
def test_streams_survive_kill_9_of_the_controller(
    start_service: Callable[..., Service], synthetic_toml: str
) -> None:
    service = start_service(synthetic_toml)
    undisturbed = run_streams(service, max_tokens=200)
    controller = service.pid_of_role("controller")
    disturbed = run_streams(service, lambda: os.kill(controller, signal.SIGKILL), max_tokens=200)
    assert disturbed == undisturbed
    service.wait_empty(30)


@pytest.mark.timeout(300)
def test_bug_12_client_that_leaves_frees_everything(
    start_service: Callable[..., Service], synthetic_toml: str
) -> None:
    service = start_service(synthetic_toml)
    for num_events in range(4):
        with httpx.stream(
            "POST", f"{service.url}/v1/completions", json=body_of(8, max_tokens=4000), timeout=60
        ) as answer:
            lines = answer.iter_lines()
            for _ in range(num_events):
                next(lines)
        service.wait_empty(10)  # liveness limit of 1 s, tenfold


@pytest.mark.timeout(300)
def test_gateway_death_frees_everything(start_service: Callable[..., Service], synthetic_toml: str) -> None:
    service = start_service(synthetic_toml)
    gateway = service.pid_of_role("gateway")
    with httpx.stream(
        "POST", f"{service.url}/v1/completions", json=body_of(3, max_tokens=4000), timeout=60
    ) as answer:
        lines = answer.iter_lines()
        next(lines)
        os.kill(gateway, signal.SIGKILL)
        with pytest.raises(httpx.TransportError):
            list(lines)
    service.wait_empty(20)
    service.wait_ready()
    assert read_stream(service.url, body_of(1))


@pytest.mark.timeout(300)
def test_bug_60_sigterm_lets_streams_finish(
    start_service: Callable[..., Service], synthetic_toml: str
) -> None:
    service = start_service(synthetic_toml)
    undisturbed = run_streams(service, max_tokens=150)
    disturbed = run_streams(service, lambda: service.process.send_signal(signal.SIGTERM), max_tokens=150)
    assert disturbed == undisturbed
    wait_until(lambda: service.process.poll() == 0, 60, "the service ends with status 0")
