"""Coded reads against plain ones: in virtual time, on real processes, with slow, stopped and dead nodes.

Each function measures one thing and returns figures; `benchmarks.pool` makes levels of them.
"""

from __future__ import annotations

import signal
import tempfile
import threading
import time
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from benchmarks.harness import say
from benchmarks.pool_nodes import NodeProcesses, NodeSpeed
from millpond.core.extents import TenantId
from millpond.core.hashing import HashChain, root_digest
from millpond.core.kv_layout import KvLayout, uniform_layout
from millpond.core.units import GIB, MILLISECOND_NS, SECOND_NS
from millpond.policies.receive_window import ReceiveWindowParams
from millpond.policies.shard_pick import ShardPickParams
from millpond.sim.shard_reads import ReadLoad, run_hedged, run_plain
from millpond.store.chain import BlockChain, Hit
from millpond.store.extent_get import GetEnd, RowsReady
from millpond.store.local_metadata import LocalMetadata
from millpond.store.metadata.core import MetadataCore
from millpond.store.pool import Pool
from millpond.store.pool_settings import PoolParams, PoolSettings

SMALL = uniform_layout(num_layers=4, kv_bytes_per_token=8, dtype="bf16")
"""Shards of 26 KB, so that two cores serve twelve nodes and reads wait for disks, not for the processor."""
LARGE = uniform_layout(num_layers=4, kv_bytes_per_token=112, dtype="fp4")
"""Blocks as large as those of V4.1-Flash: shards of 373 KB."""
NUM_CHAINS = 24
READERS = 1
"""One after the other: two cores that are busy would add waits of their own to both sides."""
PLAIN = ShardPickParams(extra_ratio=0.0, extra_burst_bytes=0, eject_ratio=1e9, max_strikes=1 << 30)
"""k of k: no eleventh shard, no hedge, nobody left out."""
DISK = NodeSpeed(read_ms=4.0)
WIDE = ReceiveWindowParams(max_in_flight_bytes=GIB)


@dataclass(frozen=True, slots=True)
class VirtualFigures:
    """`hedge_p999_ratio_virtual` and `hedge_extra_bytes`, the worst of all utilisations."""

    p999_ratio: float
    extra_ratio: float
    by_rho: dict[str, dict[str, float]]


def hedge_virtual(num_reads: int = 150_000, rhos: Sequence[float] = (0.2, 0.4, 0.6)) -> VirtualFigures:
    """Hedged against plain reads in virtual time: 0.2 % stalls of 10 ms."""
    by_rho: dict[str, dict[str, float]] = {}
    for rho in rhos:
        load = ReadLoad(num_reads=num_reads, rho=rho)
        ours, plain = run_hedged(load, ShardPickParams(), WIDE), run_plain(load)
        by_rho[f"{rho:g}"] = {
            "p50_ms": ours.quantile_ms(0.5),
            "p999_ms": ours.quantile_ms(0.999),
            "plain_p50_ms": plain.quantile_ms(0.5),
            "plain_p999_ms": plain.quantile_ms(0.999),
            "extra": ours.extra_ratio,
        }
        say(f"virtual, rho {rho:g}: {by_rho[f'{rho:g}']}")
    return VirtualFigures(
        max(row["p999_ms"] / row["plain_p999_ms"] for row in by_rho.values()),
        max(row["extra"] for row in by_rho.values()),
        by_rho,
    )


@dataclass(frozen=True, slots=True)
class ReadFigures:
    """One run of reads on real processes."""

    num_reads: int
    num_failed: int
    p50_ms: float
    p99_ms: float
    bytes_per_s: float
    extra_ratio: float


class Nothing:
    """A sink that needs only to know that the rows came."""

    def on_rows(self, ready: RowsReady) -> None:
        """See `RowSink`."""

    def on_shortened(self, num_blocks: int, reason: GetEnd) -> None:
        """See `RowSink`."""


def make_chain(index: int, num_blocks: int, layout: KvLayout) -> BlockChain:
    """A chain of its own."""
    hashes = HashChain(root_digest(b"bench", layout.fingerprint, b"", b""))
    hashes.extend(array("i", [index] * 128 * num_blocks))
    return BlockChain(TenantId(1), hashes.root, tuple(hashes.digests))


def fill(pool: Pool, layout: KvLayout, num_chains: int = NUM_CHAINS) -> list[Hit]:
    """Write chains of one full extent each; what `match` says of them."""
    rng = np.random.default_rng(1)
    hits: list[Hit] = []
    for index in range(num_chains):
        chain = make_chain(index, pool.window, layout)
        blocks = [rng.integers(0, 256, layout.block_bytes, np.uint8) for _ in chain.digests]
        pool.put(chain, 0, blocks, deadline_ns=time.monotonic_ns() + 30 * SECOND_NS)
        hits.append(pool.match(chain))
    if any(hit.num_blocks != pool.window for hit in hits):
        raise RuntimeError("the pool did not take all blocks")
    return hits


def read_all(pool: Pool, hits: Sequence[Hit], num_reads: int, *, readers: int = READERS) -> ReadFigures:
    """Read hits in turn from several threads."""
    latency_ns: list[int] = []
    failed: list[int] = []
    lock = threading.Lock()
    todo = iter(range(num_reads))

    def run() -> None:
        while True:
            with lock:
                index = next(todo, None)
            if index is None:
                return
            hit = hits[index % len(hits)]
            began_ns = time.monotonic_ns()
            result = pool.get(hit, Nothing(), deadline_ns=began_ns + 20 * SECOND_NS)
            ended_ns = time.monotonic_ns()
            with lock:
                latency_ns.append(ended_ns - began_ns)
                if result.num_blocks != hit.num_blocks:
                    failed.append(index)

    counts = pool.client.reads.counts
    asked, needed = counts.asked_bytes, counts.needed_bytes
    began_ns = time.monotonic_ns()
    threads = [threading.Thread(target=run) for _ in range(readers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    wall_s = (time.monotonic_ns() - began_ns) / SECOND_NS
    payload = sum(hits[index % len(hits)].num_blocks for index in range(num_reads)) * pool.layout.block_bytes
    return ReadFigures(
        num_reads,
        len(failed),
        float(np.quantile(latency_ns, 0.5)) / MILLISECOND_NS,
        float(np.quantile(latency_ns, 0.99)) / MILLISECOND_NS,
        payload / wall_s,
        (counts.asked_bytes - asked) / max(1, counts.needed_bytes - needed) - 1,
    )


def open_pool(metadata: LocalMetadata, layout: KvLayout, pick: ShardPickParams | None = None) -> Pool:
    """A client of the nodes in the map."""
    settings = PoolSettings(pool=PoolParams(num_buffers=12, min_piece_kib=1024), window=WIDE)
    return Pool(layout, metadata, name="bench", settings=replace(settings, pick=pick or ShardPickParams()))


def hedge_real(num_reads: int = 3000) -> tuple[float, dict[str, ReadFigures]]:
    """`hedge_p99_ratio_real`: 2 % of all disk reads stall for 100 ms.

    Returns:
        p99 of hedged over p99 of plain reads, and the figures of both.
    """
    speed = replace(DISK, stall_ratio=0.02, stall_ms=100.0)
    with tempfile.TemporaryDirectory() as folder, NodeProcesses(Path(folder), [speed] * 12) as nodes:
        metadata = LocalMetadata(MetadataCore(), nodes.pool_map())
        with open_pool(metadata, SMALL) as pool:
            hits = fill(pool, SMALL)
            read_all(pool, hits, 100)
            ours = read_all(pool, hits, num_reads)
        with open_pool(metadata, SMALL, PLAIN) as pool:
            plain = read_all(pool, hits, num_reads)
    say(f"real, 2 % x 100 ms: ours {ours}, plain {plain}")
    return ours.p99_ms / plain.p99_ms, {"ours": ours, "plain": plain}


def bad_node(num_reads: int = 1500) -> tuple[float, dict[str, ReadFigures]]:
    """`slow_node_p99_ratio`: one node four times slow, and one stopped, against healthy.

    Returns:
        The worse p99 over that of the healthy nodes, and the figures. A failed read makes it infinite.
    """
    found: dict[str, ReadFigures] = {}
    slow = [replace(DISK, read_ms=4 * DISK.read_ms), *[DISK] * 11]
    for name, speeds in (("healthy", [DISK] * 12), ("slow", slow)):
        with tempfile.TemporaryDirectory() as folder, NodeProcesses(Path(folder), speeds) as nodes:
            metadata = LocalMetadata(MetadataCore(), nodes.pool_map())
            with open_pool(metadata, SMALL) as pool:
                hits = fill(pool, SMALL)
                read_all(pool, hits, 200)
                found[name] = read_all(pool, hits, num_reads)
                if name == "healthy":
                    nodes.processes[0].send_signal(signal.SIGSTOP)
                    try:
                        found["stopped"] = read_all(pool, hits, num_reads)
                    finally:
                        nodes.processes[0].send_signal(signal.SIGCONT)
    for name, figures in found.items():
        say(f"one node {name}: {figures}")
    worst = max(found["slow"].p99_ms, found["stopped"].p99_ms) / found["healthy"].p99_ms
    return worst if not any(row.num_failed for row in found.values()) else float("inf"), found


def two_dead(num_reads: int = 1000) -> tuple[float, float, dict[str, ReadFigures]]:
    """`two_dead_readable` and `two_dead_throughput_ratio`: nodes 0 and 1 killed.

    Returns:
        Share of extents that can be read, throughput over that of the healthy pool, and the figures.
    """
    with tempfile.TemporaryDirectory() as folder, NodeProcesses(Path(folder), [NodeSpeed()] * 12) as nodes:
        metadata = LocalMetadata(MetadataCore(), nodes.pool_map())
        with open_pool(metadata, LARGE) as pool:
            hits = fill(pool, LARGE)
            read_all(pool, hits, 100)
            healthy = read_all(pool, hits, num_reads, readers=2)
            for process in nodes.processes[:2]:
                process.kill()
                process.wait()
            dead = read_all(pool, hits, num_reads, readers=2)
    say(f"two dead: {dead}, healthy {healthy}")
    readable = 1 - dead.num_failed / dead.num_reads
    return readable, dead.bytes_per_s / healthy.bytes_per_s, {"healthy": healthy, "two_dead": dead}
