"""`millpond metadata`: one metadata shard of the pool."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def metadata(
    name: Annotated[str, typer.Option(help="Name of the shard, for logs.")],
    data: Annotated[Path, typer.Option(help="Folder of its map and checkpoints.")],
    listen: Annotated[str, typer.Option(help="host:port; port 0 takes a free one.")] = "127.0.0.1:0",
    address: Annotated[
        str, typer.Option(help="host:port under which the pool map names it, if not where it listens.")
    ] = "",
    map_file: Annotated[
        Path | None, typer.Option("--map", help="Pool map as JSON; a newer one that it has counts.")
    ] = None,
    token_file: Annotated[Path | None, typer.Option(help="File with the cluster token.")] = None,
    max_blocks: Annotated[int, typer.Option(min=1024, help="Bound of the index; 16 bytes each.")] = 1 << 28,
    ttl_hours: Annotated[int, typer.Option(min=1, help="How long an extent is known after a match.")] = 24,
    max_tenant_mib: Annotated[
        int, typer.Option(min=0, help="Stored MiB of a tenant without its own quota; 0: no limit.")
    ] = 0,
    checkpoint_s: Annotated[float, typer.Option(help="Between checkpoints.")] = 30.0,
    report_s: Annotated[float, typer.Option(help="Between looks for popular prefixes.")] = 10.0,
    stop_s: Annotated[float, typer.Option(help="How long the last checkpoint may take.")] = 20.0,
) -> None:
    """Know which extents the pool has, until SIGTERM; then write a checkpoint and exit with status 0.

    The address it listens on is printed once it serves. Without a checkpoint the index is rebuilt from the
    storage nodes while it serves.
    """
    from millpond.serve.logs import configure_logging
    from millpond.store.metadata.core import MetadataParams
    from millpond.store.metadata.daemon import MetadataSpec, run_metadata
    from millpond.store.metadata.quotas import TenantQuota
    from millpond.store.metadata.server import MetadataServerParams

    configure_logging(process=name)
    params = MetadataServerParams(
        core=MetadataParams(ttl_hours=ttl_hours),
        default_quota=TenantQuota(max_mib=max_tenant_mib),
        max_blocks=max_blocks,
        checkpoint_s=checkpoint_s,
        report_s=report_s,
    )
    token = token_file.read_text().strip() if token_file else ""
    run_metadata(MetadataSpec(name, listen, data, token, address, map_file, params, stop_s))
