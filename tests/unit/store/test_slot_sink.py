"""What a load is told of a block is in its slot, whatever groups of rows come, whatever was there before."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from millpond.core.extents import ExtentId, StripeId, StripeShape
from millpond.core.kv_layout import uniform_layout
from millpond.store.codec.reed_solomon import ReedSolomon
from millpond.store.dram_arena import DramArena, SlotRef
from millpond.store.extent_get import RowsReady
from millpond.store.held_block import HeldBlock
from millpond.store.payload import payload_shape
from millpond.store.slot_sink import SlotSink
from millpond.store.stripe import ExtentMeta, encode_extent
from millpond.store.stripe_buffer import StripeBuffer, stripe_bytes
from tests.unit.store.pool_cluster import bytes_of, chain_of

LAYOUT = uniform_layout(num_layers=6, kv_bytes_per_token=2, dtype="bf16")
ENDS = [row * LAYOUT.rows[0].num_bytes for row in range(len(LAYOUT.rows) + 1)]
NUM_ROWS = len(LAYOUT.rows)
NUM_BLOCKS, FIRST = 3, 5
CHAIN = chain_of(FIRST + NUM_BLOCKS)
OLD = 0xA5
"""What a slot has before, as if of another tenant."""


@pytest.fixture(scope="module")
def arena() -> Iterator[DramArena]:
    with tempfile.TemporaryDirectory() as folder:
        size = 3 * 4096 + NUM_BLOCKS * (align(LAYOUT.block_bytes) + 40)
        made = DramArena.create(Path(folder) / "arena", size, LAYOUT, epoch=1)
        yield made
        made.close()


def align(num_bytes: int) -> int:
    return -(-num_bytes // 4096) * 4096


def encoded() -> tuple[StripeShape, StripeBuffer]:
    codec = ReedSolomon(2, 1)
    names = CHAIN.digests[FIRST:]
    shape = StripeShape(LAYOUT, NUM_BLOCKS, codec.k, codec.m)
    payload = payload_shape(shape)
    memory = np.zeros(stripe_bytes(payload) + 64, np.uint8)
    buffer = StripeBuffer(payload, memory[-memory.ctypes.data % 64 :])
    meta = ExtentMeta(
        ExtentId(names[-1], NUM_BLOCKS),
        StripeId(0, 0, 0),
        CHAIN.parent(FIRST),
        CHAIN.domain,
        FIRST,
        CHAIN.hashes_of(FIRST, FIRST + NUM_BLOCKS),
    )
    encode_extent(codec, shape, buffer, meta, [bytes_of(name, LAYOUT) for name in names])
    return shape, buffer


SHAPE, BUFFER = encoded()


@given(
    had=st.lists(st.none() | st.integers(0, NUM_ROWS), min_size=NUM_BLOCKS, max_size=NUM_BLOCKS),
    borders=st.sets(st.integers(1, NUM_ROWS - 1)),
)
def test_every_row_told_is_there_and_none_is_written_twice(
    arena: DramArena, had: list[int | None], borders: set[int]
) -> None:
    """`had`: rows that an earlier get brought, with its own groups; None: a block that nobody wants."""
    refs = [ref for name in CHAIN.digests[FIRST:] if (ref := arena.reserve(name[:16])) is not None]
    try:
        check_rows(arena, refs, had, [0, *sorted(borders), NUM_ROWS])
    finally:
        for ref in refs:
            arena.free(ref)


def check_rows(arena: DramArena, refs: list[SlotRef], had: list[int | None], edges: list[int]) -> None:
    wanted: dict[int, HeldBlock] = {}
    for index, (ref, rows) in enumerate(zip(refs, had, strict=True), start=FIRST):
        arena.view(ref.slot)[:] = OLD
        if rows is not None:
            wanted[index] = HeldBlock(CHAIN.digests[index][:16], ref, num_rows=rows)

    def tell(indices: Sequence[int], num_rows: int) -> None:
        for index in indices:
            held = wanted[index]
            before = had[index - FIRST] or 0
            held.num_rows = max(held.num_rows, num_rows)
            view, right = arena.view(held.ref.slot), bytes_of(CHAIN.digests[index], LAYOUT)
            assert np.all(view[: ENDS[before]] == OLD), "rows that were told are not written again"
            assert np.array_equal(
                view[ENDS[before] : ENDS[held.num_rows]], right[ENDS[before] : ENDS[held.num_rows]]
            )

    sink = SlotSink(arena, wanted, tell)
    for begin, end in pairwise(edges):
        sink.on_rows(RowsReady(SHAPE, BUFFER, begin, end, FIRST, NUM_BLOCKS))
    assert all(held.num_rows == NUM_ROWS for held in wanted.values())
    for ref, rows in zip(refs, had, strict=True):
        assert rows is not None or np.all(arena.view(ref.slot) == OLD)
