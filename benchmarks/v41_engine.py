"""The V4.1 engine on `configs/v41_small.json`: speed, where it goes, and whether its cost is known.

One process, one thread, CPU time, random weights; decoder layers run on the last `ring_rows` tokens of a
prompt only. Levels are those of [v41_engine].
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch

from benchmarks.harness import Report, Result, say
from benchmarks.v41_flops import estimate_error
from benchmarks.v41_meter import Meter, run_metered
from benchmarks.v41_torch_count import count_in_process
from millpond.core.ids import BlockId, DpRank, RequestId, SlotId
from millpond.core.plan import DecodeRow, PrefillChunk, RankPlan, SequenceStart
from millpond.core.request import SamplingParams
from millpond.core.units import BLOCK_TOKENS
from millpond.core.work import Mechanism
from millpond.engine.memory import MemoryPlan
from millpond.engine.model.caches import Caches
from millpond.engine.model.engine import V41Engine
from millpond.engine.model.init import init_checkpoint
from millpond.engine.model.load import load_model
from millpond.engine.model.model import V41Model
from millpond.engine.model.numerics import BF16, FP32, Numerics
from millpond.engine.model.step import Span
from millpond.engine.model.token_map import load_token_map
from millpond.engine.ref.model import RefModel
from millpond.policies.cost import TokenRange, v41_cost

_HERE = Path(__file__).parent
_CPU = torch.device("cpu")
_RANK = DpRank(0)
_GREEDY = SamplingParams(max_tokens=1 << 20, seed=0, temperature=0.0)

PREFILL_TOKENS = 2048
DECODE_BATCH = 16
DECODE_PROMPT = 1024
_TABLE_BLOCKS = PREFILL_TOKENS // BLOCK_TOKENS + 1

TINY: Mapping[str, object] = {
    **{"hidden_size": 64, "num_attention_heads": 4, "head_dim": 64, "qk_rope_head_dim": 16},
    **{"q_lora_rank": 64, "o_lora_rank": 64, "moe_intermediate_size": 32, "n_routed_experts": 8},
    **{"num_experts_per_tok": 2, "sliding_window": 16, "index_head_dim": 32, "index_topk": 8},
    **{"candidate_topk_blocks": 3, "dspark_markov_rank": 32, "hc_sinkhorn_iters": 2},
}
"""What makes the small model so small that its plain twin can run it, one token and head at a time."""


def run(*, quick: bool, only: set[str]) -> Result:
    """Measure the levels of [v41_engine]."""
    torch.set_num_threads(1)
    report = Report("v41_engine", quick, only)
    with TemporaryDirectory() as folder:
        if report.wants("prefill_tokens_per_s_small", "decode_tokens_per_s_small_b16"):
            _measure_speed(report, Path(folder) / "small")
        if report.wants("flops_estimate_error_ref", "flops_linear_error_torch"):
            _check_estimate(report, Path(folder) / "tiny")
    if report.wants("golden_tensors_passed"):
        _run_goldens(report)
    return report.finish()


def _config(changes: Mapping[str, object]) -> dict[str, Any]:
    values = json.loads((_HERE / "configs" / "v41_small.json").read_text(encoding="utf-8"))
    return {**values, "text_config": {**values["text_config"], **changes}}


def _load(folder: Path, numerics: Numerics) -> V41Model:
    return load_model(folder, tuple(sorted(folder.glob("*.safetensors"))), numerics, _CPU)


# --- speed --------------------------------------------------------------------------------------------


def _prompt(num_tokens: int, seed: int) -> array[int]:
    return array("i", np.random.default_rng(seed).integers(300, 8000, num_tokens).tolist())


def _table(slot: int) -> tuple[BlockId, ...]:
    first = slot * _TABLE_BLOCKS + 1
    return tuple(BlockId(first + i) for i in range(_TABLE_BLOCKS))


@dataclass(slots=True)
class _Run:
    """An engine and plans for it; the sequence of slot i is called str(i) and owns table i."""

    model: V41Model
    engine: V41Engine

    def start(self, slot: int, tokens: array[int], num_prompt: int) -> SequenceStart:
        """Describe a sequence."""
        return SequenceStart(RequestId(str(slot)), 0, tokens, num_prompt, _GREEDY, _table(slot), SlotId(slot))

    def prefill(self, slot: int, tokens: array[int]) -> float:
        """CPU seconds of a whole prompt in one chunk, first token included."""
        start = self.start(slot, tokens, len(tokens))
        chunk = PrefillChunk(start.request_id, 0, len(tokens), is_last=True)
        return _cpu_s(lambda: self.engine.execute(RankPlan(_RANK, start=(start,), chunks=(chunk,))))

    def decode(self, position: int) -> float:
        """CPU seconds of one step of all sequences, whose input tokens stand at `position`."""
        rows = tuple(DecodeRow(RequestId(str(slot)), position, ()) for slot in range(DECODE_BATCH))
        return _cpu_s(lambda: self.engine.execute(RankPlan(_RANK, rows=rows)))

    def copy(self, source: int, slot: int) -> None:
        """Give a sequence the KV and the state of another, as a handoff does."""
        for theirs, own in zip(_table(source), _table(slot), strict=True):
            for row in range(len(self.engine.layout.rows)):
                self.engine.write_row(own, row, self.engine.read_row(theirs, row))
        self.engine.write_state(SlotId(slot), self.engine.read_state(SlotId(source)))

    def copy_caches(self) -> Caches:
        """Copy the engine's memory, for steps that are metered outside of it."""
        shape, engine = self.model.config.shape, self.engine
        caches = Caches(shape, self.model.numerics, engine.num_blocks, engine.num_slots, _CPU)
        for slot in range(engine.num_slots):
            caches.slot_bytes(slot).copy_(torch.from_numpy(np.array(engine.read_state(SlotId(slot)))))
            for block in _table(slot):
                for row in range(len(engine.layout.rows)):
                    data = np.array(engine.read_row(block, row))
                    caches.row_bytes(block, row).copy_(torch.from_numpy(data))
        return caches


def _cpu_s(work: Callable[[], object]) -> float:
    begin_ns = time.process_time_ns()
    work()
    return (time.process_time_ns() - begin_ns) / 1e9


def _thread_s() -> float:
    return time.thread_time_ns() / 1e9


def _measure_speed(report: Report, folder: Path) -> None:
    init_checkpoint(_config({}), folder, seed=1)
    model = _load(folder, BF16)
    memory = MemoryPlan(num_blocks=DECODE_BATCH * _TABLE_BLOCKS, num_slots=DECODE_BATCH)
    keep = model.config.shape.ring_rows
    engine = V41Engine(model, memory, max_model_len=PREFILL_TOKENS + BLOCK_TOKENS, num_kept_tokens=keep)
    run_of = _Run(model, engine)
    peak = _sgemm_peak()
    report.figures["sgemm_peak_gflops"] = peak
    say(f"speed: loaded; a float32 product of 768 x 768 x 768 runs at {peak:.1f} GFLOP/s")
    if report.wants("prefill_tokens_per_s_small"):
        _measure_prefill(report, run_of, peak)
    if report.wants("decode_tokens_per_s_small_b16"):
        _measure_decode(report, run_of, peak)


def _sgemm_peak(size: int = 768, count: int = 20) -> float:
    """GFLOP/s of a large float32 product on one thread of this process, best of `count`."""
    a, b = torch.rand(size, size), torch.rand(size, size)
    best_s = min(_cpu_s(lambda: torch.mm(a, b)) for _ in range(count))
    return 2 * size**3 / best_s / 1e9


def _measure_prefill(report: Report, run_of: _Run, peak: float) -> None:
    keep_begin = PREFILL_TOKENS - run_of.model.config.shape.ring_rows
    times_s = [run_of.prefill(0, _prompt(PREFILL_TOKENS, seed)) for seed in range(4 if report.quick else 10)]
    rates = [PREFILL_TOKENS / cpu_s for cpu_s in times_s[1:]]  # the first touches memory for the first time
    tokens = np.array(_prompt(PREFILL_TOKENS, 0), dtype=np.int32)
    span = Span(tokens, 0, PREFILL_TOKENS, _table(0), slot=0, keep_begin=keep_begin)
    shape = run_of.model.config.shape
    caches = Caches(shape, run_of.model.numerics, _TABLE_BLOCKS, 1, _CPU)
    meter = run_metered(run_of.model, caches, [span], _thread_s, with_logits=True)
    ranges = [TokenRange(0, PREFILL_TOKENS, 1, keep_begin)]
    report.figures["prefill"] = _breakdown(run_of.model, meter, ranges, peak)
    report.add("prefill_tokens_per_s_small", median(rates), _spread(rates))


def _measure_decode(report: Report, run_of: _Run, peak: float) -> None:
    num_distinct = 4 if report.quick else DECODE_BATCH
    prompts = [_prompt(DECODE_PROMPT, 100 + i) for i in range(num_distinct)]
    for slot, prompt in enumerate(prompts):
        run_of.prefill(slot, prompt)
    for slot in range(num_distinct, DECODE_BATCH):
        run_of.copy(slot % num_distinct, slot)
    # each goes on with a token of its own, so that sequences with equal prompts do not route alike
    texts = [prompts[slot % num_distinct] + array("i", [700 + slot]) for slot in range(DECODE_BATCH)]
    forget = tuple(RequestId(str(slot)) for slot in range(num_distinct))
    starts = tuple(run_of.start(slot, text, DECODE_PROMPT) for slot, text in enumerate(texts))
    run_of.engine.execute(RankPlan(_RANK, forget=forget, start=starts))
    caches = run_of.copy_caches()
    count = 12 if report.quick else 40
    rates = [DECODE_BATCH / run_of.decode(DECODE_PROMPT + i) for i in range(count)][2:]
    spans = [
        Span(np.array(text, dtype=np.int32), DECODE_PROMPT, DECODE_PROMPT + 1, _table(slot), slot)
        for slot, text in enumerate(texts)
    ]
    meters = [run_metered(run_of.model, caches, spans, _thread_s, with_logits=True) for _ in range(count)]
    meter = sorted(meters, key=lambda one: sum(one.spent.values()))[count // 2]
    ranges = [TokenRange(DECODE_PROMPT, DECODE_PROMPT + 1, 1)] * DECODE_BATCH
    step_ms = {"engine_step_cpu_ms": DECODE_BATCH / median(rates) * 1e3}  # plans, sampling and all
    report.figures["decode"] = step_ms | _breakdown(run_of.model, meter, ranges, peak)
    note = f"{num_distinct} different prompts; {_spread(rates)}"
    report.add("decode_tokens_per_s_small_b16", median(rates), note)


def _spread(rates: Sequence[float]) -> str:
    return f"median of {len(rates)}, {min(rates):.0f} ... {max(rates):.0f}"


def _breakdown(model: V41Model, meter: Meter, ranges: Sequence[TokenRange], peak: float) -> dict[str, object]:
    """Time and operations of each mechanism, and what a perfect machine of this peak would leave."""
    cost = v41_cost(model.config.shape)
    flops: dict[Mechanism, int] = {}
    for tokens in ranges:
        for mechanism, count in cost.by_mechanism(tokens).items():
            flops[mechanism] = flops.get(mechanism, 0) + count
    spent_s = meter.by_mechanism()
    # one softmax runs over both
    flops[Mechanism.SELECTED] += flops.pop(Mechanism.WINDOW)
    spent_s[Mechanism.SELECTED] += spent_s.pop(Mechanism.WINDOW)
    total_s, total = sum(spent_s.values()), sum(flops.values())
    lines = {}
    for mechanism in sorted(spent_s, key=lambda m: -spent_s[m]):
        name = "attention" if mechanism is Mechanism.SELECTED else mechanism.value
        lines[name] = _line(spent_s[mechanism], flops.get(mechanism, 0), total_s, peak)
        say(
            "  {:18} {share:6.1%} {cpu_ms:9.2f} ms {gflop:9.4f} GFLOP {gflops:6.1f} GFLOP/s".format(
                name, **lines[name]
            )
        )
    return {"all": _line(total_s, total, total_s, peak), "mechanisms": lines}


def _line(spent_s: float, flops: int, total_s: float, peak: float) -> dict[str, float]:
    gflops = flops / spent_s / 1e9 if spent_s else 0.0
    return {
        "share": spent_s / total_s,
        "cpu_ms": spent_s * 1e3,
        "gflop": flops / 1e9,
        "gflops": gflops,
        "of_sgemm_peak": gflops / peak,
    }


# --- cost ---------------------------------------------------------------------------------------------


def _check_estimate(report: Report, folder: Path) -> None:
    init_checkpoint(_config(TINY), folder, seed=2)
    if report.wants("flops_estimate_error_ref"):
        model = _load(folder, FP32)
        ref = RefModel(model.config, model.weights, load_token_map(folder / "tokenizer.json", model.config))
        cost, ids = v41_cost(model.config.shape), list(_prompt(34, 5))
        errors = [estimate_error(ref, cost, ids, [5, 18], num_decoded=3, keep_begin=keep) for keep in (0, 15)]
        report.add("flops_estimate_error_ref", max(errors), "tiny model, odd chunks, decode rows, kept tail")
    if report.wants("flops_linear_error_torch"):
        errors = count_in_process([folder])
        report.add("flops_linear_error_torch", max(errors.values()), "tiny model, engine without compiler")


# --- goldens ------------------------------------------------------------------------------------------


def _run_goldens(report: Report) -> None:
    """Run the golden tests in a process of their own; what they compared counts if none failed."""
    root = _HERE.parent
    if not (root.parent / "shared" / "goldens" / "v41").is_dir():
        report.add("golden_tensors_passed", None, "the complete sets are not beside the repository")
        return
    chosen = (
        ["tests/golden/test_v41_tiny.py", "-k", "end_to_end and fp32 and not fp32q"]
        if report.quick
        else ["tests/golden"]
    )
    command = [sys.executable, "-m", "pytest", "-q", *chosen]
    say(f"goldens: {' '.join(command[2:])}")
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=540, check=False)
    found = re.search(r"(\d+) golden tensors compared", done.stdout)
    if found is None or done.returncode:
        last = (done.stdout.strip() or done.stderr.strip()).splitlines()[-1:]
        report.add("golden_tensors_passed", 0, f"failed: {' '.join(last)}")
    else:
        report.add("golden_tensors_passed", int(found[1]), " ".join(chosen))
