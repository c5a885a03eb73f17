"""Laws that hold between any two events: free + owned = total, nothing on two lines, nothing on the dead.

Run by every test, by the simulator, and by the service's idle loop.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from millpond.core.errors import InvariantBroken


class Checkable(Protocol):
    """A state machine that can inspect itself."""

    def check(self) -> list[str]:
        """Return violated laws; empty when sound."""
        ...


def check_all(machines: Iterable[Checkable]) -> list[str]:
    """Return the violated laws of all machines."""
    return [problem for machine in machines for problem in machine.check()]


def require_sound(machines: Iterable[Checkable]) -> None:
    """Raise InvariantBroken if any law is violated."""
    problems = check_all(machines)
    if problems:
        raise InvariantBroken("; ".join(problems))
