"""Write one safetensors file piece by piece, so that no tensor has to lie in memory whole.

Source: the safetensors format (see `safetensors_files`).
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Mapping
from pathlib import Path

from millpond.core.errors import InvariantBroken
from millpond.core.units import align_up
from millpond.engine.safetensors_files import BITS_BY_DTYPE


class ShardWriter:
    """A file whose tensors are known beforehand. Use as a context manager."""

    def __init__(self, path: Path, layout: Mapping[str, tuple[str, tuple[int, ...]]]) -> None:
        """Write the header.

        Args:
            path: Must not exist.
            layout: Tensor name -> dtype, as the format spells it, and shape.

        Raises:
            OSError: The file cannot be made.
        """
        header: dict[str, object] = {}
        self._places: dict[str, tuple[int, int]] = {}
        end = 0
        # the widest first, so that all of them are aligned when the file is mapped
        for name, (dtype, shape) in sorted(layout.items(), key=lambda item: -BITS_BY_DTYPE[item[1][0]]):
            begin, end = end, end + math.prod(shape) * BITS_BY_DTYPE[dtype] // 8
            header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}
            self._places[name] = (begin, end)
        text = json.dumps(header, separators=(",", ":")).encode()
        text = text.ljust(align_up(len(text), 8))
        self._data_begin = 8 + len(text)
        self._file = path.open("xb")
        self._file.write(struct.pack("<Q", len(text)) + text)

    def __enter__(self) -> ShardWriter:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        self._file.close()
        unwritten = [name for name, (at, end) in self._places.items() if at < end]
        if unwritten and kind is None:
            raise InvariantBroken(f"{unwritten[0]} was not written whole")

    def append(self, name: str, data: memoryview) -> None:
        """Write the next bytes of a tensor.

        Raises:
            OSError: The disk is full, for example.
        """
        at, end = self._places[name]
        if at + len(data) > end:
            raise InvariantBroken(f"{len(data)} bytes for {name}, which has room for {end - at}")
        self._file.seek(self._data_begin + at)
        self._file.write(data)
        self._places[name] = (at + len(data), end)
