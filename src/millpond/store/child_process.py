"""`ChildProcess`: one of our commands as a child that prints its address when it serves."""

from __future__ import annotations

import ctypes
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Sequence

from millpond.core.errors import ConfigError, DeadlineExceeded
from millpond.core.units import SECOND_NS

_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None, use_errno=True)


class ChildProcess:
    """See module. The kernel kills it when the thread that started it ends, however that happens.

    Args:
        arguments: Of `millpond`.
        name: For messages.
    """

    def __init__(self, arguments: Sequence[str], name: str) -> None:
        parent = os.getpid()

        def die_with_parent() -> None:
            _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
            if os.getppid() != parent:  # it died before we asked
                os._exit(1)

        self.name = name
        self.process = subprocess.Popen(
            [sys.executable, "-m", "millpond.cli.main", *arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            text=True,
            preexec_fn=die_with_parent,  # noqa: PLW1509 - two system calls, no lock
        )

    def wait_address(self, deadline_ns: int) -> str:
        """What it prints first.

        Raises:
            ConfigError: It ended instead.
            DeadlineExceeded: It printed nothing.
        """
        out = self.process.stdout
        if out is None:
            raise ConfigError(f"{self.name} has no output")
        left_s = max(0, deadline_ns - time.monotonic_ns()) / SECOND_NS
        if not select.select([out], [], [], left_s)[0]:
            raise DeadlineExceeded(f"{self.name} does not start", code="pool.start")
        address = out.readline().strip()
        if not address:
            raise ConfigError(f"{self.name} ended with status {self.process.wait()}")
        return address

    def end(self, number: signal.Signals = signal.SIGTERM) -> None:
        """Send a signal, without waiting."""
        if self.process.poll() is None:
            self.process.send_signal(number)

    def wait(self, timeout_s: float) -> int:
        """Exit status; a process that does not end in time is killed."""
        try:
            self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        if self.process.stdout is not None:
            self.process.stdout.close()
        return self.process.returncode
