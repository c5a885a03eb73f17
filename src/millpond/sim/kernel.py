"""Virtual time: a heap of what happens when."""

from __future__ import annotations

import heapq
from collections.abc import Callable


class Kernel:
    """Runs actions in order of (time, order, sequence number); nothing else decides.

    `order` ranks what happens at one instant, so that a run does not depend on who asked first.
    """

    def __init__(self) -> None:
        self.now_ns = 0
        self.num_events = 0
        self._heap: list[tuple[int, int, int, Callable[[], None]]] = []
        self._num_pushed = 0

    def at(self, time_ns: int, order: int, action: Callable[[], None]) -> None:
        """Run `action` at `time_ns`, or now if that has passed."""
        self._num_pushed += 1
        heapq.heappush(self._heap, (max(time_ns, self.now_ns), order, self._num_pushed, action))

    def after(self, delay_ns: int, order: int, action: Callable[[], None]) -> None:
        """Run `action` in `delay_ns`."""
        self.at(self.now_ns + delay_ns, order, action)

    @property
    def next_time_ns(self) -> int | None:
        """Time of the next event."""
        return self._heap[0][0] if self._heap else None

    def run(self, is_over: Callable[[], bool], until_ns: int) -> bool:
        """Run until `is_over` says so, which is asked after every event.

        Returns:
            False if virtual time would pass `until_ns`, or nothing is left to happen, before that.
        """
        while not is_over():
            if not self._heap or self._heap[0][0] > until_ns:
                return False
            self.now_ns, _, _, action = heapq.heappop(self._heap)
            self.num_events += 1
            action()
        return True
