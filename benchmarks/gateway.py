"""The gateway against a bare SSE app on the same server: CPU per streamed chunk, and latency of the first one.

The gateway is the real process; the rest of the service is played by `gateway_parts.peer` over the real
sockets. Both sides send the same number of events at the same pace to the same client, one event per
token, every event checked to have come.
"""

from __future__ import annotations

import asyncio
import json
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from millpond.config.engine_params import EngineParams
from millpond.config.gateway_params import GatewayParams
from millpond.config.sections import Config
from millpond.config.serve_params import SuperviseParams
from millpond.serve.process import ProcessSpec
from millpond.serve.run_folder import make_run_folder

NUM_STREAMS = 16
STEP_US = 5_000
"""Pace of both sides: 16 streams x 200 tokens/s = 3,200 events/s, which leaves either server mostly idle, so
that no side can merge events.
"""
START_DEADLINE_S = 60.0
CALL_DEADLINE_S = 60.0


@dataclass(frozen=True, slots=True)
class Server:
    """One running server under test."""

    pid: int
    port: int
    path: str
    has_role: bool
    """Its streams begin with one event more, the role, and end with one more, the finish reason."""

    def body(self, num_tokens: int) -> bytes:
        """Body of a request for that many tokens."""
        if not self.has_role:
            return json.dumps({"n": num_tokens, "step_us": STEP_US}).encode()
        fields = {"model": "synthetic", "messages": [{"role": "user", "content": "count"}], "stream": True}
        return json.dumps({**fields, "max_tokens": num_tokens}).encode()

    def num_events(self, num_tokens: int) -> int:
        """Events of a stream of that many tokens, the end mark included."""
        return num_tokens + 1 + 2 * self.has_role

    def cpu_ns(self) -> int:
        """CPU time of all its threads, in ns."""
        tasks = Path(f"/proc/{self.pid}/task").iterdir()
        return sum(int((task / "schedstat").read_text().split()[0]) for task in tasks)


@contextmanager
def gateway_server() -> Iterator[Server]:
    """Run a gateway with its peer."""
    with tempfile.TemporaryDirectory(prefix="mp-") as folder:
        port = _free_port()
        config = Config(
            engine=EngineParams(model="synthetic"),
            gateway=GatewayParams(port=port),
            supervise=SuperviseParams(run_dir=f"{folder}/run", state_dir=f"{folder}/state"),
        )
        run_folder = make_run_folder(config)
        peer = [sys.executable, "-m", "benchmarks.gateway_parts.peer", str(run_folder.path), str(STEP_US)]
        commands = (ProcessSpec("gateway", run_folder.path, 1).arguments(), peer)
        with _running(commands[0], port) as pid, _running(commands[1], None):
            _wait_ready(port)
            yield Server(pid, port, "/v1/chat/completions", has_role=True)


@contextmanager
def bare_server() -> Iterator[Server]:
    """Run the bare app."""
    port = _free_port()
    with _running([sys.executable, "-m", "benchmarks.gateway_parts.bare", str(port)], port) as pid:
        _wait_ready(port)
        yield Server(pid, port, "/stream", has_role=False)


@contextmanager
def _running(command: list[str], port: int | None) -> Iterator[int]:
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
    try:
        yield process.pid
    finally:
        process.kill()
        process.wait(START_DEADLINE_S)


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])


def _wait_ready(port: int) -> None:
    import httpx

    end_ns = time.monotonic_ns() + int(START_DEADLINE_S * 1e9)
    while time.monotonic_ns() < end_ns:
        try:
            if httpx.get(f"http://127.0.0.1:{port}/ready").status_code == httpx.codes.OK:
                return
        except httpx.TransportError:
            pass  # not listening yet
        time.sleep(0.05)
    raise RuntimeError(f"port {port} is not ready within {START_DEADLINE_S} s")


# --- client -----------------------------------------------------------------------------------


async def _read_stream(server: Server, num_tokens: int) -> tuple[float, int]:
    """One streamed call over a fresh connection: (seconds to the first event, events)."""
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    body = server.body(num_tokens)
    head = (
        f"POST {server.path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    begin_ns = time.monotonic_ns()
    writer.write(head.encode() + body)
    received = bytearray()
    first_s = 0.0
    async with asyncio.timeout(CALL_DEADLINE_S):
        while data := await reader.read(1 << 16):
            received += data
            if not first_s and b"data: " in received:
                first_s = (time.monotonic_ns() - begin_ns) / 1e9
    writer.close()
    return first_s, received.count(b"data: ")


async def _load(server: Server, num_tokens: int) -> None:
    results = await asyncio.gather(*(_read_stream(server, num_tokens) for _ in range(NUM_STREAMS)))
    wrong = [count for _, count in results if count != server.num_events(num_tokens)]
    if wrong:
        raise RuntimeError(f"streams of {wrong} events instead of {server.num_events(num_tokens)}")


# --- measures ---------------------------------------------------------------------------------


def cpu_us_per_event(server: Server, num_tokens: int) -> float:
    """Server CPU of some concurrent streams divided by their events."""
    begin_ns = server.cpu_ns()
    asyncio.run(_load(server, num_tokens))
    return (server.cpu_ns() - begin_ns) / 1e3 / (NUM_STREAMS * server.num_events(num_tokens))


def first_event_ms(server: Server, num_calls: int) -> float:
    """Median time from the request to the first event, one call at a time."""
    times = []
    for _ in range(num_calls):
        first_s, _ = asyncio.run(_read_stream(server, 1))
        times.append(first_s * 1e3)
    return statistics.median(times)


if __name__ == "__main__":
    with gateway_server() as gateway, bare_server() as bare:
        for server in (gateway, bare):
            cpu_us_per_event(server, 50)
        for _ in range(int(sys.argv[1])):
            ours, theirs = cpu_us_per_event(gateway, 200), cpu_us_per_event(bare, 200)
            added = first_event_ms(gateway, 30) - first_event_ms(bare, 30)
            print(
                f"{ours:.1f} us {theirs:.1f} us ratio {ours / theirs:.2f}; added ttft {added:.2f} ms",
                flush=True,
            )
