"""One layer for one token, float32, from the plain twins of its operations."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch

from millpond.core.work import Mechanism
from millpond.engine.model.compressor import CompressorWeights
from millpond.engine.model.config import V41Config
from millpond.engine.model.engram import EngramWeights
from millpond.engine.model.indexer import IndexerWeights
from millpond.engine.model.mhc import MixWeights
from millpond.engine.model.moe import MoeWeights
from millpond.engine.model.packed import as_matrix
from millpond.engine.model.weights import AttentionWeights, LayerWeights
from millpond.engine.ref.attention import SeenRows, attend_ref, make_latents_ref, rms_norm_ref, rotate_ref
from millpond.engine.ref.experts import add_engram_ref, expert_ref, route_ref
from millpond.engine.ref.formats import dequantise_fp8_ref
from millpond.engine.ref.mhc import collapse_ref, compute_mix_ref, expand_ref
from millpond.engine.ref.tally import inside, multiply_ref


@dataclass(frozen=True, slots=True)
class Place:
    """Where a token stands: its position and the frequencies that turn it."""

    position: int
    frequencies: torch.Tensor

    def rotate(self, row: torch.Tensor) -> torch.Tensor:
        """Rotate one row."""
        return rotate_ref(row, self.position, self.frequencies)


class RefProjected(NamedTuple):
    """What attention makes of one token's input."""

    qr: torch.Tensor
    query: torch.Tensor
    """[heads, dim], rotated."""
    kv: torch.Tensor
    """[dim], rotated."""


def mix_of_ref(
    stream: torch.Tensor, w: MixWeights, config: V41Config
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(pre, post, comb) of a sub-layer."""
    with inside(Mechanism.HYPER_CONNECTIONS):
        return compute_mix_ref(
            stream, w.fn, w.base, w.scale, norm_eps=config.norm_eps, iters=config.hc_iters, eps=config.hc_eps
        )


def input_of_ref(stream: torch.Tensor, pre: torch.Tensor, norm: torch.Tensor, eps: float) -> torch.Tensor:
    """Normed input of a sub-layer."""
    with inside(Mechanism.HYPER_CONNECTIONS):
        return rms_norm_ref(collapse_ref(stream, pre), norm, eps)


def project_ref(x: torch.Tensor, w: AttentionWeights, place: Place, config: V41Config) -> RefProjected:
    """Query heads and latent KV of one normed row."""
    shape, eps = config.shape, config.norm_eps
    with inside(Mechanism.PROJECTIONS):
        low = multiply_ref(as_matrix(w.query_kv)[: shape.q_lora_rank], x)
        kv = project_kv_ref(x, w, place, config)
        qr = rms_norm_ref(low, w.query_norm, eps)
        heads = multiply_ref(w.query, qr).split(shape.head_dim)
    return RefProjected(qr, torch.stack([place.rotate(head) for head in heads]), kv)


def project_kv_ref(x: torch.Tensor, w: AttentionWeights, place: Place, config: V41Config) -> torch.Tensor:
    """Latent KV of one normed row, rotated."""
    latent = multiply_ref(as_matrix(w.query_kv)[config.shape.q_lora_rank :], x)
    return place.rotate(rms_norm_ref(latent, w.kv_norm, config.norm_eps))


def attention_ref(
    query: torch.Tensor, seen: list[SeenRows], w: AttentionWeights, place: Place
) -> torch.Tensor:
    """Attend, rotate the heads' outputs back and project them: [hidden]."""
    core = attend_ref(query, seen, w.sink)
    turned = torch.stack([rotate_ref(head, place.position, place.frequencies, sign=-1) for head in core])
    with inside(Mechanism.PROJECTIONS):
        parts = turned.flatten().chunk(len(w.out_groups))
        low = [multiply_ref(group, part) for group, part in zip(as_matrix(w.out_groups), parts, strict=True)]
        return multiply_ref(w.out, torch.cat(low))


def compress_ref(group: list[torch.Tensor], w: CompressorWeights, eps: float) -> torch.Tensor:
    """Latent of one group from its tokens' products with `w.kv`: values and, in groups of several, scores."""
    if len(group) == 1:
        return rms_norm_ref(group[0], w.norm, eps)
    values, gates = torch.stack(group).chunk(2, dim=-1)
    return make_latents_ref(values, gates, w.norm, len(group), eps)[0]


def index_key_ref(latent: torch.Tensor, w: CompressorWeights, place: Place, eps: float) -> torch.Tensor:
    """Index key of an entry; `place` is that of its first token."""
    return place.rotate(rms_norm_ref(multiply_ref(w.index_key, latent), w.index_norm, eps))


def index_query_ref(
    qr: torch.Tensor, x: torch.Tensor, w: IndexerWeights, place: Place, dim: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Index queries [heads, dim] of one token and the weights of their heads [heads]."""
    heads = [place.rotate(head) for head in multiply_ref(w.query, qr).split(dim)]
    return torch.stack(heads), multiply_ref(w.head_weights, x) * (dim * len(heads)) ** -0.5


def experts_ref(
    x: torch.Tensor, w: MoeWeights, num_chosen: int, config: V41Config, *, is_image: bool = False
) -> torch.Tensor:
    """Routed and shared experts of one row: [hidden]."""
    bias = w.bias_image if is_image and w.bias_image is not None else w.bias
    with inside(Mechanism.ROUTER):
        weights = route_ref(x, w.gate, bias, num_chosen, config.routed_scale)
    limit, out = config.swiglu_limit, torch.zeros(len(x))
    with inside(Mechanism.ROUTED_EXPERTS):
        for e, weight in sorted(weights.items()):
            out += expert_ref(x, w.experts.gate_up[e], w.experts.down[e], weight, limit, is_quantised=False)
    with inside(Mechanism.SHARED_EXPERT):
        return out + expert_ref(x, w.shared.gate_up, w.shared.down, 1.0, limit, is_quantised=False)


def feed_forward_ref(
    stream: torch.Tensor, pre: torch.Tensor, w: LayerWeights, num_chosen: int, config: V41Config
) -> tuple[torch.Tensor, torch.Tensor]:
    """Second half of a block: the new stream and `pre` for the next sub-layer."""
    next_pre, post, comb = mix_of_ref(stream, w.ffn_mix, config)
    x = input_of_ref(stream, pre, w.ffn_norm, config.norm_eps)
    out = experts_ref(x, w.moe, num_chosen, config)
    with inside(Mechanism.HYPER_CONNECTIONS):
        return expand_ref(stream, out, post, comb), next_pre


def engram_ref(stream: torch.Tensor, w: EngramWeights, rows: list[int], eps: float) -> torch.Tensor:
    """Copies of one token with the gated value of its n-grams."""
    copies, hidden = stream.shape
    looked_up = torch.cat([dequantise_fp8_ref(w.data[row], w.scales[row]) for row in rows])
    with inside(Mechanism.ENGRAM):
        mixed = multiply_ref(w.kv, looked_up)
        keys, value = mixed[: copies * hidden].view(copies, hidden), mixed[copies * hidden :]
        return add_engram_ref(stream, keys, value, w.query_norm * w.key_norm, eps)
