"""`LlamaShape`: the sizes of a Llama-family decoder that its step costs follow from."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class LlamaShape:
    """Sizes of one dense decoder with full causal attention."""

    vocab_size: int
    hidden_size: int
    mlp_width: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
