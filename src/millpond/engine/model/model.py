"""The whole backbone: token ids of a step in, last hidden rows and logits out."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from millpond.core.ports import LayerObserver
from millpond.core.shapes import LayerShape
from millpond.engine.model.caches import Caches
from millpond.engine.model.config import V41Config
from millpond.engine.model.context import Observe, StepContext, ignore, make_frequencies
from millpond.engine.model.engram import add_engram
from millpond.engine.model.engram_ids import look_back, make_hashes
from millpond.engine.model.layer import run_layer
from millpond.engine.model.mhc import collapse
from millpond.engine.model.native import kernels_for
from millpond.engine.model.numerics import Numerics, rms_norm
from millpond.engine.model.step import Span, Step
from millpond.engine.model.weights import ModelWeights


@dataclass(frozen=True, slots=True)
class Forwarded:
    """What a step leaves for sampling and drafting; rows are those of the decoder layers."""

    hidden: torch.Tensor
    """[rows, hidden]: the collapsed stream before the final norm."""
    main_hidden: torch.Tensor
    """[rows, targets * hidden]: what the draft head sees; empty without draft stages."""


@dataclass(frozen=True, slots=True)
class ImageRows:
    """Embeddings that replace those of tokens in image spans."""

    rows: torch.Tensor
    """[n]: rows of the step."""
    values: torch.Tensor
    """[n, hidden]"""


class V41Model:
    """A backbone with its weights; keeps nothing between steps (caches do)."""

    def __init__(
        self, config: V41Config, weights: ModelWeights, numerics: Numerics, token_map: npt.NDArray[np.int64]
    ) -> None:
        """Put the parts together.

        Args:
            config: The model.
            weights: Float32 weights.
            numerics: How to compute.
            token_map: [vocab]: compressed id of each token, for Engram.
        """
        self.config = config
        self.weights = weights
        self.numerics = numerics
        self.device = weights.embed.device
        self.frequencies = make_frequencies(config, self.device)
        self._token_map = token_map
        engram = config.engram
        self._pad = int(token_map[engram.pad_token_id])
        hashes = make_hashes(
            engram.layers,
            config.shape.engram_max_ngram,
            config.shape.engram_heads,
            engram.vocab_size,
            int(token_map.max()) + 1,
        )
        self._hashes = dict(zip(engram.layers, hashes, strict=True))

    def start(self, step: Step, caches: Caches, observe: Observe = ignore) -> StepContext:
        """Make the context of a step."""
        return StepContext(self.config, self.numerics, caches, step, self.frequencies, observe)

    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Embeddings [n, hidden] in the stream's dtype."""
        return self.weights.embed[token_ids].to(self.numerics.dtype)

    def first_stream(self, embedded: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Equal copies of the embeddings, and a collapse that takes the first."""
        copies = self.config.shape.hc_mult
        pre = torch.zeros(len(embedded), copies, device=self.device)
        pre[:, 0] = 1
        return embedded[:, None].expand(-1, copies, -1).contiguous(), pre

    def forward(
        self, ctx: StepContext, images: ImageRows | None = None, observer: LayerObserver | None = None
    ) -> Forwarded:
        """Run all layers over a step; the observer is told of each KV row (source layer)."""
        step, shape = ctx.step, self.config.shape
        token_ids = np.concatenate([span.token_ids[span.begin : span.end] for span in step.encoder.spans])
        embedded = self.embed(torch.from_numpy(token_ids.astype(np.int64)).to(self.device))
        if images is not None:
            embedded[images.rows] = images.values.to(embedded.dtype)
        ctx.observe("embed", embedded)
        stream, pre = self.first_stream(embedded)
        is_image = self._image_mask(token_ids)
        recent = np.concatenate([self._recent(span) for span in step.encoder.spans])
        num_rows_done, targets = 0, []
        for layer, w in zip(shape.layers, self.weights.layers, strict=True):
            if w.engram is not None:
                stream = self._add_engram(ctx, layer, stream, recent, is_image)
            if layer.layer in shape.draft_targets:
                targets.append(self._capture(step, stream))
            mask = is_image
            if is_image is not None and layer.layer >= shape.num_encoder_layers and step.kept is not None:
                mask = is_image[step.kept]
            if layer.owns_kv and observer is not None:
                observer.on_row_needed(num_rows_done)
            stream, pre = run_layer(ctx, layer, w, stream, pre, mask)
            ctx.observe("x_out", stream)
            if layer.owns_kv and observer is not None:
                observer.on_row_ready(num_rows_done)
            num_rows_done += layer.owns_kv
            if not len(stream):  # no row is kept beyond the last KV source
                return Forwarded(
                    stream[:, 0], stream.new_empty(0, len(shape.draft_targets) * shape.hidden_size)
                )
        ctx.observe("pre_mix_out", pre)
        main_hidden = torch.cat(targets, dim=-1) if targets else stream.new_empty(len(stream), 0)
        return Forwarded(collapse(stream, pre), main_hidden)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Float32 logits [n, vocab] of collapsed rows."""
        normed = rms_norm(hidden, self.weights.norm, self.config.norm_eps)
        return self.numerics.product(normed.float(), self.weights.head)

    def _image_mask(self, token_ids: npt.NDArray[np.int32]) -> torch.Tensor | None:
        if self.config.image_token_id is None:
            return None
        mask = token_ids == self.config.image_token_id
        return torch.from_numpy(mask).to(self.device) if mask.any() else None

    def _recent(self, span: Span) -> npt.NDArray[np.int64]:
        """Compressed ids of a span's tokens with their look-back."""
        max_ngram = self.config.shape.engram_max_ngram
        first = max(0, span.begin - (max_ngram - 1))
        ids = span.token_ids[first : span.end]
        is_dead = ids == (-1 if self.config.image_token_id is None else self.config.image_token_id)
        return look_back(self._token_map[ids], is_dead, self._pad, span.begin - first, max_ngram)

    def _add_engram(
        self,
        ctx: StepContext,
        layer: LayerShape,
        stream: torch.Tensor,
        recent: npt.NDArray[np.int64],
        is_image: torch.Tensor | None,
    ) -> torch.Tensor:
        w = self.weights.layers[layer.layer].engram
        if w is None:
            return stream
        rows = torch.from_numpy(self._hashes[layer.layer].rows(recent)).to(self.device)
        is_text = None if is_image is None else ~is_image
        if len(rows) != len(stream):
            rows = rows[ctx.step.kept]
            is_text = None if is_text is None else is_text[ctx.step.kept]
        ctx.observe("engram_ids", rows)
        stream, gate = add_engram(stream, w, rows, is_text, self.config.norm_eps, self.numerics)
        ctx.observe("engram_gate", gate)
        return stream

    @staticmethod
    def _capture(step: Step, stream: torch.Tensor) -> torch.Tensor:
        """Mean of the copies of the rows that reach the end."""
        if len(stream) != step.decoder.num_rows:
            stream = stream[step.kept]
        kernels = kernels_for(stream)
        if kernels is not None:
            rows, copies, _ = stream.shape
            return kernels.collapse(stream, torch.full((rows, copies), 1 / copies))
        return stream.float().mean(1).to(stream.dtype)
