"""What the whole service has kept of KV, in virtual time: names of blocks and states, without their bytes."""

from __future__ import annotations

from collections.abc import Sequence

from millpond.core.chance import Chance
from millpond.core.hashing import ExtraKey, ExtraKind, chain_digest, root_digest
from millpond.core.request import KvIdentity, StateRestore, token_ids
from millpond.core.units import BLOCK_TOKENS

_ROOT = root_digest(b"sim", b"sim", b"", b"")
_APPROXIMATE_ROOT = chain_digest(_ROOT, token_ids(), [ExtraKey(ExtraKind.APPROXIMATE, 0, b"")])


class KvPool:
    """Blocks and snapshots of one service, by digest. Has room for all."""

    def __init__(self, *, has_state: bool) -> None:
        self._has_state = has_state
        self._blocks: dict[bytes, bool] = {}
        """Whether they are downstream of a replay, by digest."""
        self._states: dict[bytes, bool] = {}

    def identity(self, policy: StateRestore) -> KvIdentity:
        """Whose KV a request finds and keeps. What may be approximate is a world of its own."""
        is_shared = self._has_state and policy is StateRestore.REPLAY
        return KvIdentity(_APPROXIMATE_ROOT if is_shared else _ROOT, tenant=0)

    @property
    def num_blocks(self) -> int:
        """Blocks that are kept."""
        return len(self._blocks)

    @property
    def num_approximate(self) -> int:
        """Blocks of them that are downstream of a replay."""
        return sum(self._blocks.values())

    @property
    def num_states(self) -> int:
        """Snapshots that are kept."""
        return len(self._states)

    def put_block(self, digest: bytes, *, is_approximate: bool) -> None:
        """Keep a block."""
        self._blocks.setdefault(digest, is_approximate)

    def put_state(self, digest: bytes, *, is_approximate: bool) -> None:
        """Keep a snapshot."""
        self._states.setdefault(digest, is_approximate)

    def approximate(self, digests: Sequence[bytes], state_position: int) -> frozenset[bytes]:
        """Those of these blocks, and the snapshot at this position, that are downstream of a replay."""
        last = digests[state_position // BLOCK_TOKENS - 1] if state_position > 0 else b""
        blocks = {digest for digest in digests if self._blocks[digest]}
        return frozenset(blocks | {last} if self._states.get(last) else blocks)

    def num_leading(self, digests: Sequence[bytes]) -> int:
        """How many leading blocks of a chain are there."""
        return next((i for i, digest in enumerate(digests) if digest not in self._blocks), len(digests))

    def last_state(self, digests: Sequence[bytes]) -> int:
        """Leading tokens of the newest snapshot within a chain; -1 if there is none."""
        found = (i for i in range(len(digests), 0, -1) if digests[i - 1] in self._states)
        return next(found, 0) * BLOCK_TOKENS or -1

    def forget_states(self) -> None:
        """Lose all snapshots, which are in memory only, and no block."""
        self._states.clear()

    def forget(self, chance: Chance, ratio: float) -> None:
        """Lose some of everything, as when memory dies before it was written down."""
        for kept in (self._blocks, self._states):
            for digest in [digest for digest in kept if chance.uniform() < ratio]:
                del kept[digest]
