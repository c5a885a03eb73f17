"""`millpond status`: what the running service consists of and what waits."""

from __future__ import annotations

import json
from typing import Annotated, Any

import typer

from millpond.cli.options import ConfigFile, Overrides
from millpond.core.units import GIB


def status(
    config: ConfigFile = None,
    overrides: Overrides = None,
    as_json: Annotated[bool, typer.Option("--json", help="Everything, as JSON.")] = False,
) -> None:
    """List processes, groups and queues of the service that this config runs."""
    from millpond.config.load import load_config
    from millpond.serve.status import fetch_pool_status, fetch_status

    loaded = load_config(config, overrides or []).config
    report = fetch_status(loaded) | {"pool": fetch_pool_status(loaded)}
    if as_json:
        typer.echo(json.dumps(report, indent=2))
    else:
        _print(report)


def _print(report: dict[str, Any]) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table

    headings = {
        "num_seqs": "sequences",
        "num_queued": "queued",
        "kv_tokens": "KV tokens",
        "free_blocks": "free blocks",
        "free_slots": "free slots",
    }
    table = Table(
        "group", "role", "process", "rank", *headings.values(), box=box.SIMPLE, padding=(0, 1, 0, 0)
    )
    for name, group in sorted(report["groups"].items()):
        for rank in group["ranks"]:
            pid = str(group["pid"] or "") if rank["rank"] == 0 else ""
            table.add_row(name, group["role"], pid, str(rank["rank"]), *(str(rank[key]) for key in headings))
    console = Console()
    console.print(table)
    is_ready = "ready" if report["controller"]["is_ready"] else "not ready"
    queue = report["queue"]
    console.print(
        f"{is_ready}; {len(report['gateways'])} gateways; {queue['num_requests']} requests,"
        f" {queue['num_queued']} of them wait for a group"
    )
    console.print(_pool_line(report["pool"]), highlight=False)


def _pool_line(pool: dict[str, Any] | None) -> str:
    if pool is None:
        return "no KV pool"
    if "error" in pool:
        return f"KV pool: {pool['error']}"
    nodes = [
        f"{name} down"
        if "error" in node
        else f"{name} {node['used_bytes'] / GIB:.2f} of {node['capacity_bytes'] / GIB:.2f} GiB"
        for name, node in sorted(pool["nodes"].items())
    ]
    shards = [
        f"metadata at {address} down" if "error" in shard else f"{shard['name']} {shard['num_blocks']} blocks"
        for address, shard in sorted(pool["metadata"].items())
    ]
    return f"KV pool {'healthy' if pool['is_healthy'] else 'degraded'}: {', '.join([*nodes, *shards])}"
