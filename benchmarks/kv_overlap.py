"""How much of a load hides behind the forward that needs it: rows come at a pace, the engine waits per layer.

    hidden = 1 - (time with the load - time with everything in place) / time of the load

A 512-token chunk of smollm2-135m after a hit of 2,048 tokens. The source counts rows up evenly, so that the
last one is there when the load has taken its time; the swap-in thread of the product copies them.
"""

from __future__ import annotations

import time
from array import array
from dataclasses import dataclass
from statistics import median

import numpy as np

from benchmarks.engine_peers import CPU, random_prompt, shared_model
from millpond.core.ids import BlockId, DpRank, RequestId, SlotId
from millpond.core.kv_layout import KvLayout
from millpond.core.plan import PrefillChunk, RankPlan, SequenceStart, SwapIn
from millpond.core.request import SamplingParams
from millpond.core.units import BLOCK_TOKENS, MIB, SECOND_NS
from millpond.engine.kv_tensors import KvTensors
from millpond.engine.load import make_layers
from millpond.engine.runner import LlamaEngine
from millpond.engine.swap.choose import choose_method
from millpond.serve.workers.swap_in import Key, SwapIns

HIT_BLOCKS = 16
CHUNK_TOKENS = 512
NUM_PAIRS = 9
MEMORY_BYTES = 96 * MIB
DEADLINE_NS = 120 * SECOND_NS
_NAME = RequestId("r")
_KEY: Key = (_NAME, 0)
_GREEDY = SamplingParams(max_tokens=1, seed=0, temperature=0.0)


class PacedRows:
    """Implements `LoadedRows`: all rows are in memory, and said to be so at a pace."""

    def __init__(self, layout: KvLayout, blocks: np.ndarray, load_ns: int) -> None:
        self.slots = tuple(range(HIT_BLOCKS))
        self.num_blocks: int | None = None
        self.deadline_ns = time.monotonic_ns() + DEADLINE_NS
        self._row_bytes = layout.rows[0].num_bytes
        self._num_rows = len(layout.rows)
        self._blocks = blocks
        self._load_ns = load_ns
        self._begin_ns = time.monotonic_ns()

    def rows_ready(self, row: int) -> int:
        """As many as have had time to come."""
        if not self._load_ns:
            return HIT_BLOCKS
        passed_ns = time.monotonic_ns() - self._begin_ns
        num_pieces = passed_ns * self._num_rows * HIT_BLOCKS // self._load_ns
        return max(0, min(HIT_BLOCKS, num_pieces - row * HIT_BLOCKS))

    def row_memory(self, row: int) -> memoryview:
        """`[slots, row bytes]`."""
        return self._blocks[:, row * self._row_bytes : (row + 1) * self._row_bytes].data

    def num_valid(self, begin: int, end: int) -> int:
        """All of them."""
        return end - begin


@dataclass(slots=True)
class _Wait:
    """Tells the swap-ins what the step needs."""

    swaps: SwapIns

    def on_row_needed(self, row: int) -> None:
        if self.swaps.wait_for([_KEY], row):
            raise RuntimeError("the load broke")

    def on_row_ready(self, row: int) -> None:
        pass


class OverlapBench:
    """An engine, the KV of a hit, and steps that need it."""

    def __init__(self) -> None:
        config, weights = shared_model("bf16")
        kv = KvTensors(config, "bf16", MEMORY_BYTES, CPU)
        layers = make_layers(config, weights, kv, config.max_positions, is_exact=False)
        self._engine = LlamaEngine(
            config,
            weights,
            kv,
            layers,
            num_slots=1,
            max_model_len=config.max_positions,
            swap_method=choose_method("auto", kv.row_bytes),
        )
        self._ids = array("i", random_prompt(HIT_BLOCKS * BLOCK_TOKENS + CHUNK_TOKENS, 0))
        self._table = tuple(BlockId(1 + i) for i in range(-(-len(self._ids) // BLOCK_TOKENS)))
        self._step(0, HIT_BLOCKS * BLOCK_TOKENS, None)
        num_rows = len(self._engine.layout.rows)
        self._blocks = np.stack(
            [
                np.concatenate([np.asarray(self._engine.read_row(block, row)) for row in range(num_rows)])
                for block in self._table[:HIT_BLOCKS]
            ]
        )

    def _step(self, begin: int, end: int, observer: _Wait | None) -> int:
        """Nanoseconds of one step of a fresh sequence."""
        start = SequenceStart(_NAME, 0, self._ids[:end], end, _GREEDY, self._table, SlotId(0))
        chunk = PrefillChunk(_NAME, begin, end, is_last=True)
        begin_ns = time.monotonic_ns()
        self._engine.execute(RankPlan(DpRank(0), start=(start,), chunks=(chunk,)), observer)
        return time.monotonic_ns() - begin_ns

    def step_ns(self, load_ns: int | None) -> int:
        """Nanoseconds of the chunk's step while the hit's rows come; None: they are in place."""
        hit = HIT_BLOCKS * BLOCK_TOKENS
        if load_ns is None:
            return self._step(hit, len(self._ids), None)
        swaps = SwapIns(self._engine, lambda *_: None)
        rows = PacedRows(self._engine.layout, self._blocks, load_ns)
        try:
            swaps.start(SwapIn(_NAME, 0, DpRank(0), self._table[:HIT_BLOCKS]), rows)
            return self._step(hit, len(self._ids), _Wait(swaps))
        finally:
            swaps.stop()

    def hidden_fraction(self, load_share: float, num_pairs: int = NUM_PAIRS) -> float:
        """Median over pairs of steps; the load takes `load_share` of the time of a step without it."""
        self.step_ns(None)
        hidden: list[float] = []
        for _ in range(num_pairs):
            alone_ns = self.step_ns(None)
            load_ns = int(load_share * alone_ns)
            hidden.append(1 - (self.step_ns(load_ns) - alone_ns) / load_ns)
        return median(hidden)
