"""What callers of the pool name: chains of blocks, hits on them, and the extents that a range is cut into."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

from millpond.core.errors import InvalidRequest
from millpond.core.extents import ExtentId, StripeId, TenantId
from millpond.core.hashing import BLOCK_HASH_BYTES, DIGEST_BYTES
from millpond.store.net.messages import Location, Matched


@dataclass(frozen=True)
class BlockChain:
    """The blocks of one sequence of one tenant, by their digests (`core.hashing.HashChain`)."""

    tenant: TenantId
    root: bytes
    """32-byte digest before the first block; holds model, layout and salts."""
    digests: tuple[bytes, ...]
    """32 bytes per block."""

    def __post_init__(self) -> None:
        """Check the sizes.

        Raises:
            InvalidRequest: A digest that is none.
        """
        if any(len(digest) != DIGEST_BYTES for digest in (self.root, *self.digests)):
            raise InvalidRequest("a digest of a chain is not 32 bytes", code="pool.digest")

    @cached_property
    def hashes(self) -> bytes:
        """16 bytes per block, one after the other."""
        return b"".join(digest[:BLOCK_HASH_BYTES] for digest in self.digests)

    @property
    def domain(self) -> bytes:
        """First 16 bytes of the root."""
        return self.root[:BLOCK_HASH_BYTES]

    def parent(self, block: int) -> bytes:
        """Digest before a block."""
        return self.digests[block - 1] if block else self.root

    def extent(self, begin: int, end: int) -> ExtentId:
        """Name of the extent of blocks `[begin, end)`."""
        return ExtentId(self.digests[end - 1], end - begin)

    def hashes_of(self, begin: int, end: int) -> bytes:
        """Hashes of blocks `[begin, end)`."""
        return self.hashes[begin * BLOCK_HASH_BYTES : end * BLOCK_HASH_BYTES]


@dataclass(frozen=True, slots=True)
class HitExtent:
    """One extent of a hit."""

    location: Location
    begin: int
    """Index in the chain of its first block."""
    num_blocks: int
    """Leading blocks of the extent that belong to the hit."""

    @property
    def extent(self) -> ExtentId:
        """Its name."""
        return ExtentId(self.location.digest, self.location.num_blocks)

    @property
    def stripe(self) -> StripeId:
        """Where it lies."""
        return StripeId(self.location.epoch, self.location.group, self.location.nonce)

    @property
    def end(self) -> int:
        """Index in the chain after its last block that belongs to the hit."""
        return self.begin + self.num_blocks


@dataclass(frozen=True, slots=True)
class Hit:
    """The leading blocks of a chain that the pool seems to have. A promise only once they are read."""

    chain: BlockChain
    num_blocks: int
    extents: tuple[HitExtent, ...]
    """In the order of the chain, without gaps."""


def hit_of(chain: BlockChain, matched: Matched) -> Hit:
    """Make a hit of what the metadata says, as far as it is without gaps and inside the chain.

    An extent serves at most up to where the next one begins: from there on it may be another chain's, which
    parted from this one inside it. The next one is of this chain from its own begin on.
    """
    parts: list[HitExtent] = []
    covered = 0
    length = min(matched.num_blocks, len(chain.digests))
    ends = (*matched.begins, length)[1:]
    for location, begin, end_before_next in zip(matched.extents, matched.begins, ends, strict=True):
        end = min(begin + location.num_blocks, end_before_next, length)
        if begin > covered:
            break
        if end <= covered:
            continue  # the next one has all that this one has of the chain
        parts.append(HitExtent(location, begin, end - begin))
        covered = end
    return Hit(chain, covered, tuple(parts))


def cut_digests(packed: bytes) -> tuple[bytes, ...]:
    """Digests of a chain that were packed one after the other. A rest makes the last one too short."""
    return tuple(packed[begin : begin + DIGEST_BYTES] for begin in range(0, len(packed), DIGEST_BYTES))


def cut_at_windows(begin: int, end: int, window: int) -> list[tuple[int, int]]:
    """Cut blocks `[begin, end)` at multiples of `window`: extents never cross one (interfaces A.3)."""
    borders = [begin, *range((begin // window + 1) * window, end, window), end]
    return [(left, right) for left, right in pairwise(borders) if left < right]
