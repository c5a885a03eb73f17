"""Read the header of a GGUF file: metadata and the table of tensors.

The package `gguf` builds numpy views for every string of the vocabulary, which takes seconds; this reader
walks the header once. Tensor data stay in the file until `weights` maps them.

Source: GGUF specification, versions 2 and 3, little-endian.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from pathlib import Path

from millpond.core.errors import ModelFormatError
from millpond.core.units import align_up

_MAGIC = b"GGUF"
_SCALARS = {
    0: struct.Struct("<B"),
    1: struct.Struct("<b"),
    2: struct.Struct("<H"),
    3: struct.Struct("<h"),
    4: struct.Struct("<I"),
    5: struct.Struct("<i"),
    6: struct.Struct("<f"),
    7: struct.Struct("<?"),
    10: struct.Struct("<Q"),
    11: struct.Struct("<q"),
    12: struct.Struct("<d"),
}
_STRING = 8
_ARRAY = 9
_HEADER_READ_BYTES = 1 << 20
_MAX_DIMS = 4
_MAX_HEADER_BYTES = 1 << 28
"""A header holds vocabulary and tensor names; the largest known ones are about 20 MiB."""


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """Where one tensor lies in the file."""

    name: str
    shape: tuple[int, ...]
    """Outermost dimension first, as torch counts (the file stores it reversed)."""
    ggml_type: int
    """Value of `gguf.GGMLQuantizationType`."""
    offset: int
    """Bytes from the start of the file."""


@dataclass(frozen=True, slots=True)
class GgufFile:
    """Header of one GGUF file."""

    path: Path
    metadata: dict[str, object]
    """Scalars as Python values, arrays as lists."""
    tensors: dict[str, GgufTensor]


class _Cursor:
    """Bounds-checked reading position inside the header; grows its buffer as needed."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file = path.open("rb")
        self._buffer = b""
        self.position = 0

    def close(self) -> None:
        self._file.close()

    def _need(self, num_bytes: int) -> None:
        end = self.position + num_bytes
        while len(self._buffer) < end:
            if end > _MAX_HEADER_BYTES:
                raise self.error("a length field is implausibly large")
            more = self._file.read(max(_HEADER_READ_BYTES, end - len(self._buffer)))
            if not more:
                raise self.error("the file ends inside the header")
            self._buffer += more

    def error(self, what: str) -> ModelFormatError:
        return ModelFormatError(f"{self._path.name}: {what} (at byte {self.position})", code="model.gguf")

    def take(self, num_bytes: int) -> bytes:
        self._need(num_bytes)
        begin = self.position
        self.position = begin + num_bytes
        return self._buffer[begin : self.position]

    def scalar(self, kind: int) -> int | float | bool:
        form = _SCALARS.get(kind)
        if form is None:
            raise self.error(f"unknown value type {kind}")
        return form.unpack(self.take(form.size))[0]

    def uint(self, kind: int) -> int:
        return int(self.scalar(kind))

    def text(self) -> str:
        return self.take(self.uint(10)).decode("utf-8", errors="replace")

    def value(self, kind: int) -> object:
        if kind == _STRING:
            return self.text()
        if kind != _ARRAY:
            return self.scalar(kind)
        item_kind = self.uint(4)
        count = self.uint(10)
        if item_kind == _ARRAY:
            raise self.error("nested arrays are not supported")
        if item_kind == _STRING:
            return [self.text() for _ in range(count)]
        form = _SCALARS.get(item_kind)
        if form is None:
            raise self.error(f"unknown value type {item_kind}")
        return [item[0] for item in form.iter_unpack(self.take(count * form.size))]


def parse_gguf(path: Path) -> GgufFile:
    """Parse the header of a GGUF file.

    Raises:
        ModelFormatError: Not a GGUF file of version 2 or 3, or the header is cut short.
    """
    cursor = _Cursor(path)
    try:
        if cursor.take(4) != _MAGIC:
            raise cursor.error("not a GGUF file")
        version = cursor.uint(4)
        if version not in (2, 3):
            raise cursor.error(f"GGUF version {version} is not supported")
        num_tensors = cursor.uint(10)
        num_values = cursor.uint(10)
        metadata: dict[str, object] = {}
        for _ in range(num_values):
            key = cursor.text()
            metadata[key] = cursor.value(cursor.uint(4))
        found: list[tuple[str, tuple[int, ...], int, int]] = []
        for _ in range(num_tensors):
            name = cursor.text()
            num_dims = cursor.uint(4)
            if num_dims > _MAX_DIMS:
                raise cursor.error(f"tensor {name} has {num_dims} dimensions")
            shape = tuple(cursor.uint(10) for _ in range(num_dims))[::-1]
            found.append((name, shape, cursor.uint(4), cursor.uint(10)))
        alignment = metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or alignment <= 0:
            raise cursor.error(f"general.alignment is {alignment!r}")
        start = align_up(cursor.position, alignment)
    finally:
        cursor.close()
    tensors = {name: GgufTensor(name, shape, kind, start + offset) for name, shape, kind, offset in found}
    return GgufFile(path=path, metadata=metadata, tensors=tensors)
