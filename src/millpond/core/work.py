"""Words for the arithmetic of a step: which mechanism of a model it belongs to, and how it grows."""

from __future__ import annotations

from enum import StrEnum


class Mechanism(StrEnum):
    """A part of a model that is worth its own line in a cost breakdown."""

    EMBEDDING = "embedding"
    HYPER_CONNECTIONS = "hyper_connections"
    """Mixing of the stream's copies around every sub-layer."""
    PROJECTIONS = "projections"
    """Queries, latent KV and output of attention."""
    WINDOW = "attention_window"
    SELECTED = "attention_selected"
    """Attention over compressed entries."""
    CAUSAL = "attention_causal"
    """Attention over all earlier tokens (Llama family)."""
    COMPRESSOR = "compressor"
    INDEXER = "indexer"
    ROUTER = "router"
    ROUTED_EXPERTS = "routed_experts"
    SHARED_EXPERT = "shared_expert"
    MLP = "mlp"
    """The dense feed-forward layer of the Llama family."""
    ENGRAM = "engram"
    HEAD = "head"
    DRAFTS = "drafts"
    VISION = "vision"


class WorkKind(StrEnum):
    """What is multiplied, and so what the work grows with."""

    LINEAR = "linear"
    """A row and a weight: grows with rows."""
    MIXING = "mixing"
    """Numbers of one row among themselves: copies of the stream, gates. Grows with rows."""
    ATTENTION = "attention"
    """A row and cached rows: grows with pairs of the two."""
