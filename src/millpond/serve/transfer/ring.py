"""Shared memory between two processes of one host: a file of equal slots, used in turn.

The sender creates the file, both map it, and the sender unlinks it as soon as the receiver has answered:
from then on the kernel frees it with the last process, however that one ends. Pages are touched when
mapped, because the first write to a fresh page costs ten times the copy.
"""

from __future__ import annotations

import mmap
import os
import re
import secrets
import stat
from pathlib import Path
from typing import Self

from millpond.core.errors import DataError
from millpond.core.units import GIB, KIB, align_up

SLOT_ALIGN_BYTES = 4 * KIB
MIN_SLOTS = 4
MAX_RING_BYTES = GIB
"""What a receiver agrees to map."""
_NAME = re.compile(r"millpond-ring-(\d+)-[0-9a-f]{16}")


class Ring:
    """A mapped ring file, made by `create` or `attach`. Unmapped when it and its last view are gone."""

    def __init__(self, path: Path, memory: mmap.mmap, num_slots: int, slot_bytes: int) -> None:
        self.path = path
        self.num_slots = num_slots
        self.slot_bytes = slot_bytes
        self._view = memoryview(memory)

    @classmethod
    def create(cls, folder: Path, ring_bytes: int, piece_bytes: int) -> Self:
        """Make a ring for pieces of up to `piece_bytes` in about `ring_bytes`, but at least four slots.

        Raises:
            OSError: No such folder, or no room in it.
        """
        slot_bytes = align_up(piece_bytes, SLOT_ALIGN_BYTES)
        num_slots = max(MIN_SLOTS, ring_bytes // slot_bytes)
        path = folder / f"millpond-ring-{os.getpid()}-{secrets.token_hex(8)}"
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            os.posix_fallocate(descriptor, 0, num_slots * slot_bytes)
            memory = mmap.mmap(descriptor, num_slots * slot_bytes, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)
        except OSError:
            path.unlink()
            raise
        finally:
            os.close(descriptor)
        return cls(path, memory, num_slots, slot_bytes)

    @classmethod
    def attach(cls, path: Path, num_slots: int, slot_bytes: int) -> Self:
        """Map, for reading, the ring that a sender of the same user made.

        Raises:
            OSError: The file cannot be opened: it is on another host, for example.
            DataError: It is not what the sender says.
        """
        if not (0 < num_slots * slot_bytes <= MAX_RING_BYTES):
            raise DataError(f"ring of {num_slots} slots of {slot_bytes} bytes", code="handoff.ring")
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            status = os.fstat(descriptor)
            if (
                not stat.S_ISREG(status.st_mode)
                or status.st_uid != os.geteuid()
                or status.st_mode & 0o077
                or status.st_size != num_slots * slot_bytes
            ):
                raise DataError("the ring file is not the sender's", code="handoff.ring")
            memory = mmap.mmap(
                descriptor, status.st_size, mmap.MAP_SHARED | mmap.MAP_POPULATE, prot=mmap.PROT_READ
            )
        finally:
            os.close(descriptor)
        return cls(path, memory, num_slots, slot_bytes)

    def slot(self, index: int, num_bytes: int) -> memoryview:
        """The first bytes of a slot. 0 <= index < num_slots, num_bytes <= slot_bytes."""
        begin = index * self.slot_bytes
        return self._view[begin : begin + num_bytes]

    def unlink(self) -> None:
        """Remove the name; the memory lives as long as it is mapped. May be called twice."""
        self.path.unlink(missing_ok=True)


def remove_leftovers(folder: Path) -> int:
    """Remove the ring files of processes that died between making and unlinking one.

    Returns:
        How many there were.
    """
    num_removed = 0
    for path in folder.iterdir():
        match = _NAME.fullmatch(path.name)
        if match is None or _is_alive(int(match[1])):
            continue
        try:
            path.unlink()
        except (FileNotFoundError, PermissionError):
            continue  # another process was faster, or it is another user's
        num_removed += 1
    return num_removed


def _is_alive(process_id: int) -> bool:
    try:
        os.kill(process_id, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
