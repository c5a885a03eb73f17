"""`Listener`: a port whose peers are greeted and served by a thread each, up to a bound."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Sequence

import structlog

from millpond.core.errors import ConfigError, DeadlineExceeded, MillpondError, TransferFailed
from millpond.core.units import SECOND_NS
from millpond.store.net.framing import Head, welcome
from millpond.store.net.messages import Hello
from millpond.store.net.peer import Peer, ServerParams

log = structlog.get_logger(__name__)


class Listener:
    """See module.

    Args:
        address: `host:port`; port 0 takes a free one.
        hello: How we greet.
        params: Bounds.
        dispatch: Called by the peer's thread with each frame, whose payload it must read.
        on_failure: Told about a bug that ended a thread.

    Raises:
        ConfigError: The address cannot be bound.
    """

    def __init__(
        self,
        address: str,
        hello: Hello,
        params: ServerParams,
        dispatch: Callable[[Peer, Head], None],
        on_failure: Callable[[BaseException], None],
    ) -> None:
        self.num_refused_peers = 0
        """Connections that did not speak our protocol, or with another version or token."""
        self._hello = hello
        self._params = params
        self._dispatch = dispatch
        self._on_failure = on_failure
        self._socket = _listen(address)
        self._stopping = threading.Event()
        self._peers: set[Peer] = set()
        self._peer_threads: set[threading.Thread] = set()
        self._lock = threading.Lock()
        self._acceptor = guarded_thread("accept", self._accept, on_failure)

    @property
    def address(self) -> str:
        """Where it listens."""
        host, port = self._socket.getsockname()[:2]
        return f"{host}:{port}"

    @property
    def num_connections(self) -> int:
        """Open connections."""
        return len(self._peers)

    def start(self) -> None:
        """Begin to accept."""
        self._acceptor.start()

    def stop(self, deadline_ns: int) -> bool:
        """End all connections; whether every thread has ended by the deadline."""
        self._stopping.set()
        try:
            self._socket.shutdown(socket.SHUT_RDWR)  # wakes the acceptor
        except OSError:
            self._socket.close()  # never listened
        if not join_all([self._acceptor], deadline_ns):
            return False
        with self._lock:
            peers, threads = list(self._peers), list(self._peer_threads)
        for peer in peers:
            peer.frames.shutdown()
        return join_all(threads, deadline_ns)

    def _accept(self) -> None:
        while not self._stopping.is_set():
            try:
                sock, _ = self._socket.accept()
            except OSError as error:
                if not self._stopping.is_set():
                    log.warning("accept failed", error=str(error))
                    self._stopping.wait(0.1)  # out of file numbers: some connection will end
                continue
            if len(self._peers) >= self._params.max_connections:
                self.num_refused_peers += 1
                sock.close()
                continue
            peer = Peer(sock, self._params)
            thread = guarded_thread("peer", lambda peer=peer: self._serve(peer), self._on_failure)
            with self._lock:
                self._peers.add(peer)
                self._peer_threads.add(thread)
            thread.start()
        self._socket.close()

    def _serve(self, peer: Peer) -> None:
        try:
            deadline_ns = time.monotonic_ns() + self._params.answer_s * SECOND_NS
            welcome(peer.frames, self._hello, deadline_ns=deadline_ns)
            while not self._stopping.is_set():
                head = peer.frames.receive(time.monotonic_ns() + self._params.idle_s * SECOND_NS)
                self._dispatch(peer, head)
        except (TransferFailed, DeadlineExceeded):
            pass  # it left, or was silent for too long
        except MillpondError as error:
            self.num_refused_peers += 1
            log.warning("peer refused", code=error.code, error=error.message)
        finally:
            peer.close()
            with self._lock:
                self._peers.discard(peer)
                self._peer_threads.discard(threading.current_thread())


def guarded_thread(
    name: str, run: Callable[[], None], on_failure: Callable[[BaseException], None]
) -> threading.Thread:
    """A thread, not started, whose unexpected end is told before it is raised."""

    def guarded() -> None:
        try:
            run()
        except BaseException as error:
            on_failure(error)
            raise

    return threading.Thread(target=guarded, name=name)


def join_all(threads: Sequence[threading.Thread], deadline_ns: int) -> bool:
    """Wait until all that were started have ended; whether they have by the deadline."""
    for thread in threads:
        if thread.ident is not None:
            thread.join(max(0, deadline_ns - time.monotonic_ns()) / SECOND_NS)
            if thread.is_alive():
                return False
    return True


def _listen(address: str) -> socket.socket:
    host, _, port = address.rpartition(":")
    try:
        return socket.create_server((host.strip("[]"), int(port)), backlog=256)
    except (OSError, ValueError, OverflowError) as error:
        raise ConfigError(f"cannot listen on {address}: {error}") from error
