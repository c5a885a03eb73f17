"""`millpond model`: make and look at DeepSeek-V4.1 checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(no_args_is_help=True)


@app.callback()
def model() -> None:
    """Make and look at DeepSeek-V4.1 checkpoints."""


@app.command()
def info(
    path: Annotated[
        Path, typer.Argument(help="Checkpoint folder, which is checked too, or a config.json alone.")
    ],
) -> None:
    """Print layers, roles, bytes per token, block and state sizes, parameters. Reads no weights."""
    from millpond.engine.model.check import check_v41_files
    from millpond.engine.model.config import load_config
    from millpond.engine.model.info import describe_model
    from millpond.engine.model_files import locate_model

    is_config = path.suffix == ".json"
    config = load_config(path) if is_config else check_v41_files(locate_model(str(path)))
    typer.echo(describe_model(config))


@app.command()
def init(
    config: Annotated[Path, typer.Argument(help="A config.json, HF field names.")],
    out: Annotated[Path, typer.Argument(help="Folder to make; must be empty.")],
    seed: Annotated[int, typer.Option(min=0, help="Of all weights.")] = 0,
) -> None:
    """Write a random checkpoint with tokenizer, in the published format."""
    from millpond.engine.model.config import read_config
    from millpond.engine.model.init import init_checkpoint
    from millpond.serve.loading_bar import loading_bar

    with loading_bar("writing") as show:
        init_checkpoint(read_config(config), out, seed, show)
