"""A small random checkpoint, and a hand that feeds plans to an engine."""

from __future__ import annotations

import json
from array import array
from itertools import pairwise
from pathlib import Path

import torch
from safetensors.torch import save_file

from millpond.config.engine_params import EngineParams
from millpond.core.ids import BlockId, DpRank, RequestId, SlotId
from millpond.core.plan import DecodeRow, PrefillChunk, RankPlan, SequenceStart
from millpond.core.request import SamplingParams
from millpond.engine.load import load_engine
from millpond.engine.runner import LlamaEngine

GREEDY = SamplingParams(max_tokens=64, seed=0, temperature=0.0)

TINY = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 160,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 1024,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "hidden_act": "silu",
}


def tiny_tensors(config: dict) -> dict[str, torch.Tensor]:
    """Random tensors under Hugging Face names that fit a config.json record."""
    noise = torch.Generator().manual_seed(7)

    def make(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=noise) / shape[-1] ** 0.5

    hidden, inter, dim = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    query, key = config["num_attention_heads"] * dim, config["num_key_value_heads"] * dim
    tensors = {"model.embed_tokens.weight": make(config["vocab_size"], hidden)}
    tensors["model.norm.weight"] = torch.ones(hidden)
    if not config["tie_word_embeddings"]:
        tensors["lm_head.weight"] = make(config["vocab_size"], hidden) * 4
    for layer in range(config["num_hidden_layers"]):
        p = f"model.layers.{layer}."
        shapes = {
            "self_attn.q_proj": (query, hidden),
            "self_attn.k_proj": (key, hidden),
            "self_attn.v_proj": (key, hidden),
            "self_attn.o_proj": (hidden, query),
            "mlp.gate_proj": (inter, hidden),
            "mlp.up_proj": (inter, hidden),
            "mlp.down_proj": (hidden, inter),
        }
        for name, shape in shapes.items():
            tensors[f"{p}{name}.weight"] = make(*shape) * 2
            if config.get("attention_bias") and "self_attn" in name:
                tensors[f"{p}{name}.bias"] = make(shape[0])
        for name in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"{p}{name}.weight"] = 1 + 0.1 * make(hidden)
    return tensors


def write_checkpoint(folder: Path, **changes: object) -> Path:
    """Write config.json and model.safetensors of a tiny model."""
    config = TINY | changes
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    save_file(tiny_tensors(config), folder / "model.safetensors")
    return folder


def tiny_engine(folder: Path, **changes: object) -> LlamaEngine:
    """Load a tiny engine with 40 blocks or so."""
    defaults = {"dtype": "fp32", "kv_memory": 6 << 20}
    return load_engine(EngineParams(model=str(folder), **(defaults | changes)))


class Hand:
    """Feeds plans to an engine, one sequence per name, blocks handed out in order."""

    def __init__(self, engine: LlamaEngine) -> None:
        self.engine = engine
        self.next_block = 1
        self.tables: dict[str, list[BlockId]] = {}
        self.lengths: dict[str, int] = {}
        self.logits: list[torch.Tensor] = []
        layers = engine._layers
        compute = layers.logits

        def keep(hidden: torch.Tensor) -> torch.Tensor:
            self.logits.append(compute(hidden).clone())
            return self.logits[-1]

        layers.logits = keep

    def start(
        self, name: str, token_ids: list[int], room: int = 64, sampling: SamplingParams = GREEDY
    ) -> SequenceStart:
        """Allocate blocks for the prompt and `room` more tokens."""
        count = -(-(len(token_ids) + room) // 128)
        self.tables[name] = [BlockId(self.next_block + i) for i in range(count)]
        self.next_block += count
        self.lengths[name] = len(token_ids)
        return SequenceStart(
            RequestId(name),
            0,
            array("i", token_ids),
            len(token_ids),
            sampling,
            tuple(self.tables[name]),
            SlotId(0),
        )

    def prefill(
        self,
        name: str,
        token_ids: list[int],
        borders: tuple[int, ...] = (),
        sampling: SamplingParams = GREEDY,
    ) -> int:
        """Prefill one sequence, cut at `borders`; returns the first token."""
        start = (self.start(name, token_ids, sampling=sampling),)
        edges = [0, *sorted({b for b in borders if 0 < b < len(token_ids)}), len(token_ids)]
        for begin, end in pairwise(edges):
            chunk = PrefillChunk(RequestId(name), begin, end, end == len(token_ids))
            report = self.engine.execute(RankPlan(DpRank(0), start=start, chunks=(chunk,)))
            start = ()
        self.lengths[name] += 1
        return report.sampled[0].token_id

    def decode(self, *names: str) -> list[int]:
        """One step of these sequences together."""
        rows = tuple(DecodeRow(RequestId(name), self.lengths[name] - 1, ()) for name in names)
        report = self.engine.execute(RankPlan(DpRank(0), rows=rows))
        for name in names:
            self.lengths[name] += 1
        return [token.token_id for token in report.sampled]

    def kv_bytes(self, name: str) -> list[bytes]:
        """Every row of every full block of a sequence."""
        full = (self.lengths[name] - 1) // 128
        rows = range(len(self.engine.layout.rows))
        return [bytes(self.engine.read_row(b, row)) for b in self.tables[name][:full] for row in rows]
