"""A bare SSE app on the gateway's own stack (Starlette, uvicorn, uvloop, httptools): constant chunks.

Run as `python -m benchmarks.gateway_parts.bare PORT`. A POST's body says {"n": chunks, "step_us": pause}.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncIterator

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

CHUNK = (
    b'data: {"id":"chatcmpl-0123456789abcdef01234567","object":"chat.completion.chunk","created":1700000000,'
    b'"model":"synthetic","system_fingerprint":"millpond-0.1.0","choices":[{"index":0,"delta":{"content":'
    b'" 2f1"},"logprobs":null,"finish_reason":null}]}\n\n'
)


class Ticker:
    """Wakes all streams together, as the tokens of one step do."""

    def __init__(self) -> None:
        self._waiters: list[asyncio.Future[None]] = []

    async def next_tick(self, pause_s: float) -> None:
        """Wait for the next common tick, `pause_s` after the last one."""
        loop = asyncio.get_running_loop()
        if not self._waiters:
            loop.call_later(pause_s, self._tick)
        waiter = loop.create_future()
        self._waiters.append(waiter)
        await waiter

    def _tick(self) -> None:
        waiters, self._waiters = self._waiters, []
        for waiter in waiters:
            waiter.set_result(None)


ticker = Ticker()


async def stream(request: Request) -> Response:
    """Stream constant chunks."""
    asked = json.loads(await request.body())
    pause_s = asked["step_us"] / 1e6

    async def chunks() -> AsyncIterator[bytes]:
        for _ in range(asked["n"]):
            yield CHUNK
            await ticker.next_tick(pause_s)
        yield b"data: [DONE]\n\n"

    return StreamingResponse(chunks(), media_type="text/event-stream")


async def ready(_request: Request) -> Response:
    """Say that the app is up."""
    return Response(b"ok")


if __name__ == "__main__":
    app = Starlette(
        routes=[Route("/stream", stream, methods=["POST"]), Route("/ready", ready, methods=["GET"])]
    )
    uvicorn.run(
        app, port=int(sys.argv[1]), loop="uvloop", http="httptools", ws="none", lifespan="off",
        proxy_headers=False, log_config=None, access_log=False, server_header=False, date_header=False,
    )  # fmt: skip
