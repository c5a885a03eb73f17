"""What a codec needs from a backend: linear combinations of shards, and which backend there is."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from millpond.core.errors import InvariantBroken
from millpond.core.extents import COLUMN_ALIGN_BYTES
from millpond.store.codec.checksum import checksum
from millpond.store.codec.gf256 import Matrix
from millpond.store.codec.native import load_kernels

Memory = NDArray[np.uint8]


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

    def check_range(self, begin: int, num_bytes: int) -> None:
        """Check a range within the shards.

        Raises:
            InvariantBroken: It is outside or not aligned to 64 bytes.
        """
        is_aligned = (begin | num_bytes) % COLUMN_ALIGN_BYTES == 0
        if begin < 0 or num_bytes < 0 or begin + num_bytes > self.shard_bytes or not is_aligned:
            raise InvariantBroken(f"bytes [{begin}, {begin + num_bytes}) of shards of {self.shard_bytes}")


class Combine(Protocol):
    """One linear map over GF(256) from some shards to others, ready to be applied to any range of them."""

    def __call__(
        self, shards: ShardMemory, begin: int, num_bytes: int, summed: Sequence[int] = ()
    ) -> list[int]:
        """Compute `num_bytes` from `begin` on of every output; both multiples of 64.

        Returns:
            Checksums of the same range of the shards in `summed`, which may be outputs.
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


def checksums(shards: ShardMemory, begin: int, num_bytes: int, summed: Sequence[int]) -> list[int]:
    """Checksums of one range of some shards."""
    view = shards.memory.data
    return [checksum(view[at + begin : at + begin + num_bytes]) for at in (shards.begins[s] for s in summed)]


@cache
def default_backend() -> Backend:
    """ISA-L if this machine has it, else numba; all give the same bytes."""
    from millpond.store.codec.isal import IsalBackend, load_isal  # noqa: PLC0415 - reaches for a library

    library = load_isal()
    if library is not None:
        return IsalBackend(library, load_kernels())
    from millpond.store.codec.numba_backend import NumbaBackend  # noqa: PLC0415 - half a second to import

    return NumbaBackend()
