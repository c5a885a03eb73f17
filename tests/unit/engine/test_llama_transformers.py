"""The decoder against transformers: the real small model, and rope variants on random ones."""

from __future__ import annotations

import json

import pytest
import torch

from millpond.config.engine_params import EngineParams
from millpond.engine.load import load_engine
from tests.unit.engine.tiny_llama import Hand, tiny_engine, write_checkpoint

_PROMPTS = [(1, ()), (17, (5,)), (128, ()), (129, (128,)), (300, (1, 140, 256))]


@pytest.fixture(scope="module")
def smollm2():
    """The real model in fp32, and transformers on the same tensors."""
    from benchmarks.transformers_peer import as_transformers

    engine = load_engine(EngineParams(dtype="fp32", kv_memory=80 << 20))
    return Hand(engine), as_transformers(engine._config, engine._layers._weights)


@pytest.mark.parametrize(("length", "borders"), _PROMPTS)
def test_smollm2_logits_are_those_of_transformers(smollm2, length, borders):
    hand, peer = smollm2
    hand.next_block = 1
    noise = torch.Generator().manual_seed(length)
    token_ids = torch.randint(0, 49152, (length + 3,), generator=noise).tolist()
    with torch.inference_mode():
        expected = peer(torch.tensor([token_ids])).logits[0, length - 1 :]
    hand.prefill("a", token_ids[:length], borders)
    assert (hand.logits[-1][0] - expected[0]).abs().max() <= 1e-3
    for i in range(3):  # decode, fed with the same tokens instead of its own choice
        hand.engine._sequences["a"].token_ids[-1] = token_ids[length + i]
        hand.decode("a")
        assert (hand.logits[-1][0] - expected[i + 1]).abs().max() <= 1e-3
    hand.engine.forget("a")


def test_smollm2_speaks_english(smollm2):
    hand, _ = smollm2
    hand.next_block = 1
    prompt = [504, 3575, 282, 4649, 314]  # "The capital of France is"
    tokens = [hand.prefill("b", prompt)] + [hand.decode("b")[0] for _ in range(4)]
    assert 7042 in tokens  # " Paris"


_ROPES = {
    "default": {},
    "linear": {"rope_scaling": {"rope_type": "linear", "factor": 4.0}},
    "llama3": {
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        }
    },
    "yarn": {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}},
    "yarn_mscale": {
        "rope_scaling": {
            "type": "yarn",
            "factor": 4.0,
            "original_max_position_embeddings": 64,
            "beta_fast": 16.0,
            "mscale": 0.7,
            "mscale_all_dim": 1.2,
        }
    },
    "new_style": {
        "rope_parameters": {
            "rope_type": "llama3",
            "rope_theta": 500.0,
            "factor": 4.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 128,
        }
    },
    "bias_and_tied": {"attention_bias": True, "tie_word_embeddings": True},
}


@pytest.mark.parametrize("changes", _ROPES.values(), ids=_ROPES.keys())
def test_variants_equal_transformers(tmp_path, changes):
    from transformers import LlamaForCausalLM

    folder = write_checkpoint(tmp_path / "model", **changes)
    peer = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    token_ids = [(11 * i + 5) % 160 for i in range(150)]
    with torch.inference_mode():
        expected = peer(torch.tensor([token_ids])).logits[0, -1]
    hand = Hand(tiny_engine(folder))
    hand.prefill("a", token_ids, (50,))
    torch.testing.assert_close(hand.logits[-1][0], expected, atol=2e-4, rtol=1e-4)


def test_sharded_checkpoints_load(tmp_path):
    from safetensors.torch import load_file, save_file

    whole = write_checkpoint(tmp_path / "whole")
    tensors = load_file(whole / "model.safetensors")
    split = tmp_path / "split"
    split.mkdir()
    (split / "config.json").write_text((whole / "config.json").read_text(encoding="utf-8"), encoding="utf-8")
    names = sorted(tensors)
    shards = {"model-1.safetensors": names[::2], "model-2.safetensors": names[1::2]}
    for file, held in shards.items():
        save_file({name: tensors[name] for name in held}, split / file)
    index = {"weight_map": {name: file for file, held in shards.items() for name in held}}
    (split / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")
    hands = [Hand(tiny_engine(folder)) for folder in (whole, split)]
    for hand in hands:
        hand.prefill("a", [1, 2, 3])
    assert torch.equal(hands[0].logits[0], hands[1].logits[0])
