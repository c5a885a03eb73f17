"""`SnapshotStore`: copies of window state on one host, in its memory only (kvstore 2.13).

A snapshot is named by the digest of the block that ends where it was taken, which holds model, layout, salts
and all tokens before. The one that was used longest ago gives way to a new one; one that nobody used for a
while goes by itself.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, replace

from millpond.core.units import BLOCK_TOKENS

MAX_BLOCKS_BACK = 64
"""A snapshot further before the end of a hit is not looked for: computing from it costs more than it saves.
"""


@dataclass(frozen=True, slots=True)
class Snapshot:
    """State at the end of a block."""

    digest: bytes
    """Its name: of the last block before `position`, 32 bytes."""
    position: int
    """Leading tokens that it stands for."""
    generation: int
    """Differs from that of every other snapshot of this host's life."""
    state: bytes
    expires_ns: int
    is_approximate: bool = False
    """Computed downstream of a bounded replay."""


@dataclass(slots=True)
class SnapshotCounts:
    """Since the start."""

    kept: int = 0
    used: int = 0
    missed: int = 0
    """Asked for and not here."""
    replaced: int = 0
    """By a later one of the same sequence."""
    evicted: int = 0
    expired: int = 0
    refused: int = 0
    """Larger than all the memory there is."""


class SnapshotStore:
    """See module.

    Args:
        max_bytes: Of all states together.
        ttl_ns: How long one stays that is not used.
    """

    def __init__(self, max_bytes: int, ttl_ns: int) -> None:
        self.counts = SnapshotCounts()
        self._max_bytes = max_bytes
        self._ttl_ns = ttl_ns
        self._snapshots: OrderedDict[bytes, Snapshot] = OrderedDict()
        """Longest unused first, which is also the order in which they expire."""
        self._num_bytes = 0
        self._generation = 0

    def __len__(self) -> int:
        return len(self._snapshots)

    @property
    def num_bytes(self) -> int:
        """Bytes of all states."""
        return self._num_bytes

    def put(
        self,
        now_ns: int,
        digest: bytes,
        position: int,
        state: bytes,
        replaces: bytes = b"",
        *,
        is_approximate: bool = False,
    ) -> tuple[Snapshot | None, list[Snapshot]]:
        """Keep a snapshot; one of the same name is kept as it is.

        Args:
            now_ns: Time.
            digest: Its name.
            position: Leading tokens, a multiple of 128.
            state: Its bytes.
            replaces: Name of one that is not needed any more, if there is one.
            is_approximate: Computed downstream of a bounded replay.

        Returns:
            The snapshot if it is new, and those that went for it.
        """
        gone: list[Snapshot] = []
        older = self._snapshots.get(replaces)
        if older is not None and replaces != digest:
            gone.append(self._drop(older))
            self.counts.replaced += 1
        twin = self._snapshots.get(digest)
        if twin is not None:
            self._touch(now_ns, twin)
            return None, gone
        if len(state) > self._max_bytes:
            self.counts.refused += 1
            return None, gone
        while self._num_bytes + len(state) > self._max_bytes:
            gone.append(self._drop(next(iter(self._snapshots.values()))))
            self.counts.evicted += 1
        self._generation += 1
        made = Snapshot(
            digest, position, self._generation, state, now_ns + self._ttl_ns, is_approximate=is_approximate
        )
        self._snapshots[digest] = made
        self._num_bytes += len(state)
        self.counts.kept += 1
        return made, gone

    def find(self, now_ns: int, digests: Sequence[bytes]) -> Snapshot | None:
        """The last snapshot of a chain: at its end, or a little before.

        Args:
            now_ns: Time.
            digests: Of the blocks of the chain, from block 0 on, 32 bytes each.
        """
        for index in range(len(digests) - 1, max(-1, len(digests) - 1 - MAX_BLOCKS_BACK), -1):
            found = self._snapshots.get(digests[index])
            if found is not None and found.position == (index + 1) * BLOCK_TOKENS:
                self.counts.used += 1
                return self._touch(now_ns, found)
        self.counts.missed += 1
        return None

    def read(self, now_ns: int, digest_prefix: bytes, generation: int) -> Snapshot | None:
        """The snapshot that another host was told of; None if it has gone.

        Args:
            now_ns: Time.
            digest_prefix: First 16 bytes of its name.
            generation: Of it.
        """
        # Another host asks rarely, and there are hundreds at most.
        for found in self._snapshots.values():
            if found.generation == generation and found.digest.startswith(digest_prefix):
                return self._touch(now_ns, found)
        return None

    def expire(self, now_ns: int) -> list[Snapshot]:
        """Drop those whose time is over, and return them."""
        gone: list[Snapshot] = []
        while self._snapshots and (oldest := next(iter(self._snapshots.values()))).expires_ns <= now_ns:
            gone.append(self._drop(oldest))
            self.counts.expired += 1
        return gone

    def check(self) -> list[str]:
        """Return violated laws: bytes are counted and within the limit, and the order is that of expiry."""
        problems: list[str] = []
        num_bytes = sum(len(each.state) for each in self._snapshots.values())
        if num_bytes != self._num_bytes or num_bytes > self._max_bytes:
            problems.append(f"{num_bytes} bytes, {self._num_bytes} counted, {self._max_bytes} allowed")
        expiries = [each.expires_ns for each in self._snapshots.values()]
        if expiries != sorted(expiries):
            problems.append("snapshots are not in the order in which they expire")
        generations = {each.generation for each in self._snapshots.values()}
        if len(generations) < len(self._snapshots):
            problems.append("two snapshots have one generation")
        return problems

    def _touch(self, now_ns: int, snapshot: Snapshot) -> Snapshot:
        touched = replace(snapshot, expires_ns=now_ns + self._ttl_ns)
        self._snapshots[snapshot.digest] = touched
        self._snapshots.move_to_end(snapshot.digest)
        return touched

    def _drop(self, snapshot: Snapshot) -> Snapshot:
        del self._snapshots[snapshot.digest]
        self._num_bytes -= len(snapshot.state)
        return snapshot
