"""`millpond process`: what the supervisor starts. Not for people."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def process(
    role: Annotated[str, typer.Argument(help="gateway, controller or rank")],
    run_dir: Annotated[Path, typer.Option(help="Run folder of the service.")],
    incarnation: Annotated[int, typer.Option(help="Larger after each restart.")],
    group: Annotated[str, typer.Option(help="Group of a rank.")] = "",
    rank: Annotated[int, typer.Option(help="Index of a rank in its group.")] = 0,
    journal: Annotated[Path | None, typer.Option(help="Folder of the journal.")] = None,
) -> None:
    """Run one process of a service."""
    from millpond.serve.process import ProcessSpec, run_process

    run_process(ProcessSpec(role, run_dir, incarnation, group, rank, journal))
