"""N-gram hashing: compressed token ids, multipliers, primes, table rows. No torch; nothing is learned."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import isqrt

import numpy as np
import numpy.typing as npt

_SEED_STEP = 10007
_BLANKS = re.compile(r"[ \t\r\n]+")
_REPLACEMENT = "\ufffd"

Ids = npt.NDArray[np.int64]


def compress_vocabulary(tokens: Iterable[tuple[str, str]]) -> Ids:
    """Map token ids to compressed ids, so that spellings of the same word share n-grams.

    Args:
        tokens: (decoded text, raw piece) of each id in order; special tokens keep their text.

    Returns:
        [vocab]; compressed ids are handed out in order of first appearance.
    """
    known: dict[str, int] = {}
    return np.array(
        [known.setdefault(_key(text, piece), len(known)) for text, piece in tokens], dtype=np.int64
    )


def _key(text: str, piece: str) -> str:
    if _REPLACEMENT in text:
        return piece  # bytes of an unfinished character
    plain = unicodedata.normalize("NFD", unicodedata.normalize("NFKC", text))
    plain = "".join(c for c in plain if unicodedata.category(c) != "Mn").lower()
    plain = _BLANKS.sub(" ", plain)
    if plain == " ":
        return plain  # a lone blank stays one; others lose theirs
    return plain.strip() or text


def multipliers(layer: int, max_ngram: int, compressed_vocab: int) -> Ids:
    """Odd multipliers of a layer's tokens, newest first; products with compressed ids fit int64."""
    bound = max(1, (2**63 - 1) // compressed_vocab // 2)
    drawn = np.random.default_rng(_SEED_STEP * layer).integers(0, bound, size=max_ngram, dtype=np.int64)
    return 2 * drawn + 1


def table_primes(num_layers: int, max_ngram: int, num_heads: int, vocab_size: int) -> Ids:
    """Table sizes [layers, n-gram sizes, heads]: primes from `vocab_size` up, none used twice."""
    taken: set[int] = set()
    primes = np.zeros((num_layers, max_ngram - 1, num_heads), dtype=np.int64)
    for layer in range(num_layers):
        for size in range(max_ngram - 1):
            value = vocab_size - 1
            for head in range(num_heads):
                value += 1
                while value in taken or not _is_prime(value):
                    value += 1
                taken.add(value)
                primes[layer, size, head] = value
    return primes


def _is_prime(value: int) -> bool:
    if value < 4:
        return value > 1
    return value % 2 != 0 and all(value % divisor for divisor in range(3, isqrt(value) + 1, 2))


@dataclass(frozen=True, slots=True)
class NgramHash:
    """Table rows of one Engram layer."""

    multipliers: Ids
    """[max n-gram]"""
    primes: Ids
    """[n-gram sizes, heads]"""

    @property
    def offsets(self) -> Ids:
        """[columns]: first row of each column's table."""
        flat = self.primes.flatten()
        return flat.cumsum() - flat

    def rows(self, recent: Ids) -> Ids:
        """Table rows [n, columns] of tokens given with their look-back [n, max n-gram], newest first."""
        products = recent * self.multipliers
        rolling = products[:, 0]
        columns = []
        for size, primes in enumerate(self.primes, start=1):
            rolling = rolling ^ products[:, size]
            columns.append(rolling[:, None] % primes)
        return np.concatenate(columns, axis=1) + self.offsets


def make_hashes(
    layers: Sequence[int], max_ngram: int, num_heads: int, vocab_size: int, compressed_vocab: int
) -> tuple[NgramHash, ...]:
    """Hashes of all Engram layers of a model; `layers` are layer numbers."""
    primes = table_primes(len(layers), max_ngram, num_heads, vocab_size)
    return tuple(
        NgramHash(multipliers(layer, max_ngram, compressed_vocab), own)
        for layer, own in zip(layers, primes, strict=True)
    )


def look_back(ids: Ids, is_dead: npt.NDArray[np.bool_], pad: int, begin: int, max_ngram: int) -> Ids:
    """Compressed ids with look-back, newest first.

    Args:
        ids: Compressed ids of the tokens from some point on.
        is_dead: Which of them are image tokens; look-back stops there.
        pad: Compressed id that stands for what look-back may not see.
        begin: First of `ids` for which look-back is wanted; the earlier ones only serve it.
        max_ngram: Width, this token included.

    Returns:
        [len(ids) - begin, max_ngram].
    """
    front = max_ngram - 1
    padded = np.concatenate([np.full(front, pad), ids])
    dead = np.concatenate([np.ones(front, dtype=bool), is_dead])
    at = np.arange(begin, len(ids))[:, None] + front - np.arange(max_ngram)
    stopped = np.logical_or.accumulate(dead[at], axis=1)
    return np.where(stopped, pad, padded[at])
