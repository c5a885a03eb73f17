"""`millpond status`: what the running service consists of and what waits."""

from __future__ import annotations

import json

import typer

from millpond.cli.options import ConfigFile, Overrides


def status(config: ConfigFile = None, overrides: Overrides = None) -> None:
    """List processes, groups and queues of the service that this config runs, as JSON."""
    from millpond.config.load import load_config
    from millpond.serve.status import fetch_status

    report = fetch_status(load_config(config, overrides or []).config)
    typer.echo(json.dumps(report, indent=2))
