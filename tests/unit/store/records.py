"""Records for tests of the storage node: small, valid, and their payload follows from their key."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field

from millpond.core.extents import ExtentId, StripeId
from millpond.policies.retention import BlockClass
from millpond.store.payload import PayloadShape, RowPiece
from millpond.store.record import RecordHeader, check_rows, checksum, pack_header, parse_header
from millpond.store.segment import ShardKey, key_of
from millpond.store.target import Target


@dataclass(frozen=True)
class Record:
    number: int
    header: RecordHeader = field(repr=False)
    packed: bytes = field(repr=False)
    payload: bytes = field(repr=False)

    @property
    def key(self) -> ShardKey:
        return key_of(self.header)

    @property
    def whole(self) -> bytes:
        return self.packed + self.payload


def make_record(
    number: int,
    *,
    row_bytes: tuple[int, ...] = (64, 128),
    num_blocks: int = 2,
    block_class: BlockClass = BlockClass.TURN,
    shard: int = 3,
    nonce: int = 0,
) -> Record:
    """Record `number`, of one block per row and checksum group."""
    digest = hashlib.sha256(b"extent %d" % number).digest()
    rows = []
    offset = 0
    for column in row_bytes:
        rows.append(RowPiece(offset, column * num_blocks, column))
        offset += column * num_blocks
    seed = b"payload %d %d %d" % (number, shard, nonce)
    payload = hashlib.shake_128(seed).digest(offset)
    checks = [
        checksum(payload[begin : begin + row.check_bytes])
        for row in rows
        for begin in range(row.offset, row.offset + row.num_bytes, row.check_bytes)
    ]
    header = RecordHeader(
        extent=ExtentId(digest, num_blocks),
        stripe=StripeId(0, number % 7, nonce),
        shard=shard,
        shape=PayloadShape(10, 2, num_blocks, tuple(rows)),
        parent=hashlib.sha256(digest).digest(),
        root=bytes(16),
        first_block=0,
        hashes=bytes(16 * (num_blocks - 1)) + digest[:16],
        layout=bytes(16),
        checks=tuple(checks),
        expiry_class=block_class,
    )
    return Record(number, header, pack_header(header), payload)


def put(target: Target, record: Record, now_s: int) -> None:
    target.put(record.header, record.packed, record.payload, now_s=now_s)


def read(target: Target, key: ShardKey, now_s: int) -> bytes:
    """Payload as a client accepts it: header and every row verified."""
    with target.open_record(key, now_s=now_s) as record:
        payload = bytearray(record.header.payload_bytes)
        record.read_ranges([(0, len(payload))], memoryview(payload))
        header = parse_header(record.packed_header)
    assert key_of(header) == key
    check_rows(header, payload, 0, len(header.shape.rows), header.num_blocks)
    return bytes(payload)
