"""Clients that send or read too slowly, spoken to in raw ASGI."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterable
from typing import Any

import pytest

from millpond.config.gateway_params import GatewayParams
from millpond.serve.gateway.app import make_app
from millpond.serve.gateway.gateway import Gateway
from tests.unit.serve.gateway.fake_service import FakeService, completion_body, make_gateway

DEADLINE_S = 20.0
BODY = json.dumps(completion_body(stream=True, max_tokens=100, n=2)).encode()


class Client:
    """Sends `parts` and then is silent; stops reading after `num_read` messages."""

    def __init__(self, parts: Iterable[bytes], *, is_complete: bool = True, num_read: int = 1000) -> None:
        self._parts = list(parts)
        self._is_complete = is_complete
        self._num_read = num_read
        self.messages: list[dict[str, Any]] = []

    async def receive(self) -> dict[str, Any]:
        if self._parts:
            part = self._parts.pop(0)
            is_last = self._is_complete and not self._parts
            return {"type": "http.request", "body": part, "more_body": not is_last}
        return await asyncio.get_running_loop().create_future()

    async def send(self, message: Any) -> None:
        if len(self.messages) >= self._num_read:
            await asyncio.get_running_loop().create_future()
        self.messages.append(message)

    def call(self, gateway: Gateway, path: str = "/v1/completions") -> None:
        scope = {
            "type": "http", "http_version": "1.1", "method": "POST", "path": path, "raw_path": path.encode(),
            "root_path": "", "scheme": "http", "query_string": b"", "headers": [], "client": ("c", 1),
            "server": ("s", 80),
        }  # fmt: skip

        async def sweep() -> None:
            while True:
                gateway.end_stalled_calls()
                await asyncio.sleep(0.01)

        async def run() -> None:
            async with asyncio.timeout(DEADLINE_S), asyncio.TaskGroup() as tasks:
                sweeper = tasks.create_task(sweep())
                await make_app(gateway)(scope, self.receive, self.send)
                sweeper.cancel()

        asyncio.run(run())

    @property
    def status(self) -> int:
        return self.messages[0]["status"]

    @property
    def error_code(self) -> str:
        return json.loads(self.messages[1]["body"])["error"]["code"]


@pytest.mark.parametrize("num_read", [1, 2, 5, 101])
def test_a_client_that_stops_reading_loses_its_place(num_read: int) -> None:
    service = FakeService()
    gateway = make_gateway(service, params=GatewayParams(client_deadline_s=0.05))
    client = Client([BODY], num_read=num_read)
    client.call(gateway)
    assert len(client.messages) == num_read
    assert (gateway.link.num_open, gateway.num_calls, gateway.admission.num_sequences) == (0, 0, 0)
    assert gateway.idle.is_set()
    text = gateway.metrics.render().decode()
    assert 'millpond_request_finished_total{reason="aborted"} 1.0' in text


def test_a_body_that_never_ends_is_refused() -> None:
    gateway = make_gateway(FakeService(), params=GatewayParams(body_deadline_s=0.05))
    for path in ("/v1/completions", "/tokenize"):
        client = Client([BODY[:10]], is_complete=False)
        client.call(gateway, path)
        assert (client.status, client.error_code) == (400, "request_timeout")


def test_an_unannounced_body_over_the_limit_is_cut_off() -> None:
    gateway = make_gateway(FakeService(), params=GatewayParams(max_body_bytes=100))
    client = Client([b" " * 60, b" " * 60, b" " * 60])
    client.call(gateway)
    assert (client.status, client.error_code) == (413, "body_too_large")


def test_a_sequence_that_falls_silent_is_cancelled_with_an_error() -> None:
    service = FakeService(is_mute=True)
    gateway = make_gateway(service, params=GatewayParams(token_deadline_s=0.05))
    client = Client([BODY])
    client.call(gateway)
    assert (client.status, client.error_code) == (504, "request.token_deadline")
    assert len(service.cancels) == 2
