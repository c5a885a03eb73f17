"""`BufferPool`: the memory of stripes on their way, allocated and touched once.

A buffer goes back when its last holder lets go: whoever still sends from it or receives into it keeps it from
having a new owner.
"""

from __future__ import annotations

import threading
import time

import numpy as np

from millpond.core.errors import DeadlineExceeded, InvariantBroken
from millpond.core.units import KIB, SECOND_NS, align_up
from millpond.store.codec.backend import Memory

_PAGE_BYTES = 4 * KIB


class BufferLease:
    """One buffer. Its taker is the first holder."""

    def __init__(self, pool: BufferPool, index: int, memory: Memory) -> None:
        self.memory = memory
        self._pool = pool
        self._index = index
        self._holders = 1
        self._lock = threading.Lock()

    def hold(self) -> None:
        """Become one more holder.

        Raises:
            InvariantBroken: Nobody holds it any more: it may belong to someone else.
        """
        with self._lock:
            if not self._holders:
                raise InvariantBroken("a buffer that was given back is used")
            self._holders += 1

    def release(self) -> None:
        """Stop being a holder."""
        with self._lock:
            self._holders -= 1
            left = self._holders
        if left < 0:
            raise InvariantBroken("a buffer is given back twice")
        if not left:
            self._pool.give_back(self._index)


class BufferPool:
    """A fixed number of buffers of one size."""

    def __init__(self, num_buffers: int, buffer_bytes: int) -> None:
        """Allocate and touch all buffers.

        Args:
            num_buffers: How many, >= 1.
            buffer_bytes: Size of each; `stripe_bytes` of the largest stripe.
        """
        self.buffer_bytes = align_up(buffer_bytes, _PAGE_BYTES)
        self.num_buffers = num_buffers
        memory = np.empty(num_buffers * self.buffer_bytes + _PAGE_BYTES, np.uint8)
        memory[::_PAGE_BYTES] = 0  # touched here, once, and not by the first request
        begin = -memory.ctypes.data % _PAGE_BYTES
        self._memory = memory[begin:]
        self._free = list(range(num_buffers))
        self._changed = threading.Condition()

    @property
    def num_free(self) -> int:
        """Buffers that nobody holds."""
        return len(self._free)

    def take(self, *, deadline_ns: int) -> BufferLease:
        """Take a buffer, waiting for one if need be.

        Raises:
            DeadlineExceeded: None came free.
        """
        with self._changed:
            while not self._free:
                left_ns = deadline_ns - time.monotonic_ns()
                if left_ns <= 0:
                    raise DeadlineExceeded("no stripe buffer came free", code="pool.no_buffer")
                self._changed.wait(left_ns / SECOND_NS)
            index = self._free.pop()
        return self._lease(index)

    def try_take(self) -> BufferLease | None:
        """Take a buffer if one is free."""
        with self._changed:
            index = self._free.pop() if self._free else None
        return None if index is None else self._lease(index)

    def give_back(self, index: int) -> None:
        """For `BufferLease` only."""
        with self._changed:
            self._free.append(index)
            self._changed.notify()

    def _lease(self, index: int) -> BufferLease:
        begin = index * self.buffer_bytes
        return BufferLease(self, index, self._memory[begin : begin + self.buffer_bytes])
