"""Chains and messages about them, for tests of the metadata."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from millpond.store.net.messages import Commit, Location, Match, Reserve

WINDOW = 8
ROOT = b"r" * 16


def digests(path: Sequence[int]) -> list[bytes]:
    """One digest per block of a chain: equal for equal prefixes."""
    chain, parent = [], b"root"
    for choice in path:
        parent = hashlib.sha256(parent + choice.to_bytes(4, "little")).digest()
        chain.append(parent)
    return chain


def hashes(chain: Sequence[bytes]) -> bytes:
    return b"".join(digest[:16] for digest in chain)


def match(tenant: int = 1, map_version: int = 1) -> Match:
    return Match(tenant, ROOT, map_version, WINDOW)


def reserve(
    chain: Sequence[bytes], begin: int, end: int, *, holder: int, tenant: int = 1, kib: int = 10
) -> Reserve:
    return Reserve(tenant, ((chain[end - 1], end - begin),), (kib * 1024,), holder)


def commit(
    chain: Sequence[bytes],
    begin: int,
    end: int,
    nonce: int,
    *,
    holder: int = 0,
    tenant: int = 1,
    kib: int = 10,
    missing: int = 0,
) -> tuple[Commit, bytes]:
    """Message and payload."""
    location = Location(chain[end - 1], end - begin, 0, 0, nonce, missing)
    parent = chain[begin - 1] if begin else b"\0" * 32
    message = Commit(tenant, ROOT, location, begin, parent, kib * 1024, holder)
    return message, hashes(chain[begin:end])
