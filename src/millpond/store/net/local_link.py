"""`LocalLink`: a storage node on this host, its records read from its folders without the node's process.

Everything but reads goes over the connection, which also serves the reads while the folders cannot be opened.
One thread, `CachedReads`, reads for all nodes of this host what the system has in memory, so that a stripe
does not wake a thread per shard; what needs a drive goes to the thread of its node.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

import structlog

from millpond.core.errors import DataError, DeadlineExceeded, MillpondError, NodeRefused, TransferFailed
from millpond.store.local_reader import LocalNodeReader, LocalRecord
from millpond.store.net.connection import Answer, Call, Landing
from millpond.store.net.framing import Bytes
from millpond.store.net.messages import Message, ReadShard, ShardData
from millpond.store.net.node_link import NodeLink
from millpond.store.segment import ShardKey

log = structlog.get_logger(__name__)

_NO_PAYLOAD = memoryview(b"")


class _LocalCall(Call):
    def __init__(
        self, query: ReadShard, landing: Landing | None, on_done: Callable[[Call], None] | None
    ) -> None:
        super().__init__(0, landing, on_done)
        self.query = query


class CachedReads:
    """The thread that reads what is in memory, for all `LocalLink`s of a pool. Never waits for a drive."""

    def __init__(self) -> None:
        self._calls: queue.SimpleQueue[tuple[LocalLink, _LocalCall] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="read cached")
        self._thread.start()

    def put(self, link: LocalLink, call: _LocalCall) -> None:
        """Serve a call, or hand it to the thread of its link."""
        self._calls.put((link, call))

    def close(self) -> None:
        """Serve what is there and end. Links are closed later."""
        self._calls.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (job := self._calls.get()) is not None:
            link, call = job
            link.serve(call, waits=False)


class LocalLink:
    """See module. Implements `NodePort`; owns its reader thread, the reader and the connection.

    A drive that hangs holds up the reader thread only: records are read into memory of the thread and copied
    to their place if they are still wanted then, so that giving up a read never waits for a drive.

    Args:
        link: The connection; closed with this.
        cached: Outlives all calls of this.
    """

    def __init__(self, link: NodeLink, cached: CachedReads) -> None:
        self._link = link
        self._cached = cached
        self._reader: LocalNodeReader | None = None
        self._calls: queue.SimpleQueue[_LocalCall | None] = queue.SimpleQueue()
        self._copying = threading.Lock()
        self._scratch = memoryview(bytearray(0))
        self._thread = threading.Thread(target=self._run, name=f"read {link.info.node}")
        try:
            self._reader = LocalNodeReader(Path(link.info.path))
        except NodeRefused as error:
            log.info("node's folders not read directly", node=link.info.node, error=error.message)
        self._thread.start()

    @property
    def link(self) -> NodeLink:
        """The connection beside."""
        return self._link

    def start(
        self,
        message: Message,
        payload: Sequence[Bytes] = (),
        *,
        deadline_ns: int,
        landing: Landing | None = None,
        on_done: Callable[[Call], None] | None = None,
    ) -> Call:
        """See `NodePort`."""
        is_readable = self._reader is not None and self._thread.is_alive()
        if not isinstance(message, ReadShard) or not is_readable:
            return self._link.start(
                message, payload, deadline_ns=deadline_ns, landing=landing, on_done=on_done
            )
        call = _LocalCall(message, landing, on_done)
        self._cached.put(self, call)
        return call

    def cancel(self, call: Call) -> None:
        """See `NodePort`."""
        if not isinstance(call, _LocalCall):
            self._link.cancel(call)
            return
        call.finish(DeadlineExceeded("not wanted any more", code="store.deadline"))
        with self._copying:
            pass  # whoever was copying has ended, and whoever comes sees that it is done

    def close(self) -> None:
        """See `NodePort`."""
        self._calls.put(None)
        self._thread.join()
        if self._reader is not None:
            self._reader.close()
        self._link.close()

    def serve(self, call: _LocalCall, *, waits: bool) -> None:
        """Read and finish a call; one that may not wait and would have to goes to our thread."""
        if call.done:
            return
        outcome: Answer | MillpondError | None = TransferFailed(
            "the reader ended by a bug", code="pool.unreachable"
        )
        try:
            outcome = Answer(self._read(call, waits), _NO_PAYLOAD)
        except BlockingIOError:
            outcome = None
        except MillpondError as error:
            outcome = error
        finally:
            if outcome is None:
                self._calls.put(call)
            else:
                call.finish(outcome)

    def _run(self) -> None:
        while (call := self._calls.get()) is not None:
            self.serve(call, waits=True)

    def _read(self, call: _LocalCall, waits: bool) -> ShardData:
        query, reader = call.query, self._reader
        if reader is None or call.landing is None:
            raise NodeRefused("a read has no place to go to", code="store.bad_request")
        key = ShardKey(query.digest, query.num_blocks, query.shard, query.nonce)
        with reader.open_record(key, waits=waits) as record:
            ranges = record.header.shape.read_ranges(query.begin_row, query.end_row, query.num_columns)
            num_bytes = sum(size for _, size in ranges)
            answer = ShardData(len(record.packed_header), record.generation)
            rows = self._read_aside(record, ranges, num_bytes) if waits else None
            header_place, rows_place = call.landing(answer, len(record.packed_header) + num_bytes)
            if (header_place.nbytes, rows_place.nbytes) != (len(record.packed_header), num_bytes):
                raise DataError("the landing has another shape than the record", code="pool.answer")
            with self._copying:
                if not call.done:
                    header_place[:] = record.packed_header
                    if rows is None:
                        record.read_ranges(ranges, rows_place)
                    else:
                        rows_place[:] = rows
            return answer

    def _read_aside(
        self, record: LocalRecord, ranges: Sequence[tuple[int, int]], num_bytes: int
    ) -> memoryview:
        if self._scratch.nbytes < num_bytes:
            self._scratch = memoryview(bytearray(num_bytes))
        rows = self._scratch[:num_bytes]
        record.read_ranges(ranges, rows)
        return rows
