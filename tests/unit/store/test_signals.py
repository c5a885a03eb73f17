"""A process ends when it is told to, and not because it was frozen."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

CHILD = """
from millpond.store.signals import block_stop_signals, stop_asked
block_stop_signals()
while not stop_asked(0.1):
    print("on", flush=True)
"""


def state_of(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0]


def test_a_frozen_process_goes_on_and_a_told_one_ends(wait_until: Callable[..., None]):
    child = subprocess.Popen([sys.executable, "-c", CHILD], stdout=subprocess.PIPE, text=True)
    try:
        assert child.stdout is not None
        assert child.stdout.readline() == "on\n"
        os.kill(child.pid, signal.SIGSTOP)
        frozen_ns = time.monotonic_ns()
        wait_until(lambda: state_of(child.pid) == "T", "frozen")
        wait_until(lambda: time.monotonic_ns() - frozen_ns > 3e8, "longer than it waits")
        os.kill(child.pid, signal.SIGCONT)
        assert [child.stdout.readline() for _ in range(5)] == ["on\n"] * 5
        os.kill(child.pid, signal.SIGTERM)
        assert child.wait(20) == 0
    finally:
        child.kill()
        child.communicate(timeout=20)
