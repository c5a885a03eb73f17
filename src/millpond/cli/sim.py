"""`millpond sim`: the same decisions without the service."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from millpond.cli.options import ConfigFile, Overrides

app = typer.Typer(no_args_is_help=True)


@app.callback()
def sim() -> None:
    """Replay and simulate."""


@app.command()
def replay(folder: Annotated[Path, typer.Argument(help="Folder that `--journal` wrote.")]) -> None:
    """Feed journals to fresh state machines; fail on the first plan that differs."""
    from millpond.sim.replay import replay as replay_journals

    reports = replay_journals(folder)
    for report in reports:
        typer.echo(report)
    if not all(report.is_equal for report in reports):
        raise typer.Exit(1)


@app.command()
def run(
    config: ConfigFile = None,
    overrides: Overrides = None,
    trace: Annotated[Path | None, typer.Option(help="Mooncake JSONL; default: Poisson arrivals.")] = None,
    num_requests: Annotated[int, typer.Option("--requests", "-n", min=1)] = 200,
    rate: Annotated[float, typer.Option(min=0.001, help="Requests per second.")] = 2.0,
    prompt: Annotated[int, typer.Option(min=1, help="Prompt tokens of each request.")] = 256,
    output: Annotated[int, typer.Option(min=1, help="Output tokens of each request.")] = 64,
    turns: Annotated[int, typer.Option(min=1, help="Turns of each; each repeats what was said before.")] = 1,
    seed: Annotated[int, typer.Option(help="Of everything random.")] = 0,
    journal: Annotated[Path | None, typer.Option(help="Record every decision in this folder.")] = None,
) -> None:
    """Run a workload through the configured groups in virtual time; print its figures as JSON."""
    from millpond.config.load import load_config
    from millpond.core.chance import Chance
    from millpond.sim.run import run_simulation
    from millpond.sim.workload import Arrival, Session, conversations, poisson, read_trace

    loaded = load_config(config, overrides or []).config
    chance = Chance(seed, "sim.arrivals")
    arrivals: list[Arrival] = []
    sessions: list[Session] = []
    if trace is not None:
        arrivals = read_trace(trace)[:num_requests]
    elif turns == 1:
        arrivals = poisson(chance, num_requests, rate, prompt, output)
    else:
        sessions = conversations(chance, num_requests, rate, turns, prompt, output)
    figures = run_simulation(
        loaded,
        arrivals,
        costs=loaded.sim_cost,
        rank=loaded.sim_rank,
        sessions=sessions,
        seed=seed,
        journal=journal,
    )
    typer.echo(json.dumps(figures, indent=2))
