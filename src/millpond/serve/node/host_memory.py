"""`HostMemory`: what a node daemon owns: arena, DRAM level, loads, pool client, snapshots, peer servers."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, field
from pathlib import Path

import structlog

from millpond.config.node_params import NodeParams
from millpond.control.snapshot_store import SnapshotStore
from millpond.core.errors import InvariantBroken
from millpond.core.extents import window_blocks
from millpond.core.kv_layout import KvLayout
from millpond.core.units import SECOND_NS
from millpond.serve.node.arena_file import ArenaFile
from millpond.serve.node.late_pool import LatePool
from millpond.serve.node.snapshots import Snapshots, SnapshotServer
from millpond.store.dram import DramLevel, DramParams
from millpond.store.dram_arena import DramArena
from millpond.store.dram_directory import Directory, DramDirectory, DramHost
from millpond.store.dram_peers import DramPeers
from millpond.store.metadata.client import MetadataClient
from millpond.store.metadata.directory import STATES
from millpond.store.net.dram_server import DramServer
from millpond.store.pool import Pool
from millpond.store.pool_settings import PoolParams, PoolSettings
from millpond.store.remote_directory import RemoteDirectory, RemoteDirectoryCounts
from millpond.store.tiered_load import TieredLoader

SPILL_S = 1.0
"""How often it is looked for what is to be written."""
CHECK_NS = 10 * SECOND_NS
"""How often the laws of the memory are looked at. They wait for a spill that runs: not for the loop."""
SERVERS_S = 2.0
"""How long the peer servers may take to end."""

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class NodeSetup:
    """What a node daemon is to be."""

    host: str
    """Name of the host."""
    epoch: int
    """Of this life: larger than that of any earlier one."""
    layout: KvLayout
    """Of the blocks of all ranks on this host."""
    arena_folder: Path
    """In shared memory."""
    arena_name: str
    arena_bytes: int
    snapshot_bytes: int
    metadata: tuple[str, ...] = ()
    """`host:port` of the pool's metadata shards; empty: there is no pool, and there are no other hosts."""
    token: str = ""
    """Cluster token of the pool."""
    home: str = ""
    """Storage node to which alone this host writes; empty: to all."""
    block_address: str = "127.0.0.1:0"
    """Where other hosts read blocks from memory."""
    snapshot_address: str = "127.0.0.1:0"
    """Where they read snapshots."""
    params: NodeParams = field(default_factory=NodeParams)


class HostMemory:
    """See module. Made by the constructor, ended by `close`.

    Raises:
        ConfigError: The memory cannot be had, or an address cannot be bound.
    """

    def __init__(self, setup: NodeSetup) -> None:
        params = setup.params
        self.layout = setup.layout
        self._spill_ns = int(params.spill_deadline_s * SECOND_NS)
        self._file = ArenaFile(setup.arena_folder, setup.arena_name)
        try:
            self.arena = DramArena.create(self._file.path, setup.arena_bytes, setup.layout, setup.epoch)
            self._metadata = _make_metadata(setup)
            self._directories = _make_directories(self._metadata)
            self.pool = _make_pool(setup, self._metadata)
            self._block_peers, self._state_peers = (
                DramPeers(directory, name=f"node {setup.host}", token=setup.token)
                for directory in self._directories
            )
            self._make_parts(setup)
        except BaseException:
            self._file.close()
            raise
        self._failure: BaseException | None = None
        self._is_stopping = threading.Event()
        self._spiller = threading.Thread(target=self._spill, name="spill", daemon=True)
        self._spiller.start()
        self.pool.start()

    def _make_parts(self, setup: NodeSetup) -> None:
        params, (blocks, states) = setup.params, self._directories
        self.level = DramLevel(
            self.arena,
            host=setup.host,
            directory=blocks,
            window=window_blocks(setup.layout),
            write=self.pool.put,
            params=DramParams(params.evict, params.spill),
        )
        self.loader = TieredLoader(self.level, blocks, self._block_peers, self.pool)
        self.snapshots = Snapshots(
            SnapshotStore(setup.snapshot_bytes, int(params.snapshot_ttl_s * SECOND_NS)),
            state_bytes=setup.layout.state_bytes,
            directory=states,
            host=setup.host,
            epoch=setup.epoch,
            peers=self._state_peers if setup.metadata else None,
            fetch_s=params.snapshot_deadline_s,
        )
        self._servers: list[DramServer | SnapshotServer] = []
        if not setup.metadata:
            return
        block_server = DramServer(self.arena, setup.host, setup.block_address, token=setup.token)
        self._servers.append(block_server)
        state_server = SnapshotServer(
            self.snapshots, setup.host, setup.epoch, setup.snapshot_address, token=setup.token
        )
        self._servers.append(state_server)
        for server, directory in zip(self._servers, self._directories, strict=True):
            server.start()
            directory.join(setup.host, DramHost(server.address, setup.epoch))

    @property
    def num_stale(self) -> int:
        """Reads of other hosts that came too late: what they wanted had left."""
        return sum(server.num_stale for server in self._servers)

    @property
    def num_failed_peers(self) -> int:
        """Blocks that another host seemed to have and did not give."""
        return self._block_peers.counts.failed

    @property
    def directory_counts(self) -> tuple[RemoteDirectoryCounts, ...]:
        """Of blocks and of snapshots; none without other hosts."""
        return tuple(each.counts for each in self._directories if isinstance(each, RemoteDirectory))

    def spill_until_ns(self) -> int:
        """Deadline of a write that begins now."""
        return time.monotonic_ns() + self._spill_ns

    def require_alive(self) -> None:
        """Check that no thread has ended by a bug.

        Raises:
            InvariantBroken: One has.
        """
        failures = (self._failure, self.pool.failure, *(server.failure for server in self._servers))
        failure = next((each for each in failures if each is not None), None)
        if failure is not None:
            raise InvariantBroken("a thread of the node daemon ended") from failure

    def close(self, flush_s: float) -> bool:
        """Write what waits and give everything back. Loads and loans have ended before.

        Args:
            flush_s: How long the writing may take.

        Returns:
            Whether all threads ended in time; if not, only the end of the process ends them.
        """
        until_ns = time.monotonic_ns() + int(flush_s * SECOND_NS)
        self._is_stopping.set()
        stopped = [server.stop(SERVERS_S) for server in self._servers]
        closer = threading.Thread(target=self.level.close, kwargs={"deadline_ns": until_ns}, daemon=True)
        closer.start()
        closer.join(max(0, until_ns - time.monotonic_ns()) / SECOND_NS)
        num_waiting = self.level.num_waiting if closer.is_alive() else 0
        self.pool.close()  # a write that does not end, ends now
        closer.join(SERVERS_S)
        self._spiller.join(SERVERS_S)
        log.info("node.flushed", num_lost=num_waiting)
        for peers in (self._block_peers, self._state_peers):
            peers.close()
        if self._metadata is not None:
            for directory in self._directories:
                if isinstance(directory, RemoteDirectory):
                    directory.close()
            self._metadata.close()
        self._file.close()
        return all(stopped) and not closer.is_alive() and not self._spiller.is_alive()

    def _spill(self) -> None:
        checked_ns = time.monotonic_ns()
        try:
            while not self._is_stopping.wait(SPILL_S):
                self.level.spill_due(deadline_ns=self.spill_until_ns())
                if time.monotonic_ns() - checked_ns >= CHECK_NS:
                    checked_ns = time.monotonic_ns()
                    self.loader.check()
        except BaseException as error:
            self._failure = error
            raise


def _make_metadata(setup: NodeSetup) -> MetadataClient | None:
    if not setup.metadata:
        return None
    return MetadataClient(setup.metadata, name=f"node {setup.host}", token=setup.token)


def _make_directories(metadata: MetadataClient | None) -> tuple[Directory, Directory]:
    """Of blocks, and of snapshots."""
    if metadata is None:
        return DramDirectory(), DramDirectory()
    return RemoteDirectory(metadata), RemoteDirectory(metadata, STATES)


def _make_pool(setup: NodeSetup, metadata: MetadataClient | None) -> LatePool:
    params = setup.params

    def open_pool() -> Pool:
        assert metadata is not None  # noqa: S101 - only called if there is one
        settings = PoolSettings(pool=PoolParams(num_buffers=params.pool_buffers, home=setup.home))
        return Pool(setup.layout, metadata, name=f"node {setup.host}", token=setup.token, settings=settings)

    return LatePool(
        setup.layout,
        open_pool if metadata is not None else None,
        retry_s=params.pool_retry_s,
        heal_period_s=params.heal_period_s,
    )
