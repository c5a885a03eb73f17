"""`millpond`: one command, one function each. Heavy modules are imported by the command that needs them."""

from __future__ import annotations

import typer

app = typer.Typer(no_args_is_help=True, add_completion=False)


@app.command()
def version() -> None:
    """Print the version."""
    from millpond import __version__

    typer.echo(__version__)


@app.callback()
def main() -> None:
    """Millpond: an open inference service."""


if __name__ == "__main__":
    app()
