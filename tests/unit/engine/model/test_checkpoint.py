"""Random checkpoints: written, found, loaded, run; broken ones refused with one clear error."""

from __future__ import annotations

import copy
import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from millpond.config.engine_params import EngineParams
from millpond.core.errors import ConfigError, ModelFormatError
from millpond.engine.model.init import init_checkpoint
from millpond.engine.model.load import load_v41_engine
from millpond.engine.model_files import locate_model
from millpond.engine.tokenizer_files import load_tokenizer
from tests.unit.engine.model.test_config import tiny
from tests.unit.engine.model.test_engine import decode, prefill

PARAMS = EngineParams(kv_memory=1 << 20, max_num_seqs=4)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    folder = tmp_path_factory.mktemp("v41") / "model"
    values = tiny()
    values["text_config"]["engram_compressed_vocab_size"] = None
    init_checkpoint(values, folder, seed=3)
    return folder


def load(folder, **changes):
    return load_v41_engine(
        locate_model(str(folder)), EngineParams(**{"kv_memory": 1 << 20, "max_num_seqs": 4} | changes)
    )


def test_a_random_checkpoint_runs(checkpoint):
    steps = []
    engine = load_v41_engine(locate_model(str(checkpoint)), PARAMS, show=lambda *at: steps.append(at))
    config = json.loads((checkpoint / "config.json").read_text(encoding="utf-8"))
    assert config["text_config"]["engram_compressed_vocab_size"] > 100
    done, total = zip(*steps, strict=True)
    assert sorted(done) == list(done)
    assert set(total) == {done[-1]}
    tokenizer = load_tokenizer(locate_model(str(checkpoint)))
    ids = list(tokenizer.encode("Grüße, 世界!"))
    assert tokenizer.decode(ids) == "Grüße, 世界!"
    first = prefill(engine, "a", ids, (1,), 0)
    text = [first, *decode(engine, "a", len(ids), 5)]
    assert len(set(text)) > 1
    again = load(checkpoint)
    assert [prefill(again, "a", ids, (1,), 0), *decode(again, "a", len(ids), 5)] == text


def test_equal_seeds_give_equal_files(checkpoint, tmp_path):
    values = tiny()
    init_checkpoint(values, tmp_path / "again", seed=3)
    init_checkpoint(values, tmp_path / "other", seed=4)
    name = "model-00002-of-00016.safetensors"
    assert (tmp_path / "again" / name).read_bytes() == (checkpoint / name).read_bytes()
    assert (tmp_path / "other" / name).read_bytes() != (checkpoint / name).read_bytes()


def test_a_used_folder_is_left_alone(checkpoint):
    with pytest.raises(ConfigError, match="not empty"):
        init_checkpoint(tiny(), checkpoint, seed=1)


@pytest.fixture
def broken(checkpoint, tmp_path):
    return shutil.copytree(checkpoint, tmp_path / "broken")


def shard_of(folder, name):
    index = json.loads((folder / "model.safetensors.index.json").read_text(encoding="utf-8"))
    return folder / index["weight_map"][name]


def change(folder, name, make):
    path = shard_of(folder, name)
    tensors = load_file(path)
    new = make(tensors.pop(name))
    if new is not None:
        tensors[name] = new
    save_file(tensors, path)


NAME = "layers.3.attn.wq_b.weight"


@pytest.mark.parametrize(
    ("make", "what"),
    [
        (lambda _: None, "missing"),
        (lambda t: t[:32].contiguous(), "shape"),
        (lambda t: t.float(), "F32"),
        (lambda t: t.view(torch.uint8), "U8"),
    ],
)
def test_a_bad_tensor_is_named(broken, make, what):
    change(broken, NAME, make)
    with pytest.raises(ModelFormatError, match=what) as caught:
        load(broken)
    assert NAME in caught.value.message


def test_a_missing_shard_is_named(broken):
    path = shard_of(broken, NAME)
    path.unlink()
    with pytest.raises(ModelFormatError, match=path.name):
        load(broken)


def test_a_truncated_shard_is_named(broken):
    path = shard_of(broken, NAME)
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(ModelFormatError, match=path.name):
        load(broken)


def test_inconsistent_roles_are_named(broken):
    path = broken / "config.json"
    values = copy.deepcopy(json.loads(path.read_text(encoding="utf-8")))
    values["text_config"]["index_source_layer_ids"] = [2, 3, 4, 6]
    path.write_text(json.dumps(values), encoding="utf-8")
    with pytest.raises(ModelFormatError, match="index_source_layer_ids"):
        load(broken)


def test_a_strange_tokenizer_is_refused(broken):
    path = broken / "config.json"
    values = json.loads(path.read_text(encoding="utf-8"))
    values["text_config"]["engram_compressed_vocab_size"] += 1
    path.write_text(json.dumps(values), encoding="utf-8")
    with pytest.raises(ModelFormatError, match="compresses to"):
        load(broken)
    (broken / "tokenizer.json").write_text("{}", encoding="utf-8")
    with pytest.raises(ModelFormatError, match=r"tokenizer\.json"):
        load(broken)


@pytest.mark.parametrize(
    "changes", [{"dtype": "fp8"}, {"numerics": "loose"}, {"max_model_len": 513}, {"kv_memory": 1000}]
)
def test_parameters_that_cannot_be_honoured(checkpoint, changes):
    with pytest.raises(ConfigError):
        load(checkpoint, **changes)
