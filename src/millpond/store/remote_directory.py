"""`RemoteDirectory`: the directory of what hosts keep in memory, as one of these hosts sees it over the wire.

Nothing that is published waits for the network: what this host keeps is remembered here, and a thread tells
the directory about changes, many at a time. A directory that does not know this host (it has restarted, or
did not hear from us for a while) is told everything. One that does is told a little of it again with every
sign of life: it names one host for each block, and forgets that we have it too until that one drops it.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice

import structlog

from millpond.core.errors import DataError, MillpondError
from millpond.core.hashing import BLOCK_HASH_BYTES
from millpond.core.units import MILLISECOND_NS, SECOND_NS
from millpond.store.dram_arena import SlotRef
from millpond.store.dram_directory import DramHost, DramPlace
from millpond.store.metadata.client import MetadataClient
from millpond.store.metadata.directory import BLOCKS, pack_entries, unpack_places
from millpond.store.net.messages import (
    DirectoryDrop,
    DirectoryFind,
    DirectoryFound,
    DirectoryJoin,
    DirectoryLeave,
    DirectoryPublish,
    Done,
)

log = structlog.get_logger(__name__)

BEAT_S = 1.0
"""Between two signs of life."""
BATCH = 4096
"""Changes in one message."""
NUM_AGAIN = 512
"""Blocks that are told again with a sign of life: few, for there may be many hosts."""
MAX_GONE = 1 << 16
"""Blocks that have left and of which the directory was not told yet. Beyond, it finds out by itself: what it
says is a hint."""


@dataclass
class RemoteDirectoryCounts:
    """Since the start."""

    finds: int = 0
    failed_finds: int = 0
    """Nothing found because nobody answered in time."""
    told: int = 0
    """Changes that the directory knows."""
    joins: int = 0
    """Lives that began: more than one if the directory has forgotten us."""
    failed_beats: int = 0


@dataclass(frozen=True, slots=True)
class FoundPlaces:
    """Who keeps some blocks, in the order in which they were asked for."""

    places: list[DramPlace | None]
    hosts: dict[str, DramHost]


def find_places(client: MetadataClient, kind: str, hashes: bytes, *, deadline_ns: int) -> FoundPlaces:
    """Ask the directory who keeps these (16 bytes each).

    Raises:
        MillpondError: It did not answer, or with something else.
    """
    answer, payload = client.ask_directory(DirectoryFind(kind), hashes, deadline_ns=deadline_ns)
    if not isinstance(answer, DirectoryFound):
        raise DataError(f"find is answered with {type(answer).__name__}", code="directory.answer")
    places = unpack_places(answer, payload)
    if len(places) * BLOCK_HASH_BYTES != len(hashes):
        raise DataError(f"{len(places)} places", code="directory.answer")
    return FoundPlaces(places, {name: DramHost(address, epoch) for name, address, epoch in answer.hosts})


class RemoteDirectory:
    """See module. Thread-safe; `Directory` of `store.dram_directory` over a `MetadataClient`.

    Args:
        client: Of the metadata; stays the caller's.
        kind: What is kept: `metadata.directory.BLOCKS` or `STATES`.
        find_ms: How long `find` waits for an answer.
    """

    def __init__(self, client: MetadataClient, kind: str = BLOCKS, *, find_ms: int = 20) -> None:
        self.counts = RemoteDirectoryCounts()
        self._client = client
        self._kind = kind
        self._find_ns = find_ms * MILLISECOND_NS
        self._lock = threading.Lock()
        self._name = ""
        self._host: DramHost | None = None
        self._others: dict[str, DramHost] = {}
        self._kept: OrderedDict[bytes, SlotRef] = OrderedDict()
        """Those that are to be told again first come first."""
        self._changed: dict[bytes, None] = {}
        """Hashes in the order of their first change; what became of them says `_kept`."""
        self._is_closed = False
        self._wake = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"directory {kind}", daemon=True)

    @property
    def num_untold(self) -> int:
        """Changes that the directory does not know yet."""
        return len(self._changed)

    def host(self, name: str) -> DramHost | None:
        """A host that was alive when it was last heard of."""
        return self._host if name == self._name else self._others.get(name)

    def join(self, name: str, host: DramHost) -> None:
        """This host begins a life: from now on the directory is told of it."""
        with self._lock:
            self._name, self._host = name, host
            self._kept.clear()
            self._changed.clear()
        if not self._thread.ident:
            self._thread.start()
        self._wake.set()

    def leave(self, name: str, epoch: int) -> None:
        """This host's life has ended."""
        with self._lock:
            if self._host is None or (name, epoch) != (self._name, self._host.epoch):
                return
            self._host = None
            self._kept.clear()
            self._changed.clear()
        try:
            self._client.ask_directory(DirectoryLeave(self._kind, name, epoch), deadline_ns=_soon_ns())
        except MillpondError as error:
            log.info("directory not told that we leave", code=error.code)

    def find(self, hashes: bytes) -> list[DramPlace | None]:
        """Where blocks are, in the order of their hashes (16 bytes each); nowhere if nobody answers."""
        if not hashes:
            return []
        self.counts.finds += 1
        try:
            found = find_places(
                self._client, self._kind, hashes, deadline_ns=time.monotonic_ns() + self._find_ns
            )
        except MillpondError as error:
            self.counts.failed_finds += 1
            log.info("directory not asked", code=error.code)
            return [None] * (len(hashes) // BLOCK_HASH_BYTES)
        self._others |= found.hosts
        for index, place in enumerate(found.places):
            if place is not None and place.host == self._name:
                found.places[index] = self._own_place(hashes, index)
        return found.places

    def _own_place(self, hashes: bytes, index: int) -> DramPlace | None:
        """Where this host keeps a block: known better here than where it is told in the background."""
        begin = index * BLOCK_HASH_BYTES
        with self._lock:
            ref = self._kept.get(hashes[begin : begin + BLOCK_HASH_BYTES])
            host = self._host
        return DramPlace(self._name, host.epoch, ref) if ref is not None and host is not None else None

    def publish(self, places: Sequence[tuple[bytes, DramPlace]]) -> None:
        """Name places of blocks of this host; the directory hears of it soon."""
        with self._lock:
            for block_hash, place in places:
                self._kept[block_hash] = place.ref
                self._changed[block_hash] = None
        self._wake.set()

    def swap(self, block_hash: bytes, old: DramPlace, new: DramPlace | None) -> bool:
        """Compare-and-set the place of a block of this host; whether it was `old`."""
        with self._lock:
            if old.host != self._name or self._kept.get(block_hash) != old.ref:
                return False
            if new is not None:
                self._kept[block_hash] = new.ref
            else:
                del self._kept[block_hash]
            self._changed[block_hash] = None
            if len(self._changed) > len(self._kept) + MAX_GONE:
                self._changed = {each: None for each in self._changed if each in self._kept}
        self._wake.set()
        return True

    def close(self) -> None:
        """End the thread."""
        self._is_closed = True
        self._wake.set()
        if self._thread.is_alive():
            self._thread.join()

    def _run(self) -> None:
        while not self._is_closed:
            host = self._host
            is_heard = host is not None and self._beat(host)
            next_beat_ns = time.monotonic_ns() + int(BEAT_S * SECOND_NS)
            while not self._is_closed and (left_ns := next_beat_ns - time.monotonic_ns()) > 0:
                if host is not None and is_heard and self._changed:
                    is_heard = self._tell(host)
                else:
                    self._wake.wait(left_ns / SECOND_NS)
                    self._wake.clear()

    def _beat(self, host: DramHost) -> bool:
        """Say that we live; whether it was heard."""
        join = DirectoryJoin(self._kind, self._name, host.address, host.epoch)
        try:
            answer, _ = self._client.ask_directory(join, deadline_ns=_soon_ns())
        except MillpondError as error:
            self._count_failure(error)
            return False
        is_new = isinstance(answer, Done) and answer.count > 0
        self.counts.joins += is_new
        with self._lock:
            again = list(islice(self._kept, None if is_new else NUM_AGAIN))
            self._changed |= dict.fromkeys(again)
            for block_hash in again:
                self._kept.move_to_end(block_hash)
        return True

    def _tell(self, host: DramHost) -> bool:
        """Tell some changes; whether they were heard."""
        with self._lock:
            taken = list(islice(self._changed, BATCH))
            for block_hash in taken:
                del self._changed[block_hash]
            kept = [(block_hash, self._kept[block_hash]) for block_hash in taken if block_hash in self._kept]
            gone = b"".join(block_hash for block_hash in taken if block_hash not in self._kept)
        try:
            if gone:
                drop = DirectoryDrop(self._kind, self._name, host.epoch)
                self._client.ask_directory(drop, gone, deadline_ns=_soon_ns())
            if kept:
                publish = DirectoryPublish(self._kind, self._name, host.epoch)
                self._client.ask_directory(publish, pack_entries(kept), deadline_ns=_soon_ns())
        except MillpondError as error:
            with self._lock:
                self._changed = dict.fromkeys(taken) | self._changed
            self._count_failure(error)
            return False
        self.counts.told += len(taken)
        return True

    def _count_failure(self, error: MillpondError) -> None:
        self.counts.failed_beats += 1
        log.info("directory not told", code=error.code, error=error.message)


def _soon_ns() -> int:
    return time.monotonic_ns() + int(BEAT_S * SECOND_NS)
