"""One receiving rank as its sender sees it: a connection, a ring or a staging buffer, and two threads."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path

import structlog

from millpond.config.transfer_params import TransferParams
from millpond.core.errors import DeadlineExceeded, TransferFailed
from millpond.core.units import KIB
from millpond.serve.transfer.frames import INLINE, PIECE_HEADER_BYTES, PREFIX, Piece, encode_piece_header
from millpond.serve.transfer.handshake import greet_receiver
from millpond.serve.transfer.protocol import Pieces, checksum
from millpond.serve.transfer.ring import Ring
from millpond.serve.transfer.send_side import Reading
from millpond.serve.transfer.stream import DataAddress, FrameStream, connect

STAGING_BYTES = 512 * KIB
"""Inline pieces are sent in batches of about this size, or one by one if they are larger."""
STOP_S = 10.0

log = structlog.get_logger(__name__)


class Peer:
    """One receiving rank: its connection, its ring, and the two threads."""

    def __init__(
        self, connection: int, address: str, lock: threading.Lock, serve: Callable[[Peer], None]
    ) -> None:
        self.connection = connection
        self.address = address
        self.broken_why = ""
        """Set by the reading thread for the writing one."""
        self.has_work = threading.Condition(lock)
        """Of the sender's lock."""
        self.ring: Ring | None = None
        self.num_used_slots = 0
        self._stream: FrameStream | None = None
        self._next_slot = 0
        self._last_progress_ns = 0
        """When the receiver freed a slot, or got one to free."""
        self._staging = memoryview(b"")
        self._staged_pieces = 1
        self._is_cut = False
        self._reader: threading.Thread | None = None
        self.writer = threading.Thread(
            target=serve, args=(self,), name=f"handoff-send-{connection}", daemon=True
        )

    @property
    def num_slots(self) -> int:
        """Slots of the ring; 0 without one."""
        return self.ring.num_slots if self.ring is not None else 0

    @property
    def max_pieces(self) -> int:
        """Pieces that can be copied now."""
        if self.ring is None:
            return self._staged_pieces
        return min(self.ring.num_slots - self.num_used_slots, max(1, self.ring.num_slots // 4))

    def connect(self, token: bytes, pieces: Pieces, params: TransferParams) -> None:
        """Connect, prove membership, and agree on a ring if the receiver is on this host."""
        address = DataAddress.parse(self.address)
        stream = FrameStream(connect(address), max_payload_bytes=0, stall_s=params.stall_s)
        self._stream = stream
        ring = _make_ring(params, pieces.max_bytes) if address.path else None
        try:
            uses_ring = greet_receiver(stream, token, pieces.fingerprint, ring)
        finally:
            if ring is not None:
                ring.unlink()
        if uses_ring:
            self.ring = ring
        else:
            self._staged_pieces = max(1, STAGING_BYTES // pieces.max_bytes)
            self._staging = memoryview(bytearray(self._staged_pieces * (pieces.max_bytes + KIB)))

    def read_answers_by(self, target: Callable[[Peer, FrameStream], None]) -> None:
        """Start the reading thread."""
        self._reader = threading.Thread(
            target=target,
            args=(self, self._stream),
            name=f"handoff-answers-{self.connection}",
            daemon=True,
        )
        self._reader.start()

    def copy_to_ring(self, work: Reading, sources: list[memoryview]) -> bytes:
        """Copy pieces into the next slots; returns their headers. The writing thread only."""
        ring = self.ring
        if ring is None:
            raise TransferFailed("no ring", code="handoff.ring")
        headers = bytearray()
        for index, source in enumerate(sources, work.begin):
            payload = ring.slot(self._next_slot, len(source))
            payload[:] = source
            headers += encode_piece_header(_piece(work, index, payload, self._next_slot), 0)
            self._next_slot = (self._next_slot + 1) % ring.num_slots
        with self.has_work:
            if self.num_used_slots == 0:
                self._last_progress_ns = time.monotonic_ns()
            self.num_used_slots += len(sources)
        return bytes(headers)

    def copy_to_staging(self, work: Reading, sources: list[memoryview]) -> memoryview:
        """Copy headers and pieces into the staging buffer; returns its used part."""
        end = 0
        for index, source in enumerate(sources, work.begin):
            begin, end = end, end + PREFIX.size + PIECE_HEADER_BYTES + len(source)
            payload = self._staging[end - len(source) : end]
            payload[:] = source
            header = encode_piece_header(_piece(work, index, payload, INLINE), len(payload))
            self._staging[begin : end - len(payload)] = header
        return self._staging[:end]

    def free(self, now_ns: int, num_slots: int) -> None:
        """The receiver read this many slots. Holding the lock."""
        if num_slots > self.num_used_slots:
            raise TransferFailed("the receiver frees slots that were not used", code="handoff.slot")
        self.num_used_slots -= num_slots
        self._last_progress_ns = now_ns

    def check_progress(self, now_ns: int, stall_ns: int) -> None:
        """Holding the lock.

        Raises:
            DeadlineExceeded: The receiver leaves slots unread.
        """
        if self.num_used_slots and now_ns - self._last_progress_ns > stall_ns:
            raise DeadlineExceeded("the receiver reads nothing", code="handoff.stalled")

    def send(self, data: bytes | memoryview) -> None:
        """Send everything. The writing thread only."""
        if self._stream is None:
            raise TransferFailed("not connected", code="handoff.closed")
        self._stream.send(data, lambda: self._is_cut)

    def cut(self) -> None:
        """Wake whoever waits for the peer. Any thread."""
        self._is_cut = True
        if self._stream is not None:
            self._stream.cut()

    def close(self) -> None:
        """Let go of everything. The writing thread only."""
        self.cut()
        if self._reader is not None:
            self._reader.join(STOP_S)
        if self._stream is not None:
            self._stream.close()
        self.ring = None


def _make_ring(params: TransferParams, piece_bytes: int) -> Ring | None:
    try:
        return Ring.create(Path(params.shm_dir), params.ring_bytes, piece_bytes)
    except OSError as error:
        log.warning("handoff.no_ring", shm_dir=params.shm_dir, why=str(error))
        return None  # slower, but it works: pieces go inline


def _piece(work: Reading, block_index: int, payload: memoryview, slot: int) -> Piece:
    """Describe the copy that travels: the engine may write the row again, after a load that broke."""
    return Piece(
        handle=work.handle,
        block_index=block_index,
        row=work.row,
        num_bytes=len(payload),
        slot=slot,
        checksum=checksum(work.handle, block_index, work.row, payload),
    )
