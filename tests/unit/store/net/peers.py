"""The other end of a connection, for tests: a listener whose connections are handled by a given function."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from millpond.core.units import SECOND_NS

JOIN_S = 10


def within(seconds: float) -> int:
    """A deadline."""
    return time.monotonic_ns() + int(seconds * SECOND_NS)


@contextmanager
def peer(handle: Callable[[socket.socket], None]) -> Iterator[str]:
    """Serve connections with `handle`, one after the other; yields the address."""
    errors: list[BaseException] = []

    def serve() -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            try:
                with connection:
                    handle(connection)
            except BaseException as error:  # noqa: BLE001 - raised again below
                errors.append(error)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield f"127.0.0.1:{listener.getsockname()[1]}"
        finally:
            listener.shutdown(socket.SHUT_RDWR)
            thread.join(JOIN_S)
            assert not thread.is_alive()
    if errors:
        raise errors[0]
