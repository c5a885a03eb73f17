"""`millpond bench`: measure a running service."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from millpond.cli.options import DEFAULT_URL, ApiKey, ModelName, ServerUrl, auth_headers
from millpond.serve.loadgen.arrivals import Arrivals, arrival_times
from millpond.serve.loadgen.inputs import (
    InputFormat,
    LoadRequest,
    TraceScale,
    guess_format,
    read_mooncake,
    read_plain,
    read_sharegpt,
    read_text,
)

if TYPE_CHECKING:
    from millpond.serve.loadgen.client import RequestRecord
    from millpond.serve.loadgen.report import LoadReport
    from millpond.serve.loadgen.server import ServerInfo

DEFAULT_PROMPTS = (
    "Explain in two sentences why the sky is blue.",
    "Write a short poem about a water mill.",
    "List three uses of copper.",
    "What is the capital of France, and what is it known for?",
    "Describe how bread is made.",
    "Give me one piece of advice for learning to swim.",
)

app = typer.Typer(no_args_is_help=True)


@app.callback()
def bench() -> None:
    """Measure a running service."""


@app.command("serve")
def bench_serve(
    url: ServerUrl = DEFAULT_URL,
    model: ModelName = None,
    api_key: ApiKey = None,
    data: Annotated[
        Path | None,
        typer.Option(help="Prompts: plain text, ShareGPT JSON or Mooncake JSONL; may be gzipped."),
    ] = None,
    data_format: Annotated[
        InputFormat | None, typer.Option("--format", help="Default: by the name of the file.")
    ] = None,
    num_requests: Annotated[int, typer.Option("--requests", "-n", min=1, help="Requests at most.")] = 32,
    max_tokens: Annotated[int, typer.Option(min=1, help="Output length; traces bring their own.")] = 64,
    concurrency: Annotated[
        int, typer.Option(min=1, help="Requests at once, when neither rate nor trace is given.")
    ] = 4,
    rate: Annotated[float | None, typer.Option(min=0.001, help="Requests per second: an open loop.")] = None,
    arrivals: Annotated[Arrivals, typer.Option(help="Shape of an open loop.")] = Arrivals.POISSON,
    length_scale: Annotated[float, typer.Option(min=1e-6, help="Factor on the lengths of a trace.")] = 1.0,
    time_scale: Annotated[float, typer.Option(min=0, help="Factor on the times of a trace.")] = 1.0,
    seed: Annotated[int, typer.Option(help="Of the arrival process.")] = 0,
    ignore_eos: Annotated[bool, typer.Option(help="Always generate the full output length.")] = True,
    out: Annotated[Path | None, typer.Option(help="Write figures and all records as JSON.")] = None,
) -> None:
    """Send requests and print TTFT, TPOT and throughput."""
    import httpx

    from millpond.core.chance import Chance
    from millpond.serve.loadgen.report import make_report
    from millpond.serve.loadgen.server import ServerInfo

    headers = auth_headers(api_key)
    with httpx.Client(base_url=url, headers=headers, timeout=30) as http:
        server = ServerInfo(http, model)
        scale = TraceScale(length_scale, time_scale)
        requests = _read(data, data_format, scale, server, num_requests, max_tokens)
    times_ns: Sequence[int] | None = None
    if rate is not None:
        times_ns = arrival_times(arrivals, rate, len(requests), Chance(seed, "bench.arrivals"))
    elif requests[0].arrival_ns is not None:
        times_ns = [request.arrival_ns or 0 for request in requests]
    records = _drive(url, headers, server.model, requests, times_ns, concurrency, ignore_eos=ignore_eos)
    report = make_report(records)
    _print(report)
    if out:
        _write(out, report, records)
    if not report.num_completed:
        raise typer.Exit(1)


def _read(
    data: Path | None,
    data_format: InputFormat | None,
    scale: TraceScale,
    server: ServerInfo,
    num_requests: int,
    max_tokens: int,
) -> list[LoadRequest]:
    from itertools import islice

    from millpond.core.errors import DataError

    if data is None:
        return [
            LoadRequest(DEFAULT_PROMPTS[i % len(DEFAULT_PROMPTS)], max_tokens) for i in range(num_requests)
        ]
    text = read_text(data)
    match data_format or guess_format(data):
        case InputFormat.PLAIN:
            requests = read_plain(text, max_tokens)
        case InputFormat.SHAREGPT:
            requests = read_sharegpt(text, max_tokens, server.count_tokens)
        case InputFormat.MOONCAKE:
            requests = list(islice(read_mooncake(text, scale, server.vocabulary()), num_requests))
    if not requests:
        raise DataError(f"{data} holds no request", code="bench.input")
    return requests[:num_requests]


def _drive(
    url: str,
    headers: dict[str, str],
    model: str,
    requests: Sequence[LoadRequest],
    times_ns: Sequence[int] | None,
    concurrency: int,
    *,
    ignore_eos: bool,
) -> list[RequestRecord]:
    import asyncio
    import time

    import httpx
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    from millpond.serve.loadgen.client import StreamClient
    from millpond.serve.loadgen.drive import run_closed_loop, run_open_loop

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True)) as progress:
        bar = progress.add_task("requests", total=len(requests))
        num_tokens = 0

        def on_done(record: RequestRecord) -> None:
            nonlocal num_tokens
            num_tokens += record.num_output_tokens
            progress.update(bar, advance=1, description=f"requests ({num_tokens} tokens)")

        async def run() -> list[RequestRecord]:
            limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
            timeout = httpx.Timeout(30, read=600, pool=None)
            async with httpx.AsyncClient(
                base_url=url, headers=headers, timeout=timeout, limits=limits
            ) as http:
                start_ns = time.monotonic_ns()
                client = StreamClient(
                    http, model, lambda: time.monotonic_ns() - start_ns, ignore_eos=ignore_eos
                )
                if times_ns is None:
                    return await run_closed_loop(client, requests, concurrency, on_done)
                return await run_open_loop(client, requests, times_ns, on_done)

        return asyncio.run(run())


def _print(report: LoadReport) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(
        title=f"{report.num_completed} completed, {report.num_failed} failed, {report.duration_s:.1f} s"
    )
    for heading in ("", "mean", "p50", "p90", "p99", "max"):
        table.add_column(heading, justify="left" if not heading else "right")
    for name, sample in (
        ("TTFT, first event (ms)", report.ttft_event_s),
        ("TTFT, first token (ms)", report.ttft_token_s),
        ("TTFT, first text (ms)", report.ttft_text_s),
        ("TPOT (ms)", report.tpot_s),
        ("between tokens (ms)", report.inter_token_s),
        ("whole request (ms)", report.request_s),
    ):
        values = (sample.mean, sample.p50, sample.p90, sample.p99, sample.max)
        table.add_row(name, *(f"{value * 1e3:.1f}" for value in values))
    console = Console()
    console.print(table)
    console.print(
        f"{report.requests_per_s:.2f} requests/s, {report.output_tokens_per_s:.1f} output tokens/s,"
        f" {report.prompt_tokens_per_s:.1f} prompt tokens/s, {report.num_cached_tokens} of"
        f" {report.num_prompt_tokens} prompt tokens from cache"
    )
    for error, count in report.errors.items():
        console.print(f"{count} x {error}", style="red", markup=False)


def _write(out: Path, report: LoadReport, records: Sequence[RequestRecord]) -> None:
    import dataclasses
    import json

    content = {
        "report": dataclasses.asdict(report),
        "requests": [dataclasses.asdict(record) for record in records],
    }
    out.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
