"""Rows from the arena into the engine's blocks: waiting, order, and what breaks on the way."""

from __future__ import annotations

import random
import threading
import time
from dataclasses import dataclass, field

import numpy as np
import pytest

from millpond.config.synthetic_params import SyntheticParams
from millpond.core.errors import InvariantBroken
from millpond.core.ids import BlockId, DpRank, RequestId
from millpond.core.plan import SwapIn
from millpond.core.units import BLOCK_TOKENS, SECOND_NS
from millpond.engine.synthetic import SyntheticEngine
from millpond.serve.workers.swap_in import SwapIns

NUM_ROWS, NUM_SLOTS = 3, 80
PARAMS = SyntheticParams(num_layers=NUM_ROWS, kv_bytes_per_token=8, num_blocks=NUM_SLOTS)
LIMIT_S = 20


class Source:
    """A load whose rows come when the test says so."""

    def __init__(self, engine, slots, *, deadline_s=LIMIT_S, seed=0):
        chance = np.random.default_rng(seed)
        self.slots = tuple(slots)
        self.num_blocks = None
        self.deadline_ns = time.monotonic_ns() + int(deadline_s * SECOND_NS)
        self.counters = [0] * NUM_ROWS
        self.valid = len(self.slots)
        self.memory = [
            chance.integers(0, 256, (NUM_SLOTS, row.num_bytes + 32), np.uint8)[:, : row.num_bytes]
            for row in engine.layout.rows
        ]

    def rows_ready(self, row):
        return self.counters[row]

    def row_memory(self, row):
        return self.memory[row].data

    def num_valid(self, begin, end):
        return max(0, min(end, self.valid) - begin)

    def holds(self, engine, blocks, row):
        pairs = zip(blocks, self.slots, strict=False)
        return all(
            bytes(engine.read_row(block, row)) == self.memory[row][slot].tobytes() for block, slot in pairs
        )


@dataclass
class Rank:
    engine: SyntheticEngine = field(default_factory=lambda: SyntheticEngine(PARAMS))
    told: list[tuple] = field(default_factory=list)

    def __post_init__(self):
        self.swaps = SwapIns(self.engine, lambda *what: self.told.append(what))

    def start(self, name, source, blocks):
        blocks = tuple(map(BlockId, blocks))
        self.swaps.start(SwapIn(RequestId(name), 0, DpRank(0), blocks), source)
        return blocks


@pytest.fixture
def rank():
    made = Rank()
    yield made
    made.swaps.stop()
    assert not [thread for thread in threading.enumerate() if thread.name == "swap-in"]


A, B = (RequestId("a"), 0), (RequestId("b"), 0)


def until(condition):
    limit = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < limit
        time.sleep(0.001)


def test_a_step_waits_for_a_row_and_for_that_row_only(rank):
    source = Source(rank.engine, range(20))
    blocks = rank.start("a", source, range(30, 50))
    passed = []

    def step():
        for row in range(NUM_ROWS):
            assert rank.swaps.wait_for([A], row) == []
            assert source.holds(rank.engine, blocks, row)
            passed.append(row)

    engine_thread = threading.Thread(target=step)
    engine_thread.start()
    for row in range(NUM_ROWS):
        source.counters[row] = 19
        until(lambda row=row: ("a", 0, row, 19) in rank.told)
        assert passed == list(range(row)), "the last block's row is missing"
        source.counters[row] = 20
        until(lambda row=row: len(passed) == row + 1)
    engine_thread.join(LIMIT_S)
    assert rank.swaps.stats().num_rows == 20 * NUM_ROWS
    assert rank.swaps.stats().num_broken == 0
    assert max(count for *_, count in rank.told) == 20


def test_the_first_one_goes_first_and_others_use_its_pauses(rank):
    first, second = Source(rank.engine, range(40)), Source(rank.engine, range(40), seed=1)
    rank.start("a", first, range(1, 41))
    second.counters = [40] * NUM_ROWS
    blocks = rank.start("b", second, range(41, 81))
    assert rank.swaps.wait_for([B], NUM_ROWS - 1) == []  # the first has nothing yet
    assert all(second.holds(rank.engine, blocks, row) for row in range(NUM_ROWS))
    rank.swaps.end(B)
    rank.told.clear()
    second.counters = [0] * NUM_ROWS
    rank.start("b", second, range(41, 81))
    first.counters = [40] * NUM_ROWS
    second.counters = [40] * NUM_ROWS
    assert rank.swaps.wait_for([A, B], NUM_ROWS - 1) == []
    until(lambda: len(rank.told) == 2 * NUM_ROWS)
    assert [(name, row) for name, _, row, _ in rank.told] == [
        (n, row) for n in "ab" for row in range(NUM_ROWS)
    ]


@pytest.mark.parametrize("num_left", [0, 3, 11])
def test_a_load_that_ends_short_keeps_its_leading_blocks(rank, num_left):
    source = Source(rank.engine, range(12))
    source.counters = [12, num_left, num_left]
    blocks = rank.start("a", source, range(20, 32))
    assert rank.swaps.wait_for([A], 0) == []
    threading.Timer(0.02, lambda: setattr(source, "num_blocks", num_left)).start()
    assert rank.swaps.wait_for([A], 1) == [A]
    assert rank.swaps.settle(A) == num_left * BLOCK_TOKENS
    assert all(source.holds(rank.engine, blocks[:num_left], row) for row in range(NUM_ROWS))
    assert rank.swaps.stats().num_broken == 1
    assert rank.swaps.wait_for([A], 2) == [], "it is over"


def test_a_silent_load_counts_up_to_its_deadline(rank):
    source = Source(rank.engine, range(8), deadline_s=0.1)
    source.counters = [8, 5, 6]
    blocks = rank.start("a", source, range(20, 28))
    assert rank.swaps.wait_for([A], 1) == [A]
    assert rank.swaps.settle(A) == 5 * BLOCK_TOKENS
    assert all(source.holds(rank.engine, blocks[:5], row) for row in range(NUM_ROWS))


def test_a_load_whose_memory_came_long_after_its_deadline_is_copied(rank):
    """Ordered ahead and complete, its sequence waited for blocks: the copy has all its time."""

    class Slow(SyntheticEngine):
        def write_rows(self, blocks, row, source, items):
            time.sleep(0.002)  # the step waits before the first row is there
            super().write_rows(blocks, row, source, items)

    rank.engine = rank.swaps.engine = Slow(PARAMS)
    source = Source(rank.engine, range(8), deadline_s=-11)
    source.counters, source.num_blocks = [8] * NUM_ROWS, 8
    blocks = rank.start("a", source, range(20, 28))
    for row in range(NUM_ROWS):
        assert rank.swaps.wait_for([A], row) == []
        assert source.holds(rank.engine, blocks, row)


def test_slots_that_became_others_count_for_nothing(rank):
    source = Source(rank.engine, range(40))
    source.counters, source.valid = [40] * NUM_ROWS, 18
    rank.start("a", source, range(1, 41))
    assert rank.swaps.wait_for([A], 2) == [A]
    assert rank.swaps.settle(A) == 18 * BLOCK_TOKENS
    assert max(count for *_, count in rank.told) == 18, "nothing is said of the others"


def test_a_load_that_is_gone_brings_nothing(rank):
    rank.start("a", None, range(1, 5))
    assert rank.swaps.wait_for([A], 0) == [A]
    assert rank.swaps.settle(A) == 0
    assert rank.swaps.stats().num_broken == 1


def test_after_the_end_nobody_writes(rank):
    for number in range(30):
        source = Source(rank.engine, range(NUM_SLOTS), seed=number)
        source.counters = [NUM_SLOTS] * NUM_ROWS
        blocks = rank.start("a", source, range(1, NUM_SLOTS + 1))
        time.sleep(number * 20e-6)
        rank.swaps.end(A)
        before = [bytes(rank.engine.read_row(block, row)) for block in blocks for row in range(NUM_ROWS)]
        time.sleep(0.001)
        after = [bytes(rank.engine.read_row(block, row)) for block in blocks for row in range(NUM_ROWS)]
        assert before == after
    rank.swaps.end(A)
    rank.swaps.end(B)


def test_a_request_is_swapped_in_once(rank):
    rank.start("a", Source(rank.engine, [0]), [1])
    with pytest.raises(InvariantBroken, match="twice"):
        rank.start("a", Source(rank.engine, [0]), [2])


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_bug_in_the_thread_breaks_the_step_that_waits(rank):
    source = Source(rank.engine, [0, 1])
    rank.start("a", source, [0, 1])  # the null block may not be written
    source.counters = [2] * NUM_ROWS
    with pytest.raises(InvariantBroken, match="stuck") as caught:
        rank.swaps.wait_for([A], 0)
    assert isinstance(caught.value.__cause__, InvariantBroken)


@pytest.mark.parametrize("seed", range(6))
def test_storm(rank, seed):
    """Loads come, pause, end short, are stolen and ended, all at once: a row that is said to be there is."""
    chance = random.Random(seed)
    live, free = {}, list(range(1, NUM_SLOTS + 1))
    chance.shuffle(free)
    for number in range(60):
        if len(free) >= 12:
            count = chance.randint(1, 12)
            blocks, free = free[:count], free[count:]
            source = Source(
                rank.engine, chance.sample(range(NUM_SLOTS), count), deadline_s=chance.choice([0.02, LIMIT_S])
            )
            rank.start(f"r{number}", source, blocks)
            live[RequestId(f"r{number}"), 0] = source, blocks
        for source, _ in live.values():
            row = chance.randrange(NUM_ROWS)
            source.counters[row] = max(source.counters[row], chance.randint(0, len(source.slots)))
            if chance.random() < 0.1:
                source.valid = min(source.valid, chance.randint(0, len(source.slots)))
        if chance.random() < 0.5 and live:
            key = chance.choice(list(live))
            source, blocks = live.pop(key)
            finish_or_end(rank, key, source, blocks, chance)
            free += blocks
    for key, (source, blocks) in live.items():
        finish_or_end(rank, key, source, blocks, chance)


def finish_or_end(rank, key, source, blocks, chance):
    if chance.random() < 0.3:
        rank.swaps.end(key)
        return
    source.num_blocks = min(source.counters)
    for row in range(NUM_ROWS):
        broken = rank.swaps.wait_for([key], row)
        if broken:
            num_left = rank.swaps.settle(key) // BLOCK_TOKENS
            assert num_left <= min(source.counters)
            assert all(source.holds(rank.engine, blocks[:num_left], row) for row in range(NUM_ROWS))
            return
        assert source.holds(rank.engine, blocks, row)
    rank.swaps.end(key)
