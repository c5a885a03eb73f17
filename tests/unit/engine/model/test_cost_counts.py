"""The cost estimator against what models really do: multiply-adds of the plain twins, torch's own counter.

Both counts are independent of the estimator; it must meet them exactly, mechanism by mechanism.
"""

from __future__ import annotations

import copy
from collections import Counter
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.v41_flops import (
    count_proposal,
    count_range,
    estimate_error,
    flops_by_mechanism,
)
from benchmarks.v41_torch_count import count_in_process
from millpond.core.work import WorkKind
from millpond.engine.model.init import init_checkpoint
from millpond.engine.model.load import load_model
from millpond.engine.model.numerics import FP32
from millpond.engine.model.token_map import load_token_map
from millpond.engine.ref.model import RefModel, RefSequence
from millpond.engine.ref.tally import counting
from millpond.engine.ref.vision import embed_image_ref
from millpond.engine.torch_layers import TorchLayers
from millpond.policies.cost import FLOPS, TokenRange, draft_cost, llama_cost, v41_cost, vision_flops
from tests.golden.v41_case import tiny_weights
from tests.unit.engine.model.test_config import tiny
from tests.unit.engine.model.tiny_v41 import prompt
from tests.unit.engine.model.tiny_vision import small_tower
from tests.unit.engine.tiny_llama import Hand, tiny_engine, write_checkpoint

CHANGES = {
    "tiny": {},
    "wide groups": {
        "hc_mult": 2, "o_groups": 4, "num_attention_heads": 8, "index_n_heads": 3, "sliding_window": 5,
        "n_routed_experts": 5, "num_experts_per_tok": 3,
    },
    "early decoder": {
        "num_hidden_layers": 7, "compress_ratios": [0, 2, 2, 1, 1, 1, 1, 0], "kv_source_layer_ids": [1, 3],
        "index_source_layer_ids": [1, 3, 5], "candidate_source_layer_id": 3, "candidate_topk_blocks": 5,
        "candidate_block_size": 2, "engram_layer_ids": [3, 4], "num_nextn_predict_layers": 1,
        "dspark_target_layer_ids": [2, 6], "dspark_block_size": 3,
    },
    "no tables, no drafts": {
        "engram_layer_ids": [], "engram_num_embeddings": [], "num_nextn_predict_layers": 0,
        "compress_ratios": [0, 0, 2, 2, 2, 2, 1, 1, 1, 1, 1, 1], "index_topk": 4,
    },
}  # fmt: skip
"""What differs from the golden set `tiny_a`: layers of every role in other proportions."""


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Random checkpoints, by name."""
    root, made = tmp_path_factory.mktemp("models"), {}
    for number, (name, changes) in enumerate(CHANGES.items()):
        values = copy.deepcopy(tiny())
        values["text_config"].update(changes, hc_sinkhorn_iters=2)  # not counted, but slow
        made[name] = root / str(number)
        init_checkpoint(values, made[name], seed=3)
    return made


@pytest.fixture(scope="module", params=CHANGES)
def ref(request, folders):
    folder = folders[request.param]
    files = tuple(sorted(folder.glob("*.safetensors")))
    model = load_model(folder, files, FP32, torch.device("cpu"))
    return RefModel(model.config, model.weights, load_token_map(folder / "tokenizer.json", model.config))


@pytest.mark.parametrize("keep_begin", [0, 13])
def test_the_estimate_meets_the_twins_count(ref, keep_begin):
    cost, sequence = v41_cost(ref.config.shape), RefSequence(prompt(23).tolist(), keep_begin=keep_begin)
    for begin, end in pairwise([0, 7, 18, 21, 22, 23]):
        tokens = TokenRange(begin, end, int(end >= 21), keep_begin)
        tally = count_range(ref, sequence, tokens)
        wanted = {m: flops for m, flops in cost.by_mechanism(tokens).items() if flops}
        assert flops_by_mechanism(tally) == wanted
        kinds = Counter()
        for (_, kind), multiply_adds in tally.multiply_adds.items():
            kinds[kind] += FLOPS * multiply_adds
        flops = cost.flops(tokens)
        assert (kinds[WorkKind.LINEAR], kinds[WorkKind.MIXING], kinds[WorkKind.ATTENTION]) == (
            flops.linear, flops.mixing, flops.attention,
        )  # fmt: skip
    if ref.weights.draft is not None:
        wanted = draft_cost(ref.config.shape).by_mechanism(TokenRange(22, 23, keep_begin=keep_begin))
        assert flops_by_mechanism(count_proposal(ref, sequence, 22)) == wanted


def test_the_linear_part_meets_the_counter_of_torch(folders):
    chosen = [folders["wide groups"], folders["early decoder"]]  # torch's counter is slow
    assert count_in_process(chosen) == {str(folder): 0 for folder in chosen}


def test_a_wrong_estimate_is_seen():
    config, weights, token_map = tiny_weights("tiny_a")
    model, ids = RefModel(config, weights, token_map.tolist()), prompt(5).tolist()
    errors = [
        estimate_error(model, v41_cost(shape), ids, [3], num_decoded=1, keep_begin=0)
        for shape in (config.shape, replace(config.shape, num_experts_per_token=3))
    ]
    assert errors[0] == 0
    assert errors[1] > 0.02


def test_images_meet_the_twins_count():
    config, weights = small_tower()
    patches = torch.randn(20, 12)
    with counting() as tally:
        embed_image_ref(patches, 4, 5, weights, config)
    flops = vision_flops(config.shape(out_size=20), 4, 5)
    assert {kind: FLOPS * count for (_, kind), count in tally.multiply_adds.items()} == {
        WorkKind.LINEAR: flops.linear, WorkKind.ATTENTION: flops.attention,
    }  # fmt: skip


def test_a_llama_model_meets_the_counter_of_torch(tmp_path):
    """Its products with weights are matrix products; attention multiplies batches of them, masked or not."""
    engine = tiny_engine(write_checkpoint(tmp_path / "llama"))
    made = engine._layers
    engine._layers = TorchLayers(engine._config, made._weights, engine._kv, made._rope, is_exact=False)
    cost, hand = llama_cost(engine._config.shape), Hand(engine)
    with FlopCounterMode(display=False) as counter:
        hand.prefill("a", [5, 9, 2] * 11, borders=(20,))
        hand.decode("a")
    parts = [TokenRange(0, 20), TokenRange(20, 33, 1), TokenRange(33, 34, 1)]
    linear = sum(cost.flops(tokens).linear for tokens in parts)
    assert counter.get_flop_counts()["Global"][torch.ops.aten.mm] == linear
    attention = sum(cost.flops(tokens).attention for tokens in parts)
    assert attention < counter.get_flop_counts()["Global"][torch.ops.aten.bmm]
