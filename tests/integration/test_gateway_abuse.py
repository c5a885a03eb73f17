"""Clients that send no request, or no end of one, cost only themselves."""

from __future__ import annotations

import json
import socket
from collections.abc import Callable

import httpx
import pytest

from tests.integration.conftest import Service

DEEP = '{"a":' * 700 + "1" + "}" * 700


def talk(service: Service, data: bytes) -> bytes:
    """Send raw bytes and return what comes until the server closes or 10 s pass."""
    host, port = service.url.removeprefix("http://").split(":")
    answer = b""
    with socket.create_connection((host, int(port)), timeout=10) as connection:
        try:
            connection.sendall(data)
            while part := connection.recv(65536):
                answer += part
        except (ConnectionResetError, BrokenPipeError):
            pass
    return answer


@pytest.mark.timeout(120)
def test_abuse_is_refused_and_the_service_goes_on(
    start_service: Callable[..., Service], synthetic_toml: str
) -> None:
    service = start_service(synthetic_toml)
    endless = b"GET /health HTTP/1.1\r\nHost: x\r\nX: " + b"a" * (4 << 20)
    assert not talk(service, endless).startswith(b"HTTP/1.1 200")
    many = (
        b"GET /health HTTP/1.1\r\nHost: x\r\n" + b"".join(b"x-%d: y\r\n" % i for i in range(20_000)) + b"\r\n"
    )
    assert talk(service, many).startswith(b"HTTP/1.1 431")
    call = {"function": {"name": "f", "arguments": DEEP}, "type": "function", "id": "c"}
    body = {
        "model": "synthetic",
        "max_tokens": 2,
        "messages": [{"role": "user", "content": "x"}, {"role": "assistant", "tool_calls": [call]}],
    }
    answer = httpx.post(f"{service.url}/v1/chat/completions", json=body, timeout=60)
    assert answer.status_code == 400, answer.text
    tool = f'{{"type":"function","function":{{"name":"f","parameters":{DEEP}}}}}'
    tools = f'{{"messages":[{{"role":"user","content":"x"}}],"tools":[{tool}]}}'
    answer = httpx.post(f"{service.url}/tokenize", content=tools, timeout=60)
    assert answer.status_code == 400, answer.text
    assert json.loads(answer.text)["error"]["code"]
    body = {"model": "synthetic", "prompt": "hello " * 100_000, "max_tokens": 2}
    answer = httpx.post(f"{service.url}/v1/completions", json=body, timeout=60)
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "context_length_exceeded")
    assert httpx.get(f"{service.url}/health", timeout=10).status_code == 200
    service.wait_empty()
