"""`millpond replay`: play sessions of agents against a live service."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from millpond.cli.options import DEFAULT_URL, ApiKey, ModelName, ServerUrl, auth_headers
from millpond.serve.loadgen.inputs import TraceScale, read_text
from millpond.serve.replay.readers import TraceFormat, read_sessions
from millpond.serve.replay.sessions import cut_to_context

if TYPE_CHECKING:
    import httpx

    from millpond.serve.loadgen.report import Distribution
    from millpond.serve.loadgen.server import ServerInfo
    from millpond.serve.replay.figures import ReplayFigures
    from millpond.serve.replay.player import SessionRecord
    from millpond.serve.replay.sessions import Session


def replay(
    trace: Annotated[Path, typer.Argument(help="Sessions: our JSON, or a trace; may be gzipped.")],
    url: ServerUrl = DEFAULT_URL,
    model: ModelName = None,
    api_key: ApiKey = None,
    trace_format: Annotated[
        TraceFormat | None, typer.Option("--format", help="Default: told by the fields of the trace.")
    ] = None,
    num_sessions: Annotated[int, typer.Option("--sessions", "-n", min=1, help="Sessions at most.")] = 64,
    num_turns: Annotated[int, typer.Option("--turns", min=1, help="Turns of a session at most.")] = 1 << 20,
    concurrency: Annotated[
        int | None, typer.Option(min=1, help="Sessions at once; default: each begins at the trace's time.")
    ] = None,
    length_scale: Annotated[float, typer.Option(min=1e-6, help="Factor on all lengths.")] = 1.0,
    time_scale: Annotated[float, typer.Option(min=0, help="Factor on begins and pauses; 0: none.")] = 1.0,
    out: Annotated[Path | None, typer.Option(help="Write figures and all turns as JSON.")] = None,
) -> None:
    """Play multi-turn sessions: a turn is sent when the one before has ended and its pause is over.

    Answers have the trace's lengths. Prompts are token ids, which go on from the answers that were given.
    """
    import dataclasses

    import httpx

    from millpond.core.errors import DataError
    from millpond.serve.loadgen.server import ServerInfo
    from millpond.serve.replay.counters import difference
    from millpond.serve.replay.figures import make_figures

    headers = auth_headers(api_key)
    scale = TraceScale(length_scale, time_scale)
    sessions = read_sessions(read_text(trace), scale, trace_format, max_sessions=num_sessions)
    chosen = [dataclasses.replace(session, turns=session.turns[:num_turns]) for session in sessions]
    with httpx.Client(base_url=url, headers=headers, timeout=30) as http:
        server = ServerInfo(http, model)
        chosen, num_cut = cut_to_context(chosen, server.max_model_len)
        if not chosen:
            raise DataError(
                f"no session of {trace} fits the model's {server.max_model_len} tokens; try --length-scale",
                code="replay.trace",
            )
        if num_cut:
            typer.echo(f"{num_cut} turns are left out: they exceed the model's context", err=True)
        before = _counters(http)
        records = _play(url, headers, server, sorted(chosen, key=lambda each: each.begin_ns), concurrency)
        figures = make_figures(records, difference(before, _counters(http)))
    _print(figures)
    if out:
        _write(out, figures, records, num_cut)
    if figures.num_failed:
        raise typer.Exit(1)


def _counters(http: httpx.Client) -> dict[str, float]:
    import httpx

    from millpond.serve.replay.counters import read_counters

    try:
        response = http.get("/metrics")
    except httpx.HTTPError:
        return {}
    return read_counters(response.text) if response.status_code == httpx.codes.OK else {}


def _play(
    url: str,
    headers: dict[str, str],
    server: ServerInfo,
    sessions: Sequence[Session],
    concurrency: int | None,
) -> list[SessionRecord]:
    import asyncio
    import time

    import httpx
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    from millpond.serve.loadgen.client import StreamClient
    from millpond.serve.replay.player import Player, TurnRecord

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True)) as progress:
        bar = progress.add_task("turns", total=sum(len(session.turns) for session in sessions))
        num_cached = num_prompt = 0

        def on_turn(turn: TurnRecord) -> None:
            nonlocal num_cached, num_prompt
            num_cached += turn.request.num_cached_tokens
            num_prompt += turn.request.num_prompt_tokens
            share = num_cached / num_prompt if num_prompt else 0.0
            progress.update(bar, advance=1, description=f"turns ({share:.0%} cached)")

        async def run() -> list[SessionRecord]:
            limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
            timeout = httpx.Timeout(30, read=600, pool=None)
            async with httpx.AsyncClient(
                base_url=url, headers=headers, timeout=timeout, limits=limits
            ) as http:
                start_ns = time.monotonic_ns()
                client = StreamClient(
                    http, server.model, lambda: time.monotonic_ns() - start_ns, ignore_eos=True
                )
                player = Player(client, server.vocabulary(), server.model, on_turn)
                return await player.play(sessions, concurrency)

        return asyncio.run(run())


def _print(figures: ReplayFigures) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(
        title=f"{figures.num_sessions} sessions, {figures.num_turns} turns, {figures.num_failed} failed,"
        f" {figures.duration_s:.1f} s"
    )
    for heading in ("", "mean", "p50", "p95", "p99", "max"):
        table.add_column(heading, justify="left" if not heading else "right")
    samples: tuple[tuple[str, Distribution, float], ...] = (
        ("job completion (s)", figures.jct_s, 1.0),
        ("turn (s)", figures.turn_s, 1.0),
        ("TTFT (ms)", figures.ttft_s, 1e3),
        ("TPOT (ms)", figures.tpot_s, 1e3),
    )
    for name, sample, factor in samples:
        values = (sample.mean, sample.p50, sample.p95, sample.p99, sample.max)
        table.add_row(name, *(f"{value * factor:.2f}" for value in values))
    console = Console()
    console.print(table)
    of_ideal = "" if figures.cached_over_ideal is None else f", {figures.cached_over_ideal:.1%} of the ideal"
    console.print(
        f"{figures.num_cached_tokens} of {figures.num_prompt_tokens} prompt tokens from cache"
        f" ({figures.cached_share:.1%}{of_ideal})",
        highlight=False,
    )
    if figures.loaded_blocks:
        levels = ", ".join(f"{name} {share:.1%}" for name, share in figures.loaded_share_by_level.items())
        console.print(f"{figures.loaded_blocks} blocks loaded: {levels}", highlight=False)
    for name, num_bytes in figures.bytes_by_link.items():
        if num_bytes:
            console.print(f"{name}: {num_bytes / 1e6:.1f} MB", highlight=False)
    for name, count in figures.fallbacks.items():
        console.print(f"{name}: {count}", highlight=False)
    for error, count in figures.errors.items():
        console.print(f"{count} x {error}", style="red", markup=False)


def _write(out: Path, figures: ReplayFigures, records: Sequence[SessionRecord], num_cut: int) -> None:
    import dataclasses
    import json

    content = {
        "figures": dataclasses.asdict(figures),
        "num_turns_left_out": num_cut,
        "sessions": [dataclasses.asdict(record) for record in records],
    }
    out.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
