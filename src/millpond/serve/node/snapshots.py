"""`Snapshots`: window states on this host, and those of other hosts (kvstore 2.13).

They live in memory only. A directory says which host has which, and is a hint as for blocks: the bytes are
proved when they come, and one that is gone, late or damaged counts as none.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from millpond.control.snapshot_store import MAX_BLOCKS_BACK, Snapshot, SnapshotCounts, SnapshotStore
from millpond.core.hashing import BLOCK_HASH_BYTES
from millpond.core.node_messages import SnapshotPut
from millpond.core.units import BLOCK_TOKENS, SECOND_NS
from millpond.store.codec.checksum import checksum
from millpond.store.dram_arena import SlotRef
from millpond.store.dram_directory import Directory, DramPlace
from millpond.store.dram_peers import DramPeers
from millpond.store.net.framing import VERSION, Head
from millpond.store.net.listener import Listener
from millpond.store.net.messages import CancelRead, Failed, Hello, PeerBlock, PeerRead
from millpond.store.net.peer import Peer, ServerParams


@dataclass(frozen=True, slots=True)
class FoundState:
    """A state that was found."""

    position: int
    """Leading tokens that it stands for."""
    state: bytes
    is_approximate: bool = False
    """Computed downstream of a bounded replay."""


@dataclass(slots=True)
class FetchCounts:
    """Snapshots of other hosts, since the start."""

    fetched: int = 0
    late: int = 0
    """The directory knew one, and it was gone, damaged or did not come in time."""


class Snapshots:
    """See module. Thread-safe.

    Args:
        store: The decisions.
        state_bytes: Of one state; 0: the model has none, and nothing is kept.
        directory: Of all hosts' snapshots.
        host: Our name in it.
        epoch: Of this host's life.
        peers: Reads other hosts' snapshots; None: there are no others.
        fetch_s: How long that may take.
    """

    def __init__(
        self,
        store: SnapshotStore,
        *,
        state_bytes: int,
        directory: Directory,
        host: str,
        epoch: int,
        peers: DramPeers | None,
        fetch_s: float,
    ) -> None:
        self.fetches = FetchCounts()
        self.num_missized = 0
        """Snapshots dropped because they cannot be of our layout."""
        self._store = store
        self._state_bytes = state_bytes
        self._directory = directory
        self._host = host
        self._epoch = epoch
        self._peers = peers
        self._fetch_ns = int(fetch_s * SECOND_NS)
        self._lock = threading.Lock()

    @property
    def counts(self) -> SnapshotCounts:
        """Of this host's."""
        return self._store.counts

    @property
    def num_held(self) -> int:
        """Snapshots in memory."""
        return len(self._store)

    @property
    def num_bytes(self) -> int:
        """Memory that they take."""
        return self._store.num_bytes

    def put(self, message: SnapshotPut) -> None:
        """Keep a copy, as far as there is room. One of another size than our layout's is dropped."""
        if not self._state_bytes or len(message.state) != self._state_bytes:
            self.num_missized += 1
            return
        now_ns = time.monotonic_ns()
        with self._lock:
            made, gone = self._store.put(
                now_ns,
                message.digest,
                message.position,
                message.state,
                message.replaces,
                is_approximate=message.is_approximate,
            )
            self._forget(gone)
            if made is not None:
                self._directory.publish([(_name(made), self._place(made))])

    def find(self, digests: Sequence[bytes]) -> FoundState | None:
        """The last state of a chain of blocks, at its end or a little before; from another host if need be.

        Args:
            digests: 32 bytes per block, from block 0 on.
        """
        if not self._state_bytes or not digests:
            return None
        with self._lock:
            own = self._store.find(time.monotonic_ns(), digests)
        if own is not None and own.digest == digests[-1]:
            return _found(own)
        first = len(digests) - MAX_BLOCKS_BACK if own is None else own.position // BLOCK_TOKENS
        other = self._fetch(digests, max(0, first))
        if other is not None:
            return other
        return _found(own) if own is not None else None

    def expire(self) -> None:
        """Drop those whose time is over."""
        with self._lock:
            self._forget(self._store.expire(time.monotonic_ns()))

    def read(self, name: bytes, generation: int) -> FoundState | None:
        """The state that another host was told of; None: it has gone."""
        with self._lock:
            found = self._store.read(time.monotonic_ns(), name, generation)
        return _found(found) if found is not None else None

    def check(self) -> list[str]:
        """Return violated laws."""
        with self._lock:
            return self._store.check()

    def _fetch(self, digests: Sequence[bytes], first: int) -> FoundState | None:
        """From another host: the last one at or behind block `first`."""
        if self._peers is None:
            return None
        names = [digest[:BLOCK_HASH_BYTES] for digest in digests[first:]]
        places = self._directory.find(b"".join(names))
        for index in range(len(names) - 1, -1, -1):
            place = places[index]
            if place is None or place.host == self._host:
                continue
            deadline_ns = time.monotonic_ns() + self._fetch_ns
            out = np.empty(self._state_bytes, np.uint8)
            call = self._peers.start(place, names[index], out, deadline_ns=deadline_ns)
            if call is not None and call.finish(deadline_ns=deadline_ns):
                self.fetches.fetched += 1
                position = (first + index + 1) * BLOCK_TOKENS
                return FoundState(position, out.tobytes(), bool(call.lineage))
            self.fetches.late += 1
            return None
        return None

    def _forget(self, gone: Sequence[Snapshot]) -> None:
        for each in gone:
            self._directory.swap(_name(each), self._place(each), None)

    def _place(self, snapshot: Snapshot) -> DramPlace:
        return DramPlace(
            self._host, self._epoch, SlotRef(snapshot.position // BLOCK_TOKENS, snapshot.generation)
        )


class SnapshotServer:
    """Lets other hosts read this host's snapshots; the protocol is that of blocks in memory.

    Args:
        snapshots: Served.
        host: Name of this host.
        epoch: Of its life.
        address: `host:port`; port 0 takes a free one.
        token: Cluster token that peers must have.

    Raises:
        ConfigError: The address cannot be bound.
    """

    def __init__(self, snapshots: Snapshots, host: str, epoch: int, address: str, *, token: str) -> None:
        self.failure: BaseException | None = None
        """A bug that ended a thread; the process should end too."""
        self.num_stale = 0
        """Reads of snapshots that had gone."""
        self._snapshots = snapshots
        self._epoch = epoch
        hello = Hello(VERSION, host, token, epoch)
        self._listener = Listener(address, hello, ServerParams(), self._answer, self._fail)

    @property
    def address(self) -> str:
        """Where it listens."""
        return self._listener.address

    def start(self) -> None:
        """Begin to serve."""
        self._listener.start()

    def stop(self, deadline_s: float) -> bool:
        """End all connections; whether all threads ended in time."""
        return self._listener.stop(time.monotonic_ns() + int(deadline_s * SECOND_NS))

    def _answer(self, peer: Peer, head: Head) -> None:
        peer.frames.skip(head.payload_bytes, peer.frames.frame_deadline_ns())
        message = head.message
        if isinstance(message, CancelRead):
            return  # what was asked before is answered already
        if not isinstance(message, PeerRead):
            peer.answer(head.request, Failed("bad_request", f"no {type(message).__name__} of snapshots"))
            return
        found = None
        if message.epoch == self._epoch:
            found = self._snapshots.read(message.block_hash, message.generation)
        if found is None:
            self.num_stale += 1
            peer.answer(head.request, Failed("stale", "the snapshot has gone"))
            return
        lineage = int(found.is_approximate)
        answer = PeerBlock(message.block_hash, message.generation, checksum(found.state), lineage)
        peer.answer(head.request, answer, [memoryview(found.state)])

    def _fail(self, error: BaseException) -> None:
        self.failure = error


def _found(snapshot: Snapshot) -> FoundState:
    return FoundState(snapshot.position, snapshot.state, snapshot.is_approximate)


def _name(snapshot: Snapshot) -> bytes:
    return snapshot.digest[:BLOCK_HASH_BYTES]
