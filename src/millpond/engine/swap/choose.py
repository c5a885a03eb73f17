"""Measures the copy methods on this host and picks one, in a few hundredths of a second."""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np

from millpond.core.units import MIB
from millpond.engine.swap.methods import METHODS, BatchedCopy, CopyMethod, Memory, make_method

AUTO = "auto"
BATCHES = (8, 64, 512)
"""Pieces per call that the batched copy is tried with."""
_TRIAL_BYTES = 4 * MIB
_NUM_TRIALS = 3


def choose_method(name: str, piece_bytes: int) -> CopyMethod:
    """Make the method of that name; `auto`: the one, with its batch, that takes the least CPU time for such
    pieces.

    Raises:
        ConfigError: There is no such method, or not on this host.
    """
    if name != AUTO:
        return make_method(name)
    made = [make() for make in METHODS.values()] + [BatchedCopy.make(batch) for batch in BATCHES]
    methods = [method for method in made if method is not None]
    source, target = _scratch(piece_bytes), _scratch(piece_bytes)
    return min(methods, key=lambda method: _least_ns(lambda: _move(method, source, target)))


def _scratch(piece_bytes: int) -> Memory:
    return np.ones((max(2, _TRIAL_BYTES // piece_bytes), piece_bytes), np.uint8)


def _move(method: CopyMethod, source: Memory, target: Memory) -> None:
    items = np.arange(len(source))
    method.copy(source, items, target, items[::-1].copy())


def _least_ns(work: Callable[[], None]) -> int:
    times: list[int] = []
    for _ in range(_NUM_TRIALS):
        begin_ns = time.thread_time_ns()
        work()
        times.append(time.thread_time_ns() - begin_ns)
    return min(times)
