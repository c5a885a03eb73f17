"""Backend without a native library: the same bytes as ISA-L from loops that numba compiles.

Horner's rule over the bits of the coefficients: an output is doubled (times x in GF(256)) and then gets
every source whose coefficient has that bit. Eight bytes are doubled at once in a 64-bit word, and the inner
loops run over plain arrays, so that the compiler can use whatever vectors the CPU has. A row of ones costs
XORs only.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numba import int64, njit, uint8, uint64, void

from millpond.store.codec.backend import Checksums, Combine, ShardMemory, Span, checksums
from millpond.store.codec.gf256 import Matrix

_WORD_BYTES = 8
_TILE_WORDS = 512
"""One output's part stays in the first-level cache while all sources pass."""

_LOW_7 = np.uint64(0x7F7F7F7F7F7F7F7F)
_ONES = np.uint64(0x0101010101010101)
_REDUCTION = np.uint64(0x1D)
_ONE = np.uint64(1)
_SEVEN = np.uint64(7)


@njit(inline="always")
def _double(words):  # noqa: ANN001, ANN202 - typed by the caller's signature
    for i in range(words.size):
        value = words[i]
        words[i] = ((value & _LOW_7) << _ONE) ^ (((value >> _SEVEN) & _ONES) * _REDUCTION)


@njit(inline="always")
def _add(words, part):  # noqa: ANN001, ANN202 - typed by the caller's signature
    for i in range(words.size):
        words[i] ^= part[i]


@njit(void(uint8[:, ::1], uint64[::1], int64[::1], int64[::1], int64), nogil=True, cache=True)
def _combine(coefficients, words, sources, outputs, num_words):  # noqa: ANN001, ANN202 - see signature
    for begin in range(0, num_words, _TILE_WORDS):
        count = min(_TILE_WORDS, num_words - begin)
        for row in range(coefficients.shape[0]):
            target = words[outputs[row] + begin : outputs[row] + begin + count]
            target[:] = 0
            is_zero = True
            for bit in range(7, -1, -1):
                if not is_zero:
                    _double(target)
                for column in range(coefficients.shape[1]):
                    if (coefficients[row, column] >> bit) & 1:
                        is_zero = False
                        _add(target, words[sources[column] + begin : sources[column] + begin + count])


class NumbaBackend:
    """Implements `Backend`. The interpreter lock is free during each call."""

    name = "numba"

    def combine(self, coefficients: Matrix, sources: Sequence[int], outputs: Sequence[int]) -> Combine:
        """See `Backend.combine`."""
        matrix = np.ascontiguousarray(coefficients)
        from_shards, to_shards = list(sources), list(outputs)

        def apply(shards: ShardMemory, spans: Sequence[Span], summed: Sequence[int] = ()) -> list[Checksums]:
            shards.check_spans(spans)
            memory = shards.memory
            words = memory[: memory.size // _WORD_BYTES * _WORD_BYTES].view(np.uint64)
            for begin, end in spans:
                at = (np.array(shards.begins, np.int64) + begin) // _WORD_BYTES
                _combine(matrix, words, at[from_shards], at[to_shards], (end - begin) // _WORD_BYTES)
            return checksums(shards, spans, summed)

        return apply
