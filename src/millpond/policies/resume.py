"""Where a prefill begins once it is known what of its KV is there."""

from __future__ import annotations

from dataclasses import dataclass

from millpond.core.events import RankInfo
from millpond.core.request import StateRestore
from millpond.core.units import BLOCK_TOKENS

MAX_REBUILD_REPLAYS = 4
"""A snapshot is near enough to the end of a hit if computing up to there costs no more than so many replays:
exact is then worth more than the difference."""


@dataclass(frozen=True, slots=True)
class Resumption:
    """How the prefill of one sequence begins."""

    begin: int = 0
    """First token to compute: those before are hit."""
    write_begin: int = 0
    """As `PrefillChunk.write_begin`, of every chunk: above `begin` for a bounded replay."""
    restores_state: bool = False
    """The window state at `begin` comes from a snapshot."""

    @property
    def num_loaded_tokens(self) -> int:
        """Leading tokens whose block KV must be there, a multiple of 128."""
        return max(self.begin, self.write_begin)

    @property
    def is_approximate(self) -> bool:
        """Whether the windows at `begin` are not those of a cold run."""
        return self.write_begin > self.begin


COLD = Resumption()
"""Everything is computed."""


def resume(
    num_hit_tokens: int, state_position: int, num_known_tokens: int, info: RankInfo, policy: StateRestore
) -> Resumption:
    """Choose where to begin.

    Block KV decides the hit. A model with window state also needs the state where it begins: from a snapshot
    at the end of the hit or a little before, or by a bounded replay, which computes the last tokens of the
    hit again without what their windows saw before.

    Args:
        num_hit_tokens: Leading tokens whose block KV is there, a multiple of 128.
        state_position: Leading tokens that the newest snapshot within the hit stands for; -1: none.
        num_known_tokens: Tokens of the sequence, >= 1.
        info: The rank: its model's state, and how many last tokens it must compute itself.
        policy: What the request allows.

    Guarantees:
        At least `info.min_computed_tokens` are computed, or everything. An exact request never replays.
    """
    last_begin = num_known_tokens - info.min_computed_tokens
    if not info.has_state:
        return Resumption(max(0, min(num_hit_tokens, last_begin // BLOCK_TOKENS * BLOCK_TOKENS)))
    hit = min(num_hit_tokens, (num_known_tokens - 1) // BLOCK_TOKENS * BLOCK_TOKENS)
    is_near = hit - state_position <= info.replay_tokens * MAX_REBUILD_REPLAYS
    if 0 < state_position <= min(hit, last_begin) and (is_near or policy is StateRestore.EXACT):
        return Resumption(state_position, restores_state=True)
    begin = min(hit - info.replay_tokens, last_begin)
    if policy is StateRestore.EXACT or info.replay_tokens == 0 or begin <= 0:
        return COLD
    return Resumption(begin, write_begin=hit)
