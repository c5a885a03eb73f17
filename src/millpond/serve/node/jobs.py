"""`Jobs`: threads that work for a loop, which goes on with what they have made."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any, TypeVar

from millpond.core.units import SECOND_NS
from millpond.serve.rpc import Wakeup

Made = TypeVar("Made")


class Jobs:
    """See module. All methods are the loop's.

    Args:
        num_load_threads: Loads that read from disks or other hosts at once.
    """

    def __init__(self, num_load_threads: int) -> None:
        self.wakeup = Wakeup()
        """The loop waits for it, and calls `go_on`."""
        self.starter = ThreadPoolExecutor(1, "start load")
        """Finds slots for loads, in their order."""
        self.loader = ThreadPoolExecutor(num_load_threads, "load")
        self.prover = ThreadPoolExecutor(2, "prove load")
        """Runs loads that are in memory: they are not to wait behind those that read from elsewhere."""
        self.putter = ThreadPoolExecutor(1, "put")
        """Takes in what ranks have written, in the order in which it came."""
        self.maker = ThreadPoolExecutor(1, "make room")
        """Writes what waits where memory is short."""
        self._open: set[Future[Any]] = set()

    @property
    def is_idle(self) -> bool:
        """Whether no thread has anything to do, nor the loop with what they made."""
        return not self._open

    def submit(
        self, executor: ThreadPoolExecutor, work: Callable[[], Made], then: Callable[[Made], None]
    ) -> None:
        """Have a thread do `work`, and the loop what comes after it.

        What `work` raises ends the loop: it translates what may happen, all else is a bug.
        """
        job = executor.submit(work)
        self._open.add(job)
        job.add_done_callback(lambda _: self.wakeup.post(lambda: self._after(job, then)))

    def go_on(self) -> None:
        """Go on with what threads have made."""
        for event in self.wakeup.take():
            assert callable(event)  # noqa: S101 - posted above only
            event()

    def stop(self, until_ns: int) -> bool:
        """Begin nothing more; whether every thread has ended in time."""
        for executor in (self.starter, self.loader, self.prover, self.putter, self.maker):
            executor.shutdown(wait=False, cancel_futures=True)
        started = [job for job in self._open if not job.cancelled()]
        left_s = max(0, until_ns - time.monotonic_ns()) / SECOND_NS
        is_over = not wait(started, left_s).not_done
        self.wakeup.close()
        return is_over

    def _after(self, job: Future[Made], then: Callable[[Made], None]) -> None:
        self._open.discard(job)
        if not job.cancelled():
            then(job.result())
