"""The Gumbel field of interfaces A.10: noise that is a function of key and counter, not of history.

    key     = (seed, choice)         one per sequence
    counter = (position, token id)   position of the token to be sampled, prompt included
    bits    = top 52 bits of SplitMix64's output number (token id + 1) of the stream that key and position
              choose
    G       = -log(-log((bits + 1/2) * 2**-52))

The token of largest `logit / T + G` is an exact draw from softmax(logit / T). Bits are integers and equal on
every platform; G is computed in float64.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from millpond.engine.splitmix import GOLDEN_GAMMA, mix64, mix64_ref

MIN_GUMBEL = -math.log(-math.log(2.0**-53))
"""Smallest value of the field, about -3.6; the largest is about 36.7."""

_MASK = (1 << 64) - 1
_BITS = 52
_SLACK = 64
"""Steps of 2**-52 by which a bound on bits is widened: rounding must never drop a winner."""


def field_start(seed: int, choice: int, position: int) -> int:
    """Start of the stream of one position: a 64-bit integer.

    Args:
        seed: 0 ... 2**63 - 1.
        choice: Index among the choices of one call.
        position: Index in the sequence of the token to be sampled.
    """
    start = 0
    for word in (seed, choice, position):
        start = mix64_ref(((start ^ word) + int(GOLDEN_GAMMA)) & _MASK)
    return start


class GumbelField:
    """Random bits for every token of a vocabulary. Reuses its buffers: one thread at a time."""

    def __init__(self, vocab_size: int) -> None:
        self._counters = np.arange(1, vocab_size + 1, dtype=np.uint64) * GOLDEN_GAMMA
        self._bits = np.empty(vocab_size, np.uint64)
        self._scratch = np.empty(vocab_size, np.uint64)

    def bits(self, start: int) -> npt.NDArray[np.uint64]:
        """Bits of all tokens, [vocab], uint64, each in [0, 2**52). Overwritten by the next call."""
        np.add(self._counters, np.uint64(start), out=self._bits)
        return _top_bits(mix64(self._bits, self._scratch))

    def bits_of(self, start: int, token_ids: npt.NDArray[np.intp]) -> npt.NDArray[np.uint64]:
        """Bits of some tokens, [n], uint64: the same values as `bits(start)[token_ids]`."""
        return _top_bits(mix64(self._counters[token_ids] + np.uint64(start)))


def gumbel(bits: npt.NDArray[np.uint64]) -> npt.NDArray[np.float64]:
    """Turn random bits into Gumbel noise: [n], float64, rising with the bits."""
    uniform = (bits.astype(np.float64) + 0.5) * 2.0**-_BITS
    return -np.log(-np.log(uniform))


def least_bits(noise: float) -> np.uint64:
    """Bits below which the field is surely smaller than `noise`."""
    if noise <= MIN_GUMBEL:
        return np.uint64(0)
    return np.uint64(max(0, int(math.exp(-math.exp(-noise)) * 2.0**_BITS) - _SLACK))


def _top_bits(words: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    words >>= np.uint64(64 - _BITS)
    return words


def gumbel_ref(seed: int, choice: int, position: int, token_id: int) -> float:
    """One value of the field, in plain Python."""
    state = (field_start(seed, choice, position) + (token_id + 1) * int(GOLDEN_GAMMA)) & _MASK
    bits = mix64_ref(state) >> (64 - _BITS)
    return -math.log(-math.log((bits + 0.5) * 2.0**-_BITS))
