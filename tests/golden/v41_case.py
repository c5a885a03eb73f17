"""Runs golden cases through our model and keeps what it computed under the golden names."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch

from millpond.engine.model.caches import Caches
from millpond.engine.model.checkpoint import Checkpoint
from millpond.engine.model.config import load_config
from millpond.engine.model.dspark import DraftHead
from millpond.engine.model.engram_ids import compress_vocabulary
from millpond.engine.model.model import V41Model
from millpond.engine.model.numerics import BF16, FP32, FP32_QUANTISED
from millpond.engine.model.step import Span, make_step
from millpond.engine.model.weights import load_model_weights
from tests.golden.goldens import golden_folder, load_golden

NUMERICS = {"bf16": BF16, "fp32": FP32, "fp32q": FP32_QUANTISED}
NUM_DECODED = 8
SLOT = 1
TABLE = (3, 1, 4, 2)


@lru_cache(maxsize=4)
def tiny_weights(folder):
    root = golden_folder(folder)
    assert root is not None
    config = load_config(root / "config.json")
    vocab = json.loads((root / "vocab.json").read_text(encoding="utf-8"))
    token_map = compress_vocabulary((token["text"], token["piece"]) for token in vocab["tokens"])
    with Checkpoint([root / "weights.safetensors"], config) as checkpoint:
        return config, load_model_weights(checkpoint, config), token_map


@lru_cache(maxsize=8)
def tiny_model(folder, mode):
    config, weights, token_map = tiny_weights(folder)
    return V41Model(config, weights, NUMERICS[mode], token_map)


class Recorder:
    """Collects observed values: (layer, name) -> list of values."""

    def __init__(self):
        self.values = {}
        self.layer = -1

    def __call__(self, name, value):
        if name == "x_in":
            self.layer += 1
        key = name if name.startswith("draft_") or name in ("main_x", "pre_mix_out", "embed") else None
        number = self.layer + 1 if name.startswith("engram") else self.layer
        self.values.setdefault(key or (number, name), []).append(value)

    def get(self, layer, name):
        (value,) = self.values[layer, name]
        return value


@dataclass
class Case:
    """One golden case with our caches."""

    folder: str
    name: str

    def __post_init__(self):
        self.golden = load_golden(self.folder, self.name)
        self.mode = self.name.split(".")[1]
        self.model = tiny_model(self.folder, self.mode)
        self.ids = self.golden["input.ids"].numpy()
        self.num_prompt = len(self.ids) - NUM_DECODED - 1
        self.caches = Caches(self.model.config.shape, self.model.numerics, 5, 2, self.model.device)
        self.has_flipped_draft_rows = False
        draft = self.model.weights.draft
        self.draft = None if draft is None else DraftHead(self.model, draft)

    def run(self, begin, end, images=None):
        """Run tokens [begin, end); returns what the step left, its context and what was observed."""
        seen = Recorder()
        step = make_step(
            [Span(self.ids, begin, end, TABLE, SLOT)], self.model.config.shape, self.model.device
        )
        ctx = self.model.start(step, self.caches, seen)
        out = self.model.forward(ctx, images)
        if self.draft is not None:
            self.draft.remember(ctx, out.main_hidden)
        return out, ctx, seen

    def propose(self, ctx, token_id, position):
        """Greedy drafts after `position`."""
        return self.draft.propose(
            ctx,
            torch.tensor([token_id]),
            torch.tensor([position]),
            torch.tensor([SLOT]),
            lambda _, logits: logits.argmax(-1),
        )

    def window(self, layer):
        """The last `window` rows of a layer's ring as the reference lays them out, given the length."""
        shape = self.model.config.shape
        rings = self.caches.windows if layer < len(shape.layers) else self.caches.drafts
        return rings[layer if layer < len(shape.layers) else layer - len(shape.layers)]

    def ring_after(self, layer, length):
        """[window, dim]: slot = position mod window, zero where nothing was written."""
        shape = self.model.config.shape
        positions = torch.arange(max(0, length - shape.window), length)
        rows = self.window(layer).read(torch.full_like(positions, SLOT), positions % shape.ring_rows)
        out = torch.zeros(shape.window, shape.head_dim)
        out[positions % shape.window] = rows
        return out

    def entries_after(self, layer, length):
        """(main KV, index keys) of a source layer."""
        shape = self.model.config.shape
        ratio = shape.layers[layer].ratio
        places = torch.arange(length // ratio)
        per_block = 128 // ratio
        blocks = torch.tensor(TABLE)[places // per_block]
        at = (blocks, places % per_block)
        return self.caches.main[layer].read(*at), self.caches.index_keys[layer].read(*at)

    def held_after(self, layer, length):
        """(values, scores) of the incomplete group."""
        rows = self.model.config.shape.compressor_rows(2)
        held = self.caches.compressors[layer].read(torch.tensor([SLOT]), torch.tensor([(length - 1) % rows]))
        return held.chunk(2, dim=-1)


def as_int64(array):
    return torch.from_numpy(np.asarray(array, dtype=np.int64))
