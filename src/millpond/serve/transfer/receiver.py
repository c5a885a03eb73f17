"""Decode side of the handoff: threads that put arriving KV into the engine's blocks.

One thread accepts connections and watches leases; one thread per connection reads, verifies and writes.
All decisions are `ReceiveSide`'s, taken under one lock; bytes are moved outside it.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import structlog

from millpond.config.transfer_params import TransferParams
from millpond.core.errors import MillpondError, TransferFailed
from millpond.core.plan import HandoffClose, HandoffReceive
from millpond.core.ports import Engine
from millpond.core.units import SECOND_NS
from millpond.serve.transfer.frames import INLINE, Free, Piece, encode
from millpond.serve.transfer.handshake import greet_sender
from millpond.serve.transfer.protocol import Action, HandoffEvent, Pieces, Post, Transmit, checksum
from millpond.serve.transfer.receive_side import ReceiveSide, Target
from millpond.serve.transfer.ring import Ring
from millpond.serve.transfer.stream import TICK_S, DataAddress, FrameStream, listen

MAX_CONNECTIONS = 256
STOP_S = 10.0

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class ReceiverStats:
    """State and counters of one receiver."""

    num_expected: int
    """Requests the scheduler waits for."""
    num_offered: int
    """Requests announced by senders and not expected yet."""
    num_connections: int
    num_arrived: int
    num_failed: int
    num_mismatches: int
    """Pieces whose checksum was wrong."""
    num_discarded: int
    """Pieces nobody waited for."""
    num_bytes: int
    """Bytes written into blocks and slots."""


class HandoffReceiver:
    """Receives sequences into one rank's memory.

    After `HandoffArrived`, `HandoffFailed` or `HandoffClosed` was posted for a request, no thread touches
    its blocks.

    Args:
        engine: Whose blocks and slots are written, from threads of this object.
        listen: `unix:PATH` in a private folder, or `tcp:HOST:PORT` (port 0: any).
        token: The cluster's, see `serve.keys`.
        post: Takes events; called from any thread, must return at once.

    Raises:
        ConfigError: The address cannot be used.
    """

    def __init__(
        self,
        engine: Engine,
        listen_on: str,
        token: bytes,
        params: TransferParams,
        post: Callable[[HandoffEvent], None],
    ) -> None:
        self._engine = engine
        self._token = token
        self._params = params
        self._post = post
        self._pieces = Pieces(engine.layout)
        self._side = ReceiveSide(
            self._pieces,
            lease_ns=int(params.lease_s * SECOND_NS),
            gap_ns=int(params.gap_s * SECOND_NS),
            max_offers=params.max_open_requests,
        )
        self._lock = threading.Lock()
        self._links: dict[int, _Link] = {}
        self._next_connection = 0
        self._num_bytes = 0
        self._stopping = threading.Event()
        self._listener, self._address = listen(DataAddress.parse(listen_on))
        self._acceptor = threading.Thread(target=self._accept, name="handoff-accept", daemon=True)
        self._acceptor.start()

    @property
    def address(self) -> str:
        """What senders connect to, for `RankInfo.data_address`."""
        return str(self._address)

    def expect(self, order: HandoffReceive) -> None:
        """Accept this request; its blocks and slot belong to this object until an event says otherwise."""
        with self._lock:
            self._carry_out(self._side.expect(time.monotonic_ns(), order))

    def close_request(self, close: HandoffClose) -> None:
        """Give the request up. `HandoffClosed` follows, also for unknown requests."""
        with self._lock:
            self._carry_out(self._side.close(close))

    def stats(self) -> ReceiverStats:
        """A consistent picture of now."""
        with self._lock:
            side = self._side
            return ReceiverStats(
                num_expected=side.num_expected,
                num_offered=side.num_offered,
                num_connections=len(self._links),
                num_arrived=side.num_arrived,
                num_failed=side.num_failed,
                num_mismatches=side.num_mismatches,
                num_discarded=side.num_discarded,
                num_bytes=self._num_bytes,
            )

    def stop(self) -> None:
        """Close everything; what was still open fails. Returns when no thread is left."""
        with self._lock:
            self._stopping.set()
            links = list(self._links.values())
        with suppress(OSError):  # it was stopped before
            self._listener.shutdown(socket.SHUT_RDWR)
        for link in links:
            link.stream.cut()
        self._acceptor.join(STOP_S)
        for link in links:
            link.thread.join(STOP_S)
        with self._lock:
            self._carry_out(self._side.fail_all("the receiver stopped"))
        if self._address.path:
            Path(self._address.path).unlink(missing_ok=True)

    def _carry_out(self, actions: list[Action]) -> None:
        """Holding the lock, so that frames and events keep the order of the decisions."""
        for action in actions:
            match action:
                case Post(event):
                    self._post(event)
                case Transmit(connection, frame):
                    link = self._links.get(connection)
                    if link is not None:
                        link.stream.reply(encode(frame))

    # --- the accepting thread ---------------------------------------------------------------------

    def _accept(self) -> None:
        with self._listener:
            while not self._stopping.is_set():
                try:
                    self._admit(self._listener.accept()[0])
                except BlockingIOError:
                    pass  # a tick passed
                except OSError as error:
                    if self._stopping.is_set():
                        return
                    log.warning("handoff.accept_failed", why=str(error))  # out of descriptors, for example
                    self._stopping.wait(TICK_S)
                with self._lock:
                    self._carry_out(self._side.tick(time.monotonic_ns()))

    def _admit(self, connection: socket.socket) -> None:
        with self._lock:
            if self._stopping.is_set() or len(self._links) >= MAX_CONNECTIONS:
                log.warning("handoff.connection_refused", num_connections=len(self._links))
                connection.close()
                return
            stream = FrameStream(
                connection, max_payload_bytes=self._pieces.max_bytes, stall_s=self._params.stall_s
            )
            link = _Link(self._next_connection, stream, self._serve)
            self._links[self._next_connection] = link
            self._next_connection += 1
            link.thread.start()

    # --- a connection's thread --------------------------------------------------------------------

    def _serve(self, link: _Link) -> None:
        why = "the receiver broke"
        try:
            link.ring = greet_sender(
                link.stream, self._token, self._pieces.fingerprint, self._pieces.max_bytes
            )
            self._read(link)
        except (MillpondError, OSError) as error:
            why = f"connection lost: {error}"
            if not (isinstance(error, TransferFailed) and error.code == "handoff.closed"):
                log.warning("handoff.connection_dropped", why=str(error))
        finally:
            with self._lock:
                del self._links[link.connection]
                self._carry_out(self._side.on_disconnect(link.connection, why))
            link.close()

    def _read(self, link: _Link) -> None:
        """Until an error ends it."""
        while True:
            frame = link.stream.take()
            if frame is None:
                link.free_slots()
                link.stream.fill()
            elif isinstance(frame, Piece):
                self._receive(link, frame)
            else:
                with self._lock:
                    self._carry_out(self._side.on_frame(time.monotonic_ns(), link.connection, frame))

    def _receive(self, link: _Link, piece: Piece) -> None:
        payload = link.payload_of(piece)
        with self._lock:
            target = self._side.begin_piece(time.monotonic_ns(), link.connection, piece)
            if not isinstance(target, Target):
                self._carry_out(target)
                return
        is_valid = False
        try:
            is_valid = checksum(piece.handle, piece.block_index, piece.row, payload) == piece.checksum
            if is_valid:
                self._write(target, payload)
        finally:
            with self._lock:
                self._num_bytes += len(payload) if is_valid else 0
                self._carry_out(self._side.end_piece(target, is_valid=is_valid))

    def _write(self, target: Target, payload: memoryview) -> None:
        row = target.piece.row
        if row == self._pieces.state_row:
            self._engine.write_state(target.order.slot, payload)
        else:
            self._engine.write_row(target.order.block_table[target.piece.block_index], row, payload)


class _Link:
    """One sender's connection."""

    def __init__(self, connection: int, stream: FrameStream, serve: Callable[[_Link], None]) -> None:
        self.connection = connection
        self.stream = stream
        self.ring: Ring | None = None
        self._num_read_slots = 0
        """Ring slots read and not yet freed."""
        self.thread = threading.Thread(
            target=serve, args=(self,), name=f"handoff-receive-{connection}", daemon=True
        )

    def payload_of(self, piece: Piece) -> memoryview:
        """The piece's bytes, wherever they are."""
        if piece.slot == INLINE:
            return piece.payload
        ring = self.ring
        if ring is None or piece.slot >= ring.num_slots or piece.num_bytes > ring.slot_bytes:
            raise TransferFailed("a piece in a slot that does not exist", code="handoff.slot")
        if self._num_read_slots >= ring.num_slots // 4:
            self.free_slots()
        self._num_read_slots += 1
        return ring.slot(piece.slot, piece.num_bytes)

    def free_slots(self) -> None:
        """Tell the sender which slots it may use again."""
        if self._num_read_slots:
            self.stream.reply(encode(Free(self._num_read_slots)))
            self._num_read_slots = 0

    def close(self) -> None:
        """Let go of everything."""
        self.stream.close()
        self.ring = None
