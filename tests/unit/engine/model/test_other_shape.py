"""A model of another shape than the golden ones, against the plain twin.

Odd counts of heads, copies, groups, entries of a candidate block and tokens of a window; one expert a draft;
n-grams and draft targets on both sides of the border between encoder and decoder.
"""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from millpond.engine.model.engram_ids import table_primes
from millpond.engine.model.init import init_checkpoint
from millpond.engine.model.load import load_model
from millpond.engine.model.numerics import FP32
from millpond.engine.model.token_map import load_token_map
from millpond.engine.ref.dspark import propose_ref, remember_ref
from millpond.engine.ref.model import RefModel, RefSequence
from tests.unit.engine.model.tiny_v41 import Hand, prompt

CONFIG = Path(__file__).parents[3] / "golden" / "data" / "tiny_a" / "config.json"
CHANGES = {
    "vocab_size": 517,
    "hidden_size": 96,
    "num_hidden_layers": 7,
    "compress_ratios": [0, 2, 2, 2, 1, 1, 1, 0, 0],
    "kv_source_layer_ids": [1, 3, 4],
    "index_source_layer_ids": [1, 3, 4, 6],
    "candidate_source_layer_id": 4,
    "candidate_topk_blocks": 2,
    "candidate_block_size": 3,
    "index_topk": 5,
    "index_n_heads": 11,
    "index_head_dim": 96,
    "num_attention_heads": 6,
    "qk_rope_head_dim": 32,
    "q_lora_rank": 96,
    "o_groups": 3,
    "o_lora_rank": 32,
    "moe_intermediate_size": 96,
    "n_routed_experts": 7,
    "num_experts_per_tok": 3,
    "sliding_window": 9,
    "hc_mult": 3,
    "engram_layer_ids": [2, 5],
    "engram_max_ngram_size": 3,
    "engram_n_heads": 3,
    "engram_compressed_vocab_size": None,
    "num_nextn_predict_layers": 2,
    "dspark_block_size": 3,
    "dspark_target_layer_ids": [1, 5],
    "dspark_n_routed_experts": 5,
    "dspark_num_experts_per_tok": 1,
}
LENGTH = 31


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    values = json.loads(CONFIG.read_text(encoding="utf-8"))
    text = values["text_config"] | CHANGES
    primes = table_primes(2, text["engram_max_ngram_size"], text["engram_n_heads"], text["engram_vocab_size"])
    text["engram_num_embeddings"] = [int(sizes.sum()) for sizes in primes]
    values |= {"text_config": text, "vision_config": None, "image_token_id": None}
    made = tmp_path_factory.mktemp("other") / "model"
    init_checkpoint(values, made, seed=11)
    return made


@pytest.mark.parametrize("keep", [0, 20])
def test_it_computes_what_the_twin_does(folder, keep):
    model = load_model(folder, tuple(sorted(folder.glob("*.safetensors"))), FP32, torch.device("cpu"))
    token_map = load_token_map(folder / "tokenizer.json", model.config)
    ref, ids, rows = RefModel(model.config, model.weights, token_map.tolist()), prompt(LENGTH), []
    sequence = RefSequence(ids.tolist(), keep_begin=keep)
    with torch.inference_mode():
        for position in range(LENGTH):
            row = ref.run(sequence, position)
            if row is not None:
                remember_ref(ref, sequence, row, position)
                rows.append(ref.hidden(row))
        drafts = propose_ref(ref, sequence, 9, LENGTH - 1)
    hidden, hand, options = torch.stack(rows), Hand(model), {"keep_begin": keep}
    edges = [0, 7, 8, 13, 18, LENGTH - 1, LENGTH]
    ours = torch.cat([hand.run(("s", ids, a, b, options)) for a, b in pairwise(edges)])
    assert (ours - hidden).abs().max() <= 2e-5 * hidden.abs().max()
    guessed = hand.drafts(("s", 9, LENGTH - 1))
    assert guessed.token_ids[0].tolist() == drafts.token_ids
    torch.testing.assert_close(guessed.confidence[0], torch.tensor(drafts.confidence), rtol=1e-4, atol=1e-4)
