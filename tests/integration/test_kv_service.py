"""A service with its KV pool: sessions profit from what was computed, over restarts and losses."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from millpond.core.chance import Chance
from millpond.core.errors import ConfigError
from millpond.serve.pool_processes import pool_folder
from millpond.serve.status import fetch_pool_status
from tests.integration.conftest import Service, wait_until

BLOCK = 128
NUM_OUTPUT = 48

POOL = """
[pool]
data_shards = 2
parity_shards = 1
[[storage]]
name = "s0"
targets = 3
capacity = "96 MiB"
[[host]]
name = "h0"
arena = "16 MiB"
dram = "16 MiB"
"""


class Session:
    """An agent at the other end: its prompt, token ids, grows by each answer and something new."""

    def __init__(self, service: Service, name: str, num_first: int = 700) -> None:
        self.service = service
        self._chance = Chance(0, name)
        self.ids = self._new(num_first)
        self.outputs: list[list[int]] = []

    def _new(self, count: int) -> list[int]:
        return [100 + self._chance.below(5000) for _ in range(count)]

    def ask(self, **fields: Any) -> tuple[int, list[int]]:
        """One turn, not remembered: cached tokens and output ids."""
        body = {
            "model": model_of(self.service),
            "prompt": self.ids,
            "temperature": 0,
            "return_token_ids": True,
        }
        body |= {"max_tokens": NUM_OUTPUT, "min_tokens": NUM_OUTPUT, "ignore_eos": True, **fields}
        response = httpx.post(f"{self.service.url}/v1/completions", json=body, timeout=120)
        response.raise_for_status()
        answer = response.json()
        assert answer["usage"]["prompt_tokens"] == len(body["prompt"])
        cached = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
        return cached, answer["choices"][0]["token_ids"]

    def turn(self, num_new: int = 100) -> int:
        """The next turn; how many of its prompt's tokens were cached."""
        cached, output = self.ask()
        self.outputs.append(output)
        self.ids = [*self.ids, *output, *self._new(num_new)]
        return cached

    @property
    def num_expected(self) -> int:
        """Tokens of the prompt to come that are in whole blocks of what the turn before computed."""
        return (len(self.ids) - 100 - 1) // BLOCK * BLOCK


def model_of(service: Service) -> str:
    return httpx.get(f"{service.url}/v1/models").json()["data"][0]["id"]


def cached_total(service: Service) -> float:
    """Cached prompt tokens, as counted by the gateway."""
    lines = httpx.get(f"{service.url}/metrics").text.splitlines()
    counted = [line for line in lines if line.startswith("millpond_prompt_tokens_total{")]
    return sum(float(line.rpartition(" ")[2]) for line in counted if 'source="cached"' in line)


def wait_kept(session: Session) -> None:
    """Wait until the blocks of the last turn are kept: they are handed over behind its last token."""
    kept = session.ids[: session.num_expected + 1]
    wait_until(
        lambda: session.ask(prompt=kept, max_tokens=1, min_tokens=1)[0] == session.num_expected,
        30,
        f"{session.num_expected} tokens are cached",
    )


def stop(service: Service, number: signal.Signals = signal.SIGINT) -> None:
    service.process.send_signal(number)
    assert service.process.wait(60) == 0


@pytest.mark.timeout(400)
def test_an_old_session_finds_what_it_had_after_ctrl_c_and_a_second_start(
    start_service: Callable[..., Service], synthetic_toml: str, tmp_path: Path
):
    toml = synthetic_toml + POOL
    state = tmp_path / "state"
    service = start_service(toml, has_pool=True, state_dir=state)
    session = Session(service, "restart")
    assert session.turn() == 0
    wait_kept(session)
    assert session.turn() > 0
    wait_kept(session)
    assert cached_total(service) > 0
    stop(service)

    session.service = again = start_service(toml, has_pool=True, state_dir=state)
    expected = session.num_expected
    cached, warm = session.ask()
    assert cached == expected
    assert cached_total(again) == cached
    cold_cached, cold = session.ask(cache_salt="somebody else")
    assert cold_cached == 0
    assert warm == cold, "every byte that was loaded is the byte that would have been computed"
    assert fetch_pool_status(again.config)["is_healthy"]
    again.wait_empty()

    with pytest.raises(ConfigError, match="stop it"), pool_folder(again.config).claimed():
        pass
    stop(again, signal.SIGTERM)
    with pool_folder(again.config).claimed():
        assert pool_folder(again.config).clear() > 0


@pytest.mark.timeout(400)
def test_the_loss_of_any_process_of_the_pool_costs_hits_at_most(
    start_service: Callable[..., Service], synthetic_toml: str
):
    service = start_service(synthetic_toml + POOL, has_pool=True)
    groups = {name: group["incarnation"] for name, group in service.status["groups"].items()}
    session = Session(service, "losses")
    session.turn()
    wait_kept(session)
    for role in ("node", "storage", "metadata"):
        victim = service.pid_of_role(role)
        os.kill(victim, signal.SIGKILL)
        before = session.ids
        session.turn()
        reference = Session(service, "losses")
        reference.ids = before
        assert reference.ask(cache_salt=role)[1] == session.outputs[-1], role
        wait_until(
            lambda role=role, victim=victim: service.pid_of_role(role) != victim, 60, f"{role} is back"
        )
        wait_kept(session)
    assert {name: group["incarnation"] for name, group in service.status["groups"].items()} == groups
    service.wait_empty()


def test_two_services_do_not_share_a_pool(tmp_path: Path, synthetic_toml: str):
    from millpond.store.pool_folder import PoolFolder

    config_file = tmp_path / "c.toml"
    config_file.write_text(synthetic_toml + POOL)
    command = [
        sys.executable,
        "-m",
        "millpond.cli.main",
        "serve",
        "--config",
        str(config_file),
        "--port",
        "0",
    ]
    command += ["--state-dir", str(tmp_path / "state"), "--set"]
    with (
        tempfile.TemporaryDirectory(prefix="mp-") as run_dir,  # its path must be short
        PoolFolder(tmp_path / "state" / "pool").claimed(),
    ):
        command.append(f"supervise.run_dir={run_dir}")
        result = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert result.returncode == 2
    assert "stop it, or use another folder" in result.stderr
    assert "process.started" not in result.stderr


@pytest.mark.timeout(900)
def test_a_real_model_goes_on_after_a_restart_as_if_nothing_had_been_kept(
    start_service: Callable[..., Service], tmp_path: Path
):
    """In exact numerics the answers do not depend on where the hit ends."""
    toml = '[engine]\nmodel = "smollm2-135m"\nnumerics = "exact"\nkv_memory = "128 MiB"\n'
    state = tmp_path / "state"
    service = start_service(toml, has_pool=True, state_dir=state)
    session = Session(service, "real", num_first=300)
    session.turn()
    wait_kept(session)
    stop(service)
    session.service = again = start_service(toml, has_pool=True, state_dir=state)
    cached, warm = session.ask()
    assert cached == session.num_expected > 0
    assert session.ask(cache_salt="cold") == (0, warm)
    again.wait_empty()
