"""What a metadata shard keeps on disk: its newest pool map, and checkpoints of its index and quotas.

    file     `map.N`, `index.N`: the one with the largest N that is whole counts, older ones are removed
    content  magic, format u16, 0 u16, xxh3_64 of the rest u64, head bytes u32; head as msgpack; arrays, raw

A file is written under a new name and synced before the one before it is removed, so that a crash leaves the
old one or the new one. Whatever is not exactly what was written is refused: the metadata are hints, and the
storage nodes have it all.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import structlog
import xxhash

from millpond.core.errors import DataError
from millpond.core.pool_map import PoolMap
from millpond.store.files import Bytes, Files
from millpond.store.metadata.quotas import TenantQuota

MAGIC = b"MPMD"
FORMAT = 1
_PREFIX = struct.Struct("<4sHHQI")
_CHECKED_AT = _PREFIX.size - 4
_ARRAYS = {"capacity": "<i8", "entries": "<u8", "records": "<u8", "covered": "|u1"}

log = structlog.get_logger(__name__)


class _Head(msgspec.Struct, frozen=True):
    unix_s: int
    is_clean: bool
    quotas: dict[int, TenantQuota]
    dropped: dict[int, int]
    shapes: dict[str, tuple[int, ...]]


@dataclass(frozen=True)
class Checkpoint:
    """State of a shard at one time."""

    unix_s: int
    is_clean: bool
    """Written when the shard stopped: nothing was committed after it."""
    index: dict[str, npt.NDArray[Any]]
    """`BlockIndex.save`."""
    quotas: dict[int, TenantQuota] = field(default_factory=dict)
    """Tenant -> limits that were set."""
    dropped: dict[int, int] = field(default_factory=dict)
    """Tenant -> when it was dropped, seconds since 1970: what it wrote before does not come back."""


def save_checkpoint(files: Files, checkpoint: Checkpoint) -> None:
    """Write a checkpoint and remove those before it.

    Raises:
        OSError: It could not be written; the one before still counts.
    """
    arrays = [np.ascontiguousarray(checkpoint.index[name], dtype) for name, dtype in _ARRAYS.items()]
    shapes = {name: array.shape for name, array in zip(_ARRAYS, arrays, strict=True)}
    head = _Head(checkpoint.unix_s, checkpoint.is_clean, checkpoint.quotas, checkpoint.dropped, shapes)
    _save(
        files, "index", [msgspec.msgpack.encode(head), *(a.reshape(-1).view(np.uint8).data for a in arrays)]
    )


def load_checkpoint(files: Files, *, now_s: int, max_age_s: int) -> Checkpoint | None:
    """The newest checkpoint that is whole and not older than `max_age_s`, or None.

    Raises:
        OSError: The folder cannot be read.
    """
    for content in _load(files, "index"):
        try:
            checkpoint = _parse_checkpoint(content)
        except (DataError, msgspec.DecodeError) as error:
            log.warning("checkpoint refused", error=str(error))
            continue
        if now_s - checkpoint.unix_s <= max_age_s:
            return checkpoint
        log.warning("checkpoint refused", error=f"{now_s - checkpoint.unix_s} s old")
        return None
    return None


def save_map(files: Files, pool_map: PoolMap) -> None:
    """Write the pool map; see `save_checkpoint`."""
    _save(files, "map", [encode_map(pool_map)])


def load_map(files: Files) -> PoolMap | None:
    """The newest map that is whole, or None.

    Raises:
        OSError: The folder cannot be read.
    """
    for content in _load(files, "map"):
        try:
            return decode_map(_head_of(content)[0])
        except DataError as error:
            log.warning("saved map refused", error=error.message)
    return None


def encode_map(pool_map: PoolMap) -> bytes:
    """The msgpack form of a map, as messages carry it."""
    return msgspec.msgpack.encode(pool_map)


def decode_map(packed: Bytes) -> PoolMap:
    """A map from its msgpack form.

    Raises:
        DataError: It is none.
    """
    try:
        return msgspec.msgpack.decode(packed, type=PoolMap)
    except (msgspec.DecodeError, RecursionError) as error:
        raise DataError(f"no pool map: {error}", code="pool.bad_map") from error


def _parse_checkpoint(content: memoryview) -> Checkpoint:
    packed, rest = _head_of(content)
    head = msgspec.msgpack.decode(packed, type=_Head)
    index: dict[str, npt.NDArray[Any]] = {}
    for name, dtype in _ARRAYS.items():
        shape = head.shapes.get(name, ())
        num_bytes = int(np.prod(shape, dtype=np.int64)) * np.dtype(dtype).itemsize
        if not shape or min(shape) < 0 or num_bytes > len(rest):
            raise DataError(f"array {name} of shape {shape}", code="pool.checkpoint")
        index[name] = np.frombuffer(rest[:num_bytes], dtype).reshape(shape)
        rest = rest[num_bytes:]
    if len(rest) or len(index["entries"]) != int(index["capacity"].sum()):
        raise DataError("arrays that do not fit together", code="pool.checkpoint")
    return Checkpoint(head.unix_s, head.is_clean, index, head.quotas, head.dropped)


def _head_of(content: memoryview) -> tuple[memoryview, memoryview]:
    """Head and arrays of a file."""
    if len(content) < _PREFIX.size:
        raise DataError(f"cut off after {len(content)} bytes", code="pool.checkpoint")
    magic, version, zero, checksum, head_bytes = _PREFIX.unpack_from(content)
    if magic != MAGIC or version != FORMAT or zero:
        raise DataError(f"format {version} of {bytes(magic)!r}", code="pool.checkpoint")
    if xxhash.xxh3_64_intdigest(content[_CHECKED_AT:]) != checksum:
        raise DataError("checksum does not match", code="pool.checkpoint")
    return content[_PREFIX.size : _PREFIX.size + head_bytes], content[_PREFIX.size + head_bytes :]


def _save(files: Files, kind: str, parts: list[Bytes]) -> None:
    numbers = _numbers(files, kind)
    head_bytes = len(parts[0])
    checksum = xxhash.xxh3_64(head_bytes.to_bytes(4, "little"))
    for part in parts:
        checksum.update(part)
    prefix = _PREFIX.pack(MAGIC, FORMAT, 0, checksum.intdigest(), head_bytes)
    name = f"{kind}.{max(numbers, default=0) + 1}"
    file = files.create(name)
    try:
        files.write(file, 0, [prefix, *parts])
        files.sync(file)
    finally:
        files.close(file)
    files.sync_names()
    for number in numbers:
        files.remove(f"{kind}.{number}")


def _load(files: Files, kind: str) -> list[memoryview]:
    """Contents of the files of a kind, newest first."""
    contents: list[memoryview] = []
    for number in sorted(_numbers(files, kind), reverse=True):
        file = files.open(f"{kind}.{number}")
        try:
            content = memoryview(bytearray(files.size(file)))
            contents.append(content[: files.read_into(file, 0, content)])
        finally:
            files.close(file)
    return contents


def _numbers(files: Files, kind: str) -> list[int]:
    pairs = (name.partition(".") for name in files.names())
    return [int(number) for prefix, _, number in pairs if prefix == kind and number.isdecimal()]
