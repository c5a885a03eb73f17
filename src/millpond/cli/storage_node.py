"""`millpond storage-node`: one node of the pool."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def storage_node(
    name: Annotated[str, typer.Option(help="Name of the node in the pool map.")],
    target: Annotated[
        list[str],
        typer.Option(help="Folder of one drive, with its capacity: DIR or DIR:SIZE. Repeatable."),
    ],
    listen: Annotated[str, typer.Option(help="host:port; port 0 takes a free one.")] = "127.0.0.1:0",
    token_file: Annotated[Path | None, typer.Option(help="File with the cluster token.")] = None,
    capacity: Annotated[str, typer.Option(help="Of each target without its own.")] = "8 GiB",
    ttl_hours: Annotated[float, typer.Option(help="How long data lives after it was read last.")] = 24.0,
    dwpd: Annotated[
        float, typer.Option(help="Rated drive writes per day that writes must keep to; 0: no limit.")
    ] = 0.0,
    stop_s: Annotated[float, typer.Option(help="How long sealing may take at the end.")] = 20.0,
) -> None:
    """Keep shards of the pool until SIGTERM; then seal them and exit with status 0.

    The address it listens on is printed once it serves.
    """
    from millpond.serve.logs import configure_logging
    from millpond.store.net.daemon import DaemonSpec, TargetSpec, run_storage_node

    configure_logging(process=name)
    run_storage_node(
        DaemonSpec(
            name=name,
            listen=listen,
            token=token_file.read_text().strip() if token_file else "",
            targets=tuple(TargetSpec.parse(text, capacity) for text in target),
            ttl_s=int(ttl_hours * 3600),
            dwpd=dwpd,
            stop_s=stop_s,
        )
    )
