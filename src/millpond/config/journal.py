"""Journals: everything a deciding object was told and decided, in the order it saw it (interfaces A.4).

A journal is a file of length-prefixed msgpack records. The first is the header, which holds all that is
needed to make the object anew; each further one is

    ["E", now_ns, event]               the object was told an event
    ["P", now_ns, max_steps, plan]     the object was asked and decided; plan is nil for "nothing to do"
    ["C", stream, draw]                the object drew a number of chance

with events and plans as `config.wire` writes them. A file that ends inside a record, as after a crash, is
good up to there.

    setup = GroupSetup(group, role, ranks, max_model_len, params)
    journal = JournalWriter(folder, "p0.1", setup, config_digest=config.digest, seed=0)
    scheduler = journaled(setup.make(), journal)     # use it like the scheduler
    ...
    journal.close()
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, TypeVar

import msgspec

from millpond import __version__
from millpond.config import wire
from millpond.control.dispatcher import Dispatcher, DispatchParams
from millpond.control.group_scheduler import GroupParams, GroupRole, GroupScheduler
from millpond.core.errors import DataError, WireVersionMismatch
from millpond.core.events import RankInfo
from millpond.core.ids import GroupId
from millpond.core.units import MIB

JOURNAL_FORMAT = 2
"""Raised with every change that an older reader could not read."""
SUFFIX = ".journal"
MAX_RECORD_BYTES = wire.MAX_MESSAGE_BYTES

_LENGTH = struct.Struct("<I")
_encoder = msgspec.msgpack.Encoder()


@dataclass(frozen=True, slots=True)
class GroupSetup:
    """All that a group's scheduler is made of."""

    group: GroupId
    role: GroupRole
    ranks: tuple[RankInfo, ...]
    max_model_len: int
    params: GroupParams

    def make(self) -> GroupScheduler:
        """Make the scheduler."""
        return GroupScheduler(self.group, self.role, self.ranks, self.max_model_len, self.params)


@dataclass(frozen=True, slots=True)
class DispatcherSetup:
    """All that a dispatcher is made of."""

    params: DispatchParams
    expected_groups: tuple[GroupId, ...]
    """Sorted."""
    start_ns: int

    def make(self) -> Dispatcher:
        """Make the dispatcher."""
        return Dispatcher(self.params, frozenset(self.expected_groups), self.start_ns)


Setup = GroupSetup | DispatcherSetup
_SETUPS: dict[str, type[Setup]] = {"group": GroupSetup, "dispatcher": DispatcherSetup}


@dataclass(frozen=True, slots=True)
class Header:
    """First record of a journal."""

    format: int
    object: str
    """`group` or `dispatcher`."""
    name: str
    config_digest: str
    code_version: str
    seed: int
    setup: Setup


class _RawHeader(msgspec.Struct):
    format: int
    object: str = ""
    name: str = ""
    config_digest: str = ""
    code_version: str = ""
    seed: int = 0
    setup: msgspec.Raw = msgspec.Raw(b"")


def _open_private(path: str, flags: int) -> int:
    return os.open(path, flags, mode=0o600)


class JournalWriter:
    """Appends records to one file. Buffered: what the last `flush` did not see dies with the process."""

    def __init__(
        self, folder: Path, name: str, setup: Setup, *, config_digest: str = "", seed: int = 0
    ) -> None:
        """Make `folder/name.journal`, readable by this user only: prompts stand in it.

        Raises:
            FileExistsError: There is one already; each life of an object has its own name.
        """
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._file = open(folder / f"{name}{SUFFIX}", "xb", buffering=MIB, opener=_open_private)  # noqa: SIM115
        kind = next(kind for kind, cls in _SETUPS.items() if isinstance(setup, cls))
        self._put(Header(JOURNAL_FORMAT, kind, name, config_digest, __version__, seed, setup))
        self.flush()

    def event(self, now_ns: int, event: object) -> None:
        """Record what the object is told."""
        self._put(("E", now_ns, msgspec.Raw(wire.encode(event))))

    def plan(self, now_ns: int, max_steps: int, plan: object | None) -> None:
        """Record what the object decided."""
        self._put(("P", now_ns, max_steps, None if plan is None else msgspec.Raw(wire.encode(plan))))

    def chance(self, stream: str, draw: int) -> None:
        """Record a number that the object drew."""
        self._put(("C", stream, draw))

    def flush(self) -> None:
        """Hand everything to the operating system."""
        self._file.flush()

    def close(self) -> None:
        """Flush and close."""
        self._file.close()

    def __enter__(self) -> JournalWriter:
        return self

    def __exit__(
        self, _kind: type[BaseException] | None, _error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        self.close()

    def _put(self, record: object) -> None:
        body = _encoder.encode(record)
        self._file.write(_LENGTH.pack(len(body)) + body)


class Machine(Protocol):
    """What can be journaled: `Dispatcher` and `GroupScheduler`."""

    def advance(self, now_ns: int, event: Any) -> None:
        """Learn."""
        ...

    def next_plan(self, now_ns: int) -> Any:
        """Decide."""
        ...


M = TypeVar("M", bound=Machine)


def journaled(machine: M, journal: JournalWriter) -> M:
    """Record everything that passes `advance` and `next_plan` of `machine`.

    Returns:
        A stand-in that is used like `machine`; everything else reaches it unrecorded, so it must not
        change it. Flushes whenever there is nothing to do.
    """
    bare_advance, bare_next_plan = machine.advance, machine.next_plan

    def advance(now_ns: int, event: Any) -> None:
        journal.event(now_ns, event)
        bare_advance(now_ns, event)

    def next_plan(now_ns: int, *span: int) -> Any:
        plan = bare_next_plan(now_ns, *span)
        journal.plan(now_ns, span[0] if span else 1, plan)
        if plan is None:
            journal.flush()
        return plan

    # Shadowing two methods of this one object keeps its type and everything else as it is.
    machine.advance = advance
    machine.next_plan = next_plan
    return machine


@dataclass(frozen=True, slots=True)
class EventRecord:
    """The object was told `event`."""

    now_ns: int
    event: Any


@dataclass(frozen=True, slots=True)
class PlanRecord:
    """The object decided `plan`, or None."""

    now_ns: int
    max_steps: int
    plan: Any


@dataclass(frozen=True, slots=True)
class ChanceRecord:
    """The object drew `draw` from `stream`."""

    stream: str
    draw: int


Record = EventRecord | PlanRecord | ChanceRecord


class JournalReader:
    """Reads one journal.

    Attributes:
        header: The first record.
        is_torn: Set once the records were read: the file ends inside one.
    """

    def __init__(self, path: Path) -> None:
        """Open a journal and read its header.

        Raises:
            WireVersionMismatch: Written by another version of the format.
            DataError: Not a journal.
        """
        self.path = path
        self.is_torn = False
        self._data = path.read_bytes()
        self._begin = 0
        body = self._next()
        if body is None:
            raise DataError(f"{path.name} has no complete header", code="journal.malformed")
        self.header = _read_header(path.name, body)

    def records(self) -> Iterator[Record]:
        """Yield the complete records, oldest first.

        Raises:
            DataError: A record is malformed.
        """
        index = 0
        while (body := self._next()) is not None:
            try:
                yield _read_record(body)
            except (msgspec.DecodeError, ValueError, IndexError) as error:
                raise DataError(
                    f"{self.path.name}, record {index}: {error}", code="journal.malformed"
                ) from error
            index += 1

    def _next(self) -> bytes | None:
        begin = self._begin + _LENGTH.size
        if begin > len(self._data):
            self.is_torn = self._begin < len(self._data)
            return None
        (length,) = _LENGTH.unpack_from(self._data, self._begin)
        if length > MAX_RECORD_BYTES:
            raise DataError(f"{self.path.name}: a record of {length} bytes", code="journal.malformed")
        if begin + length > len(self._data):
            self.is_torn = True
            return None
        self._begin = begin + length
        return self._data[begin : begin + length]


def _read_header(name: str, body: bytes) -> Header:
    try:
        raw = msgspec.msgpack.decode(body, type=_RawHeader)
        if raw.format != JOURNAL_FORMAT or raw.object not in _SETUPS:
            raise WireVersionMismatch(
                f"{name} is a journal of {raw.object!r} in format {raw.format}; "
                f"this version reads format {JOURNAL_FORMAT} of {sorted(_SETUPS)}",
                code="journal.version",
            )
        setup = msgspec.msgpack.decode(raw.setup, type=_SETUPS[raw.object])
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise DataError(f"{name} is not a journal: {error}", code="journal.malformed") from error
    return Header(raw.format, raw.object, raw.name, raw.config_digest, raw.code_version, raw.seed, setup)


def _read_record(body: bytes) -> Record:
    parts = msgspec.msgpack.decode(body, type=list[msgspec.Raw])
    kind = msgspec.msgpack.decode(parts[0], type=str)
    if kind == "C":
        stream, draw = (msgspec.msgpack.decode(part) for part in parts[1:])
        return ChanceRecord(stream, draw)
    now_ns = msgspec.msgpack.decode(parts[1], type=int)
    if kind == "E":
        return EventRecord(now_ns, wire.decode(bytes(parts[2])))
    if kind == "P":
        max_steps = msgspec.msgpack.decode(parts[2], type=int)
        body = bytes(parts[3])
        return PlanRecord(now_ns, max_steps, None if body == b"\xc0" else wire.decode(body))
    raise ValueError(f"unknown kind of record {kind!r}")
