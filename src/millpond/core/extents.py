"""`ExtentId` and `StripeShape`: how blocks become one erasure-coded stripe (interfaces A.3).

An extent is n >= 1 consecutive blocks of one hash chain inside one window of E blocks. Its stripe has k
data and m parity shards. Cell (row, block) is cut into k columns; data shard j is column j of every cell,
row after row, so the first bytes of each shard are the first layers of all blocks.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import NewType

from millpond.core.kv_layout import KvLayout
from millpond.core.units import MIB, align_up, ceil_div

NodeId = NewType("NodeId", str)
"""Name of one storage node, for example `s0`."""
TenantId = NewType("TenantId", int)
"""Namespace in the pool, u32."""

MAX_WINDOW_BLOCKS = 32
MAX_WINDOW_BYTES = 4 * MIB
COLUMN_ALIGN_BYTES = 64


def window_blocks(layout: KvLayout) -> int:
    """E: the largest power of two <= 32 whose blocks take at most 4 MiB, at least 1."""
    blocks = MAX_WINDOW_BLOCKS
    while blocks > 1 and blocks * layout.block_bytes > MAX_WINDOW_BYTES:
        blocks //= 2
    return blocks


@dataclass(frozen=True, slots=True, order=True)
class ExtentId:
    """Name of an extent: equal ids mean equal blocks of equal prefixes."""

    digest: bytes
    """32-byte chain digest of the last block."""
    num_blocks: int


@dataclass(frozen=True, slots=True, order=True)
class StripeId:
    """Where one write of an extent lies. Never part of the identity of the bytes.

    Two writers of one extent have two stripes; `nonce` keeps their shards apart, so that a decode never
    mixes them.
    """

    epoch: int
    """u16: version of the placement table."""
    group: int
    """u32: row of that table, which names the k + m nodes."""
    nonce: int
    """u64, unique per write: 32 bits of the client, 32 of its counter. Stands in each record's header."""


@dataclass(frozen=True)
class StripeShape:
    """Sizes of one extent's shards. All k + m shards have equal sizes.

    Keep shapes: what is derived from one is computed once per object.
    """

    layout: KvLayout
    num_blocks: int
    k: int = 10
    m: int = 2

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        return hash((self.layout, self.num_blocks, self.k, self.m))

    @cached_property
    def layout_id(self) -> bytes:
        """First 16 bytes of the layout's fingerprint, as records carry it."""
        return self.layout.fingerprint[:16]

    @cached_property
    def block_bytes(self) -> int:
        """Bytes of one block over all rows."""
        return self.layout.block_bytes

    @property
    def num_shards(self) -> int:
        """Data and parity shards."""
        return self.k + self.m

    @cached_property
    def column_bytes(self) -> tuple[int, ...]:
        """Per row: bytes of one block's cell in one shard."""
        rows = self.layout.rows
        return tuple(align_up(ceil_div(row.num_bytes, self.k), COLUMN_ALIGN_BYTES) for row in rows)

    @cached_property
    def row_offsets(self) -> tuple[int, ...]:
        """Per row: where its piece begins in a shard's payload; one more entry: the payload's size."""
        offsets = [0]
        for column in self.column_bytes:
            offsets.append(offsets[-1] + column * self.num_blocks)
        return tuple(offsets)

    @property
    def shard_bytes(self) -> int:
        """Payload of one shard."""
        return self.row_offsets[-1]

    @property
    def payload_bytes(self) -> int:
        """Bytes of the blocks themselves, without padding and parity."""
        return self.num_blocks * self.block_bytes
