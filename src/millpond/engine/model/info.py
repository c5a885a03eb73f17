"""What `millpond model info` prints: roles, sizes and counts of a model, from its config alone."""

from __future__ import annotations

from millpond.core.shapes import (
    KvFormat,
    LayerRole,
    encoder_state_bytes,
    kv_bytes_per_token,
    kv_layout,
    num_backbone_parameters,
)
from millpond.engine.model.config import V41Config


def describe_model(config: V41Config) -> str:
    """Lines about a model; no weights are read."""
    shape = config.shape
    layout = kv_layout(shape, KvFormat.PACKED)
    lines = [
        f"layers: {len(shape.layers)}, of which encoder: {shape.num_encoder_layers}",
        f"draft stages: {shape.num_draft_stages}",
        *_role_lines(config),
        f"KV per token: {kv_bytes_per_token(shape):,.0f} B",
        f"KV per block: {layout.block_bytes:,} B",
        f"state per sequence: {layout.state_bytes:,} B",
        f"encoder state: {encoder_state_bytes(layout):,} B",
        f"backbone parameters: {_count(num_backbone_parameters(shape))}",
        f"Engram tables: {_count(sum(shape.engram_rows) * shape.engram_head_dim)}",
        f"longest sequence: {config.max_positions:,} tokens, vocabulary: {shape.vocab_size:,}",
    ]
    return "\n".join(lines)


def _count(number: int) -> str:
    return f"{number / 1e9:.1f} billion" if number >= 10**9 else f"{number / 1e6:.1f} million"


def _role_lines(config: V41Config) -> list[str]:
    """One line for each run of layers with equal roles."""
    lines: list[str] = []
    layers = config.shape.layers
    begin = 0
    for end in range(1, len(layers) + 1):
        last, here = layers[end - 1], layers[end] if end < len(layers) else None
        if here is not None and (here.role, here.kv_source, here.index_source) == (
            last.role,
            last.kv_source,
            last.index_source,
        ):
            continue
        first = layers[begin].layer
        span = f"{first}" if first == last.layer else f"{first}-{last.layer}"
        text = f"  {span:>6} {last.role.value}"
        if last.role is not LayerRole.WINDOW:
            text += f", ratio {last.ratio}, KV of {last.kv_source}, selection of {last.index_source}"
        lines.append(text)
        begin = end
    return lines
