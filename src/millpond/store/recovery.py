"""Start of a target: what its folder still holds after any end of its last process."""

from __future__ import annotations

from dataclasses import dataclass

import structlog

from millpond.core.errors import DataError, WireVersionMismatch
from millpond.policies.retention import RetentionParams
from millpond.store.files import Files
from millpond.store.generations import TABLE_NAME, GenerationTable
from millpond.store.live_segment import LiveSegment
from millpond.store.segment import (
    check_record_format,
    is_segment_name,
    read_footer,
    read_segment_header,
    scan_records,
)

ASIDE = ".aside"
"""End of the name of a file that was set aside. It stays until the next start, for whoever wants to look."""

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Recovered:
    """A target's state on disk."""

    table: GenerationTable
    segments: tuple[LiveSegment, ...]
    """In ascending generation. Those without a valid footer are not `sealed`."""
    dead: tuple[str, ...]
    """Files of segments that are not live, and what an earlier start set aside."""
    foreign: tuple[str, ...] = ()
    """Files of another format."""

    def clean(self, files: Files) -> None:
        """Remove dead files, and entries without a file; set aside what is of another format.

        Raises:
            OSError: The folder cannot be written.
        """
        found = {segment.identity.slot for segment in self.segments}
        for slot in self.table.live_slots():
            if slot not in found:
                self.table.end(slot)
        for name in self.dead:
            files.remove(name)
        for name in self.foreign:
            log.warning("segment set aside", name=name, why="its format is another version's")
            files.rename(name, name + ASIDE)


def recover(files: Files, *, now_s: int, retention: RetentionParams) -> Recovered:
    """Read a folder; make it a target if it is empty.

    Args:
        files: The folder.
        now_s: Calendar time.
        retention: Says how long a segment takes records: bounds the age of what a scan found.

    Raises:
        DataError: The folder holds segments without a valid generation table.
        OSError: It cannot be read, or not written where it must be.
    """
    names = files.names()
    segment_names = sorted(name for name in names if is_segment_name(name))
    table = _open_table(files, bool(segment_names))
    segments: list[LiveSegment] = []
    dead = [name for name in names if name.endswith(ASIDE)]
    foreign: list[str] = []
    try:
        for name in segment_names:
            try:
                segment = _open_segment(files, name, table)
            except WireVersionMismatch:
                foreign.append(name)
                continue
            if segment is None:
                dead.append(name)
            else:
                segments.append(segment)
        for segment in segments:
            _load(files, segment, now_s=now_s, retention=retention)
    except BaseException:
        for segment in segments:
            segment.retire()
        table.close()
        raise
    segments.sort(key=lambda segment: segment.generation)
    return Recovered(table, tuple(segments), tuple(dead), tuple(foreign))


def _open_table(files: Files, has_segments: bool) -> GenerationTable:
    if TABLE_NAME not in files.names():
        if has_segments:
            raise DataError("segments without a generation table", code="target.table")
        return GenerationTable.create(files)
    try:
        return GenerationTable.load(files)
    except WireVersionMismatch:
        log.warning("generation table set aside", why="its format is another version's")
        files.rename(TABLE_NAME, TABLE_NAME + ASIDE)
        return GenerationTable.create(files)  # no segment is live in it: those of our format are removed
    except DataError:
        if has_segments:
            raise
        return GenerationTable.create(files)  # the process died while it made the folder


def _open_segment(files: Files, name: str, table: GenerationTable) -> LiveSegment | None:
    """The live segment in a file, None if it is none.

    Raises:
        WireVersionMismatch: It is of another format.
    """
    file = files.open(name)
    try:
        identity = read_segment_header(files, file)
        table.skip(identity.generation)
        if identity.name == name and table.is_live(identity.slot, identity.generation):
            check_record_format(files, file)
            return LiveSegment(files, file, identity)
    except (OSError, WireVersionMismatch):
        files.close(file)
        raise
    except DataError:
        pass  # its first page never reached the disk: no record did, or all are lost with it
    files.close(file)
    return None


def _load(files: Files, segment: LiveSegment, *, now_s: int, retention: RetentionParams) -> None:
    identity = segment.identity
    try:
        content = read_footer(files, segment.file, identity)
        segment.sealed = True
        newest_s = content.newest_s
    except DataError:
        content = scan_records(files, segment.file, identity)
        newest_s = identity.created_s + retention.partition_s(identity.ttl_s)
    segment.load(content, min(newest_s, now_s))  # a clock that ran ahead must not make data immortal
