"""`millpond storage-node` as a process: it is killed, stopped, frozen and started again."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from millpond.core.errors import DeadlineExceeded, MillpondError
from millpond.store.local_reader import LocalNodeReader
from millpond.store.net.connection import Connection
from millpond.store.net.messages import DropShard, NodeStatusQuery, PutShard, ReadShard
from millpond.store.record import check_rows, parse_header
from tests.unit.store.net.peers import within
from tests.unit.store.records import Record, make_record

COMMAND = [sys.executable, "-m", "millpond.cli.main", "storage-node"]
ROWS = (16 * 1024, 32 * 1024)
RECORDS = [make_record(i, row_bytes=ROWS) for i in range(40)]


class NodeProcess:
    def __init__(self, folder: Path, *more: str) -> None:
        command = [*COMMAND, "--name", "s0"]
        for i in range(2):
            command += ["--target", f"{folder / f't{i}'}:64 MiB"]
        self.process = subprocess.Popen(
            [*command, *more], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        assert self.process.stdout is not None
        ready, _, _ = select.select([self.process.stdout], [], [], 60)
        self.address = self.process.stdout.readline().strip() if ready else ""
        assert self.address, self.process.communicate(timeout=10)

    def connect(self, token: str = "") -> Connection:
        return Connection(self.address, name="test", token=token, deadline_ns=within(20))

    def end(self, number: signal.Signals) -> int:
        self.process.send_signal(number)
        self.process.communicate(timeout=30)
        return self.process.returncode


@contextmanager
def node(folder: Path, *more: str) -> Iterator[NodeProcess]:
    running = NodeProcess(folder, *more)
    try:
        yield running
    finally:
        if running.process.poll() is None:
            running.end(signal.SIGKILL)


def put_all(connection: Connection, records: list[Record]) -> None:
    for record in records:
        connection.call(PutShard(*record.key), [record.whole], deadline_ns=within(20))


def read(connection: Connection, record: Record) -> bytes:
    answer = connection.call(ReadShard(*record.key, 0, len(ROWS), 2), deadline_ns=within(20))
    size = answer.message.header_bytes
    header = parse_header(answer.payload[:size])
    check_rows(header, answer.payload[size:], 0, len(ROWS), 2)
    return bytes(answer.payload[size:])


def test_a_node_is_stopped_and_started_with_everything(tmp_path: Path):
    with node(tmp_path) as first, first.connect() as connection:
        put_all(connection, RECORDS)
        boot = connection.peer.boot
        assert first.end(signal.SIGTERM) == 0
    assert [path for path in tmp_path.rglob("*.seg") if path.stat().st_size <= 4096] == []
    with node(tmp_path) as second, second.connect() as connection:
        assert connection.peer.boot >= boot
        assert [read(connection, record) for record in RECORDS] == [record.payload for record in RECORDS]
        reader = LocalNodeReader(tmp_path)
        with reader.open_record(RECORDS[0].key) as record:
            payload = bytearray(len(RECORDS[0].payload))
            record.read_ranges([(0, len(payload))], memoryview(payload))
        reader.close()
        assert payload == RECORDS[0].payload


def test_a_killed_node_comes_back_with_what_the_page_cache_held(tmp_path: Path):
    """Only the process dies: nothing that was acknowledged is lost, and what was dropped stays so."""
    with node(tmp_path) as first, first.connect() as connection:
        put_all(connection, RECORDS)
        connection.call(DropShard(*RECORDS[0].key), deadline_ns=within(20))
        first.end(signal.SIGKILL)
    with node(tmp_path) as second, second.connect() as connection:
        status = connection.call(NodeStatusQuery(), deadline_ns=within(20)).message
        assert status.num_shards == len(RECORDS) - 1
        assert [read(connection, record) for record in RECORDS[1:]] == [r.payload for r in RECORDS[1:]]
        put_all(connection, RECORDS[:1])
        assert read(connection, RECORDS[0]) == RECORDS[0].payload


def test_a_frozen_node_costs_the_deadline_and_answers_when_it_wakes(tmp_path: Path):
    with node(tmp_path) as running, running.connect() as connection:
        put_all(connection, RECORDS[:5])
        running.process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, running.process.pid, os.WSTOPPED)  # its threads may run on for a moment
        try:
            with pytest.raises(DeadlineExceeded):
                connection.call(NodeStatusQuery(), deadline_ns=within(0.3))
        finally:
            running.process.send_signal(signal.SIGCONT)
        assert read(connection, RECORDS[0]) == RECORDS[0].payload


def test_the_token_is_read_from_a_file(tmp_path: Path):
    token = tmp_path / "token"
    token.write_text("secret\n")
    with node(tmp_path / "data", "--token-file", str(token)) as running:
        with pytest.raises(MillpondError) as refused:
            running.connect("guess")
        assert refused.value.code == "store.wrong_token"
        with running.connect("secret") as connection:
            put_all(connection, RECORDS[:1])


def test_a_target_has_one_node(tmp_path: Path):
    with node(tmp_path) as first:
        second = subprocess.run(
            [*COMMAND, "--name", "s1", "--target", str(tmp_path / "t1")],
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert second.returncode == 2
        assert "in use" in second.stderr
        with first.connect() as connection:
            put_all(connection, RECORDS[:1])
        first.end(signal.SIGKILL)
    with node(tmp_path) as third, third.connect() as connection:
        assert read(connection, RECORDS[0]) == RECORDS[0].payload


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--name", "s0", "--target", "{}:much"], "size"),
        (["--name", "s0", "--target", "{}", "--listen", "nowhere"], "cannot listen"),
        (["--name", "s0", "--target", "/dev/null/x"], "/dev/null/x"),
        (["--name", "s0", "--target", "{}", "--target", "{}"], "in use"),
    ],
)
def test_what_cannot_start_says_why_with_status_2(tmp_path: Path, arguments: list[str], says: str):
    arguments = [argument.format(tmp_path / "t") for argument in arguments]
    result = subprocess.run(
        [*COMMAND, *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert result.returncode == 2, result.stderr
    assert says in result.stderr
    assert "Traceback" not in result.stderr


def test_a_node_needs_neither_torch_nor_numba(tmp_path: Path):
    code = (
        "import sys, millpond.store.net.daemon, millpond.store.local_reader;"
        "sys.exit(sum(name in sys.modules for name in ('torch', 'numba')))"
    )
    env = {key: value for key, value in os.environ.items() if key != "PYTHONSTARTUP"}
    assert subprocess.run([sys.executable, "-c", code], timeout=60, check=False, env=env).returncode == 0
