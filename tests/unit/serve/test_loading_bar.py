"""Progress on a terminal, silence elsewhere."""

from __future__ import annotations

import os
import pty
import subprocess
import sys
from pathlib import Path

from millpond.config.engine_params import EngineParams
from millpond.engine.load import load_engine
from tests.unit.engine.tiny_llama import write_checkpoint

CONFIG = Path(__file__).parents[2] / "golden" / "data" / "tiny_a" / "config.json"


def test_init_shows_a_bar_on_a_terminal_and_nothing_elsewhere(tmp_path):
    command = [sys.executable, "-m", "millpond.cli.main", "model", "init", str(CONFIG)]
    quiet = subprocess.run([*command, str(tmp_path / "a")], capture_output=True, timeout=100, check=True)
    assert (quiet.stdout, quiet.stderr) == (b"", b"")
    ours, theirs = pty.openpty()
    with subprocess.Popen([*command, str(tmp_path / "b")], stderr=theirs) as process:
        os.close(theirs)
        shown = b""
        while data := read(ours):
            shown += data
        assert process.wait(timeout=100) == 0
    os.close(ours)
    assert b"writing" in shown
    assert b"MiB" in shown


def read(descriptor):
    """What a terminal was sent; nothing once its last writer is gone."""
    try:
        return os.read(descriptor, 4096)
    except OSError:
        return b""


def test_loading_tells_how_far_it_is(tmp_path):
    told = []
    folder = write_checkpoint(tmp_path / "model")
    load_engine(EngineParams(model=str(folder), kv_memory=6 << 20), show=lambda *at: told.append(at))
    done, total = zip(*told, strict=True)
    assert sorted(set(done)) == list(done)
    assert set(total) == {done[-1]}
