"""`millpond serve`: load the config and run the service until it is told to stop."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from millpond.cli.options import ConfigFile, Overrides


def serve(
    model: Annotated[
        str | None,
        typer.Argument(
            help="Built-in name, GGUF file or model folder; `synthetic` computes no model at all."
        ),
    ] = None,
    config: ConfigFile = None,
    overrides: Overrides = None,
    journal: Annotated[
        Path | None,
        typer.Option("--journal", help="Record every decision in this folder for `millpond sim replay`."),
    ] = None,
    state_dir: Annotated[
        Path | None,
        typer.Option(
            "--state-dir", help="Folder of what outlives a restart, such as the KV pool; default: XDG's."
        ),
    ] = None,
    host: Annotated[str | None, typer.Option(help="Address to bind; default: loopback.")] = None,
    port: Annotated[
        int | None, typer.Option(min=0, max=65535, help="Port of the API; default: 8000.")
    ] = None,
) -> None:
    """Run the whole service: gateway, controller, prefill and decode workers."""
    from millpond.config.load import load_config

    given = (
        ("engine.model", model),
        ("gateway.host", host),
        ("gateway.port", port),
        ("supervise.state_dir", str(state_dir) if state_dir else None),
    )
    flags = [f"{path}={json.dumps(value)}" for path, value in given if value is not None]
    loaded = load_config(config, [*flags, *(overrides or [])])
    # Only now: a mistake in the config should not wait for the imports.
    from millpond.serve.pool_processes import describe_pool, fit_disk
    from millpond.serve.preflight import check_before_start
    from millpond.serve.run import serve as run_service

    service = loaded.config
    check_before_start(service, journal)
    if service.pool.enabled:
        service, warning = fit_disk(service)
        if warning:
            typer.echo(f"warning: {warning}", err=True)
    typer.echo(f"starting {service.engine.model}, config {service.digest[:12]}", err=True)
    typer.echo(describe_pool(service), err=True)
    run_service(service, journal, lambda url: typer.echo(f"ready at {url}/v1", err=True))
