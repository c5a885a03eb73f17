"""`Directory`: which host has a block in memory; and `DramDirectory`, one inside this process.

A soft state and a hint: the host proves what it gives. Every entry carries the epoch of its host's life, so
that the loss of a host ends all its entries at once and by one assignment; what is left of them goes when
somebody comes across it.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from millpond.core.hashing import BLOCK_HASH_BYTES
from millpond.store.dram_arena import SlotRef

_SWEEP = 64
"""Entries that each publication looks at, so that dead ones go while others come."""


@dataclass(frozen=True, slots=True)
class DramPlace:
    """Where a block is."""

    host: str
    epoch: int
    """Of the host's life."""
    ref: SlotRef


@dataclass(frozen=True, slots=True)
class DramHost:
    """A host that lends memory."""

    address: str
    """`host:port` of its `DramServer`."""
    epoch: int


class Directory(Protocol):
    """See module. Thread-safe.

    `publish` and `swap` are called with the level's lock held: neither may wait for another process. A
    directory elsewhere takes them as orders, and keeps their order.
    """

    def host(self, name: str) -> DramHost | None:
        """A host that is alive, as far as is known."""
        ...

    def join(self, name: str, host: DramHost) -> None:
        """A host begins a life; what the directory says of its earlier ones is void."""
        ...

    def leave(self, name: str, epoch: int) -> None:
        """A life of a host has ended; nothing happens if another has begun."""
        ...

    def find(self, hashes: bytes) -> list[DramPlace | None]:
        """Where the blocks are, in the order of their hashes (16 bytes each).

        May wait for another process, for a short while: if that does not answer, the blocks are nowhere.
        """
        ...

    def publish(self, places: Sequence[tuple[bytes, DramPlace]]) -> None:
        """Name places of blocks; a block that is in another host's memory already stays there."""
        ...

    def swap(self, block_hash: bytes, old: DramPlace, new: DramPlace | None) -> bool:
        """Compare-and-set: name another place, or none, if the directory still names `old`.

        Returns:
            Whether it did, or, if that is not known yet, will be seen to.
        """
        ...


class DramDirectory:
    """See `Directory`."""

    def __init__(self) -> None:
        self._hosts: dict[str, DramHost] = {}
        self._places: OrderedDict[bytes, DramPlace] = OrderedDict()
        self._lock = threading.Lock()

    def __len__(self) -> int:
        """Entries, dead ones included until they are swept."""
        return len(self._places)

    def host(self, name: str) -> DramHost | None:
        """A host that is alive."""
        return self._hosts.get(name)

    def join(self, name: str, host: DramHost) -> None:
        """A host begins a life; what the directory says of its earlier ones is void."""
        with self._lock:
            self._hosts[name] = host

    def leave(self, name: str, epoch: int) -> None:
        """A life of a host has ended; nothing happens if another has begun."""
        with self._lock:
            host = self._hosts.get(name)
            if host is not None and host.epoch == epoch:
                del self._hosts[name]

    def find(self, hashes: bytes) -> list[DramPlace | None]:
        """Where the blocks are, in the order of their hashes (16 bytes each)."""
        with self._lock:
            return [
                self._find(hashes[begin : begin + BLOCK_HASH_BYTES])
                for begin in range(0, len(hashes), BLOCK_HASH_BYTES)
            ]

    def publish(self, places: Sequence[tuple[bytes, DramPlace]]) -> None:
        """Name places of blocks; a block that is in another host's memory already stays there."""
        with self._lock:
            for block_hash, place in places:
                if self._find(block_hash) is None:
                    self._places[block_hash] = place
            self._sweep()

    def swap(self, block_hash: bytes, old: DramPlace, new: DramPlace | None) -> bool:
        """Compare-and-set: name another place, or none, if the directory still names `old`."""
        with self._lock:
            if self._places.get(block_hash) != old:
                return False
            if new is None:
                del self._places[block_hash]
            else:
                self._places[block_hash] = new
            return True

    def _find(self, block_hash: bytes) -> DramPlace | None:
        place = self._places.get(block_hash)
        if place is None:
            return None
        host = self._hosts.get(place.host)
        if host is None or host.epoch != place.epoch:
            del self._places[block_hash]
            return None
        return place

    def _sweep(self) -> None:
        for _ in range(min(_SWEEP, len(self._places))):
            block_hash = next(iter(self._places))
            self._places.move_to_end(block_hash)
            self._find(block_hash)
