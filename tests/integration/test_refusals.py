"""What cannot run says so in one line and ends with status 2; nothing restarts for ever."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

NO_GPU = '[[group]]\nname = "a"\nrole = "mixed"\ndevice = "nonsense"\n'


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("arguments", "toml", "words"),
    [(("nosuch",), "", "nosuch"), (("smollm2-135m",), NO_GPU, "nonsense")],
)
def test_the_service_ends_at_once(
    tmp_path: Path,
    tmp_path_factory: pytest.TempPathFactory,
    arguments: tuple[str, ...],
    toml: str,
    words: str,
) -> None:
    config_file = tmp_path / "c.toml"
    config_file.write_text(toml)
    run_dir = tmp_path_factory.getbasetemp().parent / f"r-{words}"
    command = [sys.executable, "-m", "millpond.cli.main", "serve", *arguments, "--config", str(config_file)]
    command += ["--port", "0", "--set", f"supervise.run_dir={run_dir}"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert result.returncode == 2, result.stderr
    assert any(line.startswith("error: ") and words in line for line in result.stderr.splitlines())
    assert "Traceback" not in result.stderr
