"""Pool codec against memmove: encode, rebuild of one shard, and a get's work after arrival.

M is memmove of the same pieces: as many, as large and at the same distances as the data that the other side
works on. All sides walk over buffers of 512 MiB together, touched before. One thread, its CPU time.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from millpond.core.extents import ExtentId, StripeId, StripeShape
from millpond.core.kv_layout import KvLayout, KvPart, KvRow
from millpond.core.units import GIB, MIB
from millpond.store.cells import Block
from millpond.store.codec.reed_solomon import ReedSolomon
from millpond.store.payload import PayloadShape, payload_shape
from millpond.store.record import RecordHeader
from millpond.store.stripe import ExtentMeta, copy_rows_out, encode_extent, open_rows
from millpond.store.stripe_buffer import StripeBuffer, stripe_bytes

NUM_BLOCKS = 16
"""Shards of 184,320 B with the layout of V4.1-Flash."""

WALK_BYTES = 512 * MIB
FLASH = KvLayout(
    tuple(
        KvRow(layer, (KvPart("main", size, "fp4"),))
        for layer, size in enumerate((22_784, 22_784, 22_784, 45_568))
    )
)
"""Blocks of V4.1-Flash, 113,920 B."""

Measurement = Callable[[], float]
"""One pass over all buffers; bytes of blocks per second."""


@dataclass(frozen=True, slots=True)
class Side:
    """One level: our side and memmove's, both as rates to be measured in pairs."""

    ours: Measurement
    memmove: Measurement


class PoolCodecBench:
    """Encoded extents in memory, and the sides of the four levels."""

    def __init__(self) -> None:
        self.stripe = StripeShape(FLASH, NUM_BLOCKS)
        self.shape: PayloadShape = payload_shape(self.stripe)
        self.codec = ReedSolomon(self.stripe.k, self.stripe.m)
        size = stripe_bytes(self.shape)
        count = -(-WALK_BYTES // (self.stripe.k * self.shape.payload_bytes))
        memory = _touched(size * count)
        self.buffers = [StripeBuffer(self.shape, memory[i * size : (i + 1) * size]) for i in range(count)]
        self.memory = memory

    @cached_property
    def blocks(self) -> list[list[Block]]:
        """Per extent its blocks, in slots of whole pages."""
        size = self.stripe.layout.block_bytes
        slot = -(-size // 4096) * 4096
        slots = _touched(slot * NUM_BLOCKS * len(self.buffers)).reshape(len(self.buffers), NUM_BLOCKS, slot)
        return [list(extent[:, :size]) for extent in slots]

    @cached_property
    def headers(self) -> list[list[RecordHeader]]:
        """Per extent the headers of its records, which are thereby made."""
        digests = [bytes([i]) * 32 for i in range(NUM_BLOCKS)]
        meta = ExtentMeta(
            ExtentId(digests[-1], NUM_BLOCKS),
            StripeId(0, 0, 0),
            bytes(32),
            bytes(16),
            0,
            b"".join(digest[:16] for digest in digests),
        )
        return [
            encode_extent(self.codec, self.stripe, buffer, replace(meta, stripe=StripeId(0, 0, i)), blocks)
            for i, (buffer, blocks) in enumerate(zip(self.buffers, self.blocks, strict=True))
        ]

    @cached_property
    def _target(self) -> np.ndarray:
        return _touched(self.stripe.k * self.shape.payload_bytes * len(self.buffers))

    def encode_sum(self) -> Side:
        """Parity and checksums of shards that lie in their buffer."""
        spans = self.shape.spans(0, len(self.shape.rows))

        def ours(buffer: StripeBuffer, _index: int) -> None:
            self.codec.encode(buffer.shards, spans)

        return Side(lambda: self._rate(ours), self._memmove)

    def put_blocks(self) -> Side:
        """The same from blocks: gathered into shards first. Not a level; what a put costs."""
        meta = self.headers[0][0]
        named = ExtentMeta(meta.extent, meta.stripe, meta.parent, meta.root, meta.first_block, meta.hashes)

        def ours(buffer: StripeBuffer, index: int) -> None:
            encode_extent(self.codec, self.stripe, buffer, named, self.blocks[index])

        return Side(lambda: self._rate(ours), self._memmove)

    def rebuild_one(self) -> Side:
        """One lost data shard from nine others and the XOR parity."""
        whole = [(0, self.shape.payload_bytes)]
        present = [0, 1, 2, 4, 5, 6, 7, 8, 9, 10]

        def ours(buffer: StripeBuffer, _index: int) -> None:
            self.codec.decode(buffer.shards, present, [3], whole)

        return Side(lambda: self._rate(ours), self._memmove)

    def get_inplace(self) -> Side:
        """Verify eleven shards where they arrived and rebuild the twelfth, a data shard."""
        at_hand = self._at_hand()

        def ours(buffer: StripeBuffer, index: int) -> None:
            opened = open_rows(self.codec, buffer, at_hand[index], 0, len(self.shape.rows))
            if opened.corrupt or not opened.is_complete:
                raise RuntimeError(f"extent {index} does not verify")

        return Side(lambda: self._rate(ours), self._memmove)

    def get_copyout(self) -> Side:
        """The same, and the blocks copied out."""
        at_hand, num_rows = self._at_hand(), len(self.shape.rows)

        def ours(buffer: StripeBuffer, index: int) -> None:
            opened = open_rows(self.codec, buffer, at_hand[index], 0, num_rows)
            if opened.corrupt or not opened.is_complete:
                raise RuntimeError(f"extent {index} does not verify")
            copy_rows_out(self.stripe, buffer, 0, num_rows, self.blocks[index])

        return Side(lambda: self._rate(ours), self._memmove)

    def _at_hand(self) -> list[dict[int, RecordHeader]]:
        return [{h.shard: h for h in headers if h.shard != 3} for headers in self.headers]

    def _memmove(self) -> float:
        """Copy every row piece of the data shards."""
        target, payload = self._target.ctypes.data, self.shape.payload_bytes
        rows = [(row.offset, row.num_bytes) for row in self.shape.rows]
        move = ctypes.memmove

        def copy(buffer: StripeBuffer, index: int) -> None:
            out = target + index * self.stripe.k * payload
            for shard, source in enumerate(buffer.shards.addresses[: self.stripe.k]):
                for offset, size in rows:
                    move(out + shard * payload + offset, source + offset, size)

        return self._rate(copy)

    def _rate(self, work: Callable[[StripeBuffer, int], None]) -> float:
        begin_ns = time.thread_time_ns()
        for index, buffer in enumerate(self.buffers):
            work(buffer, index)
        elapsed_ns = time.thread_time_ns() - begin_ns
        return self.stripe.payload_bytes * len(self.buffers) / elapsed_ns * 1e9


def _touched(num_bytes: int) -> np.ndarray:
    """Memory at a page, with content and pages of its own."""
    memory = np.empty(num_bytes + 4096, np.uint8)
    memory = memory[-memory.ctypes.data % 4096 :][:num_bytes]
    words = np.random.default_rng(0).integers(0, 256, min(num_bytes, GIB // 16), dtype=np.uint8)
    for begin in range(0, num_bytes, len(words)):
        memory[begin : begin + len(words)] = words[: num_bytes - begin]
    return memory


def main(
    names: Sequence[str] = ("encode_sum", "put_blocks", "rebuild_one", "get_inplace", "get_copyout"),
) -> None:
    """Print GB/s of both sides and the median ratio."""
    from benchmarks.harness import NUM_PAIRS, measure_pairs, median_ratio

    bench = PoolCodecBench()
    _ = bench.headers
    for name in names:
        side: Side = getattr(bench, name)()
        pairs = measure_pairs(side.ours, side.memmove, NUM_PAIRS)
        ours, theirs = (sorted(column)[len(pairs) // 2] / 1e9 for column in zip(*pairs, strict=True))
        print(f"{name:12s} {ours:6.2f} GB/s  memmove {theirs:6.2f} GB/s  ratio {median_ratio(pairs):.2f}")


if __name__ == "__main__":
    main()
