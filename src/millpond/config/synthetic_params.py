"""Parameters of the synthetic engine."""

from __future__ import annotations

from dataclasses import dataclass

SYNTHETIC = "synthetic"
"""Model name that selects the synthetic engine (interfaces A.8)."""


@dataclass(frozen=True, slots=True)
class SyntheticParams:
    """Shape and speed of the model that the synthetic engine pretends to run."""

    num_layers: int = 4
    """KV rows per block, 1 ... 1024."""
    kv_bytes_per_token: int = 32
    """Bytes of the keys of one token in one layer, >= 1; the values take as many. At most 1 MiB."""
    num_blocks: int = 512
    """Blocks of 128 tokens in memory, >= 1."""
    max_num_seqs: int = 32
    """Most sequences that hold memory at once, 1 ... 65536."""
    max_model_len: int = 8192
    """Most tokens of one sequence, prompt and output."""
    vocab_size: int = 32768
    """Token ids; the first 259 are the byte and control tokens, the others are words, so >= 260, and at most
    1,048,576."""
    prefill_token_ns: int = 20_000
    """Time of one prefill token."""
    decode_step_ns: int = 2_000_000
    """Time of a decode step, whatever its batch."""
    decode_row_ns: int = 50_000
    """Time that each sequence adds to a decode step."""
    decode_kv_token_ns: int = 10
    """Time that each token in a sequence's KV adds to its decode row."""
