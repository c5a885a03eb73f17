"""Block hash chain: the identity of KV (interfaces A.1).

    d[-1] = SHA-256("millpond-kv-1" | lp(model) | lp(layout) | lp(tenant salt) | lp(cache salt))
    d[i]  = SHA-256(d[i-1] | ids of block i, int32 little-endian | extra keys of block i)

Equal digests mean equal whole prefixes, in every process and on every platform.
"""

from __future__ import annotations

import hashlib
import struct
import sys
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

from millpond.core.errors import InvariantBroken
from millpond.core.ids import BlockHash
from millpond.core.units import BLOCK_TOKENS

DIGEST_BYTES = 32
BLOCK_HASH_BYTES = 16
_ROOT_TAG = b"millpond-kv-1"


class ExtraKind(IntEnum):
    """What besides its tokens makes a block what it is."""

    IMAGE = 1
    ADAPTER = 2
    APPROXIMATE = 3
    """Computed downstream of an approximate replay."""


@dataclass(frozen=True, slots=True)
class ExtraKey:
    """One thing besides the tokens that the KV of a block depends on."""

    kind: ExtraKind
    position: int
    """Index in the whole sequence of the token from which on it applies."""
    value: bytes
    """For example the content hash of an image."""


def root_digest(
    model_fingerprint: bytes, layout_fingerprint: bytes, tenant_salt: bytes, cache_salt: bytes
) -> bytes:
    """Digest that the chain of an empty sequence starts from, 32 bytes.

    Guarantees:
        Injective in its four arguments: each is written with its length.

    Source:
        Interfaces A.1.
    """
    parts = (model_fingerprint, layout_fingerprint, tenant_salt, cache_salt)
    return hashlib.sha256(_ROOT_TAG + b"".join(map(_with_length, parts))).digest()


def chain_digest(parent: bytes, token_ids: array[int], extras: Sequence[ExtraKey] = ()) -> bytes:
    """Digest of one block whose predecessor has digest `parent`.

    Args:
        parent: 32 bytes: digest of the block before, or the root.
        token_ids: int32, 1 ... 128 ids. Fewer than 128 name a block that is still growing; such
            digests never leave the process.
        extras: Keys whose positions lie in this block, in any order.

    Returns:
        32 bytes.
    """
    digest = hashlib.sha256(parent)
    digest.update(_little_endian(token_ids))
    for key in sorted(extras, key=lambda key: (key.position, key.kind, key.value)):
        digest.update(struct.pack("<BI", key.kind, key.position % BLOCK_TOKENS))
        digest.update(_with_length(key.value))
    return digest.digest()


def block_hash(digest: bytes) -> BlockHash:
    """First 16 bytes of a digest: the name of a block in messages and indexes."""
    return BlockHash(digest[:BLOCK_HASH_BYTES])


class HashChain:
    """Digests of the full blocks of one growing sequence.

    Only whole blocks are hashed; the ids of the block that is still growing are kept until it is full.

    Attributes:
        root: Digest before the first block.
        digests: One per full block, 32 bytes each.
    """

    def __init__(self, root: bytes) -> None:
        self.root = root
        self.digests: list[bytes] = []
        self._growing = array("i")
        self._extras: list[ExtraKey] = []

    @property
    def num_tokens(self) -> int:
        """Tokens seen so far, full blocks and the growing one."""
        return len(self.digests) * BLOCK_TOKENS + len(self._growing)

    @property
    def tip(self) -> bytes:
        """Digest of the last full block, or the root."""
        return self.digests[-1] if self.digests else self.root

    @property
    def hashes(self) -> tuple[BlockHash, ...]:
        """One per full block."""
        return tuple(map(block_hash, self.digests))

    def extend(self, token_ids: array[int], extras: Sequence[ExtraKey] = ()) -> None:
        """Append tokens.

        Args:
            token_ids: int32.
            extras: Keys whose positions lie among the appended tokens.

        Guarantees:
            The digests do not depend on how the tokens were split into calls.
        """
        begin, end = self.num_tokens, self.num_tokens + len(token_ids)
        for key in extras:
            if not begin <= key.position < end:
                raise InvariantBroken(f"extra key at {key.position} outside the tokens [{begin}, {end})")
        self._extras.extend(extras)
        self._growing.extend(token_ids)
        num_full = len(self._growing) // BLOCK_TOKENS
        for index in range(num_full):
            block = self._growing[index * BLOCK_TOKENS : (index + 1) * BLOCK_TOKENS]
            self.digests.append(chain_digest(self.tip, block, self._take_extras()))
        del self._growing[: num_full * BLOCK_TOKENS]

    def growing_digest(self) -> bytes:
        """Digest of the block that is still growing; the tip if it has no token yet."""
        return chain_digest(self.tip, self._growing, self._extras) if self._growing else self.tip

    def _take_extras(self) -> list[ExtraKey]:
        end = (len(self.digests) + 1) * BLOCK_TOKENS
        taken = [key for key in self._extras if key.position < end]
        self._extras = [key for key in self._extras if key.position >= end]
        return taken


def _with_length(value: bytes) -> bytes:
    return struct.pack("<I", len(value)) + value


def _little_endian(token_ids: array[int]) -> bytes:
    if sys.byteorder == "big":
        token_ids = token_ids[:]
        token_ids.byteswap()
    return token_ids.tobytes()
