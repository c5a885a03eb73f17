"""`LocalLink`: a storage node on this host, its records read from its folders without the node's process.

Everything but reads goes over the connection, which also serves the reads while the folders cannot be opened.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

import structlog

from millpond.core.errors import DataError, DeadlineExceeded, MillpondError, NodeRefused, TransferFailed
from millpond.store.local_reader import LocalNodeReader
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


class LocalLink:
    """See module. Implements `NodePort`; owns its reader thread, the reader and the connection.

    A drive that hangs holds up the reader thread only: records are read into memory of the thread and copied
    to their place if they are still wanted then, so that giving up a read never waits for a drive.
    """

    def __init__(self, link: NodeLink) -> None:
        self._link = link
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
        self._calls.put(call)
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

    def _run(self) -> None:
        while (call := self._calls.get()) is not None:
            if call.done:
                continue
            outcome: Answer | MillpondError = TransferFailed(
                "the reader ended by a bug", code="pool.unreachable"
            )
            try:
                outcome = Answer(self._read(call), _NO_PAYLOAD)
            except MillpondError as error:
                outcome = error
            finally:
                call.finish(outcome)

    def _read(self, call: _LocalCall) -> ShardData:
        query, reader = call.query, self._reader
        if reader is None or call.landing is None:
            raise NodeRefused("a read has no place to go to", code="store.bad_request")
        key = ShardKey(query.digest, query.num_blocks, query.shard, query.nonce)
        with reader.open_record(key) as record:
            ranges = record.header.shape.read_ranges(query.begin_row, query.end_row, query.num_columns)
            num_bytes = sum(size for _, size in ranges)
            if self._scratch.nbytes < num_bytes:
                self._scratch = memoryview(bytearray(num_bytes))
            rows = self._scratch[:num_bytes]
            record.read_ranges(ranges, rows)
            answer = ShardData(len(record.packed_header), record.generation)
            places = call.landing(answer, len(record.packed_header) + num_bytes)
            with self._copying:
                if not call.done:
                    _scatter((memoryview(record.packed_header), rows), places)
            return answer


def _scatter(sources: Sequence[memoryview], places: Sequence[memoryview]) -> None:
    if [source.nbytes for source in sources] != [place.nbytes for place in places]:
        raise DataError("the landing has another shape than the record", code="pool.answer")
    for source, place in zip(sources, places, strict=True):
        place[:] = source
