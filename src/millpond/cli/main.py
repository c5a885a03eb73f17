"""`millpond`: the command line. A command imports what it needs when it runs, so that all start quickly."""

from __future__ import annotations

import sys
from typing import Any

import typer
from typer.core import TyperGroup

from millpond.cli import (
    bench,
    chat,
    collect_env,
    config,
    metadata,
    model,
    node_daemon,
    pool,
    process,
    replay,
    serve,
    sim,
    status,
    storage_node,
)
from millpond.core.errors import ConfigError, MillpondError, ModelFormatError, UnknownModel

CONFIG_EXIT_STATUS = 2


class MillpondGroup(TyperGroup):
    """Turns our own errors into one line and an exit status. Bugs keep their traceback."""

    def invoke(self, ctx: Any) -> Any:
        """Run the chosen command."""
        try:
            return super().invoke(ctx)
        except MillpondError as error:
            typer.echo(f"error: {error.message}", err=True)
            sys.exit(
                CONFIG_EXIT_STATUS if isinstance(error, ConfigError | ModelFormatError | UnknownModel) else 1
            )


app = typer.Typer(
    cls=MillpondGroup,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Millpond: an open inference service with separate prefill and decode workers.",
)
app.command("serve")(serve.serve)
app.command("chat")(chat.chat)
app.command("replay")(replay.replay)
app.command("status")(status.status)
app.command("storage-node")(storage_node.storage_node)
app.command("metadata")(metadata.metadata)
app.command("node-daemon")(node_daemon.node_daemon)
app.command("collect-env")(collect_env.collect_env)
app.command("version")(collect_env.version)
app.add_typer(bench.app, name="bench", help="Measure a running service.")
app.add_typer(config.app, name="config", help="Look at the configuration.")
app.add_typer(model.app, name="model", help="Make and look at DeepSeek-V4.1 checkpoints.")
app.add_typer(pool.app, name="pool", help="Look at the KV pool and operate it.")
app.add_typer(sim.app, name="sim", help="Replay and simulate.")
app.command("process", hidden=True)(process.process)


if __name__ == "__main__":
    app()
