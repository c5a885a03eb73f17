"""HTTP connections that cannot be abused before a request is complete.

uvicorn bounds neither the size of a request's headers nor the time they take. Without these bounds one client
that sends an endless header, or none, costs everybody's streams. It also takes a client that closes its half
for one that left, and answers in plain text what is no HTTP.
"""

from __future__ import annotations

import asyncio
import socket

import msgspec
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

MAX_HEADER_BYTES = 64 << 10
"""Request line and headers of one request."""
HEADER_DEADLINE_S = 30.0
"""Time from the first byte (or the connection) until the headers are complete."""

PROBE_S = 0.1
"""How often a connection is looked at whose client sends no more."""

_CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
_TCP_CLOSE = 7
"""First byte of Linux' `TCP_INFO` for a connection that was reset."""


def _error(status: bytes, message: str, code: str) -> bytes:
    """A whole response with an error in the shape of all others."""
    fields = {"message": message, "type": "invalid_request_error", "param": None, "code": code}
    body = msgspec.json.encode({"error": fields})
    head = b"HTTP/1.1 %s\r\ncontent-type: application/json\r\nconnection: close\r\ncontent-length: %d\r\n\r\n"
    return head % (status, len(body)) + body


_TOO_LARGE = _error(
    b"431 Request Header Fields Too Large",
    "the request headers are larger than 64 KiB: send less",
    "headers_too_large",
)
_NO_HTTP = _error(
    b"400 Bad Request", "what was sent is no HTTP/1.1 request: correct it", "invalid_http_request"
)


class BoundedHttpProtocol(HttpToolsProtocol):
    """uvicorn's protocol with a bound on size and time of the headers."""

    _timer: asyncio.TimerHandle | None = None
    _probe: asyncio.TimerHandle | None = None
    _is_in_headers = True
    _num_header_bytes = 0
    _num_requests = 0
    """Complete requests of this connection."""

    def connection_made(self, transport: asyncio.Transport) -> None:
        """Start waiting for the first request."""
        super().connection_made(transport)
        self._start_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop waiting."""
        self._stop_timer()
        if self._probe is not None:
            self._probe.cancel()
        super().connection_lost(exc)

    def eof_received(self) -> bool:  # type: ignore[override]
        """The client sends no more: it has left, or has closed its half and waits for the answer.

        The two look alike until something is sent: the host of a client that left answers with a reset. An
        interim response does no harm to one that waits.

        Returns:
            True to keep the connection until the answer is complete.
        """
        cycle = self.cycle
        is_asking = cycle is not None and not cycle.response_complete and not cycle.more_body
        if not is_asking or self.scope["http_version"] != "1.1":  # older clients know no interim responses
            return False
        cycle.keep_alive = False
        if not cycle.response_started and not self.pipeline:
            self.transport.write(_CONTINUE)
        self._probe = self.loop.call_later(PROBE_S, self._check_client)
        return True

    def _check_client(self) -> None:
        if self.transport.is_closing():
            return
        connection = self.transport.get_extra_info("socket")
        if connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0] == _TCP_CLOSE:
            self.transport.abort()
        else:
            self._probe = self.loop.call_later(PROBE_S, self._check_client)

    def send_400_response(self, msg: str) -> None:
        """Refuse what the parser cannot read; say nothing into an answer that is under way."""
        if self.cycle is None or self.cycle.response_complete or not self.cycle.response_started:
            self.transport.write(_NO_HTTP)
        self.transport.close()

    def data_received(self, data: bytes) -> None:
        """Parse, unless the headers have grown too large."""
        if self.transport.is_closing():
            return
        if self._is_in_headers and self._timer is None:
            self._start_timer()
        num_requests = self._num_requests
        super().data_received(data)
        if self._is_in_headers and self._num_requests == num_requests:
            self._num_header_bytes += len(data)
            if self._num_header_bytes > MAX_HEADER_BYTES:
                self._refuse()

    def on_headers_complete(self) -> None:
        """Headers are here: hand the request on, unless they are too large."""
        self._is_in_headers = False
        self._stop_timer()
        if sum(len(name) + len(value) for name, value in self.headers) > MAX_HEADER_BYTES:
            self._refuse()
        else:
            super().on_headers_complete()

    def on_message_complete(self) -> None:
        """The next request begins with headers again."""
        super().on_message_complete()
        self._is_in_headers = True
        self._num_header_bytes = 0
        self._num_requests += 1

    def _refuse(self) -> None:
        self.transport.write(_TOO_LARGE)
        self.transport.close()

    def _start_timer(self) -> None:
        self._timer = self.loop.call_later(HEADER_DEADLINE_S, self.transport.close)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
