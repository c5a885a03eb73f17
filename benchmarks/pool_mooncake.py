"""The pool against Mooncake store: twelve node processes on both sides, TCP, in memory or the page cache.

Ours codes 10+2 and verifies every byte; the peer keeps one copy. A value of 1 MiB is nine blocks with us.
"""

from __future__ import annotations

import itertools
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from benchmarks.harness import Report
from benchmarks.pool_codec import FLASH
from benchmarks.pool_mooncake_peer import MooncakePeer, PeerUnavailable
from benchmarks.pool_nodes import NodeProcesses, NodeSpeed
from benchmarks.pool_reads import Nothing, make_chain, open_pool
from millpond.control.extent_write import WriteEnd
from millpond.core.pool_map import PoolMap
from millpond.core.units import MIB, SECOND_NS
from millpond.store.chain import BlockChain
from millpond.store.extent_get import BlockSink, RowSink
from millpond.store.local_metadata import LocalMetadata
from millpond.store.metadata.core import MetadataCore
from millpond.store.pool import Pool

SHAPES = {"1 MiB": ((MIB, 1), 9), "64 x 114 KB": ((FLASH.block_bytes, 64), 64)}
"""Name -> (size and count of the peer's values, blocks of ours)."""
LEVELS = ("put_vs_mooncake", "get_vs_mooncake", "get_local_vs_mooncake_local")
NUM_PAIRS = 9
WARM_UP = 3


class OurSide:
    """A pool of twelve node processes and memory for the blocks.

    Args:
        folder: For the nodes.
        reads_locally: The client reads the nodes' folders itself, and leaves the rows where they land.
    """

    def __init__(self, stack: ExitStack, folder: Path, *, reads_locally: bool = False) -> None:
        nodes = stack.enter_context(NodeProcesses(folder, [NodeSpeed()] * 12))
        pool_map = nodes.pool_map()
        if reads_locally:
            pool_map = _with_paths(pool_map, folder)
        self._pool: Pool = stack.enter_context(open_pool(LocalMetadata(MetadataCore(), pool_map), FLASH))
        rng = np.random.default_rng(1)
        self._blocks = [rng.integers(0, 256, FLASH.block_bytes, np.uint8) for _ in range(64)]
        self._into = [np.zeros(FLASH.block_bytes, np.uint8) for _ in range(64)]
        self._in_place = reads_locally
        self._numbers = itertools.count()
        self._last: dict[int, BlockChain] = {}

    def put(self, num_blocks: int) -> float:
        """Bytes per second of writing a new chain."""
        chain = self._last[num_blocks] = make_chain(next(self._numbers), num_blocks, FLASH)
        began_ns = time.monotonic_ns()
        results = self._pool.put(chain, 0, self._blocks[:num_blocks], deadline_ns=began_ns + 20 * SECOND_NS)
        elapsed_ns = time.monotonic_ns() - began_ns
        if any(result.result != WriteEnd.PUBLISHED for result in results):
            raise RuntimeError(f"not written: {results}")
        return num_blocks * FLASH.block_bytes / elapsed_ns * SECOND_NS

    def get(self, num_blocks: int) -> float:
        """Bytes per second of matching and reading the chain written last."""
        sink: RowSink = Nothing() if self._in_place else BlockSink(self._into[:num_blocks])
        chain = self._last[num_blocks]
        began_ns = time.monotonic_ns()
        hit = self._pool.match(chain)
        result = self._pool.get(hit, sink, deadline_ns=began_ns + 20 * SECOND_NS)
        elapsed_ns = time.monotonic_ns() - began_ns
        if result.num_blocks != num_blocks:
            raise RuntimeError(f"not read: {result}")
        return num_blocks * FLASH.block_bytes / elapsed_ns * SECOND_NS


def _with_paths(pool_map: PoolMap, folder: Path) -> PoolMap:
    nodes = tuple(replace(info, path=str(folder / info.node)) for info in pool_map.nodes)
    return replace(pool_map, nodes=nodes)


@dataclass(frozen=True, slots=True)
class Ratio:
    """The median of paired rates, and the rates."""

    value: float
    ours: float
    other: float


def compare(ours: Callable[[], float], other: Callable[[], float]) -> Ratio:
    """Measure both in pairs after some warm-up."""
    for _ in range(WARM_UP):
        ours(), other()
    pairs = [(ours(), other()) for _ in range(NUM_PAIRS)]
    columns = [float(np.median(column)) for column in zip(*pairs, strict=True)]
    return Ratio(float(np.median([mine / theirs for mine, theirs in pairs])), *columns)


def measure_mooncake(report: Report) -> None:
    """The three levels; where the peer does not run, null with the reason."""
    try:
        found = _remote() | _local()
    except PeerUnavailable as error:
        for level in LEVELS:
            report.add(level, None, f"mooncake: {error}")
        return
    report.figures["mooncake"] = {
        name: {"ratio": ratio.value, "ours": ratio.ours, "mooncake": ratio.other}
        for name, ratio in found.items()
    }
    for level, prefix in zip(LEVELS, ("put ", "get ", "local get "), strict=True):
        rows = {name: ratio.value for name, ratio in found.items() if name.startswith(prefix)}
        worst = min(rows, key=lambda name: rows[name])
        report.add(level, rows[worst], f"worst: {worst}")


def _remote() -> dict[str, Ratio]:
    found: dict[str, Ratio] = {}
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        peer = stack.enter_context(MooncakePeer(folder))
        ours = OurSide(stack, folder / "nodes")
        for name, (values, num_blocks) in SHAPES.items():
            found[f"put {name}"] = compare(lambda n=num_blocks: ours.put(n), lambda v=values: peer.put(*v))
            found[f"get {name}"] = compare(lambda n=num_blocks: ours.get(n), lambda v=values: peer.get(*v))
    return found


def _local() -> dict[str, Ratio]:
    found: dict[str, Ratio] = {}
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        peer = stack.enter_context(MooncakePeer(folder, is_local=True))
        ours = OurSide(stack, folder / "nodes", reads_locally=True)
        for name, (values, num_blocks) in SHAPES.items():
            ours.put(num_blocks)
            peer.put(*values)
            found[f"local get {name}"] = compare(
                lambda n=num_blocks: ours.get(n), lambda v=values: peer.get(*v)
            )
    return found
