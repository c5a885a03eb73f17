"""What cannot run says so in one line, soon, and ends with status 2; nothing restarts for ever."""

from __future__ import annotations

import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.unit.engine.tiny_llama import write_checkpoint

LIMIT_S = 50.0
"""Ten times what a refusal may take."""


@pytest.fixture
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A run folder with a short path; nothing may stay in it."""
    path = tmp_path_factory.getbasetemp().parent / f"r{time.monotonic_ns() % 10**9}"
    yield path
    assert not path.exists(), "the run folder stayed behind"


def check_refusal(run_dir: Path, model: str, *arguments: str, words: tuple[str, ...]) -> str:
    """Serve what cannot be served; returns standard error."""
    command = [sys.executable, "-m", "millpond.cli.main", "serve", model, "--port", "0"]
    command += ["--set", f"supervise.run_dir={run_dir}", "--set", "pool.enabled=false", *arguments]
    result = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    assert result.returncode == 2, result.stderr
    (line,) = [line for line in result.stderr.splitlines() if line.startswith("error: ")]
    assert all(word in line for word in words), line
    assert "Traceback" not in result.stderr
    return result.stderr


def test_an_unknown_model(run_dir: Path) -> None:
    assert "process.started" not in check_refusal(run_dir, "nosuch", words=("nosuch", "smollm2-135m"))


def test_a_port_in_use(run_dir: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        errors = check_refusal(run_dir, "synthetic", "--port", port, words=(port, "gateway.port"))
    assert "process.started" not in errors


def test_a_truncated_model(run_dir: Path, tmp_path: Path) -> None:
    file = write_checkpoint(tmp_path / "model") / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    errors = check_refusal(run_dir, str(file.parent), words=("model.safetensors", "truncated"))
    assert "process.started" not in errors


def test_what_only_a_child_process_can_find_out_is_one_line_too(tmp_path: Path, run_dir: Path) -> None:
    config_file = tmp_path / "c.toml"
    config_file.write_text('[[group]]\nname = "a"\nrole = "mixed"\ndevice = "cuda:77"\n', encoding="utf-8")
    check_refusal(run_dir, "smollm2-135m", "--config", str(config_file), words=("a-0", "cuda:77"))
