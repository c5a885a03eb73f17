"""`millpond node-daemon`: the daemon of one host, by hand."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import typer


def node_daemon(
    host: Annotated[str, typer.Option(help="Name of the host in the config.")],
    run_dir: Annotated[Path, typer.Option(help="Run folder of the service.")],
) -> None:
    """Keep a host's KV in memory and move it between engines, other hosts and the pool, until SIGTERM.

    `millpond serve` starts one for each of its hosts. It stops by writing what waits, for a few seconds.
    """
    from millpond.serve.process import ProcessSpec, run_process

    run_process(ProcessSpec("node", run_dir, time.time_ns(), host))
