"""Decoder layers in plain torch, on any device: the twin of the native kernels, and their stand-in."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.nn import functional

from millpond.core.units import BLOCK_TOKENS, align_up, ceil_div
from millpond.engine.kv_tensors import KvTensors
from millpond.engine.layers import RowSpan, StepRows
from millpond.engine.llama_config import LlamaConfig
from millpond.engine.rope import RopeTable
from millpond.engine.weights import LayerWeights, LlamaWeights

_EXACT_ROWS = 64
"""Rows per tile in exact mode (design 5): one shape for every matrix product, whatever the batch."""

Linear = Callable[[torch.Tensor, torch.Tensor, torch.Tensor | None], torch.Tensor]


def linear_fp32(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """Multiply by the transposed weight with float32 operands, whatever the weight is stored in."""
    return functional.linear(x, weight.float(), bias)


def linear_bf16(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """Multiply by the transposed weight with bf16 operands; for devices with bf16 matrix units."""
    product = functional.linear(x.to(weight.dtype), weight).float()
    return product if bias is None else product + bias


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Scale each row to unit root mean square, then by the weight."""
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight


class TorchLayers:
    """Implements `DecoderLayers` with torch operations."""

    def __init__(
        self,
        config: LlamaConfig,
        weights: LlamaWeights,
        kv: KvTensors,
        rope: RopeTable,
        *,
        is_exact: bool,
        linear: Linear | None = None,
    ) -> None:
        """Keep references; nothing is copied.

        Args:
            config: The decoder.
            weights: In the dtype of `kv`, on one device.
            kv: Block memory.
            rope: Cosines and sines.
            is_exact: Give every operation one fixed shape.
            linear: How to multiply by weights; None: bf16 operands where the device has units for them.
        """
        self._config = config
        self._weights = weights
        self._kv = kv
        self._rope = rope
        self._is_exact = is_exact
        on_cpu = weights.embedding.device.type == "cpu"
        is_fp32 = weights.embedding.dtype == torch.float32
        self._linear: Linear = linear or (linear_fp32 if on_cpu or is_fp32 else linear_bf16)

    def run(self, hidden: torch.Tensor, rows: StepRows, begin: int, end: int) -> None:
        """See `DecoderLayers.run`."""
        self._rope.ensure(rows.num_positions)
        for layer in range(begin, end):
            self._layer(layer, hidden, rows)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """See `DecoderLayers.logits`."""

        def head(x: torch.Tensor) -> torch.Tensor:
            normed = rms_norm(x, self._weights.final_norm, self._config.rms_norm_eps)
            return self._linear(normed, self._weights.head, None)

        return self._tiled(head, hidden)

    def _tiled(self, op: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> torch.Tensor:
        """Apply a row-wise operation; in exact mode to zero-padded tiles of one fixed size."""
        if not self._is_exact:
            return op(x)
        padded = x.new_zeros(align_up(len(x), _EXACT_ROWS), x.shape[1])
        padded[: len(x)] = x
        return torch.cat([op(tile) for tile in padded.split(_EXACT_ROWS)])[: len(x)]

    def _layer(self, layer: int, hidden: torch.Tensor, rows: StepRows) -> None:
        w = self._weights.layers[layer]
        eps = self._config.rms_norm_eps

        def project(x: torch.Tensor) -> torch.Tensor:
            return self._linear(rms_norm(x, w.attention_norm, eps), w.qkv, w.qkv_bias)

        qkv = self._tiled(project, hidden)
        query, keys, values = self._rotate(qkv, rows.positions)
        self._store(layer, rows, keys, values)
        mixed = torch.empty(len(hidden), query.shape[1] * query.shape[2], device=hidden.device)
        attend = self._attend_exact if self._is_exact else self._attend
        for index, span in enumerate(rows.spans):
            num_blocks = ceil_div(span.position + span.end - span.begin, BLOCK_TOKENS)
            table = rows.tables[index, :num_blocks].long() + layer
            mixed[span.begin : span.end] = attend(query[span.begin : span.end], span, table)
        hidden += self._tiled(lambda x: self._linear(x, w.output, w.output_bias), mixed)
        hidden += self._tiled(lambda x: self._mlp(w, rms_norm(x, w.mlp_norm, eps)), hidden)

    def _mlp(self, w: LayerWeights, x: torch.Tensor) -> torch.Tensor:
        gate, up = self._linear(x, w.gate_up, w.gate_up_bias).chunk(2, dim=-1)
        return self._linear(functional.silu(gate) * up, w.down, w.down_bias)

    def _rotate(
        self, qkv: torch.Tensor, positions: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Split [rows, heads * dim] into rotated queries and keys, and values, each [rows, heads, dim]."""
        heads, kv_heads, dim = self._config.num_heads, self._config.num_kv_heads, self._config.head_dim
        per_head = qkv.view(len(qkv), heads + 2 * kv_heads, dim)
        rotated, values = per_head.split([heads + kv_heads, kv_heads], dim=1)
        cos = self._rope.cos[positions.long()][:, None]
        sin = self._rope.sin[positions.long()][:, None]
        first, second = rotated.chunk(2, dim=-1)
        rotated = torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)
        query, keys = rotated.split([heads, kv_heads], dim=1)
        return query, keys, values

    def _store(self, layer: int, rows: StepRows, keys: torch.Tensor, values: torch.Tensor) -> None:
        positions = rows.positions.long()
        at_row = rows.tables[rows.sequences.long(), positions // BLOCK_TOKENS].long() + layer
        at = positions % BLOCK_TOKENS
        self._kv.keys[at_row, :, :, at] = keys.to(self._kv.keys.dtype)
        self._kv.values[at_row, :, at] = values.to(self._kv.values.dtype)

    def _attend(self, query: torch.Tensor, span: RowSpan, table: torch.Tensor) -> torch.Tensor:
        """Causal attention of one span; query [rows, heads, dim] -> [rows, heads * dim]."""
        count, heads, dim = query.shape
        kv_heads = self._config.num_kv_heads
        keys = self._kv.keys[table].float().permute(1, 2, 0, 3).flatten(2)  # [kv heads, dim, tokens]
        values = self._kv.values[table].float().transpose(0, 1).flatten(1, 2)  # [kv heads, tokens, dim]
        grouped = query.view(count, kv_heads, heads // kv_heads, dim).transpose(0, 1).flatten(1, 2)
        scores = (grouped * dim**-0.5) @ keys
        token = torch.arange(keys.shape[-1], device=query.device)
        own = span.position + torch.arange(count, device=query.device)
        hidden_tokens = (token > own[:, None]).repeat_interleave(heads // kv_heads, dim=0)
        weights = scores.masked_fill_(hidden_tokens, -torch.inf).softmax(-1)
        mixed = (weights @ values).view(kv_heads, count, heads // kv_heads, dim)
        return mixed.transpose(0, 1).reshape(count, heads * dim)

    def _attend_exact(self, query: torch.Tensor, span: RowSpan, table: torch.Tensor) -> torch.Tensor:
        """Like `_attend`, row by row and block by block, so that every operation has one fixed shape."""
        count, heads, dim = query.shape
        kv_heads = self._config.num_kv_heads
        keys, values = self._kv.keys[table].float(), self._kv.values[table].float()
        token = torch.arange(BLOCK_TOKENS, device=query.device)
        out = torch.empty(count, heads * dim, device=query.device)
        for i in range(count):
            grouped = query[i].reshape(kv_heads, heads // kv_heads, dim) * dim**-0.5
            top = torch.full((kv_heads, heads // kv_heads, 1), -torch.inf, device=query.device)
            total = torch.zeros_like(top)
            mixed = torch.zeros_like(grouped)
            position = span.position + i
            for block in range(position // BLOCK_TOKENS + 1):
                scores = (grouped @ keys[block]).masked_fill(
                    token + block * BLOCK_TOKENS > position, -torch.inf
                )
                new_top = torch.maximum(top, scores.amax(-1, keepdim=True))
                weights, keep = (scores - new_top).exp(), (top - new_top).exp()
                total = total * keep + weights.sum(-1, keepdim=True)
                mixed = mixed * keep + weights @ values[block]
                top = new_top
            out[i] = (mixed / total).flatten()
        return out
