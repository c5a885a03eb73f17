"""Chance as an argument: named, deterministic streams of numbers."""

from __future__ import annotations

import hashlib

from millpond.core.errors import InvariantBroken

_MASK = (1 << 64) - 1
_GOLDEN_GAMMA = 0x9E3779B97F4A7C15


class Chance:
    """One stream of numbers, the same for the same seed and name on every platform.

    Give each purpose its own name, so that a draw for one never shifts the draws of another.

    Source:
        SplitMix64: Steele, Lea, Flood, "Fast splittable pseudorandom number generators", 2014.
    """

    def __init__(self, seed: int, name: str) -> None:
        self.name = name
        digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
        self._state = int.from_bytes(digest[:8], "little")

    def u64(self) -> int:
        """Draw an integer in [0, 2**64)."""
        self._state = (self._state + _GOLDEN_GAMMA) & _MASK
        return _mix(self._state)

    def below(self, bound: int) -> int:
        """Draw an integer in [0, bound), every one equally likely. `bound` in 1 ... 2**64."""
        if not 1 <= bound <= 1 << 64:
            raise InvariantBroken(f"cannot draw below {bound}")
        # The last, incomplete run of `bound` values is drawn again, or small numbers would be favoured.
        limit = (1 << 64) - (1 << 64) % bound
        while (value := self.u64()) >= limit:
            pass
        return value % bound

    def uniform(self) -> float:
        """Draw a multiple of 2**-53 in [0, 1)."""
        return (self.u64() >> 11) * 2.0**-53


def _mix(value: int) -> int:
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)
