"""SplitMix64 on arrays: integer arithmetic only, so equal on every platform."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

GOLDEN_GAMMA = np.uint64(0x9E3779B97F4A7C15)
"""Distance between the states of neighbouring counters."""

_MASK = (1 << 64) - 1


def mix64(states: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Scramble every element in place and return the array.

    Args:
        states: Any shape, uint64; for element i of a stream with key k: k + i * GOLDEN_GAMMA, modulo 2**64.

    Source:
        SplitMix64: Steele, Lea, Flood, "Fast splittable pseudorandom number generators", 2014.
    """
    states ^= states >> np.uint64(30)
    states *= np.uint64(0xBF58476D1CE4E5B9)
    states ^= states >> np.uint64(27)
    states *= np.uint64(0x94D049BB133111EB)
    states ^= states >> np.uint64(31)
    return states


def mix64_ref(state: int) -> int:
    """`mix64` of one integer, in plain Python."""
    state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _MASK
    return state ^ (state >> 31)
