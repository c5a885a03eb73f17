"""A service of its own for each measurement, sessions played against it, and the log of what they asked."""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import mean
from typing import Any

import httpx

from millpond.serve.loadgen.client import RequestRecord, StreamClient
from millpond.serve.loadgen.server import ServerInfo
from millpond.serve.replay.counters import Counts, difference, read_counters
from millpond.serve.replay.player import Player, SessionRecord, TurnRecord
from millpond.serve.replay.sessions import Piece, Session, Turn

FIRST_TOKENS = 1536
NEW_TOKENS = 256
OUTPUT_TOKENS = 48
ONE_THREAD = {"OMP_NUM_THREADS": "1"}
START_S = 400.0
STOP_S = 90.0
DRAIN_S = 60.0
SETTLED = 3
"""So many looks in a row must find nothing that waits."""


@dataclass(slots=True)
class Played:
    """One run."""

    sessions: list[SessionRecord]
    log: list[dict[str, Any]]
    """Turns as `kv_ideal` reads them."""
    counts: Counts

    @property
    def jct_s(self) -> float:
        """Mean job completion time of the sessions.

        Raises:
            RuntimeError: A turn failed.
        """
        errors = [
            turn.request.error for record in self.sessions for turn in record.turns if turn.request.error
        ]
        if errors:
            raise RuntimeError(f"{len(errors)} turns failed: {errors[0]}")
        return mean((record.end_ns - record.begin_ns) / 1e9 for record in self.sessions)


class _LoggingClient(StreamClient):
    """Remembers prompts and answers; adds fields to what is asked; if it is to be cold, also a new salt."""

    def __init__(self, *arguments: Any, fields: Mapping[str, Any], is_cold: bool, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._fields = fields
        self._salts = (f"cold {number}" for number in itertools.count()) if is_cold else None
        self.log: dict[int, tuple[list[int], RequestRecord]] = {}

    async def stream(self, index: int, path: str, body: dict[str, Any]) -> RequestRecord:
        salt = {} if self._salts is None else {"cache_salt": next(self._salts)}
        record = await super().stream(index, path, {**body, **self._fields, **salt})
        self.log[id(record)] = (body["prompt"], record)
        return record


class _ContinuingPlayer(Player):
    """Sessions may go on from what was played before."""

    def __init__(self, *arguments: Any, begun: Mapping[str, list[int]]) -> None:
        super().__init__(*arguments)
        self._begun = begun

    async def _complete(
        self, session: Session, number: int, turn: Turn, known: list[int]
    ) -> tuple[TurnRecord, list[int]]:
        return await super()._complete(session, number, turn, known or self._begun.get(session.name, []))


@dataclass(slots=True)
class Service:
    """A running server: ours, or one with the same API."""

    url: str
    process: subprocess.Popen[bytes]
    log_file: Path
    vocabulary: list[int] = field(default_factory=list[int])

    def play(
        self,
        sessions: Sequence[Session],
        begun: Mapping[str, list[int]] | None = None,
        fields: Mapping[str, Any] | None = None,
        *,
        is_cold: bool = False,
    ) -> Played:
        """Play sessions, all at once.

        Args:
            sessions: Turn by turn.
            begun: Tokens that sessions have already, by name: their last prompt and its answer.
            fields: Sent with each request.
            is_cold: No request finds what another one left.
        """
        with httpx.Client(base_url=self.url, timeout=60) as http:
            server = ServerInfo(http)
            self.vocabulary = self.vocabulary or server.vocabulary()
            before = _counters(http)
            player = self._play(sessions, server.model, begun or {}, fields or {}, is_cold=is_cold)
            records, log = asyncio.run(player)
            return Played(records, log, difference(before, _counters(http)))

    async def _play(
        self,
        sessions: Sequence[Session],
        model: str,
        begun: Mapping[str, list[int]],
        fields: Mapping[str, Any],
        *,
        is_cold: bool,
    ) -> tuple[list[SessionRecord], list[dict[str, Any]]]:
        order: list[TurnRecord] = []
        timeout = httpx.Timeout(30, read=900, pool=None)
        async with httpx.AsyncClient(base_url=self.url, timeout=timeout) as http:
            client = _LoggingClient(
                http, model, time.monotonic_ns, ignore_eos=True, fields=fields, is_cold=is_cold
            )
            player = _ContinuingPlayer(client, self.vocabulary, model, order.append, begun=begun)
            records = await player.play(sessions, len(sessions))
        log = [
            {
                "session": turn.session,
                "prompt": client.log[id(turn.request)][0],
                "output": turn.request.token_ids,
                "cached": turn.request.num_cached_tokens,
            }
            for turn in order
        ]
        return records, log

    def complete(self, prompt: Sequence[int], **fields: Any) -> tuple[list[int], int]:
        """Ids of one answer, and how many tokens of its prompt were cached."""
        body = {"model": self._model, "prompt": list(prompt), "temperature": 0, "return_token_ids": True}
        body |= {"max_tokens": OUTPUT_TOKENS, "min_tokens": OUTPUT_TOKENS, "ignore_eos": True, **fields}
        response = httpx.post(f"{self.url}/v1/completions", json=body, timeout=900)
        response.raise_for_status()
        answer = response.json()
        cached = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
        return answer["choices"][0]["token_ids"], cached

    @property
    def _model(self) -> str:
        return httpx.get(f"{self.url}/v1/models", timeout=60).json()["data"][0]["id"]

    def wait_written(self) -> None:
        """Wait until no block waits for its way to the disks.

        Raises:
            RuntimeError: It takes too long.
        """

        def is_written() -> bool:
            lines = httpx.get(f"{self.url}/metrics", timeout=60).text.splitlines()
            waiting = [line for line in lines if line.startswith("millpond_node_blocks_waiting{")]
            return bool(waiting) and all(float(line.rpartition(" ")[2]) == 0 for line in waiting)

        for _ in range(SETTLED):  # ranks hand over behind their answers, and counts are told once a second
            time.sleep(2.0)
            _wait(is_written, DRAIN_S, "the write-behind has drained")

    def kill(self) -> None:
        """SIGKILL; all other processes of the service die with the supervisor."""
        self.process.kill()
        self.process.wait(STOP_S)


def _counters(http: httpx.Client) -> Counts:
    response = http.get("/metrics")
    return read_counters(response.text) if response.status_code == httpx.codes.OK else {}


@contextmanager
def running_service(folder: Path, model: str, *settings: str) -> Iterator[Service]:
    """Run our service on a free port, with its state in `folder`; settings as of `--set`."""
    command = [sys.executable, "-m", "millpond.cli.main", "serve", model, "--port", "0"]
    port = free_port()
    command[-1] = str(port)
    command += ["--state-dir", str(folder / "state")]
    for setting in (f"supervise.run_dir={folder / 'run'}", *settings):
        command += ["--set", setting]
    with running_server(command, f"http://127.0.0.1:{port}", "/ready", folder / "service.log") as service:
        yield service


@contextmanager
def running_server(
    command: Sequence[str | Path],
    url: str,
    ready: str,
    log_file: Path,
    settings: Mapping[str, str] = ONE_THREAD,
) -> Iterator[Service]:
    """Run any server until the block ends; `settings` join its environment.

    Raises:
        RuntimeError: It does not become ready.
    """
    environment = {**os.environ, **settings}  # noqa: TID251 - a child inherits its surroundings
    with log_file.open("ab") as log:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment)

    def is_ready() -> bool:
        if process.poll() is not None:
            raise RuntimeError(f"{command[0]} ended: {log_file.read_text(errors='replace')[-2000:]}")
        try:
            return httpx.get(url + ready, timeout=10).status_code == httpx.codes.OK
        except httpx.TransportError:
            return False

    try:
        _wait(is_ready, START_S, f"{url} is ready")
        yield Service(url, process, log_file)
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
        try:
            process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(STOP_S)


def free_port() -> int:
    """A TCP port that is free now."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def growing_sessions(num_sessions: int, num_turns: int, kind: str = "agent") -> list[Session]:
    """The workload of the levels: each prompt is the one before, its answer, and something new."""
    sessions: list[Session] = []
    for number in range(num_sessions):
        name = f"{kind}{number}"
        turns = [Turn(0, (Piece(f"{name}/0", FIRST_TOKENS),), OUTPUT_TOKENS)]
        for turn in range(1, num_turns):
            kept = turns[-1].num_prompt_tokens + OUTPUT_TOKENS
            turns.append(Turn(kept, (Piece(f"{name}/{turn}", NEW_TOKENS),), OUTPUT_TOKENS))
        sessions.append(Session(name, tuple(turns)))
    return sessions


def _wait(condition: Callable[[], bool], limit_s: float, what: str) -> None:
    end_ns = time.monotonic_ns() + int(limit_s * 1e9)
    while not condition():
        if time.monotonic_ns() > end_ns:
            raise RuntimeError(f"not within {limit_s:.0f} s: {what}")
        time.sleep(0.2)
