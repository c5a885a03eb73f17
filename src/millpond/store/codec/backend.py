"""What a codec needs from a backend: linear combinations of shards."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from millpond.core.errors import InvariantBroken
from millpond.core.extents import COLUMN_ALIGN_BYTES
from millpond.store.codec.checksum import checksum
from millpond.store.codec.gf256 import Matrix

Memory = NDArray[np.uint8]

Span = tuple[int, int]
"""Bytes `[begin, end)` within every shard, not empty, both multiples of 64."""

Checksums = tuple[int, ...]
"""One for each span."""


class ShardMemory:
    """Shards of equal size at equal distances in one flat piece of memory, checked once.

    Native code does not look where it reads and writes, so everything that reaches it is a range inside the
    shards of such an object.
    """

    def __init__(self, memory: Memory, num_shards: int, first: int, stride: int, shard_bytes: int) -> None:
        """Check the ranges; nothing is copied.

        Args:
            memory: Flat, contiguous; at a multiple of 64 bytes it is fastest.
            num_shards: Data and parity shards.
            first: Where shard 0 begins; a multiple of 64, as are the next two.
            stride: From the beginning of one shard to that of the next, >= `shard_bytes`.
            shard_bytes: Size of each.

        Raises:
            InvariantBroken: The shards do not fit or are not aligned.
        """
        end = first + stride * (max(num_shards, 1) - 1) + shard_bytes
        is_aligned = (first | stride | shard_bytes) % COLUMN_ALIGN_BYTES == 0
        if not is_aligned or stride < shard_bytes or first < 0 or end > memory.size:
            raise InvariantBroken(f"{num_shards} shards of {shard_bytes} bytes do not lie in {memory.size}")
        if memory.dtype != np.uint8 or memory.ndim != 1 or not memory.flags.c_contiguous:
            raise InvariantBroken("shards need flat, contiguous memory of bytes")
        self.memory = memory
        self.num_shards = num_shards
        self.shard_bytes = shard_bytes
        self.begins = tuple(first + stride * shard for shard in range(num_shards))
        """Where each shard begins in `memory`."""
        self.addresses = tuple(memory.ctypes.data + begin for begin in self.begins)
        """The same as addresses."""

    def check_spans(self, spans: Sequence[Span]) -> None:
        """Check ranges within the shards.

        Raises:
            InvariantBroken: One is empty, outside or not aligned to 64 bytes.
        """
        for begin, end in spans:
            if not 0 <= begin < end <= self.shard_bytes or (begin | end) % COLUMN_ALIGN_BYTES:
                raise InvariantBroken(f"bytes [{begin}, {end}) of shards of {self.shard_bytes}")


class Combine(Protocol):
    """One linear map over GF(256) from some shards to others, ready to be applied to any range of them."""

    def __call__(
        self, shards: ShardMemory, spans: Sequence[Span], summed: Sequence[int] = ()
    ) -> list[Checksums]:
        """Compute the bytes of all spans of every output.

        Returns:
            For each shard in `summed`, which may be an output, the checksum of each span.
        """
        ...


class Backend(Protocol):
    """Maker of linear maps."""

    name: str

    def combine(self, coefficients: Matrix, sources: Sequence[int], outputs: Sequence[int]) -> Combine:
        """Prepare the map `outputs = coefficients x sources`.

        Args:
            coefficients: [outputs, sources]; without outputs the map does nothing but checksums.
            sources: Indices of shards.
            outputs: Indices of other shards.
        """
        ...


def checksums(shards: ShardMemory, spans: Sequence[Span], summed: Sequence[int]) -> list[Checksums]:
    """For each shard in `summed` the checksum of each span."""
    view = shards.memory.data
    at = [shards.begins[shard] for shard in summed]
    return [tuple(checksum(view[base + begin : base + end]) for begin, end in spans) for base in at]
