"""`MetadataServer`: one metadata shard on a TCP port.

connection threads   read a request, ask the core under its lock, answer
upkeep thread        once a second, also when idle: expiry, checkpoints, reports to shard 0, maps
rebuild thread       after a start without a whole checkpoint: reads the records of all storage nodes
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass, field

import structlog

from millpond.core.errors import DataError, InvalidRequest, MillpondError, OverloadError, QuotaExceeded
from millpond.core.extents import TenantId
from millpond.core.hashing import BLOCK_HASH_BYTES
from millpond.core.pool_map import PoolMap
from millpond.core.units import SECOND_NS
from millpond.policies.metadata_shard import LookupKey
from millpond.store.clock import Clock
from millpond.store.files import Files
from millpond.store.index import BlockIndex
from millpond.store.metadata.checkpoint import (
    Checkpoint,
    decode_map,
    load_checkpoint,
    load_map,
    save_checkpoint,
)
from millpond.store.metadata.core import HOUR_S, MetadataCore, MetadataParams
from millpond.store.metadata.directory import HostDirectory
from millpond.store.metadata.map_holder import MapHolder
from millpond.store.metadata.quotas import QuotaBook, TenantQuota
from millpond.store.metadata.rebuild import IndexRebuild, commit_of
from millpond.store.net.connection import Connection
from millpond.store.net.framing import VERSION, Head
from millpond.store.net.listener import Listener, guarded_thread, join_all
from millpond.store.net.messages import (
    CancelRead,
    DirectoryDrop,
    DirectoryFind,
    DirectoryJoin,
    DirectoryLeave,
    DirectoryPublish,
    Done,
    DropTenant,
    Failed,
    Hello,
    LookupReport,
    MapAnswer,
    MapQuery,
    MapUpdate,
    Match,
    Matched,
    Message,
    MetadataStatus,
    MetadataStatusQuery,
    SetQuota,
)
from millpond.store.net.peer import Peer, ServerParams
from millpond.store.record import RecordHeader

log = structlog.get_logger(__name__)

UPKEEP_S = 1.0
MAX_REPORTED_KEYS = 256
LEADER_S = 2.0
"""How long shard 0 may take to answer a report."""


@dataclass(frozen=True, slots=True)
class MetadataServerParams:
    """One metadata shard's process."""

    core: MetadataParams = field(default_factory=MetadataParams)
    """Leases, pins, expiry."""
    server: ServerParams = field(default_factory=ServerParams)
    """Bounds of connections and frames."""
    default_quota: TenantQuota = field(default_factory=TenantQuota)
    """Of tenants without their own, on this shard."""
    max_blocks: int = 1 << 28
    """Bound of the index."""
    checkpoint_s: float = 30.0
    """Between checkpoints, if something changed."""
    report_s: float = 10.0
    """Between reports to shard 0; also the window in which it looks for popular prefixes."""


class MetadataServer:
    """Serves a shard until `stop`.

    Args:
        files: Folder of the shard's map and checkpoints; stays the caller's.
        address: `host:port` to listen on; port 0 takes a free one.
        advertised: Under which the pool map names this shard; by default where it listens.
        name: For logs.
        token: Cluster token.
        clock: For leases and expiry.
        params: Bounds.

    Raises:
        ConfigError: The address cannot be bound.
        OSError: The folder cannot be read.
    """

    def __init__(
        self,
        files: Files,
        address: str,
        *,
        advertised: str = "",
        name: str,
        token: str,
        clock: Clock,
        params: MetadataServerParams | None = None,
    ) -> None:
        self.params = params = params or MetadataServerParams()
        self.failure: BaseException | None = None
        """A bug that ended a thread; the process should end too."""
        self._files = files
        self._clock = clock
        self._name, self._token, self._boot = name, token, clock.unix_s()
        self._dropped: dict[int, int] = {}
        self._was_clean = False
        self._lock = threading.Lock()
        self._core = self._restore()
        self._directory = HostDirectory()
        self._stopping = threading.Event()
        hello = Hello(VERSION, name, token, self._boot)
        self._listener = Listener(address, hello, params.server, self._dispatch, self._on_failure)
        self.maps = MapHolder(load_map(files), advertised or self._listener.address, files)
        self._core.shards = self.maps.view.table
        self._saved_counts = self._changes()
        self._saved_ns = self._reported_ns = clock.monotonic_ns()
        self._reported_matches = 0
        self._rebuild = IndexRebuild(
            self.maps, self._take_extent, self._knows, name=name, token=token, stopping=self._stopping
        )
        self._threads = [
            guarded_thread("upkeep", self._keep_up, self._on_failure),
            guarded_thread("rebuild", self._run_rebuild, self._on_failure),
        ]

    @property
    def address(self) -> str:
        """Where it listens."""
        return self._listener.address

    @property
    def num_connections(self) -> int:
        """Open connections."""
        return self._listener.num_connections

    @property
    def num_refused_peers(self) -> int:
        """Connections that did not speak our protocol, or with another version or token."""
        return self._listener.num_refused_peers

    def start(self) -> None:
        """Begin to serve."""
        self._listener.start()
        for thread in self._threads:
            thread.start()

    def wait(self, timeout_s: float) -> bool:
        """Wait until `stop` is called or a thread fails; whether that happened."""
        return self._stopping.wait(timeout_s)

    def stop(self, deadline_s: float) -> bool:
        """End all connections and threads, then write a checkpoint; whether that was done in time."""
        deadline_ns = time.monotonic_ns() + int(deadline_s * SECOND_NS)
        self._stopping.set()
        if not self._listener.stop(deadline_ns) or not join_all(self._threads, deadline_ns):
            return False
        return self._save(is_clean=not self._rebuild.num_left)

    def take_map(self, pool_map: PoolMap) -> bool:
        """Use a map if it is newer than ours; whether it is.

        Raises:
            OSError: It could not be kept; it counts nevertheless.
        """
        is_newer = self.maps.update(pool_map)
        if is_newer:
            with self._lock:
                self._core.shards = self.maps.view.table
        return is_newer

    def check(self) -> None:
        """Assert that nothing has leaked; see `MetadataCore.check`."""
        with self._lock:
            self._core.check()

    def status(self) -> MetadataStatus:
        """State of the shard."""
        with self._lock:
            core = self._core
            return MetadataStatus(
                name=self._name,
                boot=self._boot,
                map_version=self.maps.view.version,
                num_blocks=core.index.num_blocks,
                num_extents=core.index.num_extents,
                num_leases=core.num_leases,
                num_pins=core.num_pins,
                rebuild_left=self._rebuild.num_left,
                counts=asdict(core.counts),
                tenants=tuple((int(tenant), *kib) for tenant, kib in core.quotas.tenants().items()),
                memory_hosts=self._directory.hosts,
                num_places=self._directory.num_places,
            )

    # --- requests ----------------------------------------------------------------------------

    def _dispatch(self, peer: Peer, head: Head) -> None:
        payload = bytearray(head.payload_bytes)
        peer.frames.receive_into(memoryview(payload), peer.frames.frame_deadline_ns())
        if isinstance(head.message, CancelRead):
            return  # answers come at once: there is nothing to cancel
        try:
            answer, content = self._answer(head.message, bytes(payload))
        except (InvalidRequest, DataError, QuotaExceeded, OverloadError, OSError) as error:
            answer, content = _refusal(error, self.maps.view.version), b""
        peer.answer(head.request, answer, [content])

    def _answer(self, message: Message, payload: bytes) -> tuple[Message, bytes]:
        match message:
            case Match():
                return self._match(message, payload), b""
            case DirectoryFind() | DirectoryPublish() | DirectoryDrop() | DirectoryJoin() | DirectoryLeave():
                return self._directory.handle(message, payload, self._clock.monotonic_ns())
            case MapQuery():
                return self._map_answer()
            case MapUpdate():
                return Done(int(self.take_map(decode_map(payload)))), b""
            case LookupReport():
                lookups = Counter({(first, key): count for first, key, count in message.keys})
                self.maps.add_report(lookups, message.total)
                return self._map_answer()
            case MetadataStatusQuery():
                return self.status(), b""
            case SetQuota():
                return self._set_quota(message), b""
            case DropTenant():
                return self._drop_tenant(message), b""
            case _:
                return self._ask_core(message, payload), b""

    def _ask_core(self, message: Message, payload: bytes) -> Message:
        with self._lock:
            return self._core.handle(message, payload, self._clock.monotonic_ns(), self._clock.unix_s())

    def _match(self, message: Match, payload: bytes) -> Message:
        view = self.maps.view
        if message.map_version < view.version and view.is_misdirected(payload):
            return Failed("redirect", "another shard knows this chain", view.version)
        answer = self._ask_core(message, payload)
        if isinstance(answer, Matched):
            return Matched(answer.num_blocks, answer.extents, answer.begins, view.version)
        return answer

    def _map_answer(self) -> tuple[Message, bytes]:
        view = self.maps.view
        return MapAnswer(view.version), view.packed

    def _set_quota(self, message: SetQuota) -> Done:
        quota = TenantQuota(message.max_mib, message.write_mib_s, message.max_pinned_mib)
        if min(quota.max_mib, quota.write_mib_s, quota.max_pinned_mib) < 0:
            raise InvalidRequest("a limit is negative", code="bad_request")
        with self._lock:
            self._core.quotas.set_quota(TenantId(message.tenant), quota)
        self._save(is_clean=False)
        return Done(1)

    def _drop_tenant(self, message: DropTenant) -> Done:
        with self._lock:
            count = self._core.drop_tenant(TenantId(message.tenant))
            self._dropped[message.tenant] = self._clock.unix_s()
        self._save(is_clean=False)  # or a rebuild would bring it back
        return Done(count)

    # --- upkeep ------------------------------------------------------------------------------

    def _keep_up(self) -> None:
        while not self._stopping.wait(UPKEEP_S):
            now_ns = self._clock.monotonic_ns()
            self._directory.tick(now_ns)
            with self._lock:
                self._core.tick(now_ns, self._clock.unix_s())
                is_changed = self._changes() != self._saved_counts
            if is_changed and now_ns - self._saved_ns >= self.params.checkpoint_s * SECOND_NS:
                self._save(is_clean=False)
            if now_ns - self._reported_ns >= self.params.report_s * SECOND_NS:
                self._reported_ns = now_ns
                self._report()

    def _report(self) -> None:
        """Tell shard 0 what we were asked, or look at what we were told if we are it."""
        with self._lock:
            lookups, self._core.lookups = self._core.lookups, Counter[LookupKey]()
            total = self._core.counts.matches - self._reported_matches
            self._reported_matches += total
        leader = self.maps.view.leader
        if not leader:
            self.maps.add_report(lookups, total)
            self._guard_disk(self.maps.deepen)
        else:
            keys = tuple((*key, count) for key, count in lookups.most_common(MAX_REPORTED_KEYS))
            self._ask_leader(leader, LookupReport(total, keys))
        with self._lock:
            self._core.shards = self.maps.view.table

    def _ask_leader(self, leader: str, report: LookupReport) -> None:
        deadline_ns = time.monotonic_ns() + int(LEADER_S * SECOND_NS)
        try:
            with Connection(leader, name=self._name, token=self._token, deadline_ns=deadline_ns) as link:
                answer = link.call(report, deadline_ns=deadline_ns)
            if isinstance(answer.message, MapAnswer) and answer.message.version > self.maps.view.version:
                newest = decode_map(answer.payload)
                self._guard_disk(lambda: self.maps.update(newest))
        except MillpondError as error:
            log.info("shard 0 not reached", code=error.code, error=error.message)

    # --- disk --------------------------------------------------------------------------------

    def _restore(self) -> MetadataCore:
        params = self.params
        max_age_s = params.core.ttl_hours * HOUR_S
        saved = load_checkpoint(self._files, now_s=self._clock.unix_s(), max_age_s=max_age_s)
        quotas = QuotaBook(params.default_quota)
        if saved is None:
            return MetadataCore(params.core, BlockIndex(params.max_blocks), quotas)
        self._was_clean = saved.is_clean
        self._dropped = dict(saved.dropped)
        for tenant, quota in saved.quotas.items():
            quotas.set_quota(TenantId(tenant), quota)
        return MetadataCore(params.core, BlockIndex.restore(saved.index, params.max_blocks), quotas)

    def _changes(self) -> tuple[int, ...]:
        counts = self._core.counts
        return (counts.commits, counts.forgotten, counts.expired_extents, self._core.index.num_extents)

    def _save(self, *, is_clean: bool) -> bool:
        with self._lock:
            self._saved_ns = self._clock.monotonic_ns()
            self._saved_counts = self._changes()
            checkpoint = Checkpoint(
                self._clock.unix_s(),
                is_clean,
                self._core.index.save(),
                self._core.quotas.own(),
                self._dropped.copy(),
            )
        return self._guard_disk(lambda: save_checkpoint(self._files, checkpoint))

    def _guard_disk(self, write: Callable[[], object]) -> bool:
        """Write something that we can do without; whether it worked."""
        try:
            write()
        except OSError as error:
            log.warning("not written", error=str(error))
            return False
        return True

    # --- rebuild -----------------------------------------------------------------------------

    def _run_rebuild(self) -> None:
        if not self._was_clean:
            self._rebuild.run()

    def _knows(self, header: RecordHeader) -> bool:
        with self._lock:
            slot = self._core.index.find(header.extent.digest[:BLOCK_HASH_BYTES])
            if slot < 0:
                return False
            entry = self._core.index.entry(slot)
            return (entry.extent, entry.stripe) == (header.extent, header.stripe)

    def _take_extent(self, header: RecordHeader, num_bytes: int) -> None:
        if header.created_s <= self._dropped.get(header.tenant, -1):
            return
        try:
            self._ask_core(commit_of(header, num_bytes), header.hashes)
        except OverloadError as error:
            log.warning("extent not indexed", error=error.message)

    def _on_failure(self, error: BaseException) -> None:
        self.failure = error
        self._stopping.set()


def _refusal(error: Exception, map_version: int) -> Failed:
    match error:
        case QuotaExceeded():
            return Failed("quota", error.message, map_version)
        case OverloadError():
            return Failed("full", error.message, map_version)
        case MillpondError():
            return Failed("bad_request", error.message, map_version)
        case _:
            return Failed("io", str(error), map_version)
