"""SplitMix64 on arrays: integer arithmetic only, so equal on every platform."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

GOLDEN_GAMMA = np.uint64(0x9E3779B97F4A7C15)
"""Distance between the states of neighbouring counters."""

_ROUNDS = (
    (np.uint64(30), np.uint64(0xBF58476D1CE4E5B9)),
    (np.uint64(27), np.uint64(0x94D049BB133111EB)),
)
_LAST_SHIFT = np.uint64(31)
_MASK = (1 << 64) - 1


def mix64(
    states: npt.NDArray[np.uint64], scratch: npt.NDArray[np.uint64] | None = None
) -> npt.NDArray[np.uint64]:
    """Scramble every element in place and return the array.

    Args:
        states: Any shape, uint64; for element i of a stream with key k: k + i * GOLDEN_GAMMA, modulo 2**64.
        scratch: Same shape and type, overwritten. Saves an allocation, which for
            large arrays takes longer than the arithmetic.

    Source:
        SplitMix64: Steele, Lea, Flood, "Fast splittable pseudorandom number generators", 2014.
    """
    if scratch is None:
        scratch = np.empty_like(states)
    for shift, factor in _ROUNDS:
        np.right_shift(states, shift, out=scratch)
        states ^= scratch
        states *= factor
    np.right_shift(states, _LAST_SHIFT, out=scratch)
    states ^= scratch
    return states


def mix64_ref(state: int) -> int:
    """`mix64` of one integer, in plain Python."""
    state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _MASK
    return state ^ (state >> 31)
