"""`RecordBuffers`: memory for records between socket and disk, used again, and never more than a limit."""

from __future__ import annotations

import threading

MIN_BUFFER_BYTES = 16 * 1024


class RecordBuffers:
    """Buffers of power-of-two sizes. Thread-safe.

    Args:
        max_bytes: Of all buffers together, in use or kept.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._lock = threading.Lock()
        self._kept: dict[int, list[bytearray]] = {}
        self._kept_bytes = 0
        self._used_bytes = 0

    @property
    def used_bytes(self) -> int:
        """Bytes of the buffers in use."""
        return self._used_bytes

    def take(self, num_bytes: int) -> bytearray | None:
        """A buffer of at least `num_bytes` with any content; None if the limit is reached."""
        size = max(MIN_BUFFER_BYTES, 1 << (num_bytes - 1).bit_length())
        with self._lock:
            if self._used_bytes + size > self._max_bytes:
                return None
            self._used_bytes += size
            kept = self._kept.get(size)
            if kept:
                self._kept_bytes -= size
                return kept.pop()
            if self._used_bytes + self._kept_bytes > self._max_bytes:
                self._kept.clear()  # of sizes that are not asked for any more
                self._kept_bytes = 0
        return bytearray(size)

    def give_back(self, buffer: bytearray) -> None:
        """Return a buffer; no view of it is used any more."""
        size = len(buffer)
        with self._lock:
            self._used_bytes -= size
            self._kept.setdefault(size, []).append(buffer)
            self._kept_bytes += size
