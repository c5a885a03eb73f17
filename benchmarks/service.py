"""The default service at rest: CPU of all its processes, and the memory they hold."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from benchmarks.harness import Report, Result, say

START_DEADLINE_S = 240.0
SETTLE_S = 3.0
"""After `ready`: caches of the allocator and first heartbeats are not idling."""
STOP_DEADLINE_S = 60.0


@dataclass(frozen=True, slots=True)
class ProcessUse:
    """What one process holds and has used."""

    pid: int
    name: str
    cpu_s: float
    """User and system time since its start, its waited-for children not included."""
    rss_bytes: int
    pss_bytes: int
    """Like RSS, but a page shared by n processes counts 1/n."""


@contextmanager
def default_service() -> Iterator[int]:
    """Start `millpond serve` with the default config on a free port; yields the supervisor's pid."""
    with tempfile.TemporaryDirectory(prefix="mp-") as folder, Path(folder, "log").open("wb") as log:
        with socket.create_server(("127.0.0.1", 0)) as probe:
            port = int(probe.getsockname()[1])
        settings = [f"supervise.run_dir={folder}/run", f"supervise.state_dir={folder}/state"]
        command = [sys.executable, "-m", "millpond.cli.main", "serve", "--port", str(port)]
        command += [part for setting in settings for part in ("--set", setting)]
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        try:
            _wait_ready(process, f"http://127.0.0.1:{port}/ready", Path(folder, "log"))
            yield process.pid
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait(STOP_DEADLINE_S)


def _wait_ready(process: subprocess.Popen[bytes], url: str, log: Path) -> None:
    import httpx

    end_ns = time.monotonic_ns() + int(START_DEADLINE_S * 1e9)
    while time.monotonic_ns() < end_ns:
        if process.poll() is not None:
            raise RuntimeError(
                f"the service ended with status {process.returncode}: {log.read_text()[-2000:]}"
            )
        try:
            if httpx.get(url).status_code == httpx.codes.OK:
                return
        except httpx.TransportError:
            pass  # not listening yet
        time.sleep(0.2)
    raise RuntimeError(f"not ready within {START_DEADLINE_S} s: {log.read_text()[-2000:]}")


def process_tree(root: int) -> list[int]:
    """The process and all its descendants, ascending."""
    found = [root]
    for pid in found:
        for task in Path(f"/proc/{pid}/task").iterdir():
            found += [int(child) for child in (task / "children").read_text().split()]
    return sorted(found)


def read_use(pid: int) -> ProcessUse:
    """Read one process's use from /proc."""
    folder = Path(f"/proc/{pid}")
    # The name of the command, in brackets, may hold blanks; utime and stime are fields 14 and 15 of the line.
    fields = (folder / "stat").read_text().rpartition(")")[2].split()
    cpu_s = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    kib = {
        name: int(rest.split()[0])
        for name, _, rest in (
            line.partition(":") for line in (folder / "smaps_rollup").read_text().splitlines()[1:]
        )
    }
    arguments = (folder / "cmdline").read_bytes().decode(errors="replace").split("\0")
    name = " ".join(
        word for word in arguments[3:] if word and len(word) < 16 and not word.startswith(("-", "/"))
    )
    return ProcessUse(pid, name, cpu_s, kib["Rss"] << 10, kib["Pss"] << 10)


def measure_idle(root: int, seconds: float) -> tuple[float, list[ProcessUse]]:
    """CPU seconds per second of all processes of a tree while nothing happens, and their use at the end."""
    before = {use.pid: use for use in map(read_use, process_tree(root))}
    begin_ns = time.monotonic_ns()
    time.sleep(seconds)
    after = [read_use(pid) for pid in process_tree(root)]
    if {use.pid for use in after} != set(before):
        raise RuntimeError("a process was started or ended while the service was idle")
    used_s = sum(use.cpu_s - before[use.pid].cpu_s for use in after)
    return used_s / ((time.monotonic_ns() - begin_ns) / 1e9), after


def run(quick: bool, only: set[str]) -> Result:
    """Measure the default service at rest, for 20 s (10 s with --quick)."""
    report = Report("service", quick, only)
    with default_service() as pid:
        say(f"ready; settling for {SETTLE_S} s")
        time.sleep(SETTLE_S)
        seconds = 10.0 if quick else 20.0
        say(f"idle for {seconds} s")
        cpu_fraction, uses = measure_idle(pid, seconds)
    report.figures["idle_pss_gb"] = sum(use.pss_bytes for use in uses) / 1e9
    report.figures["processes"] = [
        {"name": use.name, "rss_mb": use.rss_bytes / 1e6, "pss_mb": use.pss_bytes / 1e6} for use in uses
    ]
    if report.wants("idle_cpu_fraction"):
        report.add("idle_cpu_fraction", cpu_fraction, f"{len(uses)} processes over {seconds:g} s")
    if report.wants("idle_rss_gb"):
        rss_gb = sum(use.rss_bytes for use in uses) / 1e9
        report.add("idle_rss_gb", rss_gb, "sum of RSS; pages that processes share count in each")
    return report.finish()
