"""Broken checkpoints: `model info` and `serve` name the fault in one line, soon, and end with status 2."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from millpond.cli.main import app
from millpond.engine.model.init import init_checkpoint

CONFIG = Path(__file__).parents[2] / "golden" / "data" / "tiny_a" / "config.json"
NAME = "layers.3.attn.wq_b.weight"
INDEX = "model.safetensors.index.json"
LIMIT_S = 30.0
"""A refusal takes a tenth of this on a busy machine."""


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A checkpoint with nothing wrong."""
    folder = tmp_path_factory.mktemp("v41") / "model"
    init_checkpoint(json.loads(CONFIG.read_text(encoding="utf-8")), folder, seed=5)
    return folder


@pytest.fixture
def folder(whole, tmp_path):
    """A copy to break."""
    return shutil.copytree(whole, tmp_path / "model")


def shard_of(folder: Path, name: str = NAME) -> Path:
    index = json.loads((folder / INDEX).read_text(encoding="utf-8"))
    return folder / index["weight_map"][name]


def change_tensor(make: Callable[[torch.Tensor], torch.Tensor | None]) -> Callable[[Path], None]:
    def apply(folder: Path) -> None:
        tensors = load_file(shard_of(folder))
        new = make(tensors.pop(NAME))
        save_file(tensors if new is None else {**tensors, NAME: new}, shard_of(folder))

    return apply


def change_config(change: Callable[[dict[str, Any]], object]) -> Callable[[Path], None]:
    def apply(folder: Path) -> None:
        values = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        change(values["text_config"])
        (folder / "config.json").write_text(json.dumps(values), encoding="utf-8")

    return apply


def truncate(folder: Path) -> None:
    shard = shard_of(folder)
    shard.write_bytes(shard.read_bytes()[:-100])


def truncate_header(folder: Path) -> None:
    shard = shard_of(folder)
    shard.write_bytes(shard.read_bytes()[:100])


def copy_tensor(folder: Path) -> None:
    other = shard_of(folder, "layers.4.attn.wq_b.weight")
    tensor = load_file(shard_of(folder))[NAME]
    save_file({**load_file(other), NAME: tensor}, other)


def add_prefixed(folder: Path) -> None:
    tensors = load_file(shard_of(folder))
    save_file({**tensors, f"model.{NAME}": tensors[NAME].clone()}, shard_of(folder))


def forget_shard(folder: Path) -> None:
    """The index does not name the file of layer 3 at all."""
    index = json.loads((folder / INDEX).read_text(encoding="utf-8"))
    lost = shard_of(folder).name
    index["weight_map"] = {name: file for name, file in index["weight_map"].items() if file != lost}
    (folder / INDEX).write_text(json.dumps(index), encoding="utf-8")


FAULTS: dict[str, tuple[Callable[[Path], object], tuple[str, ...]]] = {
    "missing shard": (lambda folder: shard_of(folder).unlink(), ("model-00004-of-00016", "missing")),
    "forgotten shard": (forget_shard, ("layers.3.", "missing")),
    "missing tensor": (change_tensor(lambda _: None), (NAME, "missing")),
    "wrong shape": (change_tensor(lambda t: t[:32].contiguous()), (NAME, "shape")),
    "wrong dtype": (change_tensor(lambda t: t.float()), (NAME, "F32")),
    "truncated data": (truncate, ("model-00004-of-00016", "truncated")),
    "truncated header": (truncate_header, ("model-00004-of-00016", "truncated")),
    "no safetensors": (lambda folder: shard_of(folder).write_bytes(b"x" * 99), ("model-00004-of-00016",)),
    "bad index": (lambda folder: (folder / INDEX).write_text("{"), (INDEX, "JSON")),
    "index without map": (lambda folder: (folder / INDEX).write_text("{}"), (INDEX, "weight_map")),
    "index out of the folder": (
        lambda folder: (folder / INDEX).write_text('{"weight_map": {"a": "../a.safetensors"}}'),
        (INDEX, "../a.safetensors"),
    ),
    "tensor in two shards": (copy_tensor, (NAME, "too")),
    "tensor under two names": (add_prefixed, (NAME, "twice")),
    "inconsistent roles": (
        change_config(lambda text: text.update(index_source_layer_ids=[2, 3, 4, 6])),
        ("config.json", "index_source_layer_ids"),
    ),
    "unknown rope scaling": (
        change_config(lambda text: text["rope_scaling"].update(rope_type="longrope")),
        ("config.json", "rope_type", "longrope"),
    ),
    "huge tables": (
        change_config(lambda text: text.update(engram_vocab_size=10**18)),
        ("engram_vocab_size",),
    ),
    "no config": (lambda folder: (folder / "config.json").unlink(), ("config.json",)),
    "config no JSON": (lambda folder: (folder / "config.json").write_text("[" * 9999), ("config.json",)),
    "no tokenizer": (lambda folder: (folder / "tokenizer.json").unlink(), ("tokenizer.json",)),
    "another tokenizer": (
        change_config(lambda text: text.update(engram_compressed_vocab_size=7)),
        ("tokenizer.json", "7"),
    ),
}


def refuse(*arguments, words):
    """Run a command that must end with one line of error and status 2 before anything is started."""
    begin = time.monotonic()
    result = CliRunner().invoke(app, list(arguments))
    assert result.exit_code == 2, result.output
    (line,) = result.stderr.strip().splitlines()
    assert line.startswith("error: ")
    assert all(word in line for word in words), line
    assert time.monotonic() - begin < LIMIT_S


@pytest.mark.parametrize("fault", FAULTS)
def test_a_broken_checkpoint_is_refused_by_info(folder, fault):
    spoil, words = FAULTS[fault]
    spoil(folder)
    refuse("model", "info", str(folder), words=words)


@pytest.mark.parametrize("fault", FAULTS)
def test_a_broken_checkpoint_is_refused_by_serve_before_any_process_starts(folder, fault):
    spoil, words = FAULTS[fault]
    spoil(folder)
    refuse("serve", str(folder), "--port", "0", words=words)


def test_info_of_a_whole_checkpoint_and_of_its_config_alone(whole):
    texts = []
    for path in (whole, whole / "config.json"):
        result = CliRunner().invoke(app, ["model", "info", str(path)])
        assert (result.exit_code, result.stderr) == (0, "")
        texts.append(result.stdout)
    assert texts[0] == texts[1]
    assert "reindex, ratio 1, KV of 6, selection of 10" in texts[0]


def test_info_of_the_released_config():
    path = CONFIG.parents[1] / "v41_flash_config.json"
    result = CliRunner().invoke(app, ["model", "info", str(path)])
    assert result.exit_code == 0
    for line in (
        "KV per token: 890 B",
        "KV per block: 113,920 B",
        "encoder state: 1,415,040 B",
        "backbone parameters: 551.6 billion",
        "layers: 40, of which encoder: 20",
        "24 reindex, ratio 1, KV of 20, selection of 24",
    ):
        assert line in result.stdout


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ("engine.kv_memory=1000", ("engine.kv_memory = 1000", "at least")),
        ("engine.kv_memory=1_000_000_000_000_000", ("engine.kv_memory", "this machine has")),
        ("engine.host_kv_memory=1_000_000_000_000_000", ("engine.host_kv_memory", "this machine has")),
        ("engine.host_kv_memory=-1", ("engine.host_kv_memory = -1", "greater than or equal to 0")),
        ("engine.num_kept_tokens=3", ("engine.num_kept_tokens = 3", "or 0 for all")),
        ("engine.max_model_len=513", ("engine.max_model_len", "512")),
        ("engine.max_num_seqs=1_000_000_000_000", ("engine.max_num_seqs", "65536")),
        ("engine.dtype=fp8", ("engine.dtype", "fp8")),
        ("transfer.shm_dir=/nosuch", ("transfer.shm_dir", "/nosuch")),
        ("transfer.ring_bytes=0", ("transfer.ring_bytes = 0", "65536")),
    ],
)
def test_a_setting_that_cannot_be_honoured(whole, setting, words):
    refuse("serve", str(whole), "--port", "0", "--set", setting, words=words)


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ("synthetic.num_layers=1_000_000_000_000", ("synthetic.num_layers", "1024")),
        ("synthetic.num_blocks=1_000_000_000_000", ("synthetic.num_blocks", "this machine has")),
        ("synthetic.vocab_size=1_000_000_000_000", ("synthetic.vocab_size", "1048576")),
        ("synthetic.vocab_size=2", ("synthetic.vocab_size", "at least")),
    ],
)
def test_a_synthetic_model_that_cannot_exist(setting, words):
    refuse("serve", "synthetic", "--port", "0", "--set", setting, words=words)


def test_a_journal_that_cannot_be_made(tmp_path):
    (tmp_path / "file").write_text("")
    refuse(
        "serve", "synthetic", "--port", "0", "--journal", str(tmp_path / "file" / "j"), words=("--journal",)
    )
