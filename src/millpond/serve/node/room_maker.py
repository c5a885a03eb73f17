"""`RoomMaker`: writes to the pool what waits, where a load or a rank finds no slot."""

from __future__ import annotations

import time

from millpond.core.units import SECOND_NS
from millpond.serve.node.host_memory import HostMemory
from millpond.serve.node.jobs import Jobs

PAUSE_NS = SECOND_NS // 2
"""Between two writes: where the pool takes nothing, trying without a pause would help nobody."""


class RoomMaker:
    """See module. All methods are the loop's."""

    def __init__(self, memory: HostMemory, jobs: Jobs) -> None:
        self._memory = memory
        self._jobs = jobs
        self._is_busy = False
        self._ended_ns = 0

    def make(self, num_slots: int) -> None:
        """Have so many slots made free, unless that is being done or was tried just now."""
        if self._is_busy or time.monotonic_ns() - self._ended_ns < PAUSE_NS:
            return
        self._is_busy = True
        level, until_ns = self._memory.level, self._memory.spill_until_ns()
        self._jobs.submit(
            self._jobs.maker,
            lambda: level.make_room(num_slots, deadline_ns=until_ns),
            lambda _: self._on_made(),
        )

    def _on_made(self) -> None:
        self._is_busy = False
        self._ended_ns = time.monotonic_ns()
