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
    host: Annotated[str | None, typer.Option(help="Address to bind; default: loopback.")] = None,
    port: Annotated[
        int | None, typer.Option(min=0, max=65535, help="Port of the API; default: 8000.")
    ] = None,
) -> None:
    """Run the whole service: gateway, controller, prefill and decode workers."""
    from millpond.config.load import load_config

    given = (("engine.model", model), ("gateway.host", host), ("gateway.port", port))
    flags = [f"{path}={json.dumps(value)}" for path, value in given if value is not None]
    loaded = load_config(config, [*flags, *(overrides or [])])
    # Only now: a mistake in the config should not wait for the imports.
    from millpond.serve.preflight import check_before_start

    check_before_start(loaded.config, journal)
    from millpond.serve.run import serve as run_service

    typer.echo(f"starting {loaded.config.engine.model}, config {loaded.config.digest[:12]}", err=True)
    run_service(loaded.config, journal, lambda url: typer.echo(f"ready at {url}/v1", err=True))
