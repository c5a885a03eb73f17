"""The generation table of a target: which segments are live. One small file, written in place.

    page 0      magic, format, checksum
    then        per slot: u64, generation * 2 + (1 while its segment is live)

A segment is live from before its file exists until its entry says otherwise, durably; only then is the file
removed. So a file that a crash brings back is known to be dead, and no generation is used twice.
"""

from __future__ import annotations

import struct

import xxhash

from millpond.core.errors import DataError, WireVersionMismatch
from millpond.store.files import Files
from millpond.store.segment import PAGE_BYTES

TABLE_NAME = "generations"
FORMAT = 1
_HEADER = struct.Struct("<4sHH")
_MAGIC = b"MPGT"
_HEADER_BYTES = _HEADER.pack(_MAGIC, FORMAT, 0)
_HEADER_PAGE = (_HEADER_BYTES + struct.pack("<Q", xxhash.xxh3_64_intdigest(_HEADER_BYTES))).ljust(
    PAGE_BYTES, b"\0"
)
_ENTRY = struct.Struct("<Q")


class GenerationTable:
    """The table of one target, open for writing.

    Args:
        files: The target's folder.
        file: The open table.
        entries: Its content.
    """

    def __init__(self, files: Files, file: int, entries: list[int]) -> None:
        self._files = files
        self._file = file
        self._entries = entries
        self._next = 1 + max((entry >> 1 for entry in entries), default=0)
        self._free = sorted((slot for slot, entry in enumerate(entries) if not entry & 1), reverse=True)

    @classmethod
    def create(cls, files: Files) -> GenerationTable:
        """Make the table of a new target; a half-made one of an earlier try is replaced.

        Raises:
            OSError: The folder cannot be written.
        """
        if TABLE_NAME in files.names():
            files.remove(TABLE_NAME)
        file = files.create(TABLE_NAME)
        try:
            files.write(file, 0, [_HEADER_PAGE])
            files.sync(file)
            files.sync_names()
        except BaseException:
            files.close(file)
            raise
        return cls(files, file, [])

    @classmethod
    def load(cls, files: Files) -> GenerationTable:
        """Read the table of an existing target.

        Raises:
            DataError: It is damaged.
            WireVersionMismatch: It is of another format.
            OSError: There is none, or it cannot be read.
        """
        file = files.open(TABLE_NAME)
        try:
            return cls(files, file, read_table(files, file))
        except BaseException:
            files.close(file)
            raise

    def begin(self) -> tuple[int, int]:
        """Slot and generation of a new segment, durably live.

        Raises:
            OSError: The table could not be written or synced; what it holds is unknown.
        """
        slot = self._free.pop() if self._free else len(self._entries)
        generation = self._next
        self._next += 1
        if slot == len(self._entries):
            self._entries.append(0)
        try:
            self._set(slot, generation * 2 + 1)
        except OSError:
            self._entries[slot] = generation * 2
            self._free.append(slot)
            raise
        return slot, generation

    def end(self, slot: int) -> None:
        """Make the segment of a slot dead, durably.

        Raises:
            OSError: As in `begin`.
        """
        self._free.append(slot)
        self._set(slot, self._entries[slot] & ~1)

    def is_live(self, slot: int, generation: int) -> bool:
        """Whether this is the segment that the slot stands for now."""
        return slot < len(self._entries) and self._entries[slot] == generation * 2 + 1

    def live_slots(self) -> list[int]:
        """Slots with a live segment."""
        return [slot for slot, entry in enumerate(self._entries) if entry & 1]

    def skip(self, generation: int) -> None:
        """Never use generations up to this one."""
        self._next = max(self._next, generation + 1)

    def close(self) -> None:
        """Close the file."""
        self._files.close(self._file)

    def _set(self, slot: int, entry: int) -> None:
        self._entries[slot] = entry
        self._files.write(self._file, entry_offset(slot), [_ENTRY.pack(entry)])
        self._files.sync(self._file)


def entry_offset(slot: int) -> int:
    """Where a slot's entry lies in the file."""
    return PAGE_BYTES + slot * _ENTRY.size


def read_table(files: Files, file: int) -> list[int]:
    """Entries of an open table.

    Raises:
        DataError: It is damaged.
        WireVersionMismatch: It is of another format.
        OSError: It cannot be read.
    """
    data = bytearray(files.size(file))
    got = files.read_into(file, 0, memoryview(data))
    if data.startswith(_MAGIC) and got >= _HEADER.size:
        version = _HEADER.unpack_from(data)[1]
        if version != FORMAT:
            raise WireVersionMismatch(f"generation table of format {version}", code="target.table")
    if data[:PAGE_BYTES] != _HEADER_PAGE or got < len(data):
        raise DataError("the generation table is damaged", code="target.table")
    whole = (len(data) - PAGE_BYTES) // _ENTRY.size * _ENTRY.size
    return [entry for (entry,) in _ENTRY.iter_unpack(data[PAGE_BYTES : PAGE_BYTES + whole])]


def is_live_entry(files: Files, file: int, slot: int, generation: int) -> bool:
    """Whether a slot of an open table stands for this generation right now.

    Raises:
        OSError: It cannot be read.
    """
    entry = bytearray(_ENTRY.size)
    got = files.read_into(file, entry_offset(slot), memoryview(entry))
    return got == _ENTRY.size and _ENTRY.unpack(entry)[0] == generation * 2 + 1
