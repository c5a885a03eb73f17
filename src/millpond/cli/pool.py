"""`millpond pool`: look at the KV pool and operate it."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from millpond.core.errors import MillpondError
from millpond.core.units import GIB, MIB

if TYPE_CHECKING:
    from millpond.store.pool_admin import PoolAdmin
    from millpond.store.pool_folder import PoolFolder

EXIT_STATUS = 2
"""Of a command that could not do what it was told; 1: it did, and found something wrong."""

MetadataOption = Annotated[
    list[str] | None,
    typer.Option(
        "--metadata", help="host:port of a metadata shard. Repeatable. Default: the service on this machine."
    ),
]
TokenOption = Annotated[Path | None, typer.Option("--token-file", help="File with the cluster token.")]
StateDirOption = Annotated[
    Path | None,
    typer.Option("--state-dir", help="State folder of the service on this machine; default: XDG's."),
]

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


@app.command()
def status(
    metadata: MetadataOption = None, state_dir: StateDirOption = None, token_file: TokenOption = None
) -> None:
    """Print the state of every process; exit status 1 if one does not do well."""
    from millpond.store.net.messages import MetadataStatus, NodeStatus

    with _admin(metadata, state_dir, token_file) as admin:
        found = admin.status()
    epochs = ", ".join(str(epoch.epoch) for epoch in found.pool_map.epochs)
    typer.echo(f"pool map {found.pool_map.version}, placement epochs {epochs}")
    for node, state in sorted(found.nodes.items()):
        if not isinstance(state, NodeStatus):
            typer.echo(f"{node:<12}down: {state.message}")
            continue
        drives = f", drives failed: {len(state.targets_failed)}" if state.targets_failed else ""
        writes = "" if state.accepts_writes else ", takes no writes"
        foreign = f", segments set aside: {state.num_foreign_segments}" if state.num_foreign_segments else ""
        typer.echo(
            f"{node:<12}{state.num_shards} shards, {state.used_bytes / GIB:.2f} of "
            f"{state.capacity_bytes / GIB:.2f} GiB{drives}{writes}{foreign}"
        )
    for address, state in sorted(found.metadata.items()):
        if isinstance(state, MetadataStatus):
            left = f", rebuilding from {state.rebuild_left} nodes" if state.rebuild_left else ""
            typer.echo(f"{address:<22}{state.num_extents} extents, {state.num_blocks} blocks{left}")
        else:
            typer.echo(f"{address:<22}down: {state.message}")
    if not found.is_healthy:
        raise typer.Exit(1)


@app.command()
def verify(
    metadata: MetadataOption = None, state_dir: StateDirOption = None, token_file: TokenOption = None
) -> None:
    """Count the stripes that are whole, lack shards or are lost; exit status 1 if not all are whole."""
    with _admin(metadata, state_dir, token_file) as admin:
        found = admin.check()
    typer.echo(f"{found.whole} stripes whole, {found.degraded} degraded, {found.lost} lost")
    if found.misplaced:
        typer.echo(f"{found.misplaced} shards that no placement explains")
    if found.silent:
        typer.echo(f"nodes that did not answer: {', '.join(found.silent)}")
    if found.degraded or found.lost or found.silent:
        raise typer.Exit(1)


@app.command()
def scrub(
    metadata: MetadataOption = None,
    state_dir: StateDirOption = None,
    nodes: Annotated[list[str] | None, typer.Argument(help="Nodes; all if none is named.")] = None,
    share: Annotated[
        float, typer.Option(min=0.001, max=1.0, help="Of the time for which a node is busy with it.")
    ] = 0.03,
    token_file: TokenOption = None,
) -> None:
    """Read every record, check every byte, and make damaged shards again."""
    from millpond.store.scrub import ScrubParams

    with _admin(metadata, state_dir, token_file) as admin:
        names = [admin.known(node) for node in nodes or sorted(admin.links)]
        job = admin.scrub(ScrubParams(share=share))
        num_shards = admin.num_shards(names)
        _watch(lambda: job.run(names), job.stop, "records", lambda: (job.progress.checked, num_shards))
    found = job.progress
    typer.echo(
        f"{found.checked} records ({found.checked_bytes / GIB:.2f} GiB) checked, {found.damaged} damaged, "
        f"{found.healed} healed, {found.unread} not read"
    )
    if found.damaged > found.healed or found.silent_nodes:
        raise typer.Exit(1)


@app.command()
def rebuild(
    metadata: MetadataOption = None,
    state_dir: StateDirOption = None,
    node: Annotated[
        str | None, typer.Argument(help="Node that is back after a loss; none: whatever is missing.")
    ] = None,
    rate: Annotated[float, typer.Option(min=0.0, help="MiB/s read from all nodes; 0: no limit.")] = 400.0,
    ttl_hours: Annotated[float, typer.Option(help="As the storage nodes have it.")] = 24.0,
    token_file: TokenOption = None,
) -> None:
    """Make lost shards again, what was used last first; what expires within two hours is left out."""
    from millpond.store.rebuild import RebuildParams

    with _admin(metadata, state_dir, token_file) as admin:
        job = admin.rebuild(node, RebuildParams(read_mib_s=rate, ttl_s=int(ttl_hours * 3600)))
        _watch(job.run, job.stop, "stripes", lambda: (job.progress.done, job.progress.total))
    found = job.progress
    typer.echo(
        f"{found.total} stripes lacked shards: {found.rebuilt} rebuilt, {found.expiring} expire soon, "
        f"{found.lost} lost, {found.failed} failed"
    )
    if found.lost or found.failed:
        raise typer.Exit(1)


@app.command()
def drain(
    node: Annotated[str, typer.Argument(help="Storage node that is to leave.")],
    metadata: MetadataOption = None,
    state_dir: StateDirOption = None,
    token_file: TokenOption = None,
) -> None:
    """Give a node no more writes; what it has can be read until it expires."""
    with _admin(metadata, state_dir, token_file) as admin:
        pool_map = admin.drain(node)
    typer.echo(f"placement epoch {pool_map.epochs[-1].epoch} does without {node}")


@app.command()
def drop(
    tenant: Annotated[int | None, typer.Argument(min=0, help="Number of the tenant.")] = None,
    everything: Annotated[
        bool, typer.Option("--all", help="Everybody: remove the files of a pool on this machine.")
    ] = False,
    metadata: MetadataOption = None,
    state_dir: StateDirOption = None,
    token_file: TokenOption = None,
) -> None:
    """Forget everything that a tenant wrote, or remove the pool of this machine's stopped service."""
    if everything == (tenant is not None) or (everything and metadata):
        typer.echo("error: name a tenant, or write --all for the pool on this machine", err=True)
        raise typer.Exit(EXIT_STATUS)
    if tenant is None:
        folder = _local_pool(state_dir)
        if not folder.path.exists():
            typer.echo(f"no KV pool in {folder.path}")
            return
        with folder.claimed():
            num_bytes = folder.clear()
        typer.echo(f"{num_bytes / GIB:.2f} GiB removed from {folder.path}")
        return
    with _admin(metadata, state_dir, token_file) as admin:
        count = admin.drop(tenant)
    typer.echo(f"{count} extents forgotten")


@app.command()
def bench(
    metadata: MetadataOption = None,
    state_dir: StateDirOption = None,
    num_mib: Annotated[int, typer.Option("--mib", min=1, help="MiB to write and read back.")] = 256,
    token_file: TokenOption = None,
) -> None:
    """Write blocks of DeepSeek-V4.1's size, read them back, compare, and print the rates."""
    from millpond.serve.loading_bar import loading_bar
    from millpond.store.pool import Pool
    from millpond.store.pool_bench import bench_layout, bench_pool

    with (
        _admin(metadata, state_dir, token_file) as admin,
        Pool(bench_layout(), admin.metadata, name="pool bench", token=admin.token) as client,
        loading_bar("write, read") as on_progress,
    ):
        result = bench_pool(client, num_mib, on_progress)
    typer.echo(
        f"{result.num_bytes / MIB:.0f} MiB: put {result.put_bytes_per_s / 1e9:.3f} GB/s, "
        f"get {result.get_bytes_per_s / 1e9:.3f} GB/s"
    )


@contextmanager
def _admin(
    metadata: list[str] | None, state_dir: Path | None, token_file: Path | None
) -> Iterator[PoolAdmin]:
    """The pool; its errors become one line and the exit status."""
    from millpond.store.pool_admin import PoolAdmin

    try:
        if metadata:
            access = metadata, _token(token_file)
        else:
            folder = _local_pool(state_dir)
            access = folder.metadata_addresses(), folder.token()
        with PoolAdmin(*access) as admin:
            yield admin
    except MillpondError as error:
        typer.echo(f"error: {error.message}", err=True)
        raise typer.Exit(EXIT_STATUS) from error


def _local_pool(state_dir: Path | None) -> PoolFolder:
    """Folder of the pool of this machine's service."""
    from millpond.config.load import load_config
    from millpond.serve.pool_processes import pool_folder

    overrides = [f"supervise.state_dir={json.dumps(str(state_dir))}"] if state_dir else []
    return pool_folder(load_config(None, overrides).config)


def _token(file: Path | None) -> str:
    try:
        return file.read_text().strip() if file else ""
    except OSError as error:
        typer.echo(f"error: {file}: {error.strerror}", err=True)
        raise typer.Exit(EXIT_STATUS) from error


def _watch(
    run: Callable[[], object], stop: Callable[[], None], what: str, count: Callable[[], tuple[int, int]]
) -> None:
    """Run a long job with a progress bar on a terminal; an interrupt stops it after its current step."""
    from concurrent.futures import ThreadPoolExecutor

    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn(what), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    ended = threading.Event()
    with (
        ThreadPoolExecutor(1, "pool job") as executor,
        Progress(*columns, console=Console(stderr=True)) as bar,
    ):
        task = bar.add_task(what, total=None)
        job = executor.submit(run)
        job.add_done_callback(lambda _: ended.set())
        try:
            while not ended.wait(0.2):
                done, total = count()
                bar.update(task, completed=done, total=total or None)
        finally:
            stop()
        job.result()
        done, total = count()
        bar.update(task, completed=done, total=max(done, total))


def _range(spread: tuple[int, int]) -> str:
    low, high = spread
    return str(low) if low == high else f"{low} to {high}"
