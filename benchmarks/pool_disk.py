"""The pool against the raw disk under it: put until sealed and synced, get with the page cache dropped.

Both sides use the same folder in turn, raw - pool - raw. Raw means O_DIRECT in pieces of 1 MiB from several
threads; the pool is twelve node processes and their client, all bytes verified.
"""

from __future__ import annotations

import mmap
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from benchmarks.harness import say
from benchmarks.pool_codec import FLASH
from benchmarks.pool_nodes import NodeProcesses, NodeSpeed
from benchmarks.pool_reads import ReadFigures, fill, make_chain, open_pool, read_all
from millpond.control.extent_write import WriteEnd
from millpond.core.extents import window_blocks
from millpond.core.units import MIB, SECOND_NS
from millpond.store.cells import Block
from millpond.store.chain import BlockChain
from millpond.store.local_metadata import LocalMetadata
from millpond.store.metadata.core import MetadataCore
from millpond.store.pool import Pool

NUM_NODES = 12
RAW_THREADS = 4
WRITERS = 2
EXTENTS_PER_CHAIN = 8
SEAL_S = 300.0
PIECE_BYTES = MIB


@dataclass(frozen=True, slots=True)
class DiskFigures:
    """Bytes per second on both sides, and bytes on disk."""

    logical_bytes: int
    stored_bytes: int
    """Of all files of all nodes, after sealing."""
    put: float
    get: float
    raw_write: float
    raw_read: float
    failed_reads: int

    @property
    def write_amplification(self) -> float:
        """Bytes stored per byte put."""
        return self.stored_bytes / self.logical_bytes


def measure_disk(num_bytes: int, folder: Path | None = None) -> DiskFigures:
    """Write and read back `num_bytes` of blocks of V4.1-Flash, with raw I/O before and after each.

    Args:
        num_bytes: Logical.
        folder: Where; default: the folder for temporary files.
    """
    with tempfile.TemporaryDirectory(dir=folder) as name:
        data, raw = Path(name) / "nodes", Path(name) / "raw"
        core = MetadataCore()
        writes = [raw_write(raw, num_bytes // 2)]
        chains, put = _put(data, core, num_bytes)
        writes.append(raw_write(raw, num_bytes // 2))
        num_blocks = sum(len(chain.digests) for chain in chains) + window_blocks(FLASH)  # and the warm-up
        logical = num_blocks * FLASH.block_bytes
        drop_cache(data.rglob("*.seg"))
        reads = [raw_read(raw)]
        got = _get(data, core, chains)
        reads.append(raw_read(raw))
        stored = sum(path.stat().st_size for path in data.rglob("*") if path.is_file())
    found = DiskFigures(
        logical, stored, put, got.bytes_per_s, statistics.mean(writes), statistics.mean(reads), got.num_failed
    )
    say(f"disk: {found}; raw writes {writes}, raw reads {reads}")
    return found


def _put(folder: Path, core: MetadataCore, num_bytes: int) -> tuple[list[BlockChain], float]:
    """Chains written, and bytes per second until every node has sealed, synced and ended."""
    blocks = _random_blocks()
    with NodeProcesses(folder, [NodeSpeed()] * NUM_NODES, stop_s=SEAL_S) as nodes:
        metadata = LocalMetadata(core, nodes.pool_map())
        with open_pool(metadata, FLASH) as pool:
            num_blocks = EXTENTS_PER_CHAIN * pool.window
            count = max(1, num_bytes // (num_blocks * FLASH.block_bytes))
            chains = [make_chain(1 + index, num_blocks, FLASH) for index in range(count)]
            fill(pool, FLASH, num_chains=1)  # compiles and connects what the first put needs
            began_ns = time.monotonic_ns()
            with ThreadPoolExecutor(WRITERS) as writers:
                list(writers.map(lambda chain: _write(pool, chain, blocks), chains))
        nodes.end()  # each seals and syncs
        elapsed_s = (time.monotonic_ns() - began_ns) / SECOND_NS
    return chains, count * num_blocks * FLASH.block_bytes / elapsed_s


def _write(pool: Pool, chain: BlockChain, blocks: Sequence[Block]) -> None:
    count = len(chain.digests)
    results = pool.put(chain, 0, blocks[:count], deadline_ns=time.monotonic_ns() + 120 * SECOND_NS)
    if any(result.result != WriteEnd.PUBLISHED for result in results):
        raise RuntimeError(f"not written: {results}")


def _get(folder: Path, core: MetadataCore, chains: Sequence[BlockChain]) -> ReadFigures:
    with (
        NodeProcesses(folder, [NodeSpeed()] * NUM_NODES, stop_s=SEAL_S) as nodes,
        open_pool(LocalMetadata(core, nodes.pool_map()), FLASH) as pool,
    ):
        hits = [pool.match(chain) for chain in chains]
        if any(hit.num_blocks != len(chain.digests) for hit, chain in zip(hits, chains, strict=True)):
            raise RuntimeError("the metadata does not know what was put")
        drop_cache(folder.rglob("*.seg"))
        return read_all(pool, hits, len(hits))


def _random_blocks() -> list[Block]:
    """Blocks of one chain; all chains share the bytes, not the names."""
    rng = np.random.default_rng(1)
    count = EXTENTS_PER_CHAIN * 32
    return [rng.integers(0, 256, FLASH.block_bytes, np.uint8) for _ in range(count)]


def drop_cache(paths: Iterable[Path]) -> None:
    """Write back some files and forget what the page cache holds of them."""
    for path in paths:
        file = os.open(path, os.O_RDONLY)
        try:
            os.fsync(file)
            os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(file)


def raw_write(path: Path, num_bytes: int) -> float:
    """Bytes per second of writing a new file and syncing it."""
    path.unlink(missing_ok=True)
    file = os.open(path, os.O_CREAT | os.O_WRONLY | os.O_DIRECT)
    try:
        began_ns = time.monotonic_ns()
        _each_piece(num_bytes, lambda piece, offset: os.pwrite(file, piece, offset))
        os.fsync(file)
        return num_bytes / (time.monotonic_ns() - began_ns) * SECOND_NS
    finally:
        os.close(file)


def raw_read(path: Path) -> float:
    """Bytes per second of reading a file."""
    num_bytes = path.stat().st_size
    file = os.open(path, os.O_RDONLY | os.O_DIRECT)
    try:
        began_ns = time.monotonic_ns()
        _each_piece(num_bytes, lambda piece, offset: os.preadv(file, [piece], offset))
        return num_bytes / (time.monotonic_ns() - began_ns) * SECOND_NS
    finally:
        os.close(file)


def _each_piece(num_bytes: int, work: Callable[[mmap.mmap, int], int]) -> None:
    """Call `work` for every piece of a file, from several threads, each with memory of its own."""
    offsets = iter(range(0, num_bytes - num_bytes % PIECE_BYTES, PIECE_BYTES))
    noise = np.random.default_rng(1).bytes(PIECE_BYTES)

    def run(_index: int) -> None:
        with mmap.mmap(-1, PIECE_BYTES) as piece:  # whole pages, as O_DIRECT wants them
            piece[:] = noise
            for offset in offsets:
                if work(piece, offset) != PIECE_BYTES:
                    raise OSError("the disk took or gave less than asked")

    with ThreadPoolExecutor(RAW_THREADS) as threads:
        list(threads.map(run, range(RAW_THREADS)))
