"""Backend on Intel's ISA-L, called directly: several times faster than through pyeclib's Python interface."""

from __future__ import annotations

import ctypes
import ctypes.util
import struct
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path

import numpy as np

from millpond.store.codec.backend import Combine, ShardMemory
from millpond.store.codec.gf256 import Matrix

_CARRIER = "pyeclib"
"""Package whose wheel carries a build of the library."""

_TABLE_BYTES = 32
"""ISA-L's expanded form of one coefficient."""

_XOR_ALIGN_BYTES = 32

_Int = ctypes.c_int
_Pointer = ctypes.c_void_p


def load_isal() -> ctypes.CDLL | None:
    """Load the system's ISA-L or the one inside pyeclib's wheel; None if there is neither."""
    for path in _candidates():
        try:
            library = ctypes.CDLL(path)
            library.ec_init_tables.argtypes = [_Int, _Int, _Pointer, _Pointer]
            library.ec_init_tables.restype = None
            library.ec_encode_data.argtypes = [_Int, _Int, _Int, _Pointer, _Pointer, _Pointer]
            library.ec_encode_data.restype = None
            library.xor_gen.argtypes = [_Int, _Int, _Pointer]
            library.xor_gen.restype = _Int
        except (OSError, AttributeError):  # not for this machine, or another library of that name
            continue
        return library
    return None


def _candidates() -> list[str]:
    found = ctypes.util.find_library("isal")
    paths = [found] if found else []
    try:
        files = metadata.files(_CARRIER) or []
    except metadata.PackageNotFoundError:
        files = []
    return paths + sorted(str(Path(str(f.locate()))) for f in files if f.name.startswith("libisal"))


class IsalBackend:
    """Implements `Backend`. The interpreter lock is free during each call."""

    name = "isal"

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library

    def combine(self, coefficients: Matrix, sources: Sequence[int], outputs: Sequence[int]) -> Combine:
        """See `Backend.combine`."""
        return _IsalCombine(self._library, np.ascontiguousarray(coefficients), sources, outputs)


class _IsalCombine:
    """Implements `Combine`."""

    def __init__(
        self, library: ctypes.CDLL, matrix: Matrix, sources: Sequence[int], outputs: Sequence[int]
    ) -> None:
        self._sources, self._outputs = tuple(sources), tuple(outputs)
        num_outputs, num_sources = matrix.shape
        self._tables = np.zeros(_TABLE_BYTES * matrix.size, np.uint8)
        self._tables_at = self._tables.ctypes.data
        library.ec_init_tables(num_sources, num_outputs, matrix.ctypes.data, self._tables_at)
        self._is_xor = num_outputs == 1 and num_sources > 1 and bool((matrix == 1).all())
        self._encode = library.ec_encode_data
        self._xor = library.xor_gen

    def __call__(self, shards: ShardMemory, begin: int, num_bytes: int) -> None:
        shards.check_range(begin, num_bytes)
        sources = [shards.addresses[shard] + begin for shard in self._sources]
        outputs = [shards.addresses[shard] + begin for shard in self._outputs]
        if self._is_xor and sources[0] % _XOR_ALIGN_BYTES == 0:
            self._xor(len(sources) + 1, num_bytes, _pointers(sources + outputs))
            return
        self._encode(
            num_bytes, len(sources), len(outputs), self._tables_at, _pointers(sources), _pointers(outputs)
        )


def _pointers(addresses: list[int]) -> bytes:
    """An array of pointers; ctypes passes bytes by reference, in a tenth of the time of its own arrays."""
    return struct.pack(f"{len(addresses)}P", *addresses)
