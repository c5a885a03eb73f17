"""Who hashes blocks and who computes them mean the same, in every process."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from millpond.config.engine_params import EngineParams
from millpond.config.synthetic_params import SyntheticParams
from millpond.core.errors import ModelFormatError
from millpond.engine.kv_identity import (
    DIGEST_FILE,
    WeightDigests,
    configured_fingerprint,
    configured_layout,
)
from millpond.engine.load import load_engine
from millpond.engine.model.init import init_checkpoint
from millpond.engine.model_files import locate_model, model_fingerprint
from millpond.engine.synthetic import SyntheticEngine
from tests.unit.engine.model.test_config import tiny
from tests.unit.engine.tiny_llama import write_checkpoint

SYNTHETIC = SyntheticParams(num_layers=3, kv_bytes_per_token=24)


@pytest.fixture(scope="module")
def v41(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("v41") / "model"
    values = tiny()
    values["text_config"]["engram_compressed_vocab_size"] = None
    init_checkpoint(values, folder, seed=3)
    return folder


def test_the_synthetic_engine_has_the_configured_layout():
    layout = configured_layout(EngineParams(model="synthetic"), SYNTHETIC)
    assert SyntheticEngine(SYNTHETIC).layout == layout
    assert SyntheticEngine(SYNTHETIC).layout.fingerprint == layout.fingerprint


@pytest.mark.parametrize("dtype", ["auto", "bf16", "fp32"])
@pytest.mark.parametrize("kind", ["llama", "v41"])
def test_an_engine_has_the_configured_layout(tmp_path: Path, v41: Path, kind: str, dtype: str):
    folder = v41 if kind == "v41" else write_checkpoint(tmp_path / "model")
    params = EngineParams(model=str(folder), dtype=dtype, kv_memory=6 << 20, max_num_seqs=2)
    layout = configured_layout(params, SYNTHETIC)
    assert load_engine(params).layout == layout
    assert bool(layout.state) is (kind == "v41")


def test_other_processes_find_the_same_names_without_torch(tmp_path: Path):
    params = EngineParams(model=str(write_checkpoint(tmp_path / "model")))
    code = f"""
import sys
from pathlib import Path
from millpond.config.engine_params import EngineParams
from millpond.config.synthetic_params import SyntheticParams
from millpond.engine.kv_identity import *
params = EngineParams(model={params.model!r})
layout = configured_layout(params, SyntheticParams())
print(layout.fingerprint.hex(), configured_fingerprint(params, WeightDigests(Path({str(tmp_path)!r}))).hex())
assert "torch" not in sys.modules and "numba" not in sys.modules
"""
    mine = configured_layout(params, SYNTHETIC).fingerprint.hex()
    digests = WeightDigests(tmp_path / "mine")
    expected = [mine, configured_fingerprint(params, digests).hex()]
    for seed in ("1", "2"):
        environment = {**os.environ, "PYTHONHASHSEED": seed}
        said = subprocess.run(
            [sys.executable, "-c", code], env=environment, check=True, capture_output=True, text=True
        )
        assert said.stdout.split() == expected


def test_settings_that_change_bits_change_the_name(tmp_path: Path):
    folder = str(write_checkpoint(tmp_path / "model"))
    digests = WeightDigests(tmp_path / "state")
    usual = configured_fingerprint(EngineParams(model=folder), digests)
    assert usual == model_fingerprint(locate_model(folder)), "interfaces A.1"
    same = EngineParams(model=folder, kv_memory=1 << 20, max_model_len=64, weights="packed")
    assert configured_fingerprint(same, digests) == usual
    others = [EngineParams(model=folder, numerics="exact"), EngineParams(model=folder, num_kept_tokens=256)]
    names = {configured_fingerprint(params, digests) for params in others}
    assert len(names | {usual}) == 3


def test_the_tokenizer_of_v41_is_part_of_the_name(v41: Path, tmp_path: Path):
    """N-gram tables look up compressed token ids, which are made from it."""
    folder = tmp_path / "model"
    shutil.copytree(v41, folder)
    params, digests = EngineParams(model=str(folder)), WeightDigests(tmp_path / "state")
    before = configured_fingerprint(params, digests)
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    ids = tokenizer["model"]["vocab"]
    one, other = list(ids)[-2:]
    ids[one], ids[other] = ids[other], ids[one]
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    assert configured_fingerprint(params, digests) != before
    (folder / "tokenizer.json").unlink()
    with pytest.raises(ModelFormatError, match=r"tokenizer\.json"):
        configured_fingerprint(params, digests)


def test_a_file_that_was_written_over_and_keeps_its_mtime_is_read_again(tmp_path: Path):
    weights = tmp_path / "weights"
    weights.write_bytes(b"one")
    old_ns = time.time_ns() - 3600 * 10**9
    os.utime(weights, ns=(old_ns, old_ns))
    before = weights.stat()
    assert WeightDigests(tmp_path).digest(weights) == hashlib.sha256(b"one").digest()
    weights.write_bytes(b"two")
    os.utime(weights, ns=(old_ns, old_ns))
    assert (weights.stat().st_ino, weights.stat().st_mtime_ns) == (before.st_ino, before.st_mtime_ns)
    assert WeightDigests(tmp_path).digest(weights) == hashlib.sha256(b"two").digest()


def test_weights_are_read_once_in_the_life_of_the_folder(tmp_path: Path):
    weights = tmp_path / "weights"
    weights.write_bytes(b"one")
    old_ns = time.time_ns() - 3600 * 10**9
    os.utime(weights, ns=(old_ns, old_ns))
    state = tmp_path / "state"
    assert WeightDigests(state).digest(weights) == hashlib.sha256(b"one").digest()
    saved = json.loads((state / DIGEST_FILE).read_text())
    assert list(saved.values()) == [hashlib.sha256(b"one").hexdigest()]
    # Only what is remembered can say this; a later start does.
    (state / DIGEST_FILE).write_text(json.dumps(dict.fromkeys(saved, "77" * 32)))
    assert WeightDigests(state).digest(weights) == b"\x77" * 32
    weights.write_bytes(b"two")
    os.utime(weights, ns=(old_ns + 1, old_ns + 1))
    assert WeightDigests(state).digest(weights) == hashlib.sha256(b"two").digest()


def test_a_file_that_may_still_change_is_not_remembered(tmp_path: Path):
    weights = tmp_path / "weights"
    weights.write_bytes(b"one")
    assert WeightDigests(tmp_path).digest(weights) == hashlib.sha256(b"one").digest()
    assert not (tmp_path / DIGEST_FILE).exists()


@pytest.mark.parametrize("content", ["", "[]", '{"a": 1}', '{"a": "zz"}', '{"a": "00"}'])
def test_a_damaged_memory_is_forgotten(tmp_path: Path, content: str):
    (tmp_path / DIGEST_FILE).write_text(content)
    weights = tmp_path / "weights"
    weights.write_bytes(b"one")
    assert WeightDigests(tmp_path).digest(weights) == hashlib.sha256(b"one").digest()
