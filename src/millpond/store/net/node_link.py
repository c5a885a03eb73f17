"""`NodeLink`: the way to one storage node, dialled in the background and again after a loss."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import structlog

from millpond.core.errors import MillpondError, TransferFailed
from millpond.core.pool_map import StorageNodeInfo
from millpond.core.units import MILLISECOND_NS, SECOND_NS
from millpond.store.net.connection import Call, Connection, Landing
from millpond.store.net.framing import Bytes
from millpond.store.net.messages import Message

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class NodeLinkParams:
    """Connections to storage nodes."""

    connect_s: float = 2.0
    """How long a node may take to accept and greet."""
    min_redial_ms: int = 100
    """Pause after the first failed try; doubles with each."""
    max_redial_s: float = 5.0
    """Longest pause between tries."""


class NodePort(Protocol):
    """One storage node as its clients see it."""

    def start(
        self,
        message: Message,
        payload: Sequence[Bytes] = (),
        *,
        deadline_ns: int,
        landing: Landing | None = None,
        on_done: Callable[[Call], None] | None = None,
    ) -> Call:
        """Send a request; see `Connection.start`.

        Raises:
            TransientError: The node cannot be reached now.
        """
        ...

    def cancel(self, call: Call) -> None:
        """Give up a request; see `Connection.cancel`."""
        ...

    def close(self) -> None:
        """Give everything back."""
        ...


class NodeLink:
    """See module. Thread-safe.

    Nobody waits for a dial: while there is no connection every request fails at once, which a coded read
    answers by asking another node.
    """

    def __init__(self, info: StorageNodeInfo, *, name: str, token: str, params: NodeLinkParams) -> None:
        self.info = info
        self._name = name
        self._token = token
        self._params = params
        self._changed = threading.Condition()
        self._connection: Connection | None = None
        self._dialler: threading.Thread | None = None
        self._redial_ns = 0
        self._next_dial_ns = 0
        self._is_closed = False

    def start(
        self,
        message: Message,
        payload: Sequence[Bytes] = (),
        *,
        deadline_ns: int,
        landing: Landing | None = None,
        on_done: Callable[[Call], None] | None = None,
    ) -> Call:
        """See `NodePort`."""
        connection = self._connection
        if connection is None or connection.broken:
            self.dial()
            raise TransferFailed(f"no connection to {self.info.node}", code="pool.unreachable")
        return connection.start(message, payload, deadline_ns=deadline_ns, landing=landing, on_done=on_done)

    def cancel(self, call: Call) -> None:
        """See `NodePort`."""
        connection = self._connection
        if connection is not None:
            connection.cancel(call)

    @property
    def is_up(self) -> bool:
        """Whether there is a connection."""
        connection = self._connection
        return connection is not None and not connection.broken

    def dial(self) -> None:
        """Begin to connect, unless that is going on or the last failure was just now."""
        with self._changed:
            if self._is_closed or self._dialler is not None or time.monotonic_ns() < self._next_dial_ns:
                return
            if self._connection is not None and not self._connection.broken:
                return
            self._dialler = threading.Thread(target=self._dial, name=f"dial {self.info.node}")
            self._dialler.start()

    def wait_up(self, *, deadline_ns: int) -> bool:
        """Wait until the first dial has ended; whether there is a connection."""
        with self._changed:
            while self._dialler is not None:
                left_ns = deadline_ns - time.monotonic_ns()
                if left_ns <= 0:
                    break
                self._changed.wait(left_ns / SECOND_NS)
        return self.is_up

    def close(self) -> None:
        """See `NodePort`."""
        with self._changed:
            self._is_closed = True
            dialler, connection = self._dialler, self._connection
            self._connection = None
        if dialler is not None:
            dialler.join()  # it ends after `connect_s` at the latest
        if connection is not None:
            connection.close()

    def _dial(self) -> None:
        old, connection = self._connection, None
        try:
            if old is not None:
                old.close()
            deadline_ns = time.monotonic_ns() + int(self._params.connect_s * SECOND_NS)
            connection = Connection(
                self.info.address, name=self._name, token=self._token, deadline_ns=deadline_ns
            )
        except MillpondError as error:
            log.info("storage node unreachable", node=self.info.node, code=error.code, error=error.message)
        with self._changed:
            self._dialler = None
            if connection is None:
                longest_ns = int(self._params.max_redial_s * SECOND_NS)
                self._redial_ns = min(self._redial_ns * 2, longest_ns) or (
                    self._params.min_redial_ms * MILLISECOND_NS
                )
                self._next_dial_ns = time.monotonic_ns() + self._redial_ns
            else:
                self._redial_ns = self._next_dial_ns = 0
            is_closed = self._is_closed
            self._connection = None if is_closed else connection
            self._changed.notify_all()
        if is_closed and connection is not None:
            connection.close()
