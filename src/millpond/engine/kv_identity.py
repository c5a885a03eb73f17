"""What names the KV of the configured model: its layout and its fingerprint. No torch, no weights in memory.

Whoever hashes blocks (the gateway), keeps them (the node daemon) and computes them (the engine) has to mean
the same: all of them start from here.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from dataclasses import replace
from pathlib import Path

from millpond.config.engine_params import EngineParams
from millpond.config.synthetic_params import SYNTHETIC, SyntheticParams
from millpond.core.errors import ModelFormatError
from millpond.core.kv_layout import KvLayout
from millpond.core.shapes import KvFormat, kv_layout
from millpond.core.units import SECOND_NS
from millpond.engine.memory import llama_kv_layout
from millpond.engine.model.config import is_v41, load_config
from millpond.engine.model_files import (
    ModelFiles,
    file_digest,
    load_llama_config,
    locate_model,
    model_fingerprint,
)
from millpond.engine.synthetic import make_layout

DIGEST_FILE = "weight_digests.json"
_TOKENIZER_FILE = "tokenizer.json"
_SETTLED_NS = 2 * SECOND_NS
"""A file that changed more recently could change again without another mtime."""
_FP32 = "fp32"
_USUAL = EngineParams()


def configured_layout(engine: EngineParams, synthetic: SyntheticParams) -> KvLayout:
    """Layout of the blocks and states of the configured model, as its engine will have it.

    Raises:
        UnknownModel: There is no such model.
        ModelFormatError: Its config cannot be used.
    """
    if engine.model == SYNTHETIC:
        return make_layout(synthetic)
    files = locate_model(engine.model)
    if is_v41(files):
        kv_format = KvFormat.FP32 if engine.dtype == _FP32 else KvFormat.PACKED
        return kv_layout(load_config(files.root / "config.json").shape, kv_format)
    return llama_kv_layout(load_llama_config(files), _FP32 if engine.dtype == _FP32 else "bf16")


def named_files(files: ModelFiles) -> ModelFiles:
    """Add to the weight files what else the bits of KV depend on: V4.1's n-gram tables look up compressed
    token ids, which are made from the tokenizer (`load_token_map`).

    Raises:
        ModelFormatError: There is no such file.
    """
    if not is_v41(files):
        return files
    path = files.root / _TOKENIZER_FILE
    if not path.is_file():
        raise ModelFormatError(f"{path.name}: missing in the model folder", code="model.tokenizer")
    return replace(files, weight_files=(*files.weight_files, path))


def configured_fingerprint(engine: EngineParams, digests: WeightDigests) -> bytes:
    """Digest of the model and of how it is computed, 32 bytes: KV of equal names has equal bits.

    The fingerprint of the model's `named_files`; hashed together with the settings that change bits and not
    the layout, if these are not the usual ones.

    Raises:
        UnknownModel: There is no such model.
        ModelFormatError: Its files cannot be used.
    """
    if engine.model == SYNTHETIC:
        return hashlib.sha256(SYNTHETIC.encode()).digest()
    model = model_fingerprint(named_files(locate_model(engine.model)), digests.digest)
    if engine.numerics == _USUAL.numerics and engine.num_kept_tokens == _USUAL.num_kept_tokens:
        return model
    settings = {"numerics": engine.numerics, "num_kept_tokens": engine.num_kept_tokens}
    return hashlib.sha256(model + json.dumps(settings, sort_keys=True).encode()).digest()


class WeightDigests:
    """SHA-256 of files, remembered in a folder as long as size, inode and times of change stay the same.

    Args:
        folder: Outlives the service; made if missing.
    """

    def __init__(self, folder: Path) -> None:
        self._path = folder / DIGEST_FILE
        self._known = self._load()

    def digest(self, path: Path) -> bytes:
        """SHA-256 of a file."""
        status = path.stat()
        parts = (status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns)
        stamp = ":".join(map(str, parts))
        known = self._known.get(stamp)
        if known is not None:
            return known
        digest = file_digest(path)
        if time.time_ns() - status.st_mtime_ns > _SETTLED_NS:
            self._known[stamp] = digest
            self._save()
        return digest

    def _load(self) -> dict[str, bytes]:
        try:
            saved = json.loads(self._path.read_text(encoding="utf-8"))
            known = {str(stamp): bytes.fromhex(text) for stamp, text in saved.items()}
        except (OSError, ValueError, AttributeError, TypeError):
            return {}  # a cache: the files are read again
        return known if all(len(digest) == hashlib.sha256().digest_size for digest in known.values()) else {}

    def _save(self) -> None:
        self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        draft = self._path.with_suffix(f".{os.getpid()}")
        draft.write_text(json.dumps({stamp: digest.hex() for stamp, digest in self._known.items()}, indent=1))
        draft.replace(self._path)
