"""Host memory for snapshots: the bytes behind the buffer numbers of `control.snapshot_holder`."""

from __future__ import annotations

from millpond.core.errors import InvariantBroken
from millpond.core.ids import BufferId


class SnapshotBuffers:
    """Buffers as large as one state slot each. Written and read by the engine's thread only."""

    def __init__(self, state_bytes: int, memory_bytes: int) -> None:
        """Make as many as fit.

        Args:
            state_bytes: Size of a state slot; 0, for models without state, gives no buffers.
            memory_bytes: Size of all together. Each is allocated when it is first written.
        """
        self._state_bytes = state_bytes
        self._buffers: list[bytearray] = [
            bytearray() for _ in range(memory_bytes // state_bytes if state_bytes else 0)
        ]

    def __len__(self) -> int:
        return len(self._buffers)

    def write(self, buffer: BufferId, state: memoryview) -> None:
        """Replace one buffer's bytes."""
        if state.nbytes != self._state_bytes:
            raise InvariantBroken(f"{state.nbytes} bytes of state, a buffer has {self._state_bytes}")
        place = self._buffers[buffer]
        if not place:
            place.extend(bytes(self._state_bytes))
        place[:] = state.cast("B")

    def read(self, buffer: BufferId) -> memoryview:
        """Bytes of one buffer; valid until it is written again."""
        if not self._buffers[buffer]:
            raise InvariantBroken(f"snapshot buffer {buffer} was never written")
        return memoryview(self._buffers[buffer]).toreadonly()
