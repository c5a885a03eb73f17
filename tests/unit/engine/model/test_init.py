"""`init_checkpoint`: little memory at any size, the same bytes whatever the slices and shards."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from dataclasses import replace

import pytest
import torch

from millpond.core.errors import ConfigError, ModelFormatError
from millpond.engine.model import init
from millpond.engine.model.config import parse_config
from millpond.engine.model.engram_ids import table_primes
from millpond.engine.model.init import init_checkpoint
from millpond.engine.model.init_tokenizer import make_tokenizer
from millpond.engine.model.tensors import Weight, WeightKind, all_weights, check_tensors
from millpond.engine.safetensors_files import read_headers
from tests.unit.engine.model.test_config import tiny

MIB = 1 << 20


def with_tables(num_rows):
    """The tiny config with Engram tables of about `num_rows` rows for each layer."""
    values = tiny()
    text = values["text_config"]
    ngram, heads = text["engram_max_ngram_size"], text["engram_n_heads"]
    text["engram_vocab_size"] = num_rows // ((ngram - 1) * heads)
    primes = table_primes(len(text["engram_layer_ids"]), ngram, heads, text["engram_vocab_size"])
    text["engram_num_embeddings"] = primes.sum((1, 2)).tolist()
    return values


MEASURE = """
import json, resource, sys
from pathlib import Path
from millpond.engine.model.init import init_checkpoint
def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10
values, small, large = json.loads(sys.argv[1]), Path(sys.argv[2]), Path(sys.argv[3])
init_checkpoint(json.loads(sys.argv[4]), small, 1)
before = peak()
init_checkpoint(values, large, 1)
print(peak() - before)
"""


def test_a_large_table_never_lies_in_memory_whole(tmp_path):
    values = with_tables(4_000_000)
    tables = [w for w in all_weights(parse_config(values)) if w.kind is WeightKind.TABLE]
    least = min(sum(tensor.num_bytes for tensor in table.stored()) for table in tables)
    assert least > 120 * MIB
    texts = [json.dumps(values), str(tmp_path / "small"), str(tmp_path / "large"), json.dumps(tiny())]
    result = subprocess.run(
        [sys.executable, "-c", MEASURE, *texts], capture_output=True, text=True, timeout=170, check=True
    )
    assert int(result.stdout) < 30 * MIB < least / 4
    table = read_headers(sorted((tmp_path / "large").glob("*.safetensors")))
    check_tensors(table, parse_config(values))


def pieces(weight, seed=0):
    parts = zip(*init._random_pieces(weight, seed), strict=True)
    return [torch.cat(part) for part in parts]


@pytest.mark.parametrize(
    ("kind", "size"),
    [
        (WeightKind.FP8, (100, 64)),
        (WeightKind.FP4, (70, 64)),
        (WeightKind.TABLE, (131, 32)),
        (WeightKind.BF16, (65, 32)),
        (WeightKind.FP32, (9,)),
    ],
)
def test_slices_add_up_to_what_the_format_says(monkeypatch, kind, size):
    monkeypatch.setattr(init, "_SLICE_VALUES", 1024)
    weight = Weight("layers.0.x", kind, size)
    made = pieces(weight)
    wanted = weight.stored()
    assert [part.numel() * part.element_size() for part in made] == [tensor.num_bytes for tensor in wanted]
    assert all(torch.equal(a, b) for a, b in zip(made, pieces(weight), strict=True))
    assert not torch.equal(made[0], pieces(weight, seed=1)[0])
    assert not torch.equal(made[0], pieces(replace(weight, name="layers.1.x"))[0])
    if len(size) == 2:
        assert not torch.equal(made[0][:32], made[0][32:64])


def test_a_tensor_does_not_depend_on_the_others(tmp_path):
    """The same names and sizes in a model with fewer experts: other shards, equal bytes."""
    fewer = tiny()
    fewer["text_config"]["n_routed_experts"] -= 1
    folders = tmp_path / "all", tmp_path / "fewer"
    tables = []
    for values, folder in zip((tiny(), fewer), folders, strict=True):
        init_checkpoint(values, folder, seed=3)
        tables.append(read_headers(sorted(folder.glob("*.safetensors"))))
    same = [name for name, entry in tables[1].items() if entry.shape == tables[0][name].shape]
    assert len(same) > 500
    for name in same:
        first, second = (
            table[name].file.read_bytes()[table[name].begin : table[name].end] for table in tables
        )
        assert first == second, name


def test_a_folder_without_room_is_refused_before_anything_is_written(tmp_path, monkeypatch):
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=100_000))
    with pytest.raises(ConfigError, match="100,000 bytes are free"):
        init_checkpoint(tiny(), tmp_path / "out", seed=0)
    assert list((tmp_path / "out").iterdir()) == []


def test_an_init_that_is_cut_short_leaves_no_checkpoint(tmp_path):
    def stop(num_done, num_total):
        if num_done > num_total // 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        init_checkpoint(tiny(), tmp_path / "out", 0, stop)
    assert not (tmp_path / "out" / "config.json").exists()


@pytest.mark.parametrize(
    ("changes", "what"),
    [({"vocab_size": 200}, "vocab_size"), ({"bos_token_id": 1}, "share an id")],
)
def test_a_vocabulary_that_cannot_be_made(changes, what):
    values = tiny()
    values["text_config"] |= changes
    if "vocab_size" in changes:
        values["image_token_id"] = 199
        values["text_config"]["dspark_noise_token_id"] = 198
    with pytest.raises(ModelFormatError, match=what):
        make_tokenizer(parse_config(values))
