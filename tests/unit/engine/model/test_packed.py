"""Weights kept packed: the same bits as unpacked ones, in less memory."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from millpond.config.engine_params import EngineParams
from millpond.core.errors import ConfigError
from millpond.engine.check_model import check_model
from millpond.engine.model.formats import dequantise_fp4_weight, dequantise_tiles
from millpond.engine.model.init import init_checkpoint
from millpond.engine.model.load import load_v41_engine
from millpond.engine.model.packed import PackedWeight
from millpond.engine.model_files import locate_model
from tests.unit.engine.model.test_config import tiny
from tests.unit.engine.model.tiny_v41 import Hand, prompt
from tests.unit.engine.tiny_llama import write_checkpoint

MIB = 1 << 20


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    folder = tmp_path_factory.mktemp("v41") / "model"
    init_checkpoint(tiny(), folder, seed=3)
    return folder


def load_hand(folder, **params):
    files = locate_model(str(folder))
    engine = load_v41_engine(files, EngineParams(kv_memory=MIB, max_num_seqs=2, **params))
    return Hand(engine._model)


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
@pytest.mark.parametrize("numerics", ["exact", "fast"])
def test_logits_and_caches_are_equal_bit_for_bit(checkpoint, dtype, numerics):
    ids = prompt(150)
    seen = []
    for weights in ("unpacked", "packed"):
        hand = load_hand(checkpoint, dtype=dtype, numerics=numerics, weights=weights)
        hidden = torch.cat([hand.run(("a", ids, 0, 133)), hand.run(("a", ids, 133, 134), ("b", ids, 0, 7))])
        with torch.inference_mode():
            logits = hand.model.logits(hidden)
        drafts = hand.drafts(("a", int(ids[134]), 134))
        seen.append((logits, hand.state("a", 134), hand.state("b", 7), drafts.token_ids, drafts.confidence))
    for unpacked, packed in zip(*seen, strict=True):
        assert torch.equal(unpacked, packed)


MEASURE = """
import sys
from millpond.config.engine_params import EngineParams
from millpond.engine.model.load import load_v41_engine
from millpond.engine.model_files import locate_model
def own_bytes():
    lines = open("/proc/self/smaps_rollup").read().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("Anonymous:"))
before = own_bytes()
engine = load_v41_engine(
    locate_model(sys.argv[1]), EngineParams(kv_memory=1 << 20, max_num_seqs=2, weights=sys.argv[2])
)
print(own_bytes() - before)
"""


def test_packed_weights_take_less_memory(tmp_path):
    values = tiny()
    values["text_config"] |= {"n_routed_experts": 24, "moe_intermediate_size": 256}
    init_checkpoint(values, tmp_path / "model", seed=0)
    num_weights = (
        24 * 3 * 256 * values["text_config"]["hidden_size"] * values["text_config"]["num_hidden_layers"]
    )
    grown = {}
    for weights in ("unpacked", "packed"):
        command = [sys.executable, "-c", MEASURE, str(tmp_path / "model"), weights]
        result = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
        grown[weights] = int(result.stdout)
    assert grown["packed"] < num_weights
    assert grown["unpacked"] > grown["packed"] + num_weights // 2  # FP4 in memory of its own


@pytest.mark.parametrize(
    ("dequantise", "size", "parts"),
    [
        (dequantise_tiles, (64, 96), [((32, 96), (1, 3)), ((32, 96), (1, 3))]),
        (dequantise_tiles, (2, 32, 64), [((64, 64), (2, 2))]),
        (dequantise_fp4_weight, (40, 64), [((8, 32), (8, 2)), ((32, 32), (32, 2))]),
    ],
)
def test_a_weight_of_several_parts_has_their_rows_in_order(dequantise, size, parts):
    made = [
        (torch.randint(0, 120, a, dtype=torch.uint8), torch.randint(120, 130, b, dtype=torch.uint8))
        for a, b in parts
    ]
    weight = PackedWeight(size, tuple(made), dequantise)
    matrix = weight.as_matrix()
    assert tuple(matrix.shape) == size
    assert len(weight) == size[0]
    wanted = torch.cat([dequantise(*part) for part in made]).view(size)
    assert torch.equal(matrix.float(), wanted)


def test_models_without_packed_weights_refuse(tmp_path):
    folder = write_checkpoint(tmp_path / "model")
    with pytest.raises(ConfigError, match=r"engine\.weights"):
        check_model(EngineParams(model=str(folder), weights="packed"))
