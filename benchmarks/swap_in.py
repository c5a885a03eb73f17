"""Copies of KV rows into the engine's memory: what each method costs to submit, to finish, and to a forward.

512 blocks of V4.1-Flash, four rows each, from random slots of an arena into random blocks: a hit of 65,536
tokens, 2,048 pieces, 58 MB. Three columns, kept apart:

    submit      the same pieces, cut to one cache line each: nanoseconds per piece
    end to end  bytes per CPU second, against one memcpy of as many bytes
    slow-down   of a 512-token forward of smollm2-135m that runs meanwhile: booked (1 + CPU of the copies /
                CPU of the forward), and seen (the forward's own CPU time with copies beside it all the time,
                over that without)

Source and target are several times larger than what one pass moves, so that no pass finds its bytes in the
cache. One thread, CPU time.
"""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate, pairwise
from statistics import median

import numpy as np
import torch

from benchmarks.engine import Ours
from benchmarks.engine_peers import CPU, random_prompt, shared_model
from benchmarks.harness import Report, Result, say
from benchmarks.pool_codec import FLASH
from millpond.core.kv_layout import KvLayout
from millpond.core.units import MIB, SECOND_NS, align_up
from millpond.engine.kv_tensors import KvTensors
from millpond.engine.load import make_layers
from millpond.engine.memory import llama_kv_layout
from millpond.engine.runner import LlamaEngine
from millpond.engine.swap.choose import choose_method
from millpond.engine.swap.methods import METHODS, BatchedCopy, CopyMethod, Items, Memory

NUM_BLOCKS = 512
NUM_PLACES = 4096
"""Slots and blocks to choose from."""
BATCHES = tuple(1 << i for i in range(10))
FORWARD_TOKENS = 512
SMOLLM_HIT = 60
"""Blocks before a 512-token chunk that ends at smollm2-135m's limit."""
LINE_BYTES = 64
PAGE_BYTES = 4096


def run(*, quick: bool, only: set[str]) -> Result:
    """Measure the levels of [swap_in]."""
    torch.set_num_threads(1)
    report = Report("swap_in", quick, only)
    rounds = 5 if quick else 15
    bench = SwapBench(FLASH, NUM_BLOCKS, NUM_PLACES)
    methods = _methods(bench, report, rounds)
    columns = {name: bench.columns(method, rounds) for name, method in methods.items()}
    best = min(columns, key=lambda name: columns[name]["cpu_ms"])
    report.figures["best_method"] = best
    report.figures["chosen_at_start"] = choose_method("auto", max(bench.row_bytes)).name
    if report.wants("best_method_vs_memcpy"):
        ours, memcpy = (lambda: bench.rate(methods[best])), bench.memcpy_rate
        report.add_ratio("best_method_vs_memcpy", ours, memcpy, f"{best}, 2,048 pieces")
    if report.wants("forward_slowdown_best_method"):
        _measure_forward(report, bench, methods, columns, best)
    report.figures["methods"] = columns
    for name, column in columns.items():
        say(f"{name}: " + ", ".join(f"{what} {value:.4g}" for what, value in column.items()))
    return report.finish()


def _methods(bench: SwapBench, report: Report, rounds: int) -> dict[str, CopyMethod]:
    """Every method that works here; the batched one with the batch that is quickest."""
    made = {name: method for name, make in METHODS.items() if (method := make()) is not None}
    if isinstance(made.get("batched"), BatchedCopy):
        rates: dict[int, float] = {}
        for size in BATCHES:
            method = BatchedCopy.make(size)
            if method is not None:
                rates[size] = median(bench.rate(method) for _ in range(rounds))
                made["batched"] = max((method, made["batched"]), key=lambda m: _rate_of(m, rates))
        report.figures["batch_sweep_gb_per_s"] = {size: rate / 1e9 for size, rate in rates.items()}
        report.figures["best_batch"] = max(rates, key=lambda size: rates[size])
    return made


def _rate_of(method: CopyMethod, rates: dict[int, float]) -> float:
    return rates.get(method.batch, 0.0) if isinstance(method, BatchedCopy) else 0.0


@dataclass(frozen=True, slots=True)
class _Pass:
    """Which slots go to which blocks."""

    slots: Items
    blocks: Items


class SwapBench:
    """An arena, an engine's memory, and a new choice of places for each pass."""

    def __init__(self, layout: KvLayout, num_blocks: int, num_places: int) -> None:
        self.row_bytes = tuple(row.num_bytes for row in layout.rows)
        self.num_bytes = num_blocks * layout.block_bytes
        self._num_blocks = num_blocks
        begins = list(accumulate(self.row_bytes, initial=0))
        self._ranges = list(pairwise(begins))
        stride = align_up(layout.block_bytes, PAGE_BYTES)
        self._slots = np.ones((num_places, stride), np.uint8)
        self._blocks = np.ones((num_places, layout.block_bytes), np.uint8)
        self._chance = np.random.default_rng(0)

    def _choose(self) -> _Pass:
        count, places = self._num_blocks, len(self._slots)
        choose = self._chance.permutation
        return _Pass(choose(places)[:count].astype(np.int64), choose(places)[:count].astype(np.int64))

    def rows(self, num_bytes: int | None = None) -> list[tuple[Memory, Memory]]:
        """Of each row, the slots' and the blocks' pieces; cut to `num_bytes`."""
        cuts = [(begin, end if num_bytes is None else begin + num_bytes) for begin, end in self._ranges]
        return [(self._slots[:, begin:end], self._blocks[:, begin:end]) for begin, end in cuts]

    def copy(self, method: CopyMethod, num_bytes: int | None = None) -> float:
        """One pass, row by row; its CPU seconds."""
        rows, chosen = self.rows(num_bytes), self._choose()

        def work() -> None:
            for source, target in rows:
                method.copy(source, chosen.slots, target, chosen.blocks)

        return _cpu_s(work)

    def rate(self, method: CopyMethod) -> float:
        """Bytes per CPU second of one pass."""
        return self.num_bytes / self.copy(method)

    def memcpy_rate(self) -> float:
        """The same of one memcpy of as many bytes, at a new place each time."""
        room = min(self._slots.nbytes, self._blocks.nbytes) - self.num_bytes
        begin = int(self._chance.integers(0, room // PAGE_BYTES)) * PAGE_BYTES
        source, target = self._slots.ctypes.data + begin, self._blocks.ctypes.data + begin
        return self.num_bytes / _cpu_s(lambda: ctypes.memmove(target, source, self.num_bytes))

    def columns(self, method: CopyMethod, rounds: int) -> dict[str, float]:
        """Submit only, and end to end."""
        num_pieces = self._num_blocks * len(self.row_bytes)
        submit_s = median(self.copy(method, LINE_BYTES) for _ in range(rounds))
        copy_s = median(self.copy(method) for _ in range(rounds))
        return {
            "submit_ns_per_piece": submit_s * SECOND_NS / num_pieces,
            "cpu_ms": copy_s * 1e3,
            "gb_per_s": self.num_bytes / copy_s / 1e9,
        }


def _cpu_s(work: Callable[[], object]) -> float:
    begin_ns = time.thread_time_ns()
    work()
    return max(time.thread_time_ns() - begin_ns, 1) / SECOND_NS


class Forward:
    """A 512-token forward of smollm2-135m, whole prompts."""

    def __init__(self) -> None:
        config, weights = shared_model("bf16")
        kv = KvTensors(config, "bf16", 32 * MIB, CPU)
        layers = make_layers(config, weights, kv, config.max_positions, is_exact=False)
        engine = LlamaEngine(config, weights, kv, layers, num_slots=1, max_model_len=config.max_positions)
        self.layout = llama_kv_layout(config, "bf16")
        self._ours = Ours(engine)
        self._prompt = random_prompt(FORWARD_TOKENS, 0)

    def cpu_s(self) -> float:
        """CPU seconds of one."""
        return _cpu_s(lambda: self._ours.prefill(0, self._prompt))

    def beside(self, copy: Callable[[], object]) -> float:
        """CPU seconds of one while another thread copies without a pause."""
        is_done = threading.Event()

        def keep_copying() -> None:
            while not is_done.is_set():
                copy()

        thread = threading.Thread(target=keep_copying)
        thread.start()
        try:
            return self.cpu_s()
        finally:
            is_done.set()
            thread.join()


def _measure_forward(
    report: Report,
    bench: SwapBench,
    methods: dict[str, CopyMethod],
    columns: dict[str, dict[str, float]],
    best: str,
) -> None:
    forward = Forward()
    forward.cpu_s()
    rounds = 1 if report.quick else 3
    alone_s = median(forward.cpu_s() for _ in range(3))
    report.figures["forward_cpu_s"] = alone_s
    for name, method in methods.items():
        columns[name]["slowdown_booked"] = 1 + columns[name]["cpu_ms"] / 1e3 / alone_s
        seen = median(forward.beside(lambda m=method: bench.copy(m)) / alone_s for _ in range(rounds))
        columns[name]["slowdown_seen_copying_all_the_time"] = seen
    report.add(
        "forward_slowdown_best_method",
        columns[best]["slowdown_booked"],
        f"{best}: {columns[best]['cpu_ms']:.1f} ms beside {alone_s * 1e3:.0f} ms",
    )
    own = SwapBench(forward.layout, SMOLLM_HIT, 2 * SMOLLM_HIT)
    report.figures["smollm2_60_blocks"] = {
        name: own.columns(method, 3) | {"slowdown_booked": 1 + own.copy(method) / alone_s}
        for name, method in methods.items()
    }
