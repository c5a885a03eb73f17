"""Order of waiting requests: by priority, with a bound on how often one is overtaken."""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class QueueOrderParams:
    """Order of the controller's queue."""

    max_overtakes: int = 64
    """A request that others passed this often is next, whatever its priority, >= 0."""


@dataclass(slots=True)
class _Waiting:
    priority: int
    arrival: int
    num_overtaken: int = 0


class OrderedQueue:
    """Requests by (priority, arrival), the longest waiting one being overtaken a bounded number of times."""

    def __init__(self, params: QueueOrderParams) -> None:
        self._params = params
        self._waiting: dict[str, _Waiting] = {}
        self._heap: list[tuple[int, int, str]] = []

    def __len__(self) -> int:
        """Requests that wait."""
        return len(self._waiting)

    def __iter__(self) -> Iterator[str]:
        """Keys, longest waiting first."""
        return iter(self._waiting)

    def push(self, key: str, priority: int, arrival: int) -> None:
        """Add a request; lower `priority` is sooner; `arrival` breaks ties."""
        self._waiting[key] = _Waiting(priority, arrival)
        heapq.heappush(self._heap, (priority, arrival, key))

    def discard(self, key: str) -> None:
        """Remove a request if it waits."""
        self._waiting.pop(key, None)

    def head(self) -> str | None:
        """Return the next request without removing it."""
        if not self._waiting:
            return None
        oldest = next(iter(self._waiting))
        if self._waiting[oldest].num_overtaken >= self._params.max_overtakes:
            return oldest
        while self._is_stale(self._heap[0]):
            heapq.heappop(self._heap)
        return self._heap[0][2]

    def pop(self, key: str) -> None:
        """Remove `key`, which `head` returned, and count it as overtaking the oldest if that still waits."""
        taken = self._waiting.pop(key)
        if self._waiting:
            oldest = next(iter(self._waiting.values()))
            if oldest.arrival < taken.arrival:
                oldest.num_overtaken += 1

    def _is_stale(self, entry: tuple[int, int, str]) -> bool:
        waiting = self._waiting.get(entry[2])
        return waiting is None or waiting.arrival != entry[1]
