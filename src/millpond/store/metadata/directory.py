"""`HostDirectory`: which host keeps what in its memory, as metadata shard 0 answers it over the wire.

A soft state beside the index, never on disk: hosts say again and again that they live, and tell everything
again to a directory that does not know them. What it says is a hint; the host proves what it gives.
"""

from __future__ import annotations

import struct
import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from millpond.core.errors import DataError, InvalidRequest
from millpond.core.hashing import BLOCK_HASH_BYTES
from millpond.core.units import SECOND_NS
from millpond.store.dram_arena import SlotRef
from millpond.store.dram_directory import DramDirectory, DramHost, DramPlace
from millpond.store.net.messages import (
    DirectoryDrop,
    DirectoryFind,
    DirectoryFound,
    DirectoryJoin,
    DirectoryLeave,
    DirectoryPublish,
    Done,
    Failed,
    Message,
)

BLOCKS = "blocks"
STATES = "states"
SILENCE_S = 5
"""A host that said nothing for so long is gone."""
MAX_PLACES = 1 << 22
"""Of all hosts; what is published beyond is not named."""
_ENTRY = struct.Struct(f"<{BLOCK_HASH_BYTES}sIQ")
_PLACE = struct.Struct("<iIQ")


@dataclass(slots=True)
class _Life:
    """A host from its joining to its leaving or its silence."""

    address: str
    epoch: int
    number: int
    """New for each life, so that entries of one that ended never count again."""
    heard_ns: int


@dataclass
class _Kind:
    places: DramDirectory = field(default_factory=DramDirectory)
    """Its epochs are numbers of lives."""
    lives: dict[str, _Life] = field(default_factory=dict)


class HostDirectory:
    """See module. Thread-safe."""

    def __init__(self) -> None:
        self._kinds = {BLOCKS: _Kind(), STATES: _Kind()}
        self._num_lives = 0
        self._lock = threading.Lock()

    @property
    def hosts(self) -> tuple[str, ...]:
        """Hosts that live, by name."""
        with self._lock:
            return tuple(sorted({name for kind in self._kinds.values() for name in kind.lives}))

    @property
    def num_places(self) -> int:
        """Entries, dead ones included until they are swept."""
        return sum(len(kind.places) for kind in self._kinds.values())

    def handle(self, request: Message, payload: bytes, now_ns: int) -> tuple[Message, bytes]:
        """Answer one request.

        Raises:
            InvalidRequest: The message makes no sense.
        """
        match request:
            case DirectoryJoin():
                return self._join(request, now_ns), b""
            case DirectoryLeave():
                return Done(self._leave(self._kind(request.kind), request.host, request.epoch)), b""
            case DirectoryPublish():
                return self._publish(request, payload), b""
            case DirectoryDrop():
                return self._drop(request, payload), b""
            case DirectoryFind():
                return self._find(self._kind(request.kind), payload)
            case _:
                raise InvalidRequest(
                    f"the directory does not answer {type(request).__name__}", code="bad_request"
                )

    def tick(self, now_ns: int) -> None:
        """Let the lives of silent hosts end. To be called every second or so."""
        for kind in self._kinds.values():
            for name, life in list(kind.lives.items()):
                if now_ns - life.heard_ns > SILENCE_S * SECOND_NS:
                    self._leave(kind, name, life.epoch)

    def _kind(self, name: str) -> _Kind:
        kind = self._kinds.get(name)
        if kind is None:
            raise InvalidRequest(f"the directory has no {name[:40]!r}", code="bad_request")
        return kind

    def _join(self, request: DirectoryJoin, now_ns: int) -> Done:
        kind = self._kind(request.kind)
        with self._lock:
            life = kind.lives.get(request.host)
            if life is not None and (life.epoch, life.address) == (request.epoch, request.address):
                life.heard_ns = now_ns
                return Done(0)
            self._num_lives += 1
            kind.lives[request.host] = _Life(request.address, request.epoch, self._num_lives, now_ns)
            kind.places.join(request.host, DramHost(request.address, self._num_lives))
            return Done(1)

    def _leave(self, kind: _Kind, host: str, epoch: int) -> int:
        with self._lock:
            life = kind.lives.get(host)
            if life is None or life.epoch != epoch:
                return 0
            del kind.lives[host]
            kind.places.leave(host, life.number)
            return 1

    def _life(self, request: DirectoryPublish | DirectoryDrop) -> _Life | None:
        life = self._kind(request.kind).lives.get(request.host)
        return life if life is not None and life.epoch == request.epoch else None

    def _publish(self, request: DirectoryPublish, payload: bytes) -> Message:
        if len(payload) % _ENTRY.size:
            raise InvalidRequest(f"{len(payload)} bytes are no entries", code="bad_request")
        life = self._life(request)
        if life is None:
            return Failed("stale", f"{request.host} has not joined")
        places = self._kind(request.kind).places
        new: list[tuple[bytes, DramPlace]] = []
        count = 0
        for block_hash, slot, generation in _ENTRY.iter_unpack(payload):
            place = DramPlace(request.host, life.number, SlotRef(slot, generation))
            (there,) = places.find(block_hash)
            if there is None:
                new.append((block_hash, place))
            elif there.host == request.host:
                count += there == place or places.swap(block_hash, there, place)
        room = max(0, MAX_PLACES - self.num_places)
        places.publish(new[:room])
        return Done(count + len(new[:room]))

    def _drop(self, request: DirectoryDrop, payload: bytes) -> Message:
        _check_hashes(payload)
        if self._life(request) is None:
            return Done(0)
        places = self._kind(request.kind).places
        count = 0
        for index, there in enumerate(places.find(payload)):
            if there is not None and there.host == request.host:
                begin = index * BLOCK_HASH_BYTES
                count += places.swap(payload[begin : begin + BLOCK_HASH_BYTES], there, None)
        return Done(count)

    def _find(self, kind: _Kind, payload: bytes) -> tuple[Message, bytes]:
        _check_hashes(payload)
        found = kind.places.find(payload)
        indexes: dict[str, int] = {}
        hosts: list[tuple[str, str, int]] = []
        out = bytearray(len(found) * _PLACE.size)
        for at, place in enumerate(found):
            life = kind.lives.get(place.host) if place is not None else None
            if place is None or life is None or life.number != place.epoch:
                _PLACE.pack_into(out, at * _PLACE.size, -1, 0, 0)
                continue
            if place.host not in indexes:
                indexes[place.host] = len(hosts)
                hosts.append((place.host, life.address, life.epoch))
            ref = place.ref
            _PLACE.pack_into(out, at * _PLACE.size, indexes[place.host], ref.slot, ref.generation)
        return DirectoryFound(tuple(hosts)), bytes(out)


def pack_entries(entries: Iterable[tuple[bytes, SlotRef]]) -> bytes:
    """Payload of `DirectoryPublish`."""
    return b"".join(_ENTRY.pack(block_hash, ref.slot, ref.generation) for block_hash, ref in entries)


def unpack_places(found: DirectoryFound, payload: bytes) -> list[DramPlace | None]:
    """What `DirectoryFound` says, in the order of the hashes.

    Raises:
        DataError: It says nothing that makes sense.
    """
    if len(payload) % _PLACE.size:
        raise DataError(f"{len(payload)} bytes are no places", code="directory.answer")
    return [_place(found.hosts, *fields) for fields in _PLACE.iter_unpack(payload)]


def _place(hosts: Sequence[tuple[str, str, int]], index: int, slot: int, generation: int) -> DramPlace | None:
    if index < 0:
        return None
    if index >= len(hosts):
        raise DataError("a place at a host that is not named", code="directory.answer")
    name, _, epoch = hosts[index]
    return DramPlace(name, epoch, SlotRef(slot, generation))


def _check_hashes(payload: bytes) -> None:
    if len(payload) % BLOCK_HASH_BYTES:
        raise InvalidRequest(f"{len(payload)} bytes are no block hashes", code="bad_request")
