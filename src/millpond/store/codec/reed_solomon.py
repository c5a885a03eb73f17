"""Reed-Solomon k + m: parity from data, any shard from any k others, in place in one piece of memory."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

from millpond.core.errors import InvariantBroken
from millpond.store.codec.backend import Backend, Checksums, Combine, ShardMemory, Span
from millpond.store.codec.choose import default_backend
from millpond.store.codec.gf256 import coding_matrix, invert_matrix, matrix_product

MAX_PARITY = 4
_CACHED_PATTERNS = 1024
"""More than 10+2 has (78 erasures of one or two shards) and wider codes need in practice."""


class ReedSolomon:
    """A systematic code whose first parity is a plain XOR."""

    def __init__(self, k: int, m: int, backend: Backend | None = None) -> None:
        """Prepare k data and m <= 4 parity shards.

        Args:
            k: Data shards, >= 1.
            m: Parity shards.
            backend: Default: the fastest of this machine.
        """
        if not 0 <= m <= MAX_PARITY:
            raise InvariantBroken(f"{m} parity shards")
        self.k = k
        self.m = m
        self.matrix = coding_matrix(k, m)
        self.backend = backend or default_backend()
        parity = range(k, k + m)
        self._encode = self.backend.combine(self.matrix[k:], range(k), parity)
        self._pattern = lru_cache(_CACHED_PATTERNS)(self._make_pattern)

    def encode(self, shards: ShardMemory, spans: Sequence[Span]) -> list[Checksums]:
        """Compute spans of the parity shards from those of the data shards.

        Returns:
            Of each of the k + m shards the checksum of each span.
        """
        return self._encode(shards, spans, range(self.k + self.m))

    def decode(
        self,
        shards: ShardMemory,
        present: Sequence[int],
        wanted: Sequence[int],
        spans: Sequence[Span],
        summed: Sequence[int] = (),
    ) -> list[Checksums]:
        """Compute spans of shards, data or parity, from those of k others.

        Args:
            shards: All k + m.
            present: At least k shards in order of preference; the first k are read.
            wanted: Shards to compute, none of them among those k.
            spans: Where.
            summed: Shards to take checksums of, present or wanted.

        Returns:
            Of each shard in `summed` the checksum of each span.

        Raises:
            InvariantBroken: Fewer than k shards, or a wanted one is among them.
        """
        combine = self._pattern(tuple(sorted(present[: self.k])), tuple(wanted))
        return combine(shards, spans, summed)

    def _make_pattern(self, sources: tuple[int, ...], wanted: tuple[int, ...]) -> Combine:
        if len(set(sources)) != self.k or set(sources) & set(wanted):
            raise InvariantBroken(f"shards {wanted} from {sources} at k = {self.k}")
        decoder = invert_matrix(self.matrix[list(sources)])
        coefficients = matrix_product(self.matrix[list(wanted)], decoder)
        return self.backend.combine(coefficients, sources, wanted)
