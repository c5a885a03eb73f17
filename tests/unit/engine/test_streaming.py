"""Sequences that the block memory cannot hold: same bits as with memory for all, whatever the chunks."""

from __future__ import annotations

from array import array
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from millpond.core.errors import InvariantBroken
from millpond.core.ids import BlockId, DpRank, RequestId, SlotId
from millpond.core.plan import PrefillChunk, RankPlan, SequenceStart
from millpond.engine.torch_layers import TorchLayers
from tests.unit.engine.tiny_llama import GREEDY, Hand, tiny_engine, write_checkpoint

NAME = RequestId("long")
R0 = DpRank(0)
NUM_LAYERS = 3
PROMPT = [(5 * i + 11) % 160 for i in range(900)]
"""Eight blocks; the small engine has three."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_checkpoint(tmp_path_factory.mktemp("tiny") / "model", num_hidden_layers=NUM_LAYERS)


def engine_of(folder, num_blocks, layers="native", host_kv_memory=12 << 20):
    """`num_blocks` usable blocks, and the null block."""
    config = {"numerics": "exact", "host_kv_memory": host_kv_memory}
    block_bytes = NUM_LAYERS * 2 * 2 * 32 * 128 * 4
    engine = tiny_engine(folder, kv_memory=(num_blocks + 1) * block_bytes, **config)
    assert engine.num_blocks == num_blocks
    if layers == "torch":
        native = engine._layers
        engine._layers = TorchLayers(engine._config, native._weights, engine._kv, native._rope, is_exact=True)
    return engine


def home_table(engine, count, reverse=False):
    table = [BlockId(engine.num_blocks + 1 + i) for i in range(count)]
    return tuple(reversed(table)) if reverse else tuple(table)


def start_of(engine, table, staging, prompt=PROMPT):
    return SequenceStart(NAME, 0, array("i", prompt), len(prompt), GREEDY, table, SlotId(0), staging=staging)


def compute(engine, start, edges, observer=None, prompt=PROMPT):
    starts = (start,)
    for begin, end in pairwise(edges):
        chunk = PrefillChunk(NAME, begin, end, end == len(prompt))
        report = engine.execute(RankPlan(R0, start=starts, chunks=(chunk,)), observer)
        starts = ()
    return report.sampled[0].token_id


def kv_of(engine, table):
    return [bytes(engine.read_row(block, row)) for block in table[:7] for row in range(NUM_LAYERS)]


@pytest.fixture(scope="module", params=["native", "torch"])
def expected(request, folder):
    """(kind of layers, token, KV) with room for everything."""
    engine = engine_of(folder, 10, request.param)
    table = tuple(BlockId(1 + i) for i in range(8))
    token = compute(engine, start_of(engine, table, ()), [0, len(PROMPT)])
    return request.param, token, kv_of(engine, table)


@settings(max_examples=6)
@given(edges=st.sets(st.integers(1, len(PROMPT) - 1), max_size=4), reverse=st.booleans())
def test_bits_are_those_of_a_memory_that_holds_all(folder, expected, edges, reverse):
    layers, token, kv = expected
    engine = engine_of(folder, 3, layers)
    table = home_table(engine, 8, reverse)
    start = start_of(engine, table, (BlockId(3), BlockId(1), BlockId(2)))
    assert compute(engine, start, [0, *sorted(edges), len(PROMPT)]) == token
    assert kv_of(engine, table) == kv


def test_the_way_over_a_device_gives_the_same_bits(folder, expected):
    """Home blocks are in host memory, blocks are not: each copy goes through torch."""
    layers, token, kv = expected
    engine = engine_of(folder, 3, layers)
    engine._kv._bytes = None
    table = home_table(engine, 8)
    start = start_of(engine, table, (BlockId(1), BlockId(2), BlockId(3)))
    assert compute(engine, start, [0, 300, 512, len(PROMPT)]) == token
    assert kv_of(engine, table) == kv
    row = bytes(reversed(kv[0]))
    engine.write_row(BlockId(1), 1, memoryview(row))
    engine.write_row(table[1], 1, memoryview(row))
    source = np.frombuffer(row, np.uint8)[None].data
    engine.write_rows((BlockId(2),), 1, source, [0])
    engine.write_rows((table[2],), 1, source, [0])
    for block in (BlockId(1), BlockId(2), *table[1:3]):
        assert bytes(engine.read_row(block, 1)) == row


class Loads:
    """Brings each row of what was loaded when the layer asks for it, and looks at what a layer has left."""

    def __init__(self, engine, table, kv):
        self.engine, self.table, self.kv = engine, table, kv
        self.ready = []

    def on_row_needed(self, row):
        blocks = self.table[:5]
        source = np.stack([np.frombuffer(self.kv[i * NUM_LAYERS + row], np.uint8) for i in range(5)])
        self.engine.write_rows(blocks, row, source.data, list(range(5)))

    def on_row_ready(self, row):
        assert bytes(self.engine.read_row(self.table[6], row)) == self.kv[6 * NUM_LAYERS + row]
        self.ready.append(row)


def test_a_loaded_prefix_is_needed_layer_by_layer(folder, expected):
    layers, token, kv = expected
    engine = engine_of(folder, 3, layers)
    table = home_table(engine, 8)
    loads = Loads(engine, table, kv)
    start = start_of(engine, table, (BlockId(1), BlockId(2), BlockId(3)))
    assert compute(engine, start, [5 * 128, len(PROMPT)], loads) == token
    assert loads.ready == list(range(NUM_LAYERS))
    assert kv_of(engine, table) == kv


def test_others_share_the_step(folder, expected):
    layers, token, _ = expected
    whole = Hand(engine_of(folder, 4, layers))
    alone = [whole.prefill("small", PROMPT[:40]), *whole.decode("small")]
    engine = engine_of(folder, 4, layers)
    hand = Hand(engine)
    small = hand.start("small", PROMPT[:40])
    start = start_of(engine, home_table(engine, 8), (BlockId(4), BlockId(2), BlockId(3)))
    chunks = (PrefillChunk(NAME, 0, 500, False), PrefillChunk(RequestId("small"), 0, 40, True))
    first = engine.execute(RankPlan(R0, start=(start, small), chunks=chunks))
    hand.lengths["small"] += 1
    assert [first.sampled[0].token_id, *hand.decode("small")] == alone
    last = engine.execute(RankPlan(R0, chunks=(PrefillChunk(NAME, 500, len(PROMPT), True),)))
    assert [t.token_id for t in last.sampled] == [token]


def test_plans_that_do_not_fit_home_or_staging_are_refused(folder):
    engine = engine_of(folder, 3)
    table = home_table(engine, 8)
    for blocks, staging in (
        ((*table[:7], BlockId(1)), (BlockId(1), BlockId(2), BlockId(3))),
        ((*table[:7], BlockId(4 + engine.num_home_blocks)), (BlockId(1), BlockId(2), BlockId(3))),
        (table, (BlockId(1), BlockId(2), BlockId(4))),
        (table, (BlockId(1), BlockId(2))),
        (table, ()),
    ):
        with pytest.raises(InvariantBroken):
            compute(engine, start_of(engine, blocks, staging), [0, 100])


def test_without_host_memory_there_are_no_home_blocks(folder):
    engine = engine_of(folder, 3, host_kv_memory=0)
    assert engine.num_home_blocks == 0
    with pytest.raises(InvariantBroken):
        engine.read_row(BlockId(4), 0)


def test_rows_of_blocks_and_home_blocks_cannot_be_written_in_one_go(folder):
    engine = engine_of(folder, 3)
    source = np.zeros((2, engine.layout.rows[0].num_bytes), np.uint8)
    with pytest.raises(InvariantBroken):
        engine.write_rows((BlockId(3), BlockId(4)), 0, source.data, [0, 1])
    with pytest.raises(InvariantBroken):
        engine.write_rows((BlockId(4), BlockId(3)), 0, source.data, [0, 1])
