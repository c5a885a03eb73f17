"""A whole service of real processes for one test: started, watched, killed in parts, and checked empty."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from millpond.config.load import load_config
from millpond.config.sections import Config
from millpond.serve.status import fetch_status

START_DEADLINE_S = 120.0
SHM = Path("/dev/shm")


def wait_until(condition: Callable[[], bool], deadline_s: float, what: str) -> None:
    """Poll until `condition` holds; fail after `deadline_s`."""
    until = time.monotonic() + deadline_s
    while not condition():
        assert time.monotonic() < until, f"not within {deadline_s} s: {what}"
        time.sleep(0.02)  # the interval of a poll with a deadline


@dataclass
class Service:
    """A running service and what a test may do to it."""

    config: Config
    process: subprocess.Popen[bytes]
    url: str
    log_file: Path

    @property
    def status(self) -> dict[str, Any]:
        """The controller's status."""
        return fetch_status(self.config, deadline_s=30.0)

    def pid(self, group: str) -> int:
        """Process id of a group's leader."""
        wait_until(lambda: bool(self.status["groups"].get(group, {}).get("pid")), 60, f"{group} is up")
        return int(self.status["groups"][group]["pid"])

    def pids_of_role(self, role: str) -> list[int]:
        """Process ids of the children that run `role` now."""
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        found: list[int] = []
        for child in children:
            arguments = Path(f"/proc/{child}/cmdline").read_bytes().split(b"\0")
            if role.encode() in arguments:
                found.append(int(child))
        return found

    def pid_of_role(self, role: str) -> int:
        """Process id of a child that runs `role`."""
        pids = self.pids_of_role(role)
        assert pids, f"no child runs {role}"
        return pids[0]

    def kill(self, group: str) -> None:
        """kill -9 a group's leader."""
        os.kill(self.pid(group), signal.SIGKILL)

    def wait_ready(self) -> None:
        """Wait for /ready."""

        def is_ready() -> bool:
            assert self.process.poll() is None, f"the service died:\n{self.log_file.read_text()[-4000:]}"
            try:
                return client.get(f"{self.url}/ready").status_code == 200
            except httpx.TransportError:
                return False

        with httpx.Client() as client:  # one for each poll takes more CPU time than what starts
            wait_until(is_ready, START_DEADLINE_S, "ready")

    def wait_busy(self) -> None:
        """Wait until a decode or mixed group runs something."""
        wait_until(
            lambda: any(
                rank["kv_tokens"] > 0
                for group in self.status["groups"].values()
                if group["role"] != "prefill"
                for rank in group["ranks"]
            ),
            60,
            "a group decodes",
        )

    def wait_empty(self, deadline_s: float = 10.0) -> None:
        """Wait until every block and slot of every rank is free again and no request is known."""

        def is_empty() -> bool:
            status = self.status
            ranks = [rank for group in status["groups"].values() for rank in group["ranks"]]
            return (
                status["queue"] == {"num_queued": 0, "num_requests": 0}
                and len(status["groups"]) == len(self.config.groups)
                and all(
                    r["num_seqs"] == r["num_queued"] == r["kv_tokens"] == r["queued_tokens"] == 0
                    for r in ranks
                )
            )

        wait_until(is_empty, deadline_s, f"empty, but {self.status}")

    def stop(self, deadline_s: float = 60.0) -> None:
        """SIGTERM, wait, and check that nothing stays behind."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            self.process.wait(deadline_s)


def find_free_port() -> int:
    """Return a TCP port that is free now."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


@pytest.fixture
def free_port() -> Callable[[], int]:
    """Return a function that finds a free TCP port."""
    return find_free_port


@pytest.fixture
def start_service(tmp_path: Path) -> Iterator[Callable[..., Service]]:
    """Return a function that starts a service from TOML text; stop all and check at the end.

    Only where a test asks for it there is a KV pool: its processes take seconds to start.
    """
    services: list[Service] = []
    folders: list[Path] = []

    def start(
        toml: str = "", *arguments: str, has_pool: bool = False, state_dir: Path | None = None
    ) -> Service:
        # Socket paths are limited to 107 bytes, which pytest's own folders may exceed.
        run_dir = Path(tempfile.mkdtemp(prefix="mp-"))
        shm_dir = Path(tempfile.mkdtemp(prefix="mp-", dir=SHM))
        folders.extend((run_dir, shm_dir))
        port = find_free_port()
        config_file = run_dir / "service.toml"
        config_file.write_text(toml)
        settings = (
            f"supervise.run_dir={run_dir / 'run'}",
            f"supervise.state_dir={state_dir or run_dir / 'state'}",
            f"pool.enabled={str(has_pool).lower()}",
            "supervise.pin_cores=false",
            f"transfer.shm_dir={shm_dir}",
            f"gateway.port={port}",
        )
        log_file = tmp_path / f"service-{port}.log"
        command = [sys.executable, "-m", "millpond.cli.main", "serve", "--config", str(config_file)]
        command += [f"--set={setting}" for setting in settings] + list(arguments)
        with log_file.open("wb") as log:
            process = subprocess.Popen(command, stdout=log, stderr=log, stdin=subprocess.DEVNULL)
        config = load_config(config_file, settings).config
        service = Service(config, process, f"http://127.0.0.1:{port}", log_file)
        services.append(service)
        service.wait_ready()
        return service

    yield start
    for service in services:
        service.stop()
        assert not Path(service.config.supervise.run_dir).exists(), "the run folder stayed behind"
        left = [path.name for path in Path(service.config.transfer.shm_dir).iterdir()]
        assert not left, f"shared memory stayed behind: {left}"
    for folder in folders:
        shutil.rmtree(folder)


SYNTHETIC = """
[engine]
model = "synthetic"
[synthetic]
decode_step_ns = 8_000_000
"""
"""Config of a service without weights: starts at once, and its text proves its KV. Steps are slow enough
that all streams of a test overlap."""


@pytest.fixture
def synthetic_toml() -> str:
    """Config of the synthetic engine."""
    return SYNTHETIC
