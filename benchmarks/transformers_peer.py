"""The same weights in transformers' own Llama: peer of the benchmark, oracle of the tests."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from transformers import GenerationConfig, LlamaForCausalLM
from transformers import LlamaConfig as PeerConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from millpond.engine.llama_config import LlamaConfig
from millpond.engine.weights import LlamaWeights


def as_transformers(config: LlamaConfig, weights: LlamaWeights) -> LlamaForCausalLM:
    """Wrap our tensors, without a copy, in transformers' model. Rope of kind `default` only."""
    peer_config = PeerConfig(
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_hidden_layers=config.num_layers,
        num_attention_heads=config.num_heads,
        num_key_value_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        max_position_embeddings=config.max_positions,
        rms_norm_eps=config.rms_norm_eps,
        rope_parameters={"rope_type": "default", "rope_theta": config.rope.theta},
        tie_word_embeddings=config.tie_embeddings,
        attn_implementation="sdpa",  # pyright: ignore[reportCallIssue] - passed on by **kwargs
    )
    dtype = weights.embedding.dtype
    with torch.device("meta"):
        model = LlamaForCausalLM(peer_config)
    tensors = {
        "model.embed_tokens.weight": weights.embedding,
        "lm_head.weight": weights.head,
        "model.norm.weight": weights.final_norm.to(dtype),
    }
    query, key = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    for index, layer in enumerate(weights.layers):
        prefix = f"model.layers.{index}."
        q, k, v = layer.qkv.split([query, key, key])
        gate, up = layer.gate_up.chunk(2)
        named = {
            "self_attn.q_proj": q,
            "self_attn.k_proj": k,
            "self_attn.v_proj": v,
            "self_attn.o_proj": layer.output,
            "mlp.gate_proj": gate,
            "mlp.up_proj": up,
            "mlp.down_proj": layer.down,
            "input_layernorm": layer.attention_norm.to(dtype),
            "post_attention_layernorm": layer.mlp_norm.to(dtype),
        }
        tensors.update({f"{prefix}{name}.weight": tensor for name, tensor in named.items()})
    model.load_state_dict(tensors, assign=True)
    model.model.rotary_emb = LlamaRotaryEmbedding(peer_config)  # its buffers are computed, not loaded
    return model.eval()


@dataclass(frozen=True, slots=True)
class GreedyText:
    """What transformers continues a prompt with."""

    token_ids: list[int]
    margins: list[float]
    """How far each token's logit lies above the next best."""


def greedy_texts(model: LlamaForCausalLM, prompts: list[list[int]], num_tokens: int) -> list[GreedyText]:
    """Continue prompts of one length, together, by transformers' own `generate`; never stops early."""
    setting = GenerationConfig(
        max_new_tokens=num_tokens, do_sample=False, output_logits=True, return_dict_in_generate=True
    )
    model.generation_config.eos_token_id = None  # it would fill in for the setting's own None
    generate: Any = model.generate  # pyright: ignore[reportAttributeAccessIssue] - of its own `self`
    out = generate(torch.tensor(prompts), generation_config=setting)
    best = torch.stack(out.logits, dim=1).topk(2).values  # [prompts, tokens, 2]
    margins = (best[..., 0] - best[..., 1]).tolist()
    tokens = out.sequences[:, len(prompts[0]) :].tolist()
    return [GreedyText(text, margin) for text, margin in zip(tokens, margins, strict=True)]
