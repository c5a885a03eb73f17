"""`NodeServer`: a storage node on a TCP port.

    accept thread        greets nobody itself: one thread per connection (`Listener`)
    connection threads   read requests, answer what memory knows, queue the rest; never touch a disk
    worker threads       some per target: a drive that hangs holds up its own records only
    upkeep threads       one per target, once a second

So the heartbeat (`NodeStatusQuery`) is answered while every drive hangs. Each request gets one answer;
queues, buffers and connections are bounded, and what does not fit is refused as busy.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Sequence

import structlog

from millpond.core.errors import (
    BadFrame,
    DataError,
    ExtentAbsent,
    MillpondError,
)
from millpond.core.units import MIB, SECOND_NS
from millpond.store.net.framing import VERSION, Bytes, Head
from millpond.store.net.listener import Listener, guarded_thread, join_all
from millpond.store.net.messages import (
    CancelRead,
    Done,
    DropShard,
    Failed,
    Hello,
    ListShards,
    Message,
    NodeStatus,
    NodeStatusQuery,
    PutShard,
    ReadShard,
    ShardData,
    ShardList,
)
from millpond.store.net.peer import Job, Peer, ServerParams
from millpond.store.net.record_buffers import RecordBuffers
from millpond.store.node import StorageNode
from millpond.store.segment import ShardKey
from millpond.store.target import TargetState

log = structlog.get_logger(__name__)

UPKEEP_S = 1.0
LIST_BYTES = 4 * MIB
"""Headers in one answer."""


class NodeServer:
    """Serves a node until `stop`.

    Args:
        node: Closed by `stop`.
        address: `host:port`; port 0 takes a free one.
        token: Cluster token that peers must have.
        boot: Number of this start, larger than those before.
        params: Bounds.

    Raises:
        ConfigError: The address cannot be bound.
    """

    def __init__(
        self, node: StorageNode, address: str, *, token: str, boot: int, params: ServerParams
    ) -> None:
        self.node = node
        self.params = params
        self.num_busy = 0
        """Requests refused because queues or buffers were full."""
        self.read_bytes = 0
        self.failure: BaseException | None = None
        """A bug that ended a thread; the process should end too."""
        self._boot = boot
        self._buffers = RecordBuffers(params.max_buffer_bytes)
        self._stopping = threading.Event()
        self._lock = threading.Lock()
        self._listener = Listener(
            address, Hello(VERSION, node.name, token, boot), params, self._dispatch, self._on_failure
        )
        self._queues: list[queue.Queue[Job | None]] = [queue.Queue(params.max_queued) for _ in node.targets]
        self._threads = [
            self._thread(f"work {index}", lambda jobs=jobs: self._work(jobs))
            for index, jobs in enumerate(self._queues)
            for _ in range(params.workers_per_target)
        ]
        self._threads += [
            self._thread(f"upkeep {index}", lambda index=index: self._keep_up(index))
            for index in range(len(node.targets))
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
        for thread in self._threads:
            thread.start()
        self._listener.start()

    def wait(self, timeout_s: float) -> bool:
        """Wait until `stop` is called or a thread fails; whether that happened."""
        return self._stopping.wait(timeout_s)

    def stop(self, deadline_s: float) -> bool:
        """Refuse new work, finish what is queued, seal and sync everything, end all threads.

        Returns:
            Whether all of that was done in time; if not, a drive hangs and the process must be left by exit.
        """
        deadline_ns = time.monotonic_ns() + int(deadline_s * SECOND_NS)
        self._stopping.set()
        if not self._listener.stop(deadline_ns):
            return False
        for jobs in self._queues:
            for _ in range(self.params.workers_per_target):
                if not _put_by(jobs, None, deadline_ns):
                    return False
        if not join_all(self._threads, deadline_ns):
            return False
        closing = self._thread("close", self.node.close)
        closing.start()
        return join_all([closing], deadline_ns)

    def status(self) -> NodeStatus:
        """State of the node, from memory."""
        targets = self.node.targets
        return NodeStatus(
            node=self.node.name,
            boot=self._boot,
            capacity_bytes=sum(target.params.capacity_bytes for target in targets),
            used_bytes=sum(target.used_bytes for target in targets),
            num_shards=sum(target.num_shards for target in targets),
            targets_failed=tuple(i for i, target in enumerate(targets) if target.state is TargetState.FAILED),
            accepts_writes=any(target.state is TargetState.OK for target in targets),
            written_bytes=self.node.written_bytes,
            read_bytes=self.read_bytes,
            queued_reads=sum(jobs.qsize() for jobs in self._queues),
            read_slots=len(targets) * self.params.workers_per_target,
            num_foreign_segments=sum(target.num_foreign_segments for target in targets),
        )

    def _thread(self, name: str, run: Callable[[], None]) -> threading.Thread:
        return guarded_thread(name, run, self._on_failure)

    def _on_failure(self, error: BaseException) -> None:
        self.failure = error
        self._stopping.set()

    def _dispatch(self, peer: Peer, head: Head) -> None:
        """Answer a request or queue it. Its payload is read in any case."""
        message = head.message
        if isinstance(message, PutShard):
            self._receive_put(peer, head, message)
            return
        peer.frames.skip(head.payload_bytes, peer.frames.frame_deadline_ns())
        if isinstance(message, ReadShard | DropShard) and not _key_of(message).is_valid:
            peer.answer(head.request, Failed("bad_request", "no shard has this name"))
        elif isinstance(message, NodeStatusQuery):
            peer.answer(head.request, self.status())
        elif isinstance(message, CancelRead):
            job = peer.jobs.get(message.request)
            if job is not None:
                job.cancelled = True
        elif isinstance(message, ReadShard | DropShard):
            index = self.node.find(_key_of(message).fingerprint)
            if index is not None:
                self._queue(index, Job(peer, head.request, message))
            elif isinstance(message, DropShard):
                peer.answer(head.request, Done(0))
            else:
                peer.answer(head.request, Failed("absent"))
        elif isinstance(message, ListShards) and self._queues:
            index = min(max(0, message.cursor >> 56), len(self._queues) - 1)
            self._queue(index, Job(peer, head.request, message))
        else:
            peer.answer(head.request, Failed("bad_request", f"a node does not do {type(message).__name__}"))

    def _receive_put(self, peer: Peer, head: Head, message: PutShard) -> None:
        deadline_ns = peer.frames.frame_deadline_ns()
        key = _key_of(message)
        if not key.is_valid or not head.payload_bytes:
            peer.frames.skip(head.payload_bytes, deadline_ns)
            peer.answer(head.request, Failed("bad_request", "no shard has this name, or no bytes"))
            return
        buffer = self._buffers.take(head.payload_bytes)
        if buffer is None:
            self.num_busy += 1
            peer.frames.skip(head.payload_bytes, deadline_ns)
            peer.answer(head.request, Failed("busy", "no memory for another record"))
            return
        try:
            peer.frames.receive_into(memoryview(buffer)[: head.payload_bytes], deadline_ns)
        except BaseException:
            self._buffers.give_back(buffer)
            raise
        self._queue(
            self.node.pick(key.fingerprint), Job(peer, head.request, message, buffer, head.payload_bytes)
        )

    def _queue(self, index: int, job: Job) -> None:
        job.peer.jobs[job.request] = job
        try:
            self._queues[index].put_nowait(job)
        except queue.Full:
            self.num_busy += 1
            self._finish(job, Failed("busy", "too many requests wait"))

    def _work(self, jobs: queue.Queue[Job | None]) -> None:
        while (job := jobs.get()) is not None:
            if job.cancelled:
                self._finish(job, Failed("deadline", "cancelled"))
                continue
            try:
                self._do(job)
            except MillpondError as error:
                self._finish(job, _failed(error))

    def _finish(self, job: Job, answer: Message, payload: Sequence[Bytes] = ()) -> None:
        job.peer.jobs.pop(job.request, None)
        if job.buffer is not None:
            self._buffers.give_back(job.buffer)
            job.buffer = None
        job.peer.answer(job.request, answer, payload)

    def _do(self, job: Job) -> None:
        message = job.message
        if isinstance(message, PutShard) and job.buffer is not None:
            self.node.put(_key_of(message), memoryview(job.buffer)[: job.payload_bytes])
            self._finish(job, Done(1))
        elif isinstance(message, ReadShard):
            self._read(job, message)
        elif isinstance(message, DropShard):
            self._finish(job, Done(int(self.node.drop(_key_of(message)))))
        elif isinstance(message, ListShards):
            listing = self.node.list_headers(message.cursor, max(1, message.limit), LIST_BYTES)
            sizes = tuple(len(header) for header in listing.headers)
            answer = ShardList(listing.next_cursor, sizes, listing.last_read_s)
            self._finish(job, answer, listing.headers)

    def _read(self, job: Job, message: ReadShard) -> None:
        with self.node.open_record(_key_of(message), is_use=message.is_use) as record:
            try:
                ranges = record.header.shape.read_ranges(
                    message.begin_row, message.end_row, message.num_columns
                )
            except DataError as error:
                raise BadFrame(error.message, code="store.bad_request") from error
            num_bytes = sum(size for _, size in ranges)
            buffer = self._buffers.take(num_bytes)
            if buffer is None:
                self.num_busy += 1
                self._finish(job, Failed("busy", "no memory for another record"))
                return
            try:
                view = memoryview(buffer)[:num_bytes]
                record.read_ranges(ranges, view)
                answer = ShardData(len(record.packed_header), record.generation)
                self._finish(job, answer, [record.packed_header, view])
            finally:
                self._buffers.give_back(buffer)
        with self._lock:
            self.read_bytes += num_bytes

    def _keep_up(self, index: int) -> None:
        target = self.node.targets[index]
        seen = (target.state, target.fault)
        while not self._stopping.wait(UPKEEP_S):
            self.node.upkeep(index)
            if seen != (target.state, target.fault):
                seen = (target.state, target.fault)
                log.warning("node.target", target=index, state=target.state.value, fault=target.fault)


def _key_of(message: PutShard | ReadShard | DropShard) -> ShardKey:
    return ShardKey(message.digest, message.num_blocks, message.shard, message.nonce)


def _failed(error: MillpondError) -> Failed:
    if isinstance(error, ExtentAbsent):
        return Failed("absent", error.message)
    return Failed(error.code.removeprefix("store."), error.message)


def _put_by(jobs: queue.Queue[Job | None], job: Job | None, deadline_ns: int) -> bool:
    try:
        jobs.put(job, timeout=max(0, deadline_ns - time.monotonic_ns()) / SECOND_NS)
    except queue.Full:
        return False
    return True
