"""The gateway against a bare SSE app on the same server: CPU per streamed chunk, latency of the first one.

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

from benchmarks.harness import Report, Result, say
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
        ours = ProcessSpec("gateway", run_folder.path, 1).arguments()
        with _running(ours, Path(folder, "gateway.log")) as pid, _running(peer, Path(folder, "peer.log")):
            _wait_ready(port)
            yield Server(pid, port, "/v1/chat/completions", has_role=True)


@contextmanager
def bare_server() -> Iterator[Server]:
    """Run the bare app."""
    port = _free_port()
    command = [sys.executable, "-m", "benchmarks.gateway_parts.bare", str(port)]
    with tempfile.TemporaryDirectory(prefix="mp-") as folder, _running(command, Path(folder, "log")) as pid:
        _wait_ready(port)
        yield Server(pid, port, "/stream", has_role=False)


@contextmanager
def _running(command: list[str], log_file: Path) -> Iterator[int]:
    with log_file.open("wb") as log:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
    try:
        yield process.pid
    except BaseException:
        say(log_file.read_text(encoding="utf-8")[-2000:])
        raise
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


async def first_event_ms(servers: tuple[Server, ...], num_calls: int) -> list[list[float]]:
    """Times from the request to the first event, one call at a time, the servers in turn."""
    times: list[list[float]] = [[] for _ in servers]
    for _ in range(num_calls):
        for server, values in zip(servers, times, strict=True):
            first_s, _ = await _read_stream(server, 1)
            values.append(first_s * 1e3)
    return times


def run(quick: bool, only: set[str]) -> Result:
    """Measure both levels."""
    report = Report("gateway", quick, only)
    num_tokens = 100 if quick else 400
    num_calls = 300 if quick else 1000
    with gateway_server() as gateway, bare_server() as bare:
        say("both servers are up")
        for server in (gateway, bare):
            cpu_us_per_event(server, num_tokens)
        if report.wants("cpu_per_chunk_vs_bare"):
            report.add_ratio(
                "cpu_per_chunk_vs_bare",
                lambda: cpu_us_per_event(gateway, num_tokens),
                lambda: cpu_us_per_event(bare, num_tokens),
                f"{NUM_STREAMS} streams x {num_tokens} tokens at one step per {STEP_US / 1e3:g} ms",
            )
            report.figures["bare_cpu_us_per_event"] = cpu_us_per_event(bare, num_tokens)
            report.figures["gateway_cpu_us_per_event"] = cpu_us_per_event(gateway, num_tokens)
        if report.wants("added_ttft_ms_p50"):
            ours, theirs = asyncio.run(first_event_ms((gateway, bare), num_calls))
            report.figures["ttft_ms_p50_p90"] = _p50_p90(ours)
            report.figures["bare_ttft_ms_p50_p90"] = _p50_p90(theirs)
            added_ms = statistics.median(ours) - statistics.median(theirs)
            report.add("added_ttft_ms_p50", added_ms, f"{num_calls} calls each, wall time")
    return report.finish()


def _p50_p90(values: list[float]) -> tuple[float, float]:
    return statistics.median(values), statistics.quantiles(values, n=10)[8]
