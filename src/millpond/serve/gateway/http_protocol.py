"""HTTP connections that cannot be abused before a request is complete.

uvicorn bounds neither the size of a request's headers nor the time they take. Without these bounds one client
that sends an endless header, or none, costs everybody's streams.
"""

from __future__ import annotations

import asyncio

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

MAX_HEADER_BYTES = 64 << 10
"""Request line and headers of one request."""
HEADER_DEADLINE_S = 30.0
"""Time from the first byte (or the connection) until the headers are complete."""

_BODY = (
    b'{"error":{"message":"the request headers are larger than 64 KiB: send less",'
    b'"type":"invalid_request_error","param":null,"code":"headers_too_large"}}'
)
_TOO_LARGE = (
    b"HTTP/1.1 431 Request Header Fields Too Large\r\ncontent-type: application/json\r\n"
    b"connection: close\r\ncontent-length: %d\r\n\r\n" % len(_BODY)
) + _BODY


class BoundedHttpProtocol(HttpToolsProtocol):
    """uvicorn's protocol with a bound on size and time of the headers."""

    _timer: asyncio.TimerHandle | None = None
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
        super().connection_lost(exc)

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
