"""A quick look at what a running pool takes and gives from here (`millpond pool bench`)."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from millpond.control.extent_write import WriteEnd
from millpond.core.errors import TransferFailed
from millpond.core.extents import TenantId
from millpond.core.kv_layout import KvLayout, KvPart, KvRow
from millpond.core.units import MIB, SECOND_NS
from millpond.store.chain import BlockChain
from millpond.store.extent_get import BlockSink
from millpond.store.pool import Pool

V41_ROWS = (22_784, 22_784, 22_784, 45_568)
"""Bytes of a block in each KV-owning layer of DeepSeek-V4.1-Flash (kvstore 1.2)."""
BENCH_TENANT = TenantId(0xFFFFFFFE)
BATCH_S = 60


@dataclass(frozen=True, slots=True)
class PoolBenchResult:
    """Logical bytes a second."""

    put_bytes_per_s: float
    get_bytes_per_s: float
    num_bytes: int


def bench_layout() -> KvLayout:
    """Blocks as large as those of DeepSeek-V4.1-Flash."""
    return KvLayout(
        tuple(KvRow(layer, (KvPart("main", num_bytes, "fp4"),)) for layer, num_bytes in enumerate(V41_ROWS))
    )


def bench_pool(pool: Pool, num_mib: int, on_progress: Callable[[int, int], None]) -> PoolBenchResult:
    """Write random blocks, read them back, compare every byte, and forget them.

    Args:
        pool: Of `bench_layout`.
        num_mib: How much.
        on_progress: Told (bytes done, bytes in all), writing and reading together.

    Raises:
        TransferFailed: Something was not written, or not read back.
    """
    window = pool.window
    per_batch = window * pool.layout.block_bytes
    num_batches = max(1, num_mib * MIB // per_batch)
    total = 2 * num_batches * per_batch
    random = np.random.default_rng()
    blocks = [random.integers(0, 256, pool.layout.block_bytes, np.uint8) for _ in range(window)]
    found = [np.zeros(pool.layout.block_bytes, np.uint8) for _ in range(window)]
    chains = [
        BlockChain(BENCH_TENANT, secrets.token_bytes(32), tuple(secrets.token_bytes(32) for _ in blocks))
        for _ in range(num_batches)
    ]
    try:
        put_ns = get_ns = 0
        for index, chain in enumerate(chains):
            began = time.monotonic_ns()
            results = pool.put(chain, 0, blocks, deadline_ns=_deadline_ns())
            put_ns += time.monotonic_ns() - began
            if any(result.result != WriteEnd.PUBLISHED for result in results):
                raise TransferFailed("the pool did not take what was written", code="pool.bench")
            on_progress((index + 1) * per_batch, total)
        for index, chain in enumerate(chains, num_batches):
            began = time.monotonic_ns()
            result = pool.get(pool.match(chain), BlockSink(found), deadline_ns=_deadline_ns())
            get_ns += time.monotonic_ns() - began
            if result.num_blocks < window or not all(map(np.array_equal, blocks, found)):
                raise TransferFailed("the pool did not give back what was written", code="pool.bench")
            on_progress((index + 1) * per_batch, total)
    finally:
        for chain in chains:
            pool.evict(chain)
    num_bytes = num_batches * per_batch
    return PoolBenchResult(num_bytes * SECOND_NS / put_ns, num_bytes * SECOND_NS / get_ns, num_bytes)


def _deadline_ns() -> int:
    return time.monotonic_ns() + BATCH_S * SECOND_NS
