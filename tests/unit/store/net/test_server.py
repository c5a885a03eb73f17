"""A storage node on its port, over real folders: what clients may rely on, whatever happens."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import msgspec
import pytest

from millpond.core.errors import (
    BadFrame,
    DeadlineExceeded,
    ExtentAbsent,
    MillpondError,
    NodeRefused,
    TransferFailed,
    Unauthorized,
)
from millpond.core.units import KIB, MIB
from millpond.policies.retention import BlockClass
from millpond.store.clock import SystemClock
from millpond.store.files import DiskFiles, Files
from millpond.store.net.connection import Answer, Connection
from millpond.store.net.framing import HEAD, VERSION
from millpond.store.net.messages import (
    KINDS,
    CancelRead,
    Done,
    DropShard,
    ListShards,
    Match,
    Message,
    NodeStatus,
    NodeStatusQuery,
    PutShard,
    ReadShard,
)
from millpond.store.net.peer import ServerParams
from millpond.store.net.server import NodeServer
from millpond.store.node import Calendar, StorageNode
from millpond.store.record import check_rows, parse_header
from millpond.store.segment import ShardKey
from millpond.store.target import Target, TargetParams
from millpond.store.wear import WearBudget
from tests.unit.store.net.peers import within
from tests.unit.store.records import Record, make_record

TOKEN = "secret"
PARAMS = TargetParams(capacity_bytes=64 * MIB, segment_bytes=4 * MIB)
BOUNDS = ServerParams()
ROWS = (16 * KIB, 32 * KIB, 16 * KIB)


@contextlib.contextmanager
def serving(
    targets: Sequence[Files], *, params: ServerParams = BOUNDS, budget_bytes: float = 0
) -> Iterator[NodeServer]:
    calendar = Calendar(SystemClock())
    budget = WearBudget(budget_bytes, calendar.now_s()) if budget_bytes else None
    node = StorageNode(
        "s0",
        [Target(files, PARAMS, now_s=calendar.now_s()) for files in targets],
        calendar=calendar,
        budget=budget,
    )
    server = NodeServer(node, "127.0.0.1:0", token=TOKEN, boot=7, params=params)
    server.start()
    try:
        yield server
    finally:
        assert server.stop(10)
    assert server.failure is None
    assert server.num_connections == 0


KIND_OF = {kind: number for number, kind in KINDS.items()}


def connect(server: NodeServer) -> Connection:
    return Connection(server.address, name="c", token=TOKEN, deadline_ns=within(10))


def call(connection: Connection, message: Message, payload: bytes = b"") -> Answer:
    return connection.call(message, [payload] if payload else [], deadline_ns=within(20))


def put(connection: Connection, record: Record) -> Message:
    return call(connection, PutShard(*record.key), record.whole).message


def read_message(key: ShardKey, begin: int = 0, end: int = len(ROWS), columns: int = 2) -> ReadShard:
    return ReadShard(*key, begin, end, columns)


def read(connection: Connection, key: ShardKey) -> bytes:
    answer = call(connection, read_message(key))
    size = answer.message.header_bytes
    header = parse_header(answer.payload[:size])
    assert header.generation == answer.message.generation
    check_rows(header, answer.payload[size:], 0, len(ROWS), 2)
    return bytes(answer.payload[size:])


@pytest.fixture
def folders(tmp_path: Path) -> list[DiskFiles]:
    return [DiskFiles(tmp_path / f"t{i}") for i in range(3)]


@pytest.fixture
def server(folders) -> Iterator[NodeServer]:
    with serving(folders) as server:
        yield server


@pytest.fixture
def connection(server) -> Iterator[Connection]:
    with connect(server) as connection:
        yield connection


RECORDS = [make_record(i, row_bytes=ROWS) for i in range(30)]


def test_shards_are_put_read_listed_and_dropped(
    server: NodeServer, connection: Connection, wait_until: Callable[..., None]
):
    assert {put(connection, record) for record in RECORDS} == {Done(1)}
    assert [read(connection, record.key) for record in RECORDS] == [record.payload for record in RECORDS]
    num_read = sum(len(record.payload) for record in RECORDS)
    wait_until(lambda: server.read_bytes >= num_read, "the last answer is counted: it went before")
    status = call(connection, NodeStatusQuery()).message
    assert isinstance(status, NodeStatus)
    assert (status.node, status.boot, status.num_shards) == ("s0", 7, 30)
    assert (status.accepts_writes, status.targets_failed) == (True, ())
    assert status.read_bytes == num_read
    assert status.written_bytes > status.read_bytes
    assert all(target.num_shards for target in server.node.targets), "one target holds nothing"
    assert call(connection, DropShard(*RECORDS[0].key)).message == Done(1)
    assert call(connection, DropShard(*RECORDS[0].key)).message == Done(0)
    with pytest.raises(ExtentAbsent):
        read(connection, RECORDS[0].key)


@pytest.mark.parametrize(("begin", "end", "columns"), [(0, 1, 2), (1, 3, 2), (0, 3, 1), (2, 3, 1)])
def test_parts_of_a_shard_are_read_and_verified(connection: Connection, begin: int, end: int, columns: int):
    record = RECORDS[0]
    put(connection, record)
    answer = call(connection, read_message(record.key, begin, end, columns))
    size = answer.message.header_bytes
    header = parse_header(answer.payload[:size])
    check_rows(header, answer.payload[size:], begin, end, columns)
    wanted = b"".join(
        record.payload[offset : offset + length]
        for offset, length in header.shape.read_ranges(begin, end, columns)
    )
    assert answer.payload[size:] == wanted


def test_listing_gives_every_header_once_in_parts_of_any_size(connection: Connection):
    for record in RECORDS:
        put(connection, record)
    for limit in (1, 7, 1000):
        keys = []
        cursor = 0
        while True:
            answer = call(connection, ListShards(cursor, limit))
            begin = 0
            for size in answer.message.header_bytes:
                header = parse_header(answer.payload[begin : begin + size])
                keys.append((header.extent.digest, header.shard))
                begin += size
            cursor = answer.message.next_cursor
            if not cursor:
                break
        assert sorted(keys) == sorted((record.key.digest, record.key.shard) for record in RECORDS)


def flipped(data: bytes, at: int) -> bytes:
    return data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]


BAD_REQUESTS = {
    "not a record": (PutShard(*RECORDS[0].key), b"x" * 5000),
    "an empty record": (PutShard(*RECORDS[0].key), b""),
    "another record": (PutShard(*RECORDS[1].key), RECORDS[0].whole),
    "a longer record": (PutShard(*RECORDS[0].key), RECORDS[0].whole + b"x"),
    "a shorter record": (PutShard(*RECORDS[0].key), RECORDS[0].whole[:-1]),
    "a damaged header": (PutShard(*RECORDS[0].key), flipped(RECORDS[0].whole, 100)),
    "a short digest": (PutShard(b"short", 2, 3, 0), RECORDS[0].whole),
    "no such rows": (read_message(RECORDS[2].key, 0, 9), b""),
    "no such columns": (read_message(RECORDS[2].key, 0, 1, 0), b""),
    "a negative row": (read_message(RECORDS[2].key, -1, 1), b""),
    "a shard out of range": (ReadShard(bytes(32), 1, 256, 0, 0, 1, 1), b""),
    "blocks out of range": (DropShard(bytes(32), 1 << 16, 1, 0), b""),
    "a negative nonce": (DropShard(bytes(32), 1, 1, -1), b""),
    "a request for the metadata": (Match(0, bytes(16), 0), b"x" * 16),
    "an answer": (Done(1), b""),
}


@pytest.mark.parametrize("name", BAD_REQUESTS)
def test_a_bad_request_is_refused_and_the_connection_goes_on(connection: Connection, name: str):
    put(connection, RECORDS[2])
    message, payload = BAD_REQUESTS[name]
    with pytest.raises(BadFrame):
        call(connection, message, payload)
    assert read(connection, RECORDS[2].key) == RECORDS[2].payload
    assert call(connection, NodeStatusQuery()).message.num_shards == 1


def test_a_class_that_is_not_known_is_refused(connection: Connection):
    from dataclasses import replace

    from millpond.store.record import pack_header

    header = replace(RECORDS[0].header, expiry_class=200)
    with pytest.raises(BadFrame):
        call(connection, PutShard(*RECORDS[0].key), pack_header(header) + RECORDS[0].payload)


@pytest.mark.parametrize("cursor", [-1, 1 << 60, (1 << 64) - 1, 1 << 70])
def test_a_cursor_from_nowhere_lists_nothing_or_something_and_breaks_nothing(
    connection: Connection, cursor: int
):
    put(connection, RECORDS[0])
    with contextlib.suppress(MillpondError, OverflowError):
        connection.call(ListShards(cursor, 10), deadline_ns=within(5))
    if not connection.broken:
        assert read(connection, RECORDS[0].key) == RECORDS[0].payload


def test_garbage_a_wrong_version_and_a_wrong_token_are_closed_and_counted(server: NodeServer, wait_until):
    for data in (b"GET / HTTP/1.1\r\n\r\n........", HEAD.pack(b"MPST", VERSION + 1, 1, 0, 0, 0)):
        with socket.create_connection(_host_port(server.address)) as sock:
            sock.sendall(data)
            sock.settimeout(10)
            while sock.recv(4096):
                pass
    with pytest.raises(Unauthorized):
        Connection(server.address, name="c", token="guess", deadline_ns=within(10))
    wait_until(lambda: server.num_refused_peers == 3, "three peers refused")
    wait_until(lambda: server.num_connections == 0, "their connections closed")


def test_a_peer_that_dies_half_way_through_a_put_leaves_nothing(server: NodeServer, wait_until):
    record = RECORDS[0]
    with connect(server) as connection:
        body = msgspec.msgpack.encode(PutShard(*record.key))
        head = HEAD.pack(b"MPST", VERSION, KIND_OF[PutShard], 9, len(body), 150_000)
        connection._frames._socket.sendall(head + body + record.whole[:50_000])
    wait_until(lambda: server.num_connections == 0, "the connection closed")
    with connect(server) as connection:
        with pytest.raises(ExtentAbsent):
            read(connection, record.key)
        assert server._buffers.used_bytes == 0


def test_more_connections_than_allowed_are_closed(folders):
    with serving(folders, params=ServerParams(max_connections=2)) as server:
        first, second = connect(server), connect(server)
        with pytest.raises(TransferFailed):
            connect(server)
        assert put(first, RECORDS[0]) == Done(1)
        first.close()
        second.close()


def test_an_idle_connection_is_closed(folders, wait_until):
    with serving(folders, params=ServerParams(idle_s=0)) as server, connect(server) as connection:
        wait_until(lambda: connection.broken, "the server closed it")
        assert server.num_refused_peers == 0


class StuckFiles(DiskFiles):
    """A drive that hangs: while `stuck`, its calls wait in a read of a pipe, as they would in a dead disk."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self._read_end, self._write_end = os.pipe()
        self.stuck = False
        self.num_waiting = 0

    def _hang(self) -> None:
        if self.stuck:
            self.num_waiting += 1
            os.read(self._read_end, 1)

    def write(self, file, offset, views):
        self._hang()
        super().write(file, offset, views)

    def read_into(self, file, offset, view):
        self._hang()
        return super().read_into(file, offset, view)

    def sync(self, file):
        self._hang()
        super().sync(file)

    def release(self) -> None:
        self.stuck = False
        os.write(self._write_end, b"x" * 4096)


def test_bug_42_the_heartbeat_is_answered_while_every_drive_hangs(tmp_path: Path, wait_until):
    stuck = [StuckFiles(tmp_path / f"t{i}") for i in range(2)]
    with serving(stuck) as server, connect(server) as connection:
        for record in RECORDS[:10]:
            put(connection, record)
        for files in stuck:
            files.stuck = True
        try:
            calls = [
                connection.start(read_message(record.key), deadline_ns=within(10)) for record in RECORDS[:10]
            ]
            calls += [
                connection.start(PutShard(*record.key), [record.whole], deadline_ns=within(10))
                for record in RECORDS[10:20]
            ]
            wait_until(lambda: all(files.num_waiting >= 2 for files in stuck), "all workers hang")
            for _ in range(20):
                status = connection.call(NodeStatusQuery(), deadline_ns=within(5)).message
                assert status.num_shards == 10
            assert status.queued_reads > 0
            assert not any(call.done for call in calls)
        finally:
            for files in stuck:
                files.release()
        assert all(call.wait(within(10)) for call in calls)
        for call_ in calls:
            call_.result()


def test_a_drive_that_hangs_does_not_hold_up_the_others(tmp_path: Path, wait_until):
    stuck = StuckFiles(tmp_path / "t0")
    with serving([stuck, DiskFiles(tmp_path / "t1")]) as server, connect(server) as connection:
        for record in RECORDS:
            put(connection, record)
        on_stuck = [r for r in RECORDS if server.node.find(r.key.fingerprint) == 0]
        on_other = [r for r in RECORDS if server.node.find(r.key.fingerprint) == 1]
        assert on_stuck
        assert on_other
        stuck.stuck = True
        try:
            calls = [connection.start(read_message(r.key), deadline_ns=within(10)) for r in on_stuck]
            assert [read(connection, r.key) for r in on_other] == [r.payload for r in on_other]
            assert not any(call.done for call in calls)
        finally:
            stuck.release()
        assert all(call.wait(within(10)) for call in calls)


def test_a_cancelled_read_is_not_done_and_still_answered(tmp_path: Path, wait_until):
    stuck = StuckFiles(tmp_path / "t0")
    params = ServerParams(workers_per_target=1)
    with serving([stuck], params=params) as server, connect(server) as connection:
        put(connection, RECORDS[0])
        stuck.stuck = True
        first = connection.start(read_message(RECORDS[0].key), deadline_ns=within(10))
        wait_until(lambda: stuck.num_waiting, "the worker hangs")
        second = connection.start(read_message(RECORDS[0].key), deadline_ns=within(10))
        connection._frames.send(0, CancelRead(second.request), deadline_ns=within(10))
        call(connection, NodeStatusQuery())  # so the cancellation has arrived
        read_before = server.read_bytes
        stuck.release()
        assert first.wait(within(10))
        assert second.wait(within(10))
        first.result()
        with pytest.raises(DeadlineExceeded):
            second.result()
        assert server.read_bytes - read_before <= len(RECORDS[0].payload)


def test_what_does_not_fit_in_queues_and_buffers_is_refused_as_busy(tmp_path: Path, wait_until):
    stuck = StuckFiles(tmp_path / "t0")
    params = ServerParams(workers_per_target=1, max_queued=4, max_buffer_bytes=1 * MIB)
    with serving([stuck], params=params) as server, connect(server) as connection:
        put(connection, RECORDS[0])
        stuck.stuck = True
        outcomes: list[str] = []
        try:
            reads = [
                connection.start(read_message(RECORDS[0].key), deadline_ns=within(10)) for _ in range(20)
            ]
            puts = [
                connection.start(PutShard(*r.key), [r.whole], deadline_ns=within(10)) for r in RECORDS[1:20]
            ]
            wait_until(lambda: server.num_busy >= 20, "requests refused")
        finally:
            stuck.release()
        for call_ in reads + puts:
            assert call_.wait(within(10))
            try:
                call_.result()
            except NodeRefused as error:
                outcomes.append(error.code)
        assert set(outcomes) == {"store.busy"}
        assert len(outcomes) == server.num_busy < 39
        wait_until(lambda: server._buffers.used_bytes == 0, "buffers released behind the last answer")


def test_a_low_wear_budget_refuses_by_class(folders):
    refused = {BlockClass.REASONING: 0, BlockClass.PROMPT: 0}
    with serving(folders, budget_bytes=12 * MIB) as server, connect(server) as connection:
        for number in range(300):
            for block_class in refused:
                record = make_record(number, row_bytes=ROWS, block_class=block_class, nonce=block_class)
                try:
                    put(connection, record)
                except NodeRefused:
                    refused[block_class] += 1
            if server.node.wear_level < 0.1:
                break
    assert refused[BlockClass.PROMPT] == 0
    assert refused[BlockClass.REASONING] > 0


def test_data_survives_a_clean_stop_and_a_start(tmp_path: Path):
    paths = [tmp_path / "a", tmp_path / "b"]
    with serving([DiskFiles(path) for path in paths]) as server, connect(server) as connection:
        for record in RECORDS:
            put(connection, record)
    with serving([DiskFiles(path) for path in reversed(paths)]) as server, connect(server) as connection:
        assert [read(connection, r.key) for r in RECORDS] == [r.payload for r in RECORDS]
        assert all(segment.sealed for target in server.node.targets for segment in target.segments())


def test_stop_gives_up_on_a_drive_that_hangs(tmp_path: Path, wait_until):
    stuck = StuckFiles(tmp_path / "t0")
    calendar = Calendar(SystemClock())
    node = StorageNode("s0", [Target(stuck, PARAMS, now_s=calendar.now_s())], calendar=calendar)
    server = NodeServer(node, "127.0.0.1:0", token=TOKEN, boot=1, params=ServerParams())
    server.start()
    with connect(server) as connection:
        put(connection, RECORDS[0])
        stuck.stuck = True
        connection.start(read_message(RECORDS[0].key), deadline_ns=within(10))
        wait_until(lambda: stuck.num_waiting, "a worker hangs")
        assert not server.stop(0.3)
    stuck.release()
    assert server.stop(10)


def test_many_clients_at_once_get_their_own_bytes(server: NodeServer):
    failures: list[str] = []

    def work(number: int) -> None:
        with connect(server) as connection:
            for i in range(20):
                record = make_record(1000 * number + i, row_bytes=ROWS)
                put(connection, record)
                if read(connection, record.key) != record.payload:
                    failures.append(f"{number}/{i}")

    threads = [threading.Thread(target=work, args=(i,)) for i in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert failures == []
    assert server.status().num_shards == 120


def _host_port(address: str) -> tuple[str, int]:
    host, _, port = address.rpartition(":")
    return host, int(port)
