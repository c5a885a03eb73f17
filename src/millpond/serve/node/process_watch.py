"""`ProcessWatch`: learns at once when a process of this host has ended, however it did."""

from __future__ import annotations

import os
import select


class ProcessWatch:
    """Processes, each by a descriptor that becomes readable when it ends. A source for `wait_any`."""

    def __init__(self) -> None:
        self._pid_by_descriptor: dict[int, int] = {}

    def poll_items(self) -> tuple[int, ...]:
        """What `wait_any` watches."""
        return tuple(self._pid_by_descriptor)

    def watch(self, pid: int) -> bool:
        """Watch a process until it has ended; whether there is one that can be watched."""
        if pid in self._pid_by_descriptor.values():
            return True
        try:
            descriptor = os.pidfd_open(pid) if pid > 0 else -1
        except OSError:
            return False
        if descriptor >= 0:
            self._pid_by_descriptor[descriptor] = pid
        return descriptor >= 0

    def take_ended(self) -> list[int]:
        """Processes that have ended; they are not watched any more."""
        poller = select.poll()
        for descriptor in self._pid_by_descriptor:
            poller.register(descriptor, select.POLLIN)
        ended = [descriptor for descriptor, _ in poller.poll(0)]
        for descriptor in ended:
            os.close(descriptor)
        return [self._pid_by_descriptor.pop(descriptor) for descriptor in ended]

    def close(self) -> None:
        """Watch nothing any more."""
        for descriptor in self._pid_by_descriptor:
            os.close(descriptor)
        self._pid_by_descriptor.clear()
