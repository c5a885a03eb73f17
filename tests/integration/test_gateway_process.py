"""The gateway as a process: real HTTP, real sockets, clients that leave, controllers that restart."""

from __future__ import annotations

import json
import shutil
import signal
import socket
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from millpond.core.hashing import root_digest
from millpond.engine.kv_identity import WeightDigests, configured_fingerprint, configured_layout
from millpond.serve.gateway.tenants import OPEN_TENANT, load_salts
from millpond.serve.run_folder import PoolAccess
from tests.integration.gateway_peer import DEADLINE_S, GatewayProcess, make_config, start_gateway
from tests.unit.serve.gateway.test_cached_tokens import store
from tests.unit.store.metadata.shards import TOKEN, shards, stop

TEXT = "0123456789" * 20
BODY = {"model": "synthetic", "prompt": "count", "max_tokens": 200}


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])


@pytest.fixture
def folder() -> Iterator[Path]:
    # Paths of sockets are limited to 107 bytes, which pytest's own folders may exceed.
    path = Path(tempfile.mkdtemp(prefix="mp-gw-"))
    yield path
    shutil.rmtree(path)


@pytest.fixture
def start(folder: Path) -> Iterator[Callable[..., GatewayProcess]]:
    started: list[GatewayProcess] = []

    def make(**options: Any) -> GatewayProcess:
        gateway = start_gateway(folder, make_config(folder, free_port(), **options))
        started.append(gateway)
        gateway.wait_ready()
        return gateway

    yield make
    for gateway in started:
        gateway.process.kill()
        gateway.process.wait(DEADLINE_S)
        gateway.peer.stop()


class Reader:
    """A client of one streamed completion, in a thread of its own."""

    def __init__(self, gateway: GatewayProcess, body: dict[str, Any]) -> None:
        self.text = ""
        self.events: list[str] = []
        self._url = f"{gateway.url}/v1/completions"
        self._body = {**body, "stream": True}
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        with httpx.stream("POST", self._url, json=self._body, timeout=DEADLINE_S) as response:
            for line in response.iter_lines():
                if line.startswith("event: "):
                    self.events.append(line)
                elif line.startswith("data: "):
                    data = line.removeprefix("data: ")
                    self.events.append(data)
                    if data != "[DONE]":
                        for choice in json.loads(data).get("choices", []):
                            self.text += choice["text"]

    def join(self) -> None:
        self._thread.join(DEADLINE_S)
        assert not self._thread.is_alive()


def test_the_official_client_holds_a_streamed_chat(start: Callable[..., GatewayProcess]) -> None:
    gateway = start()
    client = openai.OpenAI(base_url=f"{gateway.url}/v1", api_key="none", timeout=DEADLINE_S)
    messages: list[dict[str, str]] = []
    for turn in range(3):
        messages.append({"role": "user", "content": f"turn {turn}"})
        stream = client.chat.completions.create(
            model="synthetic",
            messages=messages,  # type: ignore[arg-type]
            stream=True,
            max_tokens=50,
            stream_options={"include_usage": True},
        )
        chunks = list(stream)
        answer = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
        assert answer == TEXT[:50]
        assert chunks[-1].usage is not None
        assert chunks[-1].usage.completion_tokens == 50
        messages.append({"role": "assistant", "content": answer})
    prompts = [spec.num_prompt_tokens for spec in gateway.peer.submits]
    assert prompts == sorted(set(prompts))

    whole = client.completions.create(**BODY, n=2, logprobs=1)
    assert [choice.text for choice in whole.choices] == [TEXT, TEXT]
    assert [model.id for model in client.models.list()] == ["synthetic"]
    with pytest.raises(openai.NotFoundError):
        client.completions.create(model="other", prompt="x")
    with pytest.raises(openai.BadRequestError, match="temperature"):
        client.completions.create(model="synthetic", prompt="x", temperature=9)


def test_bug_12_a_client_that_leaves_cancels_all_choices(start: Callable[..., GatewayProcess]) -> None:
    gateway = start()
    for is_stream in (True, False):
        for num_before in (0, 5):
            leave_after(gateway, is_stream=is_stream, num_before=num_before)
    metrics = httpx.get(f"{gateway.url}/metrics").text
    assert 'millpond_request_finished_total{reason="aborted"} 4.0' in metrics
    assert "millpond_sequences_running 0.0" in metrics
    assert "millpond_sequences_waiting 0.0" in metrics


def test_a_client_that_closes_its_half_gets_its_answer(start: Callable[..., GatewayProcess]) -> None:
    gateway = start()
    for is_stream in (True, False):
        for num_before in (0, 5):
            answer = half_close_after(gateway, is_stream=is_stream, num_before=num_before)
            head, _, body = answer.removeprefix("HTTP/1.1 100 Continue\r\n\r\n").partition("\r\n\r\n")
            assert head.startswith("HTTP/1.1 200")
            assert "100 Continue" not in body
            if is_stream:
                assert body.count('"finish_reason":"length"') == 1
                assert "data: [DONE]" in body
            else:
                assert json.loads(body)["choices"][0]["text"] == TEXT
            assert gateway.peer.cancels == []


def half_close_after(gateway: GatewayProcess, *, is_stream: bool, num_before: int) -> str:
    """Everything that a client reads which sends a request, closes its half and then waits."""
    peer = gateway.peer
    peer.limit = num_before
    peer.submits.clear()
    body = json.dumps({**BODY, "stream": is_stream})
    with socket.create_connection(("127.0.0.1", int(gateway.url.rsplit(":", 1)[1]))) as client:
        client.settimeout(DEADLINE_S)
        client.sendall(
            f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n{body}".encode()
        )
        gateway.wait_for(lambda: len(peer.submits) == 1, "submitted")
        client.shutdown(socket.SHUT_WR)
        if not is_stream or not num_before:
            assert client.recv(5, socket.MSG_PEEK)  # it has seen the end of what this client sends
        peer.limit = 1 << 30
        received = b""
        while part := client.recv(65536):
            received += part
    return received.decode()


@pytest.mark.parametrize("data", [b"hello\r\n\r\n", b"GET /health HTTP/9.9\r\n\r\n", b"\0" * 100])
def test_what_is_no_http_is_refused_in_the_shape_of_all_errors(
    start: Callable[..., GatewayProcess], data: bytes
) -> None:
    gateway = start()
    with socket.create_connection(("127.0.0.1", int(gateway.url.rsplit(":", 1)[1]))) as client:
        client.settimeout(DEADLINE_S)
        client.sendall(data)
        received = b""
        while part := client.recv(65536):
            received += part
    head, _, body = received.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 400 ")
    assert json.loads(body)["error"]["code"] == "invalid_http_request"


def leave_after(gateway: GatewayProcess, *, is_stream: bool, num_before: int) -> None:
    peer = gateway.peer
    peer.limit = num_before
    peer.submits.clear()
    peer.cancels.clear()
    body = json.dumps({**BODY, "n": 3, "stream": is_stream})
    with socket.create_connection(("127.0.0.1", int(gateway.url.rsplit(":", 1)[1]))) as client:
        client.sendall(
            f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n{body}".encode()
        )
        gateway.wait_for(lambda: len(peer.submits) == 3, "submitted")
        if is_stream and num_before:
            assert client.recv(100)
    gateway.wait_for(lambda: len(peer.cancels) == 3, "cancelled")
    assert set(peer.cancels) == {spec.request_id for spec in peer.submits}


def test_sigterm_lets_streams_end_and_refuses_new_ones(start: Callable[..., GatewayProcess]) -> None:
    gateway = start()
    gateway.peer.limit = 10
    reader = Reader(gateway, BODY)
    gateway.wait_for(lambda: len(reader.text) == 10, "streaming")
    gateway.process.send_signal(signal.SIGTERM)
    gateway.wait_for(lambda: httpx.get(f"{gateway.url}/ready").status_code == 503, "draining")
    refused = httpx.post(f"{gateway.url}/v1/completions", json=BODY)
    assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")
    assert refused.json()["error"]["code"] == "service.draining"
    gateway.peer.limit = 1000
    assert gateway.process.wait(DEADLINE_S) == 0
    reader.join()
    assert reader.text == TEXT
    assert reader.events[-1] == "[DONE]"


def test_the_drain_deadline_cuts_a_stream_with_one_clear_error(start: Callable[..., GatewayProcess]) -> None:
    gateway = start(drain_s=0.3)
    gateway.peer.limit = 10
    reader = Reader(gateway, BODY)
    gateway.wait_for(lambda: len(reader.text) == 10, "streaming")
    assert gateway.stop() == 0
    reader.join()
    assert reader.text == TEXT[:10]
    assert reader.events[-2] == "event: error"
    assert json.loads(reader.events[-1])["error"]["code"] == "service.draining"


def test_a_controller_restart_is_invisible_in_a_stream(start: Callable[..., GatewayProcess]) -> None:
    gateway = start()
    peer = gateway.peer
    peer.limit = 50
    reader = Reader(gateway, BODY)
    gateway.wait_for(lambda: len(reader.text) == 50, "streaming")
    peer.stop()
    peer.limit = 1000
    peer.submits.clear()
    peer.start()
    gateway.wait_for(lambda: peer.submits, "submitted again")
    reader.join()
    assert reader.text == TEXT
    # The same attempt: a controller that learns that a worker still runs it can leave it there.
    (again,) = peer.submits
    assert again.attempt == 0
    delivered = bytes(list(again.output_ids)).decode()
    assert TEXT.startswith(delivered)
    assert len(delivered) >= 50


def test_a_controller_that_stays_away_gets_calls_refused(start: Callable[..., GatewayProcess]) -> None:
    gateway = start()
    gateway.peer.stop()

    def is_refused() -> bool:
        response = httpx.post(f"{gateway.url}/v1/completions", json=BODY, timeout=DEADLINE_S)
        return response.status_code == 503 and "retry-after" in response.headers

    gateway.wait_for(is_refused, "refused")
    gateway.peer.start()

    def is_served() -> bool:
        response = httpx.post(f"{gateway.url}/v1/completions", json=BODY, timeout=DEADLINE_S)
        return response.status_code == 200 and response.json()["choices"][0]["text"] == TEXT

    gateway.wait_for(is_served, "served again")


def test_a_pool_is_asked_and_a_lost_one_costs_hits_only(folder: Path) -> None:
    config = make_config(folder, free_port())
    prompt = "count " * 100
    with shards(folder, 1) as made:
        gateway = start_gateway(folder, config, PoolAccess(made.pool_map.metadata, TOKEN))
        try:
            gateway.wait_ready()
            body = BODY | {"prompt": prompt}

            def cached_tokens() -> int:
                response = httpx.post(f"{gateway.url}/v1/completions", json=body, timeout=DEADLINE_S)
                return response.json()["usage"]["prompt_tokens_details"]["cached_tokens"]

            assert cached_tokens() == 0
            spec = gateway.peer.submits[0]
            store(made, spec.kv, spec.prompt_ids, on_disk=2, in_memory=1)
            assert cached_tokens() == 3 * 128
            layout = configured_layout(config.engine, config.synthetic)
            (salt,) = load_salts(Path(config.supervise.state_dir), [OPEN_TENANT]).values()
            model = configured_fingerprint(config.engine, WeightDigests(folder))
            assert spec.kv.root == root_digest(model, layout.fingerprint, salt, b""), "interfaces A.1"
            stop(made.servers[0])
            assert cached_tokens() == 0
            metrics = httpx.get(f"{gateway.url}/metrics").text
            assert 'millpond_prefix_match_total{outcome="failed"} 1.0' in metrics
            assert 'millpond_prompt_tokens_total{group="gw0",source="cached"} 384.0' in metrics
            assert gateway.stop() == 0
        finally:
            gateway.process.kill()
            gateway.process.wait(DEADLINE_S)
            gateway.peer.stop()


def test_a_port_in_use_is_named_and_the_process_ends(folder: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        gateway = start_gateway(folder, make_config(folder, port))
        try:
            assert gateway.process.wait(DEADLINE_S) != 0
            reason = gateway.peer.folder.reason_file("gateway").read_text(encoding="utf-8")
            assert f"cannot listen on 127.0.0.1:{port}" in reason
        finally:
            gateway.process.kill()
            gateway.peer.stop()
