"""How much a rank can hold: blocks, state slots, tokens of one sequence. No torch here."""

from __future__ import annotations

from dataclasses import dataclass

from millpond.core.errors import ConfigError
from millpond.core.kv_layout import KvLayout, uniform_layout
from millpond.engine.llama_config import LlamaConfig

_SLOT_SPARE_RATIO = 1.2
"""Slots per running sequence: those being handed off hold one too."""
_ITEM_BYTES = {"bf16": 2, "fp32": 4}


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """How a rank's KV memory is divided."""

    num_blocks: int
    """Without the null block, which exists too."""
    num_slots: int


def plan_memory(layout: KvLayout, memory_bytes: int, max_num_seqs: int) -> MemoryPlan:
    """Give slots to 1.2 sequences per running one, and the rest to blocks.

    Raises:
        ConfigError: Not even one usable block is left.
    """
    num_slots = int(max_num_seqs * _SLOT_SPARE_RATIO) + 1
    state_bytes = num_slots * layout.state_bytes
    num_blocks = (memory_bytes - state_bytes) // layout.block_bytes - 1
    if num_blocks < 1:
        least = state_bytes + 2 * layout.block_bytes
        slots = f"{num_slots} state slots and " if state_bytes else ""
        raise ConfigError(
            f"engine.kv_memory = {memory_bytes}: {slots}one block of this model need at least {least} bytes",
            param="engine.kv_memory",
        )
    return MemoryPlan(num_blocks, num_slots)


def choose_max_model_len(wanted: int, limit: int) -> int:
    """Return the most tokens of one sequence: what is wanted, or the model's limit where that is 0.

    Raises:
        ConfigError: The model cannot do so many.
    """
    if not 0 <= wanted <= limit:
        raise ConfigError(
            f"engine.max_model_len = {wanted}: this model allows at most {limit}; 0 takes that",
            param="engine.max_model_len",
        )
    return wanted or limit


def llama_kv_layout(config: LlamaConfig, dtype: str) -> KvLayout:
    """Make the layout of a Llama-family decoder; `dtype` is `bf16` or `fp32`."""
    token_bytes = config.num_kv_heads * config.head_dim * _ITEM_BYTES[dtype]
    return uniform_layout(config.num_layers, token_bytes, dtype)
