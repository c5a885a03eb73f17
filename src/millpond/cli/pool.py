"""`millpond pool`: look at the KV pool and operate it."""

from __future__ import annotations

from typing import Annotated

import typer

app = typer.Typer(no_args_is_help=True)


@app.callback()
def pool() -> None:
    """Look at the KV pool and operate it."""


@app.command()
def placement(
    num_nodes: Annotated[int, typer.Option("--nodes", "-n", min=1, help="Storage nodes.")],
    num_racks: Annotated[int, typer.Option("--racks", "-r", min=1, help="Racks, filled evenly.")] = 1,
    k: Annotated[int, typer.Option(min=1, help="Data shards.")] = 10,
    m: Annotated[int, typer.Option(min=0, help="Parity shards.")] = 2,
    allow_shared: Annotated[
        bool, typer.Option("--allow-shared", help="Allow several shards of a stripe on one node.")
    ] = False,
) -> None:
    """Print how evenly so many nodes share shards, pairs and the reads of a rebuild."""
    from millpond.core.extents import NodeId
    from millpond.core.pool_map import StorageNodeInfo
    from millpond.policies.stripe_placement import make_epoch, report_placement

    nodes = [
        StorageNodeInfo(NodeId(f"s{i}"), "", rack=f"rack{i % num_racks}" if num_racks > 1 else "")
        for i in range(num_nodes)
    ]
    epoch = make_epoch(0, nodes, k, m, allow_shared=allow_shared)
    report = report_placement(epoch, {node.node: node.rack for node in nodes})
    lines = {
        "nodes": f"{report.num_nodes} in {num_racks} rack{'s' if num_racks > 1 else ''}",
        "groups": f"{report.num_groups} of {k}+{m} shards",
        "shards per point": _range(report.shards_per_point),
        "of one role": _range(report.shards_per_role),
        "groups per pair": _range(report.groups_per_pair),
        "shards of a group per rack": f"at most {report.max_shards_per_rack}",
        "rebuild reads, max / mean": f"{report.rebuild_max_over_mean:.3f} "
        f"(worst of {report.num_nodes_tried} nodes lost)",
    }
    for name, value in lines.items():
        typer.echo(f"{name:<28}{value}")
    if report.num_nodes < k + m:
        typer.echo("warning: the loss of one node loses several shards of a stripe", err=True)


def _range(spread: tuple[int, int]) -> str:
    low, high = spread
    return str(low) if low == high else f"{low} to {high}"
