"""`ChainCache`: block digests of prompts, so that a session that grows pays for what is new only."""

from __future__ import annotations

import threading
from array import array
from collections import OrderedDict
from dataclasses import dataclass

from millpond.core.hashing import chain_digest
from millpond.core.units import BLOCK_TOKENS

MAX_TOKENS = 1 << 21
"""Of all chains that are remembered: 8 MiB of ids."""
MAX_BRANCHES = 32
"""Chains with one first block: sessions that share a system prompt."""


@dataclass(frozen=True, slots=True)
class _Chain:
    ids: bytes
    """Token ids of its blocks, as they lie in memory."""
    digests: tuple[bytes, ...]


class ChainCache:
    """See module. Thread-safe; the hashing itself is done outside the lock.

    Args:
        max_tokens: Remembered at most; what was used longest ago is forgotten first.
    """

    def __init__(self, max_tokens: int = MAX_TOKENS) -> None:
        self.num_hashed = 0
        """Blocks that had to be hashed since the start."""
        self._max_tokens = max_tokens
        self._num_tokens = 0
        self._families: OrderedDict[tuple[bytes, bytes], list[_Chain]] = OrderedDict()
        """(root, ids of the first block) -> chains that begin so, used last at the end."""
        self._lock = threading.Lock()

    @property
    def num_tokens(self) -> int:
        """Tokens remembered."""
        return self._num_tokens

    def digests(self, root: bytes, ids: array[int], num_blocks: int) -> tuple[bytes, ...]:
        """Digests of the first blocks of a sequence, 32 bytes each.

        Args:
            root: Before its first block.
            ids: Token ids, int32.
            num_blocks: Full blocks of it that are wanted.
        """
        if not num_blocks:
            return ()
        wanted = ids[: num_blocks * BLOCK_TOKENS].tobytes()
        block_bytes = len(wanted) // num_blocks
        family = (root, wanted[:block_bytes])
        with self._lock:
            known = tuple(self._families.get(family, ()))
        best, num_common = None, 0
        for chain in reversed(known):
            common = _num_common(chain.ids, wanted, block_bytes)
            if common > num_common:
                best, num_common = chain, common
        made = list(best.digests[:num_common]) if best is not None else []
        for block in range(num_common, num_blocks):
            parent = made[-1] if made else root
            made.append(chain_digest(parent, ids[block * BLOCK_TOKENS : (block + 1) * BLOCK_TOKENS]))
        chain = _Chain(wanted, tuple(made))
        with self._lock:
            self.num_hashed += num_blocks - num_common
            self._remember(family, chain, best, num_common)
        return chain.digests

    def _remember(
        self, family: tuple[bytes, bytes], chain: _Chain, best: _Chain | None, num_common: int
    ) -> None:
        chains = self._families.setdefault(family, [])
        self._families.move_to_end(family)
        is_part = num_common == len(chain.digests)
        if best is not None and (is_part or num_common == len(best.digests)):
            # One continues the other: the longer one stays.
            self._forget(chains, best)
            chain = best if is_part else chain
        if chain not in chains:  # another thread may have been here
            chains.append(chain)
            self._num_tokens += len(chain.digests) * BLOCK_TOKENS
        if len(chains) > MAX_BRANCHES:
            self._forget(chains, chains[0])
        while self._num_tokens > self._max_tokens:
            oldest = next(iter(self._families))
            self._forget(self._families[oldest], self._families[oldest][0])
            if not self._families[oldest]:
                del self._families[oldest]

    def _forget(self, chains: list[_Chain], chain: _Chain) -> None:
        if chain in chains:
            chains.remove(chain)
            self._num_tokens -= len(chain.digests) * BLOCK_TOKENS


def _num_common(left: bytes, right: bytes, block_bytes: int) -> int:
    """Leading blocks that are equal; found by halving, so that equal parts are compared once or twice."""
    low, high = 0, min(len(left), len(right)) // block_bytes
    if left[: high * block_bytes] == right[: high * block_bytes]:
        return high
    while high - low > 1:
        middle = (low + high) // 2
        if left[low * block_bytes : middle * block_bytes] == right[low * block_bytes : middle * block_bytes]:
            low = middle
        else:
            high = middle
    return low
