"""`millpond sim`: the same decisions without the service."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(no_args_is_help=True)


@app.callback()
def sim() -> None:
    """Replay and simulate."""


@app.command()
def replay(folder: Annotated[Path, typer.Argument(help="Folder that `serve --journal` wrote.")]) -> None:
    """Feed a journal to fresh state machines; fail on the first plan that differs."""
    from millpond.sim.replay import replay as replay_journal

    report = replay_journal(folder)
    typer.echo(report)
