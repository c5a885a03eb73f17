"""Units and integer arithmetic. Time inside the code is integer nanoseconds."""

from __future__ import annotations

MICROSECOND_NS = 1_000
MILLISECOND_NS = 1_000_000
SECOND_NS = 1_000_000_000
KIB = 1 << 10
MIB = 1 << 20
GIB = 1 << 30

BLOCK_TOKENS = 128
"""Tokens per block: unit of hashing, allocation, transfer and storage (interfaces A.2)."""


def ceil_div(value: int, divisor: int) -> int:
    """Divide rounding up. `divisor` > 0."""
    return -(-value // divisor)


def align_up(value: int, alignment: int) -> int:
    """Round `value` up to a multiple of `alignment` > 0."""
    return -(-value // alignment) * alignment


def num_blocks_for(num_tokens: int) -> int:
    """Blocks that hold the KV of `num_tokens` tokens."""
    return ceil_div(num_tokens, BLOCK_TOKENS)
