"""What the simulator assumes about the hardware."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class SimCostParams:
    """Constant costs. The defaults are round numbers near one CPU core with a model of 135 M parameters."""

    prefill_step_ns: int = 2_000_000
    """Fixed part of a prefill step."""
    prefill_token_ns: int = 1_000_000
    """Each token of the rank with the most tokens in a prefill step."""
    decode_step_ns: int = 12_000_000
    """Fixed part of a decode step."""
    decode_row_ns: int = 1_000_000
    """Each row of the rank with the most rows in a decode step."""
    message_ns: int = 200_000
    """Way of one control message or of the tokens of one step."""
    handoff_setup_ns: int = 500_000
    """Fixed part of a handoff, after the last chunk is computed."""
    handoff_bytes_per_s: int = 2_000_000_000
    """Speed of a handoff."""
    kv_bytes_per_token: int = 23_040
    """Bytes of KV that a handoff or a load moves for each token."""
    load_setup_ns: int = 1_000_000
    """Time until it is known what of a hit will be there."""
    load_bytes_per_s: int = 1_000_000_000
    """Speed of the loads of one rank."""


@dataclass(frozen=True, slots=True)
class SimRankParams:
    """Memory of one simulated rank."""

    num_blocks: int = 96
    """Blocks of 128 tokens."""
    num_prefill_blocks: int = 0
    """Of a prefill rank; 0: as many as of the others."""
    num_home_blocks: int = 0
    """Blocks in host memory of a prefill rank, for prompts that its blocks cannot hold."""
    num_rows: int = 30
    """Rows of a block: layers of the model that own KV."""
    num_slots: int = 32
    """State slots: most sequences that hold memory at once."""
    can_load: bool = True
    """Whether there is a KV pool, and a node daemon on every host."""
    has_state: bool = False
    """Whether the model has window state."""
    replay_tokens: int = 128
    """Tokens of a bounded replay, a multiple of 128; only for models with window state."""
    min_computed_tokens: int = 1
    """Last tokens of a prompt that are computed however much is there already, >= 1."""
    max_drafts: int = 0
    """Drafts that the model can make per row, at most 5; 0 as for one without a draft head."""
    max_model_len: int = 8192
    """Most tokens of one sequence, before the memory lowers it."""
