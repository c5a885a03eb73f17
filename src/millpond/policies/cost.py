"""What a step's arithmetic costs: multiply-adds in closed form from a model's shape.

A model's cost is a short list of terms. Each says how many multiply-adds one counted item takes (a row, a
compressed entry, a pair of a row and a cached row), and how many items a range of tokens has. Nothing loops
over tokens. Only the products that the mathematics needs are counted: no padding, no masked-out pairs, no
norms, rotations, activations or number formats.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Protocol

from millpond.core.llama_shape import LlamaShape
from millpond.core.pairs import num_candidate_pairs, num_pairs
from millpond.core.shapes import (
    KvFormat,
    LayerShape,
    ModelShape,
    VisionShape,
    index_entry_bytes,
    main_entry_bytes,
    window_row_bytes,
)
from millpond.core.units import ceil_div
from millpond.core.work import Mechanism, WorkKind

FLOPS = 2
"""Floating-point operations of one multiply-add."""


@dataclass(frozen=True, slots=True)
class TokenRange:
    """Tokens [begin, end) of one sequence that a step computes; earlier ones are in the caches."""

    begin: int
    end: int
    num_logits: int = 0
    """Rows that go through the output head: 1 at the end of a prompt, every row in decode."""
    keep_begin: int = 0
    """Decoder layers run from this position on (decoder-side replay)."""
    window_begin: int = 0
    """Windows hold nothing below this position (encoder-side replay)."""
    write_begin: int = 0
    """Compressed entries of tokens below this position exist already."""

    def rows_from(self, position: int) -> int:
        """First computed position that is not below `position`."""
        return min(max(self.begin, position), self.end)


class Count(Protocol):
    """How many items of one kind a range of tokens has."""

    def of(self, tokens: TokenRange) -> int:
        """Count the items."""
        ...


@dataclass(frozen=True, slots=True)
class Once:
    """One per range."""

    def of(self, tokens: TokenRange) -> int:
        """See `Count.of`."""
        return 1


@dataclass(frozen=True, slots=True)
class Rows:
    """Rows of a layer: all, or the kept ones in the decoder layers."""

    in_decoder: bool

    def of(self, tokens: TokenRange) -> int:
        """See `Count.of`."""
        return tokens.end - tokens.rows_from(tokens.keep_begin if self.in_decoder else 0)


@dataclass(frozen=True, slots=True)
class Logits:
    """Rows of the output head."""

    def of(self, tokens: TokenRange) -> int:
        """See `Count.of`."""
        return tokens.num_logits


@dataclass(frozen=True, slots=True)
class WrittenRows:
    """Rows that go into compressed entries."""

    def of(self, tokens: TokenRange) -> int:
        """See `Count.of`."""
        return tokens.end - tokens.rows_from(tokens.write_begin)


@dataclass(frozen=True, slots=True)
class WrittenEntries:
    """Compressed entries whose last token is among the written rows."""

    ratio: int

    def of(self, tokens: TokenRange) -> int:
        """See `Count.of`."""
        return tokens.end // self.ratio - tokens.rows_from(tokens.write_begin) // self.ratio


@dataclass(frozen=True, slots=True)
class WindowPairs:
    """Rows with the tokens of their sliding windows, themselves included."""

    width: int
    in_decoder: bool

    def of(self, tokens: TokenRange) -> int:
        """See `Count.of`."""
        keep_begin = tokens.keep_begin if self.in_decoder else 0
        first = max(tokens.window_begin, keep_begin)
        begin = tokens.rows_from(keep_begin)
        return num_pairs(tokens.end - first, 1, self.width) - num_pairs(begin - first, 1, self.width)


@dataclass(frozen=True, slots=True)
class EntryPairs:
    """Rows with the compressed entries that they see, at most `cap` each; ratio 1: with earlier tokens."""

    ratio: int
    cap: int | None
    in_decoder: bool

    def of(self, tokens: TokenRange) -> int:
        """See `Count.of`."""
        begin = tokens.rows_from(tokens.keep_begin if self.in_decoder else 0)
        return num_pairs(tokens.end, self.ratio, self.cap) - num_pairs(begin, self.ratio, self.cap)


@dataclass(frozen=True, slots=True)
class CandidatePairs:
    """Rows with the entries of their candidate blocks (ratio 1)."""

    num_blocks: int
    block_size: int

    def of(self, tokens: TokenRange) -> int:
        """See `Count.of`."""
        ends = (tokens.end, tokens.rows_from(tokens.keep_begin))
        end, begin = (num_candidate_pairs(n, self.num_blocks, self.block_size) for n in ends)
        return end - begin


@dataclass(frozen=True, slots=True)
class Term:
    """Work of one mechanism that grows with one count."""

    mechanism: Mechanism
    kind: WorkKind
    count: Count
    multiply_adds: int
    """Of one item."""
    kv_bytes: int = 0
    """Cached bytes that one item reads."""


@dataclass(frozen=True, slots=True)
class Flops:
    """Floating-point operations by what they grow with."""

    linear: int = 0
    mixing: int = 0
    attention: int = 0

    @property
    def total(self) -> int:
        """All of them."""
        return self.linear + self.mixing + self.attention


@dataclass(frozen=True, slots=True)
class Cost:
    """A model's cost; make it with `v41_cost`, `draft_cost` or `llama_cost`."""

    terms: tuple[Term, ...]
    num_experts: int = 0
    num_experts_per_token: int = 0

    def flops(self, tokens: TokenRange) -> Flops:
        """Work of a prompt chunk or of decode rows.

        Guarantees:
            Adds up: the chunks of a prompt cost what the whole prompt does. Never falls when the range grows.
        """
        sums: dict[WorkKind, int] = defaultdict(int)
        for term in self.terms:
            sums[term.kind] += FLOPS * term.multiply_adds * term.count.of(tokens)
        return Flops(sums[WorkKind.LINEAR], sums[WorkKind.MIXING], sums[WorkKind.ATTENTION])

    def attention_flops(self, begin: int, end: int) -> int:
        """Work of positions [begin, end) that grows with the context, all layers run."""
        tokens = TokenRange(begin, end)
        pairs = (term for term in self.terms if term.kind is WorkKind.ATTENTION)
        return FLOPS * sum(term.multiply_adds * term.count.of(tokens) for term in pairs)

    def by_mechanism(self, tokens: TokenRange) -> dict[Mechanism, int]:
        """Floating-point operations of each mechanism."""
        sums: dict[Mechanism, int] = defaultdict(int)
        for term in self.terms:
            sums[term.mechanism] += FLOPS * term.multiply_adds * term.count.of(tokens)
        return dict(sums)

    def kv_bytes_read(self, tokens: TokenRange) -> int:
        """Cached bytes that the rows read if each reads its own: exact for one row, else an upper bound."""
        return sum(term.kv_bytes * term.count.of(tokens) for term in self.terms)

    def weights_touched(self, num_rows: int) -> float:
        """Weights that a step of `num_rows` >= 1 rows uses at least once, with even routing.

        Source:
            Of E experts, n rows with k different ones each leave each out with probability (1 - k/E)^n.
        """
        routed = dense = 0
        for term in self.terms:
            if term.kind is WorkKind.LINEAR and term.mechanism is Mechanism.ROUTED_EXPERTS:
                routed += term.multiply_adds
            elif term.kind is WorkKind.LINEAR:
                dense += term.multiply_adds
        if not routed:
            return dense
        per_token, experts = self.num_experts_per_token, self.num_experts
        num_used = experts * (1 - (1 - per_token / experts) ** num_rows)
        return dense + routed / per_token * num_used


def _merged(terms: Iterable[Term]) -> tuple[Term, ...]:
    """Add up terms that differ in their size only, so that a cost takes a few additions."""
    sums: dict[tuple[Mechanism, WorkKind, Count], tuple[int, int]] = {}
    for term in terms:
        key = (term.mechanism, term.kind, term.count)
        multiply_adds, kv_bytes = sums.get(key, (0, 0))
        sums[key] = (multiply_adds + term.multiply_adds, kv_bytes + term.kv_bytes)
    return tuple(Term(*key, *values) for key, values in sums.items())


def llama_cost(shape: LlamaShape, kv_element_bytes: int = 2) -> Cost:
    """Cost of a Llama-family decoder; KV elements of `kv_element_bytes`."""
    hidden, query = shape.hidden_size, shape.num_heads * shape.head_dim
    kv = 2 * shape.num_kv_heads * shape.head_dim
    layers = shape.num_layers
    rows, pairs = Rows(in_decoder=False), EntryPairs(1, None, in_decoder=False)
    linear, attention = WorkKind.LINEAR, WorkKind.ATTENTION
    return Cost(
        (
            Term(Mechanism.PROJECTIONS, linear, rows, layers * hidden * (2 * query + kv)),
            Term(Mechanism.MLP, linear, rows, layers * 3 * hidden * shape.mlp_width),
            Term(Mechanism.CAUSAL, attention, pairs, layers * 2 * query, layers * kv * kv_element_bytes),
            Term(Mechanism.HEAD, linear, Logits(), shape.vocab_size * hidden),
        )
    )


def v41_cost(shape: ModelShape, kv_format: KvFormat = KvFormat.PACKED) -> Cost:
    """Cost of a V4.1 backbone, with what the draft stages keep of every row but without their proposals."""
    terms = [term for layer in shape.layers for term in _layer_terms(shape, layer, kv_format)]
    terms += _head_terms(shape)
    return Cost(_merged(terms), shape.num_experts, shape.num_experts_per_token)


def draft_cost(shape: ModelShape, kv_format: KvFormat = KvFormat.PACKED) -> Cost:
    """Cost of one proposal of the draft stages, after the rows [position, position + 1)."""
    count, hidden, vocab = shape.num_draft_tokens, shape.hidden_size, shape.vocab_size
    stages, rank = shape.num_draft_stages, shape.draft_markov_rank
    heads = 2 * shape.num_heads * shape.head_dim
    linear = stages * (
        2 * _mix_weights(shape)
        + _projection_weights(shape)
        + shape.draft_num_experts * hidden
        + 3 * hidden * shape.moe_width * (shape.draft_num_experts_per_token + 1)
    )
    linear += vocab * (hidden + rank) + hidden + rank  # both heads of each draft
    mixing = stages * 2 * (_collapse(shape) + _expand(shape)) + _collapse(shape)
    kv_bytes = stages * window_row_bytes(shape, kv_format)
    window = WindowPairs(shape.window, in_decoder=True)
    return Cost(
        (
            Term(Mechanism.DRAFTS, WorkKind.LINEAR, Once(), count * linear),
            Term(Mechanism.DRAFTS, WorkKind.MIXING, Once(), count * mixing),
            Term(Mechanism.DRAFTS, WorkKind.ATTENTION, Once(), stages * heads * count * count),
            Term(Mechanism.DRAFTS, WorkKind.ATTENTION, window, stages * heads * count, kv_bytes),
        )
    )


def vision_flops(vision: VisionShape, patch_rows: int, patch_columns: int) -> Flops:
    """Work of the tower and the aligner on one image of this many patches."""
    size, patches = vision.hidden_size, patch_rows * patch_columns
    cells = ceil_div(patch_rows, vision.downsample) * ceil_div(patch_columns, vision.downsample)
    block = size * (4 * size + 3 * vision.width)
    linear = patches * (3 * vision.patch_size**2 * size + vision.num_layers * block)
    linear += cells * vision.out_size * (size * vision.downsample**2 + vision.out_size)
    return Flops(linear=FLOPS * linear, attention=FLOPS * vision.num_layers * patches**2 * 2 * size)


def _mix_weights(shape: ModelShape) -> int:
    copies = shape.hc_mult
    return copies * (copies + 2) * copies * shape.hidden_size


def _collapse(shape: ModelShape) -> int:
    return shape.hc_mult * shape.hidden_size


def _expand(shape: ModelShape) -> int:
    return (shape.hc_mult + 1) * shape.hc_mult * shape.hidden_size


def _projection_weights(shape: ModelShape) -> int:
    width = shape.num_heads * shape.head_dim
    return (
        shape.hidden_size * (shape.q_lora_rank + shape.head_dim)
        + width * shape.q_lora_rank
        + width * shape.o_lora_rank
        + shape.o_groups * shape.o_lora_rank * shape.hidden_size
    )


def _layer_terms(shape: ModelShape, layer: LayerShape, kv_format: KvFormat) -> Iterator[Term]:
    in_decoder = layer.layer >= shape.num_encoder_layers
    # the last KV source makes entries of every row, so it takes every row up to its normed input
    all_rows, rows = Rows(layer.layer > shape.num_encoder_layers), Rows(in_decoder)
    hidden, heads = shape.hidden_size, 2 * shape.num_heads * shape.head_dim
    linear, mixing, attention = WorkKind.LINEAR, WorkKind.MIXING, WorkKind.ATTENTION

    hyper = Mechanism.HYPER_CONNECTIONS
    yield Term(hyper, mixing, all_rows, _collapse(shape))
    yield Term(hyper, linear, rows, 2 * _mix_weights(shape))
    yield Term(hyper, mixing, rows, _collapse(shape) + 2 * _expand(shape))

    yield Term(Mechanism.PROJECTIONS, linear, rows, _projection_weights(shape))
    window = WindowPairs(shape.window, in_decoder)
    yield Term(Mechanism.WINDOW, attention, window, heads, window_row_bytes(shape, kv_format))
    if layer.ratio:
        selected = EntryPairs(layer.ratio, shape.index_topk, in_decoder)
        yield Term(Mechanism.SELECTED, attention, selected, heads, main_entry_bytes(shape, kv_format))
    if layer.owns_kv:
        yield from _compressor_terms(shape, layer)
    if layer.owns_index:
        yield from _indexer_terms(shape, layer, rows, kv_format)

    expert = 3 * hidden * shape.moe_width
    yield Term(Mechanism.ROUTER, linear, rows, shape.num_experts * hidden)
    yield Term(Mechanism.ROUTED_EXPERTS, linear, rows, shape.num_experts_per_token * expert)
    yield Term(Mechanism.SHARED_EXPERT, linear, rows, expert)
    if layer.has_engram:
        columns, copies = shape.engram_columns * shape.engram_head_dim, shape.hc_mult
        yield Term(Mechanism.ENGRAM, linear, all_rows, (copies + 1) * hidden * columns)
        yield Term(Mechanism.ENGRAM, mixing, all_rows, 2 * copies * hidden)


def _compressor_terms(shape: ModelShape, layer: LayerShape) -> Iterator[Term]:
    entries, num_matrices = WrittenEntries(layer.ratio), 2 if layer.ratio > 1 else 1
    compressor, linear = Mechanism.COMPRESSOR, WorkKind.LINEAR
    yield Term(compressor, linear, WrittenRows(), num_matrices * shape.head_dim * shape.hidden_size)
    yield Term(compressor, linear, entries, shape.index_head_dim * shape.head_dim)
    if layer.ratio > 1:
        yield Term(compressor, WorkKind.MIXING, entries, layer.ratio * shape.head_dim)


def _indexer_terms(shape: ModelShape, layer: LayerShape, rows: Rows, kv_format: KvFormat) -> Iterator[Term]:
    width = shape.index_heads * shape.index_head_dim
    weights = width * shape.q_lora_rank + shape.index_heads * shape.hidden_size
    yield Term(Mechanism.INDEXER, WorkKind.LINEAR, rows, weights)
    scored: Count = EntryPairs(layer.ratio, None, rows.in_decoder)
    if not layer.owns_kv:
        scored = CandidatePairs(shape.candidate_blocks, shape.candidate_block_size)
    per_entry = width + shape.index_heads  # the products, and their weighted sum over heads
    key_bytes = index_entry_bytes(shape, kv_format)
    yield Term(Mechanism.INDEXER, WorkKind.ATTENTION, scored, per_entry, key_bytes)


def _head_terms(shape: ModelShape) -> Iterator[Term]:
    rows, linear = Rows(in_decoder=True), WorkKind.LINEAR
    yield Term(Mechanism.HYPER_CONNECTIONS, WorkKind.MIXING, Logits(), _collapse(shape))
    yield Term(Mechanism.HEAD, linear, Logits(), shape.vocab_size * shape.hidden_size)
    if shape.num_draft_stages:
        main = len(shape.draft_targets) * shape.hidden_size**2
        latents = shape.num_draft_stages * shape.head_dim * shape.hidden_size
        yield Term(Mechanism.DRAFTS, linear, rows, main + latents)
