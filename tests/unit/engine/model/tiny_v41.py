"""A tiny model of every role, and a hand that runs sequences through its caches."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import numpy as np
import torch

from millpond.engine.model.caches import Caches
from millpond.engine.model.dspark import DraftHead
from millpond.engine.model.model import V41Model
from millpond.engine.model.numerics import BF16, FP32
from millpond.engine.model.step import Span, make_step
from tests.golden.v41_case import tiny_weights

EXACT = {"bf16": replace(BF16, is_exact=True), "fp32": replace(FP32, is_exact=True)}
NUM_BLOCKS = 24


def tiny_model(numerics):
    """The golden set's weights: their scales are those of a trained model."""
    config, weights, token_map = tiny_weights("tiny_a")
    return V41Model(config, weights, numerics, token_map)


def prompt(count, seed=0):
    """Random text ids, no image tokens."""
    return np.random.default_rng(seed).integers(3, 480, count).astype(np.int32)


class Hand:
    """Runs sequences by name; each has its own slot and blocks."""

    def __init__(self, model: V41Model, num_slots: int = 6) -> None:
        self.model = model
        self.shape = model.config.shape
        self.caches = Caches(self.shape, model.numerics, NUM_BLOCKS, num_slots, model.device)
        # what earlier owners left behind must not show: these bytes decode to NaN, or to 3e38
        self.caches.slots.fill_(0x7F)
        self.caches.blocks.fill_(0x7F)
        self.places: dict[str, tuple[int, tuple[int, ...]]] = {}
        self.draft = DraftHead(model, model.weights.draft)
        self._next_block = NUM_BLOCKS

    def place(self, name: str, num_blocks: int = 3) -> None:
        blocks = tuple(range(self._next_block, self._next_block - num_blocks, -1))
        self._next_block -= num_blocks
        self.places[name] = (len(self.places), blocks)

    @torch.inference_mode()
    def run(self, *spans, observe=None):
        """Run (name, ids, begin, end[, options]) spans in one step; hidden rows [rows, hidden]."""
        made = []
        for name, ids, begin, end, *options in spans:
            if name not in self.places:
                self.place(name)
            slot, table = self.places[name]
            made.append(Span(ids, begin, end, table, slot, **(options[0] if options else {})))
        step = make_step(made, self.shape, self.model.device)
        ctx = self.model.start(step, self.caches, *([observe] if observe else []))
        out = self.model.forward(ctx)
        self.draft.remember(ctx, out.main_hidden)
        return out.hidden

    @torch.inference_mode()
    def drafts(self, *ends, choose=lambda _, logits: logits.argmax(-1)):
        """Drafts, greedy by default, after (name, token id, position) of several sequences."""
        names, token_ids, positions = zip(*ends, strict=True)
        ctx = self.model.start(make_step([], self.shape, self.model.device), self.caches)
        return self.draft.propose(
            ctx,
            torch.tensor(token_ids),
            torch.tensor(positions),
            torch.tensor([self.places[name][0] for name in names]),
            choose,
        )

    def prefill(self, name, ids, borders=()):
        """Run a prompt cut at `borders`; hidden of all its rows."""
        edges = [0, *sorted({b for b in borders if 0 < b < len(ids)}), len(ids)]
        return torch.cat([self.run((name, ids, a, b)) for a, b in pairwise(edges)])

    def entries(self, name, length):
        """Bytes of every compressed entry of a sequence's first `length` tokens."""
        _, table = self.places[name]
        pieces = []
        for source in self.shape.kv_sources:
            places = torch.arange(length // source.ratio)
            per_block = 128 // source.ratio
            blocks = torch.tensor(table)[places // per_block]
            kinds = (self.caches.main[source.layer], self.caches.index_keys[source.layer])
            pieces.extend(rows.memory[blocks, places % per_block].flatten() for rows in kinds)
        return torch.cat(pieces)

    def windows(self, name, length, count=None, layers=None):
        """Bytes of the last `count` window rows of every layer and draft stage."""
        slot, _ = self.places[name]
        first = max(0, length - (self.shape.window if count is None else count))
        rows = torch.arange(first, length) % self.shape.ring_rows
        rings = [*self.caches.windows.values(), *self.caches.drafts.values()]
        rings = rings if layers is None else [self.caches.windows[layer] for layer in layers]
        return torch.cat([ring.memory[slot, rows].flatten() for ring in rings])

    def held(self, name, length):
        """Bytes of the (kv, score) row of the newest token where its group is incomplete."""
        slot, _ = self.places[name]
        if length % 2 == 0:
            return torch.empty(0, dtype=torch.uint8)
        at = (length - 1) % self.shape.compressor_rows(2)
        return torch.cat([rows.memory[slot, at] for rows in self.caches.compressors.values()])

    def state(self, name, length):
        """Everything that later steps may read."""
        return torch.cat([self.entries(name, length), self.windows(name, length), self.held(name, length)])
