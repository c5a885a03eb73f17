"""Copies of many pieces: every method leaves the same bytes, and refuses what is outside."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from millpond.config.synthetic_params import SyntheticParams
from millpond.core.errors import ConfigError, InvariantBroken
from millpond.core.ids import BlockId
from millpond.engine.model.engine import MemoryPlan, V41Engine
from millpond.engine.swap.choose import choose_method
from millpond.engine.swap.methods import METHODS, BatchedCopy, make_method
from millpond.engine.synthetic import SyntheticEngine
from tests.unit.engine.model.tiny_v41 import EXACT, tiny_model
from tests.unit.engine.tiny_llama import tiny_engine, write_checkpoint

ITEMS = np.array([4, 0, 2])


def memory(num_items, stride, begin, num_bytes, seed=0):
    """Pieces at a distance from each other, in the middle of others' bytes."""
    whole = np.random.default_rng(seed).integers(0, 256, (num_items, stride), np.uint8)
    return whole, whole[:, begin : begin + num_bytes]


@pytest.mark.parametrize("name", METHODS)
@settings(max_examples=40, deadline=None)
@given(
    num_bytes=st.integers(1, 5000),
    begin=st.integers(0, 70),
    gap=st.integers(0, 300),
    order=st.permutations(range(9)),
    count=st.integers(0, 9),
    batch=st.integers(1, 4),
)
def test_pieces_arrive_and_nothing_else_changes(name, num_bytes, begin, gap, order, count, batch):
    method = BatchedCopy.make(batch) if name == "batched" else make_method(name)
    _, source = memory(12, num_bytes + gap, min(begin, gap), num_bytes)
    whole, target = memory(9, num_bytes + begin + 3, begin, num_bytes, seed=1)
    expected = whole.copy()
    items, places = np.array(order[:count], np.int64), np.arange(count)[::-1].copy()
    for item, place in zip(items, places, strict=True):
        expected[place, begin : begin + num_bytes] = source[item]
    method.copy(source, items, target, places)
    assert np.array_equal(whole, expected)


@pytest.mark.parametrize("name", METHODS)
def test_more_pieces_than_one_call_takes(name):
    _, source = memory(2500, 10, 1, 8)
    target = np.zeros((2500, 8), np.uint8)
    order = np.random.default_rng(3).permutation(2500)
    make_method(name).copy(source, order, target, np.arange(2500))
    assert np.array_equal(target, source[order])


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("outside", [-1, 5])
def test_places_outside_are_refused(name, outside):
    method = make_method(name)
    source, target = np.ones((5, 16), np.uint8), np.zeros((5, 16), np.uint8)
    with pytest.raises(InvariantBroken):
        method.copy(source, np.array([0, outside]), target, np.array([1, 2]))
    with pytest.raises(InvariantBroken):
        method.copy(source, np.array([1, 2]), target, np.array([0, outside]))


@pytest.mark.parametrize("name", METHODS)
def test_what_does_not_fit_is_refused(name):
    method = make_method(name)
    source, target = np.ones((5, 16), np.uint8), np.zeros((5, 15), np.uint8)
    with pytest.raises(InvariantBroken, match="16 bytes"):
        method.copy(source, ITEMS, target, ITEMS)
    with pytest.raises(InvariantBroken, match="3 pieces"):
        method.copy(source, ITEMS, source.copy(), ITEMS[:2])
    read_only = source.copy()
    read_only.flags.writeable = False
    with pytest.raises(InvariantBroken, match="written"):
        method.copy(source, ITEMS, read_only, ITEMS)


def test_the_method_can_be_named_or_measured():
    for name in METHODS:
        assert choose_method(name, 1000).name == name
    assert choose_method("auto", 1000).name in METHODS
    with pytest.raises(ConfigError, match="per_block"):
        choose_method("fast", 1000)


def engines(folder):
    yield SyntheticEngine(SyntheticParams(num_layers=3, kv_bytes_per_token=8, num_blocks=6))
    for name in METHODS:
        yield tiny_engine(folder, swap_method=name)
    yield V41Engine(tiny_model(EXACT["bf16"]), MemoryPlan(6, 2), max_model_len=512, num_kept_tokens=0)


def test_engines_write_rows_of_many_blocks_at_once(tmp_path):
    for engine in engines(write_checkpoint(tmp_path / "model")):
        for row, layout in enumerate(engine.layout.rows):
            _, source = memory(7, layout.num_bytes + 64, 32, layout.num_bytes, seed=row)
            blocks = [BlockId(5), BlockId(1), BlockId(4)]
            before = bytes(engine.read_row(BlockId(2), row))
            engine.write_rows(blocks, row, source.data, [6, 0, 3])
            for block, item in zip(blocks, [6, 0, 3], strict=True):
                assert bytes(engine.read_row(block, row)) == source[item].tobytes()
            assert bytes(engine.read_row(BlockId(2), row)) == before
            with pytest.raises(InvariantBroken):
                engine.write_rows([BlockId(0)], row, source.data, [0])
