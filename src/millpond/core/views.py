"""Frozen pictures of state that policies read. An event replaces the view of the rank it names."""

from __future__ import annotations

from dataclasses import dataclass

from millpond.core.ids import DpRank


@dataclass(frozen=True, slots=True)
class RankView:
    """Load of one DP rank as its leader reports it."""

    rank: DpRank
    num_seqs: int
    """Sequences that hold memory: waiting for KV, running, or being handed off."""
    num_queued: int
    """Assigned sequences that hold nothing yet."""
    queued_tokens: int
    """Prompt tokens still to be computed (prefill), or tokens of queued sequences (decode)."""
    kv_tokens: int
    """Tokens of the sequences that hold memory."""
    free_blocks: int
    free_slots: int
    queued_kv_tokens: int = 0
    """Known tokens of assigned sequences that hold nothing yet: what they will hold, cached or not."""
