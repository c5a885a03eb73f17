"""The whole backbone for one sequence, one token at a time, in float32 and with plain lists as caches."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from millpond.core.shapes import LayerShape
from millpond.core.work import Mechanism
from millpond.engine.model.compressor import CompressorWeights
from millpond.engine.model.config import V41Config
from millpond.engine.model.engram_ids import multipliers, table_primes
from millpond.engine.model.indexer import IndexerWeights
from millpond.engine.model.weights import LayerWeights, ModelWeights
from millpond.engine.ref.attention import (
    SeenRows,
    choose_candidates_ref,
    choose_largest_ref,
    rms_norm_ref,
    rope_frequencies_ref,
    score_entries_ref,
    window_ref,
)
from millpond.engine.ref.experts import engram_rows_ref, look_back_ref
from millpond.engine.ref.layer import (
    Place,
    attention_ref,
    compress_ref,
    engram_ref,
    feed_forward_ref,
    index_key_ref,
    index_query_ref,
    input_of_ref,
    mix_of_ref,
    project_ref,
)
from millpond.engine.ref.mhc import collapse_ref, expand_ref
from millpond.engine.ref.tally import inside, multiply_ref

Rows = dict[int, torch.Tensor]
"""Position -> cached row."""


@dataclass(slots=True)
class RefSequence:
    """A sequence's tokens and everything that is cached of them."""

    token_ids: Sequence[int]
    keep_begin: int = 0
    """Decoder layers run from this position on."""
    window_begin: int = 0
    """Windows hold nothing below this position."""
    write_begin: int = 0
    """Entries of tokens below this position are there already."""
    windows: dict[int, Rows] = field(default_factory=dict)
    """By layer."""
    drafts: dict[int, Rows] = field(default_factory=dict)
    """By draft stage."""
    entries: dict[int, list[torch.Tensor]] = field(default_factory=dict)
    """Main KV by source layer."""
    keys: dict[int, list[torch.Tensor]] = field(default_factory=dict)
    """Index keys by source layer."""
    held: dict[int, list[torch.Tensor]] = field(default_factory=dict)
    """Rows of an incomplete group by source layer."""


class RefRow(NamedTuple):
    """One token behind the last layer."""

    stream: torch.Tensor
    """[copies, hidden]"""
    pre: torch.Tensor
    main_hidden: torch.Tensor
    """[targets * hidden]: what the draft stages see."""


@dataclass(slots=True)
class _Token:
    """One token on its way through the layers."""

    position: int
    candidates: list[bool] | None = None
    selected: list[int] = field(default_factory=list)
    """Entries that the newest selecting layer chose."""


class RefModel:
    """The twin of `V41Model` with `FP32` numerics; text only."""

    def __init__(self, config: V41Config, weights: ModelWeights, token_map: Iterable[int]) -> None:
        """Take the engine's weights.

        Args:
            config: The model.
            weights: Float32 weights.
            token_map: Compressed id of each token.
        """
        self.config, self.weights = config, weights
        dim, scaling = config.shape.rope_dim, config.rope_scaling
        yarn = (scaling.factor, scaling.beta_fast, scaling.beta_slow, scaling.original_positions)
        self.plain = rope_frequencies_ref(config.rope_theta, dim)
        self.compressed = rope_frequencies_ref(config.compress_rope_theta, dim, yarn)
        self._token_map = [int(i) for i in token_map]
        engram, shape = config.engram, config.shape
        primes = table_primes(
            len(engram.layers), shape.engram_max_ngram, shape.engram_heads, engram.vocab_size
        )
        self._primes = dict(zip(engram.layers, primes.tolist(), strict=True))

    def run(self, sequence: RefSequence, position: int) -> RefRow | None:
        """Run the token at `position`; None where the decoder layers do not need it."""
        shape, eps = self.config.shape, self.config.norm_eps
        embedded = self.weights.embed[sequence.token_ids[position]].float()
        stream, pre = self.first_stream(embedded)
        token, targets = _Token(position), []
        for layer, w in zip(shape.layers, self.weights.layers, strict=True):
            if w.engram is not None:
                stream = engram_ref(stream, w.engram, self._engram_rows(sequence, layer, position), eps)
            if layer.layer in shape.draft_targets:
                targets.append(stream.mean(0))
            x = input_of_ref(stream, pre, w.attention.norm, eps)
            if w.compressor is not None and position >= sequence.write_begin:
                self._compress(sequence, layer, w.compressor, x, position)
            if layer.layer == shape.num_encoder_layers and position < sequence.keep_begin:
                return None
            next_pre, post, comb = mix_of_ref(stream, w.attention_mix, self.config)
            out = self._attend(sequence, layer, w, x, token)
            with inside(Mechanism.HYPER_CONNECTIONS):
                stream = expand_ref(stream, out, post, comb)
            stream, pre = feed_forward_ref(stream, next_pre, w, shape.num_experts_per_token, self.config)
        return RefRow(stream, pre, torch.cat(targets) if targets else torch.empty(0))

    def first_stream(self, embedded: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Equal copies of an embedding, and a collapse that takes the first."""
        copies = self.config.shape.hc_mult
        return torch.stack([embedded] * copies), torch.tensor([1.0] + [0.0] * (copies - 1))

    def hidden(self, row: RefRow) -> torch.Tensor:
        """Collapsed stream before the final norm: [hidden]."""
        with inside(Mechanism.HYPER_CONNECTIONS):
            return collapse_ref(row.stream, row.pre)

    def logits(self, row: RefRow) -> torch.Tensor:
        """Logits [vocab]."""
        normed = rms_norm_ref(self.hidden(row), self.weights.norm, self.config.norm_eps)
        with inside(Mechanism.HEAD):
            return multiply_ref(self.weights.head, normed)

    def _engram_rows(self, sequence: RefSequence, layer: LayerShape, position: int) -> list[int]:
        max_ngram = self.config.shape.engram_max_ngram
        ids = [self._token_map[i] for i in sequence.token_ids[: position + 1]]
        pad = self._token_map[self.config.engram.pad_token_id]
        recent = look_back_ref(ids, [False] * len(ids), position, pad, max_ngram)
        odd = multipliers(layer.layer, max_ngram, max(self._token_map) + 1).tolist()
        return engram_rows_ref(recent, odd, self._primes[layer.layer])

    def _compress(
        self, sequence: RefSequence, layer: LayerShape, w: CompressorWeights, x: torch.Tensor, position: int
    ) -> None:
        eps = self.config.norm_eps
        group = sequence.held.setdefault(layer.layer, [])
        with inside(Mechanism.COMPRESSOR):
            group.append(multiply_ref(w.kv, x))
            if len(group) < layer.ratio:
                return
            place = Place(position + 1 - layer.ratio, self.compressed)
            latent = compress_ref(group, w, eps)
            sequence.entries.setdefault(layer.layer, []).append(place.rotate(latent))
            sequence.keys.setdefault(layer.layer, []).append(index_key_ref(latent, w, place, eps))
        group.clear()

    def _attend(
        self, sequence: RefSequence, layer: LayerShape, w: LayerWeights, x: torch.Tensor, token: _Token
    ) -> torch.Tensor:
        place = Place(token.position, self.compressed if layer.ratio else self.plain)
        projected = project_ref(x, w.attention, place, self.config)
        window = sequence.windows.setdefault(layer.layer, {})
        window[token.position] = projected.kv
        in_decoder = layer.layer >= self.config.shape.num_encoder_layers
        first = max(sequence.window_begin, sequence.keep_begin if in_decoder else 0)
        places = window_ref(token.position, self.config.shape.window, first)
        seen = [SeenRows(Mechanism.WINDOW, [window[p] for p in places])]
        if w.indexer is not None:
            self._select(sequence, layer, w.indexer, x, projected.qr, token)
        if layer.ratio:
            entries = sequence.entries.get(layer.kv_source, [])
            seen.append(SeenRows(Mechanism.SELECTED, [entries[p] for p in token.selected]))
        return attention_ref(projected.query, seen, w.attention, place)

    def _select(
        self,
        sequence: RefSequence,
        layer: LayerShape,
        w: IndexerWeights,
        x: torch.Tensor,
        qr: torch.Tensor,
        token: _Token,
    ) -> None:
        shape, keys = self.config.shape, sequence.keys.get(layer.kv_source, [])
        visible = (token.position + 1) // layer.ratio
        allowed = None if layer.owns_kv else token.candidates
        with inside(Mechanism.INDEXER):
            place = Place(token.position, self.compressed)
            query, weights = index_query_ref(qr, x, w, place, shape.index_head_dim)
            scores = score_entries_ref(query, weights, keys, visible, allowed)
        if layer.layer == shape.candidate_source:
            blocks, size = shape.candidate_blocks, shape.candidate_block_size
            token.candidates = choose_candidates_ref(scores, visible, blocks, size)
        token.selected = [p for p in choose_largest_ref(scores, shape.index_topk) if p >= 0]
