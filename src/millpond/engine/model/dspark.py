"""DSpark: draft stages that guess the next tokens from what the backbone saw."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from millpond.engine.model.attention import KvPart, attend
from millpond.engine.model.context import StepContext
from millpond.engine.model.layer import combine_heads, mix_of, project, run_ffn
from millpond.engine.model.mhc import collapse, expand
from millpond.engine.model.model import V41Model
from millpond.engine.model.numerics import rms_norm
from millpond.engine.model.packed import as_matrix
from millpond.engine.model.rope import Rotation
from millpond.engine.model.weights import DraftWeights, LayerWeights

Choose = Callable[[int, torch.Tensor], torch.Tensor]
"""(draft number, float32 logits [sequences, vocab]) -> token ids [sequences]."""


@dataclass(frozen=True, slots=True)
class Drafts:
    """Guesses for each sequence."""

    token_ids: torch.Tensor
    """[sequences, drafts]"""
    confidence: torch.Tensor
    """[sequences, drafts], float32: the logit that a draft is right."""


class DraftHead:
    """The draft stages of a model. Their windows lie in the state slots beside the backbone's."""

    def __init__(self, model: V41Model, weights: DraftWeights) -> None:
        """Take embedding and output head from `model`."""
        self._model = model
        self._w = weights
        self._num_drafts = model.config.shape.num_draft_tokens

    def remember(self, ctx: StepContext, main_hidden: torch.Tensor) -> None:
        """Store what the stages will attend to; main_hidden [decoder rows, targets * hidden] of the step."""
        if not len(main_hidden):
            return
        numerics, eps = ctx.numerics, ctx.config.norm_eps
        rows = ctx.step.decoder
        rotation = ctx.rotation(rows, is_compressed=False)
        main_x = rms_norm(numerics.quantised_linear(main_hidden, self._w.main_proj), self._w.main_norm, eps)
        ctx.observe("main_x", main_x)
        at = rows.window
        for stage, w in enumerate(self._w.stages):
            latent = numerics.quantised_linear(
                main_x, as_matrix(w.attention.query_kv)[ctx.config.shape.q_lora_rank :]
            )
            kv = rotation.apply(rms_norm(latent, w.attention.kv_norm, eps))
            ring = ctx.caches.drafts[stage]
            ring.write(at.write_slots, at.write_rows, ring.row_format.encode(kv[at.write_from]))

    def propose(
        self,
        ctx: StepContext,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        slots: torch.Tensor,
        choose: Choose,
    ) -> Drafts:
        """Draft tokens after the one that was just sampled.

        Args:
            ctx: The step that made `main_hidden` of `positions`, or any later one.
            token_ids: [sequences]: the token sampled for position + 1.
            positions: [sequences]: last position that went through the backbone.
            slots: [sequences].
            choose: Picks each draft.
        """
        model, count = self._model, self._num_drafts
        noise = model.config.draft_noise_token_id
        ids = torch.full((len(token_ids), count), noise, dtype=torch.int64, device=model.device)
        ids[:, 0] = token_ids
        own = positions[:, None] + 1 + torch.arange(count, device=model.device)
        rotation = Rotation(ctx.frequencies.plain, own.flatten())
        stream, pre = model.first_stream(model.embed(ids.flatten()))
        for stage, w in enumerate(self._w.stages):
            history = self._history(ctx, stage, positions, slots)
            stream, pre = self._stage(ctx, w, stream, pre, rotation, history)
            ctx.observe("draft_x_out", stream)
        hidden = collapse(stream, pre)
        ctx.observe("draft_hidden", hidden)
        normed = rms_norm(hidden, self._w.norm, ctx.config.norm_eps)
        logits = ctx.numerics.product(normed.float(), model.weights.head).unflatten(0, (-1, count))
        return self._choose_drafts(ctx, token_ids, hidden.unflatten(0, (-1, count)), logits, choose)

    def _history(self, ctx: StepContext, stage: int, positions: torch.Tensor, slots: torch.Tensor) -> KvPart:
        """Window rows up to each sequence's last position, seen by all of its drafts."""
        shape, count = ctx.config.shape, self._num_drafts
        seen = positions[:, None] + torch.arange(-shape.window + 1, 1, device=positions.device)
        ring = ctx.caches.drafts[stage]
        rows = ring.read(slots[:, None].expand_as(seen), seen % shape.ring_rows)
        rows = rows.masked_fill_((seen < 0)[..., None], 0)  # never written: may hold anything
        index = torch.arange(seen.numel(), device=seen.device).view_as(seen).masked_fill(seen < 0, -1)
        return KvPart(rows.flatten(0, 1), index.repeat_interleave(count, dim=0))

    def _stage(
        self,
        ctx: StepContext,
        w: LayerWeights,
        stream: torch.Tensor,
        pre: torch.Tensor,
        rotation: Rotation,
        history: KvPart,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        count, numerics = self._num_drafts, ctx.numerics
        mix = mix_of(ctx, stream, w.attention_mix)
        x = rms_norm(collapse(stream, pre), w.attention.norm, ctx.config.norm_eps)
        projected = project(ctx, x, w.attention, rotation)
        kv = numerics.window_rows.decode(numerics.window_rows.encode(projected.kv), projected.kv.shape[-1])
        rows = torch.arange(len(kv), device=kv.device)
        block = KvPart(kv, rows.unflatten(0, (-1, count)).repeat_interleave(count, dim=0))
        core = attend(projected.query, [history, block], w.attention.sink, numerics.dtype)
        stream = expand(stream, combine_heads(ctx, core, w.attention, rotation), mix)
        return run_ffn(ctx, w, stream, mix.pre, None, ctx.config.shape.draft_num_experts_per_token)

    def _choose_drafts(
        self,
        ctx: StepContext,
        token_ids: torch.Tensor,
        hidden: torch.Tensor,
        logits: torch.Tensor,
        choose: Choose,
    ) -> Drafts:
        """Each draft depends on the one before through the Markov head."""
        numerics = ctx.numerics
        chosen: list[torch.Tensor] = []
        confidence: list[torch.Tensor] = []
        before = token_ids
        for number in range(self._num_drafts):
            markov = self._w.markov_embed[before]
            biased = logits[:, number] + numerics.product(markov, self._w.markov_head)
            ctx.observe("draft_logits", biased)
            before = choose(number, biased)
            chosen.append(before)
            seen = torch.cat([hidden[:, number].float(), markov], dim=-1)
            confidence.append(numerics.product(seen, self._w.confidence)[:, 0])
        return Drafts(torch.stack(chosen, dim=1), torch.stack(confidence, dim=1))
