"""`PoolGet` and `Prefetch`: a read of the pool in the caller's thread or in the background, to cancel."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import CancelledError, Future

from millpond.core.errors import DeadlineExceeded, TransferFailed
from millpond.core.units import SECOND_NS
from millpond.store.extent_get import ExtentGet, GetResult


class PoolGet:
    """A get that may be cancelled."""

    def __init__(self, get: ExtentGet, end: Callable[[GetResult], None]) -> None:
        self._get = get
        self._end = end

    def run(self) -> GetResult:
        """Read, in the caller's thread; see `Pool.get`."""
        result = self._get.run()
        self._end(result)
        return result

    def cancel(self) -> None:
        """Give up, from any thread: `run` returns soon, with what it has."""
        self._get.cancel()


class Prefetch:
    """A get that runs in the background."""

    def __init__(self, get: PoolGet, future: Future[GetResult]) -> None:
        self._get = get
        self._future = future

    def cancel(self) -> None:
        """Give up; `result` then says how far it came."""
        self._get.cancel()

    def result(self, *, deadline_ns: int) -> GetResult:
        """Wait for the end.

        Raises:
            DeadlineExceeded: It has not ended by the deadline.
            TransferFailed: The pool was closed before it began.
        """
        try:
            return self._future.result(max(0, deadline_ns - time.monotonic_ns()) / SECOND_NS)
        except TimeoutError as error:
            raise DeadlineExceeded("the prefetch goes on", code="pool.deadline") from error
        except CancelledError as error:
            raise TransferFailed("the pool was closed", code="pool.closed") from error
