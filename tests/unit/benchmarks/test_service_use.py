"""What the service benchmark reads from /proc, on processes whose use is known."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator

import pytest

from benchmarks.service import measure_idle, process_tree, read_use

CHILD = """
import subprocess, sys
subprocess.Popen([sys.executable, "-c", "import sys; sys.stdin.read()"], stdin=0)
print("started", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def family() -> Iterator[subprocess.Popen[str]]:
    """A process with one child, both waiting for input."""
    with subprocess.Popen(
        [sys.executable, "-c", CHILD, "one", "--flag", "two"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        process.stdout.readline()
        yield process
        process.stdin.close()


def test_a_tree_holds_the_process_and_all_below_it(family: subprocess.Popen[str]):
    assert len(process_tree(family.pid)) == 2
    assert family.pid in process_tree(family.pid)


def test_use_is_told_in_bytes_and_seconds(family: subprocess.Popen[str]):
    use = read_use(family.pid)
    assert use.name == "one two"
    assert 4 << 20 < use.pss_bytes <= use.rss_bytes < 1 << 30
    assert 0 <= use.cpu_s < 60


def test_idle_processes_use_hardly_anything_and_busy_ones_do(family: subprocess.Popen[str]):
    idle, uses = measure_idle(family.pid, 0.3)
    assert len(uses) == 2
    with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as burner:
        try:
            busy, _ = measure_idle(burner.pid, 0.5)
        finally:
            burner.kill()
    assert idle < busy
