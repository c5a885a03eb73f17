"""Prefill side of the handoff: threads that stream KV out of the engine's blocks while it computes.

Two threads per receiving rank: one connects and writes, one reads the answers. All decisions are
`SendSide`'s, taken under one lock. Pieces are copied out of the engine, into the ring or a staging buffer,
before they are sent: however slow the peer is, blocks can be given back as soon as a copy ends.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import structlog

from millpond.config.transfer_params import TransferParams
from millpond.core.errors import ConfigError, MillpondError, TransferFailed
from millpond.core.ids import RequestId
from millpond.core.plan import HandoffClose, HandoffSend
from millpond.core.ports import Engine
from millpond.core.units import SECOND_NS
from millpond.serve.transfer.frames import Free, encode
from millpond.serve.transfer.peer import Peer
from millpond.serve.transfer.protocol import Action, HandoffEvent, Pieces, Post
from millpond.serve.transfer.ring import remove_leftovers
from millpond.serve.transfer.send_side import Reading, SendSide, Work
from millpond.serve.transfer.stream import TICK_S, FrameStream

STOP_S = 10.0

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class SenderStats:
    """State and counters of one sender."""

    num_open: int
    """Requests that have not ended."""
    num_connections: int
    num_slots: int
    """Ring slots of all connections."""
    num_used_slots: int
    """Those that a receiver has not read yet."""
    num_sent: int
    num_failed: int
    num_bytes: int
    """Bytes of all pieces put on connections."""


class HandoffSender:
    """Sends sequences out of one rank's memory.

    After `HandoffSent`, `HandoffFailed` or `HandoffClosed` was posted for a request, no thread touches its
    blocks.

    Args:
        engine: Whose blocks and slots are read, from threads of this object.
        token: The cluster's, see `serve.keys`.
        post: Takes events; called from any thread, must return at once.

    Raises:
        ConfigError: The folder for shared memory cannot be used.
    """

    def __init__(
        self,
        engine: Engine,
        token: bytes,
        params: TransferParams,
        post: Callable[[HandoffEvent], None],
    ) -> None:
        self._engine = engine
        self._token = token
        self._params = params
        self._post = post
        self._pieces = Pieces(engine.layout)
        self._side = SendSide(
            self._pieces,
            lease_ns=int(params.lease_s * SECOND_NS),
            stall_ns=int(params.stall_s * SECOND_NS),
        )
        self._lock = threading.Lock()
        self._peers: dict[str, Peer] = {}
        """By address."""
        self._next_connection = 0
        self._num_bytes = 0
        self._is_stopping = False
        try:
            num_removed = remove_leftovers(Path(params.shm_dir))
        except OSError as error:
            raise ConfigError(
                f"cannot use {params.shm_dir}: {error.strerror}", param="transfer.shm_dir"
            ) from error
        if num_removed:
            log.info("handoff.leftovers_removed", num_files=num_removed)

    def start(self, order: HandoffSend) -> None:
        """Announce this request to its receiver."""
        with self._lock:
            peer = self._peers.get(order.address)
            if peer is None:
                peer = Peer(self._next_connection, order.address, self._lock, self._serve)
                self._peers[order.address] = peer
                self._next_connection += 1
                peer.writer.start()
            self._carry_out(self._side.start(time.monotonic_ns(), order, peer.connection))
            if self._is_stopping:
                self._carry_out(self._side.fail_all("the sender stopped"))
            peer.has_work.notify()

    def open_attempts(self) -> dict[RequestId, int]:
        """Attempt of each request that is being sent."""
        with self._lock:
            return self._side.open_attempts()

    def rows_ready(self, request_id: RequestId, attempt: int, row: int, num_complete_blocks: int) -> None:
        """Row `row` of the request's first blocks is written and will not change. Returns at once."""
        with self._lock:
            self._side.rows_ready(time.monotonic_ns(), (request_id, attempt), row, num_complete_blocks)
            self._wake_writers()

    def finish(
        self, request_id: RequestId, attempt: int, first_token_id: int, *, is_approximate: bool = False
    ) -> None:
        """Every row and the state are written, and the first token is known. Returns at once."""
        with self._lock:
            key = (request_id, attempt)
            self._side.finish(time.monotonic_ns(), key, first_token_id, is_approximate=is_approximate)
            self._wake_writers()

    def close_request(self, close: HandoffClose) -> None:
        """Give the request up. `HandoffClosed` follows, also for unknown requests."""
        with self._lock:
            self._carry_out(self._side.close(close))
            self._wake_writers()

    def stats(self) -> SenderStats:
        """A consistent picture of now."""
        with self._lock:
            peers = list(self._peers.values())
            return SenderStats(
                num_open=self._side.num_open,
                num_connections=len(peers),
                num_slots=sum(peer.num_slots for peer in peers),
                num_used_slots=sum(peer.num_used_slots for peer in peers),
                num_sent=self._side.num_sent,
                num_failed=self._side.num_failed,
                num_bytes=self._num_bytes,
            )

    def stop(self) -> None:
        """Close everything; what was still open fails. Returns when no thread is left."""
        with self._lock:
            self._is_stopping = True
            peers = list(self._peers.values())
            self._wake_writers()
        for peer in peers:
            peer.cut()
        for peer in peers:
            peer.writer.join(STOP_S)
        with self._lock:
            self._carry_out(self._side.fail_all("the sender stopped"))

    def _wake_writers(self) -> None:
        for peer in self._peers.values():
            peer.has_work.notify()

    def _carry_out(self, actions: list[Action]) -> None:
        """Holding the lock, so that events keep the order of the decisions. Frames go by `next_work`."""
        for action in actions:
            if isinstance(action, Post):
                self._post(action.event)

    # --- a peer's writing thread ------------------------------------------------------------------

    def _serve(self, peer: Peer) -> None:
        why = "the sender broke"
        try:
            peer.connect(self._token, self._pieces, self._params)
            peer.read_answers_by(self._read_answers)
            self._write(peer)
        except (MillpondError, OSError) as error:
            why = peer.broken_why or f"connection lost: {error}"
            if not self._is_stopping:
                log.warning("handoff.connection_lost", address=peer.address, why=why)
        finally:
            with self._lock:
                if self._peers.get(peer.address) is peer:
                    del self._peers[peer.address]
                self._carry_out(self._side.on_disconnect(peer.connection, why))
            peer.close()

    def _write(self, peer: Peer) -> None:
        """Until an error ends it."""
        while True:
            work = self._wait_for_work(peer)
            if not isinstance(work, Reading):
                peer.send(encode(work))
                continue
            try:
                data, num_bytes = self._copy(peer, work)
            finally:
                with self._lock:
                    self._carry_out(self._side.end_reading(work))
            peer.send(data)
            with self._lock:
                self._num_bytes += num_bytes

    def _wait_for_work(self, peer: Peer) -> Work:
        with self._lock:
            while True:
                if self._is_stopping or peer.broken_why:
                    raise TransferFailed(peer.broken_why or "stopped", code="handoff.stopped")
                work = self._side.next_work(time.monotonic_ns(), peer.connection, peer.max_pieces)
                if work is not None:
                    return work
                peer.has_work.wait(TICK_S)

    def _copy(self, peer: Peer, work: Reading) -> tuple[bytes | memoryview, int]:
        """Copy the pieces; returns what to send, and the number of bytes of the pieces themselves."""
        if not work.block_ids:
            sources = [self._engine.read_state(work.slot)]
        else:
            sources = [self._engine.read_row(block, work.row) for block in work.block_ids]
        copy = peer.copy_to_ring if peer.ring is not None else peer.copy_to_staging
        return copy(work, sources), sum(len(source) for source in sources)

    # --- a peer's reading thread ------------------------------------------------------------------

    def _read_answers(self, peer: Peer, stream: FrameStream) -> None:
        try:
            last_tick_ns = time.monotonic_ns()
            while True:
                now_ns = time.monotonic_ns()
                frame = stream.take()
                if frame is None:
                    stream.fill()
                    if now_ns - last_tick_ns > TICK_S * SECOND_NS:
                        last_tick_ns = now_ns
                        self._tick(peer, now_ns)
                    continue
                with self._lock:
                    if isinstance(frame, Free):
                        peer.free(now_ns, frame.num_slots)
                    else:
                        self._carry_out(self._side.on_frame(now_ns, peer.connection, frame))
                    peer.has_work.notify()
        except (MillpondError, OSError) as error:
            with self._lock:
                peer.broken_why = peer.broken_why or f"connection lost: {error}"
                peer.has_work.notify()
            stream.cut()

    def _tick(self, peer: Peer, now_ns: int) -> None:
        with self._lock:
            peer.check_progress(now_ns, int(self._params.stall_s * SECOND_NS))
            self._carry_out(self._side.tick(now_ns))
            peer.has_work.notify()
