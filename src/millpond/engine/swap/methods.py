"""Four ways to copy pieces of memory between places at random: one interface.

    method      a call moves          needs                              on a GPU host its place is taken by
    per_block   one piece             nothing                            cudaMemcpyAsync
    batched     a list of pieces      a C compiler at first use          cudaMemcpyBatchAsync
    gather      pieces by index       nothing                            a kernel that copies by index
    one_sided   a list of pieces      Linux: process_vm_readv allowed    the NIC's reads into device memory

Memory is `[items, bytes]` with any distance between items: row `r` of all slots of the arena, row `r` of all
blocks of the engine. All methods leave the same bytes, and none holds the interpreter lock while it copies.
Only host memory is served: an engine whose blocks lie on a device moves rows one by one.

`one_sided` has the kernel read the source's pages: what a third party does that knows both addresses and
asks neither side. Here both are mapped by this process, which always may read itself; another process's
memory would need the right to trace it.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from millpond.core.errors import ConfigError, InvariantBroken
from millpond.engine.compiler import build_library

Memory: TypeAlias = npt.NDArray[np.uint8]
"""[items, bytes]: pieces of equal size, each in one stretch."""
Items: TypeAlias = npt.NDArray[np.int64]

DEFAULT_BATCH = 64
"""Pieces per call of the batched copy, until it was measured."""
_GATHER_BYTES = 256 * 1024
"""Pieces that are gathered at once: what stays in the core's own cache on the way."""
_MAX_VECTORS = 1024
"""Linux's limit of pieces per call."""
_SOURCE = Path(__file__).with_name("copy.c")


class CopyMethod(Protocol):
    """Copies pieces."""

    @property
    def name(self) -> str:
        """As in `METHODS`."""
        ...

    def copy(self, source: Memory, source_items: Items, target: Memory, target_items: Items) -> None:
        """Copy `source[source_items[i]]` to `target[target_items[i]]` for every i.

        Raises:
            InvariantBroken: Sizes differ, or an item is outside its memory.
        """
        ...


def _addresses(memory: Memory, items: Items) -> npt.NDArray[np.uint64]:
    """Address of each piece."""
    return (items * memory.strides[0] + memory.ctypes.data).astype(np.uint64)


def _check(source: Memory, source_items: Items, target: Memory, target_items: Items) -> None:
    if source.shape[1] != target.shape[1] or len(source_items) != len(target_items):
        raise InvariantBroken(
            f"{len(source_items)} pieces of {source.shape[1]} bytes"
            f" for {len(target_items)} of {target.shape[1]} bytes"
        )
    for memory, items in ((source, source_items), (target, target_items)):
        if memory.ndim != 2 or memory.strides[1] != 1:
            raise InvariantBroken("pieces of memory are not in one stretch each")
        if len(items) and not 0 <= items.min() <= items.max() < len(memory):
            raise InvariantBroken(f"items {items.min()} ... {items.max()} of {len(memory)}")
    if not target.flags.writeable:
        raise InvariantBroken("the target may not be written")


class PerBlockCopy:
    """One call per piece."""

    name = "per_block"

    def copy(self, source: Memory, source_items: Items, target: Memory, target_items: Items) -> None:
        """See `CopyMethod.copy`."""
        _check(source, source_items, target, target_items)
        begins = _addresses(source, source_items).tolist()
        places = _addresses(target, target_items).tolist()
        num_bytes = source.shape[1]
        for place, begin in zip(places, begins, strict=True):
            ctypes.memmove(place, begin, num_bytes)


class BatchedCopy:
    """One native call per batch of pieces."""

    name = "batched"

    def __init__(self, library: ctypes.CDLL, batch: int = DEFAULT_BATCH) -> None:
        self._copy_pieces = library.mp_copy_pieces
        self._copy_pieces.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64]
        self._copy_pieces.restype = None
        self.batch = batch

    @classmethod
    def make(cls, batch: int = DEFAULT_BATCH) -> BatchedCopy | None:
        """Build the library if need be; None without a compiler."""
        library = _load_library()
        return None if library is None else cls(library, batch)

    def copy(self, source: Memory, source_items: Items, target: Memory, target_items: Items) -> None:
        """See `CopyMethod.copy`."""
        _check(source, source_items, target, target_items)
        begins, places = _addresses(source, source_items), _addresses(target, target_items)
        for at in range(0, len(begins), self.batch):
            part, into = begins[at : at + self.batch], places[at : at + self.batch]
            self._copy_pieces(part.ctypes.data, into.ctypes.data, len(part), source.shape[1])


class GatherCopy:
    """Index copies of the array library, through a buffer that stays in the cache."""

    name = "gather"

    def copy(self, source: Memory, source_items: Items, target: Memory, target_items: Items) -> None:
        """See `CopyMethod.copy`."""
        _check(source, source_items, target, target_items)
        at_once = max(1, _GATHER_BYTES // source.shape[1])
        for at in range(0, len(source_items), at_once):
            target[target_items[at : at + at_once]] = source[source_items[at : at + at_once]]


class OneSidedCopy:
    """The kernel reads the source's memory."""

    name = "one_sided"

    def __init__(self, read: Callable[..., int]) -> None:
        self._read = read

    @classmethod
    def make(cls) -> OneSidedCopy | None:
        """None where the system has no such call, or forbids it."""
        read = getattr(ctypes.CDLL(None, use_errno=True), "process_vm_readv", None)
        if read is None:
            return None
        read.argtypes = [ctypes.c_int, *[ctypes.c_void_p, ctypes.c_ulong] * 2, ctypes.c_ulong]
        read.restype = ctypes.c_ssize_t
        method = cls(read)
        source, target = np.ones((1, 8), np.uint8), np.zeros((1, 8), np.uint8)
        first = np.zeros(1, np.int64)
        try:
            method.copy(source, first, target, first)
        except OSError:
            return None
        return method

    def copy(self, source: Memory, source_items: Items, target: Memory, target_items: Items) -> None:
        """See `CopyMethod.copy`."""
        _check(source, source_items, target, target_items)
        num_bytes = source.shape[1]
        remote = _vectors(_addresses(source, source_items), num_bytes)
        local = _vectors(_addresses(target, target_items), num_bytes)
        for at in range(0, len(remote), _MAX_VECTORS):
            there, here = remote[at : at + _MAX_VECTORS], local[at : at + _MAX_VECTORS]
            count = len(there)
            num_read = self._read(os.getpid(), here.ctypes.data, count, there.ctypes.data, count, 0)
            if num_read != count * num_bytes:
                raise OSError(ctypes.get_errno(), f"process_vm_readv moved {num_read} bytes")


def _vectors(begins: npt.NDArray[np.uint64], num_bytes: int) -> npt.NDArray[np.uint64]:
    """[pieces, (address, bytes)], as `struct iovec`."""
    return np.stack([begins, np.full(len(begins), num_bytes, np.uint64)], axis=1)


@lru_cache(maxsize=1)
def _load_library() -> ctypes.CDLL | None:
    path = build_library(_SOURCE)
    return None if path is None else ctypes.CDLL(str(path))


METHODS: dict[str, Callable[[], CopyMethod | None]] = {
    "per_block": PerBlockCopy,
    "batched": BatchedCopy.make,
    "gather": GatherCopy,
    "one_sided": OneSidedCopy.make,
}


def make_method(name: str) -> CopyMethod:
    """Make one method.

    Raises:
        ConfigError: There is none of this name, or not on this host.
    """
    make = METHODS.get(name)
    if make is None:
        raise ConfigError(
            f"engine.swap_method is {name!r}; use auto, {', '.join(METHODS)}", param="engine.swap_method"
        )
    method = make()
    if method is None:
        raise ConfigError(
            f"engine.swap_method {name!r} cannot be used on this host", param="engine.swap_method"
        )
    return method
