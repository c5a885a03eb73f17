"""The metadata as a dict: the simplest thing that keeps its promises."""

from __future__ import annotations

import threading
import time

from millpond.core.errors import DeadlineExceeded
from millpond.core.pool_map import PoolMap
from millpond.store.net.messages import (
    LEASE_HELD,
    Abort,
    Commit,
    Done,
    Evict,
    Forget,
    Location,
    Match,
    Matched,
    Message,
    Pin,
    Reserve,
    Reserved,
    Touch,
    Unpin,
)

LEASE_NS = 30 * 10**9


class DictMetadata:
    """Implements `MetadataPort`. `is_down` makes every call fail, `is_silent` only at its deadline."""

    def __init__(self, pool_map: PoolMap) -> None:
        self.map = pool_map
        self.extents: dict[tuple[int, bytes, bytes, int], Location] = {}
        """(tenant, domain, digest, blocks) -> where."""
        self.blocks: dict[tuple[int, bytes, bytes], list[tuple[int, int, Location]]] = {}
        """(tenant, domain, block hash) -> (first block, column, extent) of each extent with it."""
        self.leases: dict[tuple[int, bytes, int], int] = {}
        self.pins: set[tuple[int, bytes, int, int]] = set()
        self.is_down = False
        self.is_silent = False
        self._lock = threading.Lock()

    def pool_map(self, *, deadline_ns: int) -> PoolMap:
        return self.map

    def call(self, request: Message, payload: bytes = b"", *, prefix: bytes, deadline_ns: int) -> Message:
        if self.is_down:
            raise DeadlineExceeded("metadata is down", code="test.down")
        if self.is_silent:
            time.sleep(max(0, deadline_ns - time.monotonic_ns()) / 10**9)
            raise DeadlineExceeded("metadata is silent", code="test.silent")
        with self._lock:
            return self._answer(request, payload)

    def _answer(self, request: Message, payload: bytes) -> Message:
        hashes = [payload[begin : begin + 16] for begin in range(0, len(payload), 16)]
        match request:
            case Match():
                return self._match(request, hashes)
            case Reserve():
                return Reserved(tuple(self._lease(request, *pair) for pair in request.extents))
            case Commit():
                return self._commit(request, hashes)
            case Abort():
                for digest, count in request.extents:
                    if self.leases.get((request.tenant, digest, count)) == request.holder:
                        del self.leases[request.tenant, digest, count]
                return Done()
            case Forget():
                return Done(self._forget(request.tenant, request.root, request.location))
            case Pin():
                self.pins |= {(request.tenant, *pair, request.holder) for pair in request.extents}
                return Done(len(request.extents))
            case Unpin():
                self.pins -= {(request.tenant, *pair, request.holder) for pair in request.extents}
                return Done()
            case Touch():
                return Done(sum((request.tenant, request.root, name) in self.blocks for name in hashes))
            case Evict():
                doomed = {
                    location
                    for name in hashes[request.first_block :]
                    for _, _, location in self.blocks.get((request.tenant, request.root, name), [])
                }
                return Done(sum(self._forget(request.tenant, request.root, location) for location in doomed))
        raise AssertionError(request)

    def _match(self, request: Match, hashes: list[bytes]) -> Matched:
        covered, extents, begins = 0, [], []
        while covered < len(hashes):
            found = self.blocks.get((request.tenant, request.root, hashes[covered]), [])
            fitting = [entry for entry in found if entry[1] == 0]
            if not fitting:
                break
            begin, _, location = max(fitting, key=lambda entry: entry[2].num_blocks)
            names = [
                name
                for name in hashes[covered : covered + location.num_blocks]
                if any(
                    entry[2] == location
                    for entry in self.blocks.get((request.tenant, request.root, name), [])
                )
            ]
            extents.append(location)
            begins.append(begin)
            covered += len(names)
            if len(names) < location.num_blocks:
                break
        return Matched(covered, tuple(extents), tuple(begins))

    def _lease(self, request: Reserve, digest: bytes, count: int) -> int:
        key = (request.tenant, digest, count)
        if any((k[0], k[2], k[3]) == key for k in self.extents):
            return 0
        if self.leases.get(key, request.holder) != request.holder:
            return LEASE_HELD
        self.leases[key] = request.holder
        return LEASE_NS

    def _commit(self, request: Commit, hashes: list[bytes]) -> Done:
        location = request.location
        self.leases.pop((request.tenant, location.digest, location.num_blocks), None)
        key = (request.tenant, request.root, location.digest, location.num_blocks)
        if key in self.extents:
            return Done(int(self.extents[key].nonce == location.nonce))
        self.extents[key] = location
        for column, name in enumerate(hashes):
            entries = self.blocks.setdefault((request.tenant, request.root, name), [])
            entries.append((request.first_block, column, location))
        return Done(1)

    def _forget(self, tenant: int, root: bytes, location: Location) -> int:
        key = (tenant, root, location.digest, location.num_blocks)
        if self.extents.get(key) != location:
            return 0
        del self.extents[key]
        for name, entries in list(self.blocks.items()):
            if name[:2] == (tenant, root):
                self.blocks[name] = [entry for entry in entries if entry[2] != location]
                if not self.blocks[name]:
                    del self.blocks[name]
        return 1
