"""Extents with known content for the tests of the store."""

from __future__ import annotations

import hashlib

import numpy as np

from millpond.core.extents import ExtentId, StripeId, StripeShape
from millpond.core.kv_layout import KvLayout, KvPart, KvRow
from millpond.store.payload import payload_shape
from millpond.store.stripe import ExtentMeta
from millpond.store.stripe_buffer import StripeBuffer, stripe_bytes


def aligned_memory(num_bytes: int) -> np.ndarray:
    memory = np.zeros(num_bytes + 64, np.uint8)
    begin = -memory.ctypes.data % 64
    return memory[begin : begin + num_bytes]


def flash_layout() -> KvLayout:
    """V4.1-Flash: three rows of 22,784 B and one of 45,568 B."""
    return layout(22_784, 22_784, 22_784, 45_568)


def layout(*row_bytes: int) -> KvLayout:
    return KvLayout(rows=tuple(KvRow(i, (KvPart("main", n, "fp4"),)) for i, n in enumerate(row_bytes)))


def blocks_of(shape: StripeShape, seed: int) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    return list(rng.integers(0, 256, (shape.num_blocks, shape.layout.block_bytes), dtype=np.uint8))


def meta_of(num_blocks: int, nonce: int = 1) -> ExtentMeta:
    digests = [hashlib.sha256(bytes([nonce & 255, i])).digest() for i in range(num_blocks + 1)]
    return ExtentMeta(
        extent=ExtentId(digests[-1], num_blocks),
        stripe=StripeId(epoch=2, group=7, nonce=nonce),
        parent=digests[0],
        root=bytes(range(16)),
        first_block=3,
        hashes=b"".join(digest[:16] for digest in digests[1:]),
        tenant=5,
        created_s=1_800_000_000,
    )


def buffer_of(shape: StripeShape) -> StripeBuffer:
    payload = payload_shape(shape)
    return StripeBuffer(payload, aligned_memory(stripe_bytes(payload)))
