"""A storage node in this process, to test the client: real sockets, shards in memory, faults on demand."""

from __future__ import annotations

import socket
import threading
import time
from dataclasses import dataclass

from millpond.core.errors import MillpondError
from millpond.store.net.framing import VERSION, FrameSocket, welcome
from millpond.store.net.messages import (
    Done,
    Failed,
    Hello,
    NodeStatus,
    NodeStatusQuery,
    PutShard,
    ReadShard,
    ShardData,
)
from millpond.store.record import parse_header

SECOND_NS = 10**9


@dataclass
class Faults:
    """How the node misbehaves; set at any time."""

    delay_s: float = 0.0
    """Before each answer to a read; other requests wait behind it."""
    is_silent: bool = False
    """Reads and writes are not answered at all."""
    refuse_puts: bool = False
    flip_payload: bool = False
    """One bit of each payload read is wrong."""
    wrong_shard: bool = False
    """Reads are answered with whatever record is stored first."""
    short: bool = False
    """Answers lack their last bytes."""
    error: str = ""
    """Code that reads are refused with."""


class ShardPeer:
    """Serves one connection after the other in threads of its own; `close` ends them all."""

    def __init__(self, name: str, token: str = "t") -> None:
        self.name = name
        self.token = token
        self.faults = Faults()
        self.records: dict[tuple[bytes, int, int, int], bytes] = {}
        self.num_reads = 0
        # Holds the port while the peer is closed: nobody's connection may have it meanwhile.
        self._place = _bound_socket(0)
        self._open()

    @property
    def is_open(self) -> bool:
        return not self._is_closed

    def reopen(self) -> None:
        """Start again where it was, with the shards it has."""
        self._open()

    def _open(self) -> None:
        self._listener = _bound_socket(self._place.getsockname()[1])
        self._listener.listen()
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self._streams: list[FrameSocket] = []
        self._threads = [threading.Thread(target=self._accept, name=f"peer {self.name}")]
        self._is_closed = False
        self._threads[0].start()

    def close(self) -> None:
        if self._is_closed:
            return
        self._is_closed = True
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for stream in self._streams:
            stream.shutdown()
        for thread in self._threads:
            thread.join()

    def _accept(self) -> None:
        while True:
            try:
                sock, _ = self._listener.accept()
            except OSError:
                return
            stream = FrameSocket(sock)
            self._streams.append(stream)
            thread = threading.Thread(target=self._serve, args=(stream,))
            self._threads.append(thread)
            thread.start()

    def _serve(self, stream: FrameSocket) -> None:
        try:
            welcome(
                stream, Hello(VERSION, self.name, self.token), deadline_ns=time.monotonic_ns() + SECOND_NS
            )
            while True:
                head = stream.receive(None)
                payload = bytearray(head.payload_bytes)
                stream.receive_into(memoryview(payload), None)
                self._answer(stream, head.request, head.message, bytes(payload))
        except MillpondError:
            pass  # the client left, or was refused
        finally:
            stream.close()

    def _answer(self, stream: FrameSocket, request: int, message: object, payload: bytes) -> None:
        answer, body = None, b""
        match message:
            case PutShard() if self.faults.is_silent:
                return
            case PutShard(digest, num_blocks, shard, nonce):
                if self.faults.refuse_puts:
                    answer = Failed("full")
                else:
                    self.records[digest, num_blocks, shard, nonce] = payload
                    answer = Done(1)
            case ReadShard():
                self.num_reads += 1
                if self.faults.is_silent:
                    return
                if self.faults.delay_s:
                    time.sleep(self.faults.delay_s)
                answer, body = self._read(message)
            case NodeStatusQuery():
                answer = NodeStatus(self.name, 1, 0, 0, len(self.records), (), True, 0, 0, 0, 4)
        if answer is not None:
            stream.send(request, answer, [body], deadline_ns=time.monotonic_ns() + SECOND_NS)

    def _read(self, query: ReadShard) -> tuple[object, bytes]:
        if self.faults.error:
            return Failed(self.faults.error), b""
        key = (query.digest, query.num_blocks, query.shard, query.nonce)
        if self.faults.wrong_shard and self.records:
            key = next(iter(self.records))
        record = self.records.get(key)
        if record is None:
            return Failed("absent"), b""
        header = parse_header(record)
        body = bytearray(record[: header.header_bytes])
        for offset, size in header.shape.read_ranges(query.begin_row, query.end_row, query.num_columns):
            begin = header.header_bytes + offset
            body += record[begin : begin + size]
        if self.faults.flip_payload:
            body[-1] ^= 1
        if self.faults.short:
            del body[-64:]
        return ShardData(header.header_bytes, header.generation), bytes(body)


def _bound_socket(port: int) -> socket.socket:
    """Bound to a port of ours, or for 0 to one that nobody has, and that others of ours may share later."""
    made = socket.socket()
    if port:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    made.bind(("127.0.0.1", port))
    made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    return made
