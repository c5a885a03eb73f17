"""`millpond config`: look at the configuration."""

from __future__ import annotations

import typer

from millpond.cli.options import ConfigFile, Overrides

app = typer.Typer(no_args_is_help=True)


@app.callback()
def config() -> None:
    """Look at the configuration."""


@app.command()
def show(config: ConfigFile = None, overrides: Overrides = None) -> None:
    """Print every value with its origin and meaning, as TOML that `--config` accepts."""
    from millpond.config.load import load_config
    from millpond.config.show import show_config

    typer.echo(show_config(load_config(config, overrides or [])), nl=False)
