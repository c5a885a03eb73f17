"""Headers of safetensors shards: what lies where, read and checked without torch and without the data.

A file is a little-endian u64, that many bytes of JSON (name -> dtype, shape, byte range), then the data.

Source: the safetensors format.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from millpond.core.errors import ModelFormatError

BITS_BY_DTYPE = {
    "BOOL": 8,
    "U8": 8,
    "I8": 8,
    "F8_E4M3": 8,
    "F8_E5M2": 8,
    "F8_E8M0": 8,
    "U16": 16,
    "I16": 16,
    "F16": 16,
    "BF16": 16,
    "U32": 32,
    "I32": 32,
    "F32": 32,
    "U64": 64,
    "I64": 64,
    "F64": 64,
}
_LENGTH = struct.Struct("<Q")
_MAX_HEADER_BYTES = 100_000_000
"""What the format allows."""


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """Where one tensor lies and what it is."""

    file: Path
    dtype: str
    """As the format spells it, for example `BF16`."""
    shape: tuple[int, ...]
    begin: int
    """Byte range in the file."""
    end: int


def read_headers(files: Sequence[Path]) -> dict[str, TensorEntry]:
    """Read the headers of a model's shards.

    Raises:
        ModelFormatError: A shard is cut short or no safetensors file, or two of them hold the same tensor.
    """
    table: dict[str, TensorEntry] = {}
    for file in files:
        for name, entry in read_header(file).items():
            if name in table:
                raise _error(file, f"{name} is in {table[name].file.name} too", name)
            table[name] = entry
    return table


def read_header(file: Path) -> dict[str, TensorEntry]:
    """Read the header of one file.

    Raises:
        ModelFormatError: It is cut short or no safetensors file.
    """
    try:
        with file.open("rb") as opened:
            file_bytes = opened.seek(0, 2)
            opened.seek(0)
            head = opened.read(_LENGTH.size)
            header_bytes = _LENGTH.unpack(head)[0] if len(head) == _LENGTH.size else _MAX_HEADER_BYTES + 1
            if header_bytes > _MAX_HEADER_BYTES:
                raise _error(file, "is no safetensors file")
            text = opened.read(header_bytes)
    except OSError as error:
        raise _error(file, f"cannot be read: {error.strerror}") from error
    if len(text) < header_bytes:
        raise _error(file, f"is truncated: {len(text)} of {header_bytes} bytes of its header")
    data_begin = _LENGTH.size + header_bytes
    entries = _entries(file, text, data_begin)
    end = max((entry.end for entry in entries.values()), default=data_begin)
    if file_bytes < end:
        raise _error(file, f"is truncated: {file_bytes} of {end} bytes")
    return entries


def _entries(file: Path, text: bytes, data_begin: int) -> dict[str, TensorEntry]:
    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        values = dict(pairs)
        if len(values) < len(pairs):
            twice = next(name for i, (name, _) in enumerate(pairs) if any(name == n for n, _ in pairs[:i]))
            raise _error(file, f"names {twice} twice in its header", twice)
        return values

    try:
        record = json.loads(text, object_pairs_hook=once)
    except (ValueError, RecursionError) as error:
        raise _error(file, f"has a header that is no JSON: {error}") from error
    if not isinstance(record, dict):
        raise _error(file, "has a header that is no JSON object")
    record.pop("__metadata__", None)
    return {name: _entry(file, name, value, data_begin) for name, value in record.items()}


def _entry(file: Path, name: str, value: Any, data_begin: int) -> TensorEntry:
    match value:
        case {"dtype": str(dtype), "shape": list(shape), "data_offsets": [int(begin), int(end)]}:
            pass
        case _:
            raise _error(file, f"has no dtype, shape and byte range for {name}", name)
    if not all(isinstance(size, int) and size >= 0 for size in shape):
        raise _error(file, f"{name} has shape {shape}", name)
    bits = BITS_BY_DTYPE.get(dtype)
    if bits is not None and (begin < 0 or end - begin != math.prod(shape) * bits // 8):
        raise _error(file, f"{name} has {end - begin} bytes, which is not {dtype} {shape}", name)
    return TensorEntry(file, dtype, tuple(shape), data_begin + begin, data_begin + end)


def _error(file: Path, what: str, tensor: str | None = None) -> ModelFormatError:
    return ModelFormatError(f"{file.name}: {what}", code="model.weights", param=tensor)
