"""The draft stages of one sequence, one token at a time."""

from __future__ import annotations

from typing import NamedTuple

import torch

from millpond.core.errors import InvariantBroken
from millpond.core.work import Mechanism
from millpond.engine.model.weights import DraftWeights
from millpond.engine.ref.attention import SeenRows, rms_norm_ref, window_ref
from millpond.engine.ref.layer import (
    Place,
    attention_ref,
    feed_forward_ref,
    input_of_ref,
    mix_of_ref,
    project_kv_ref,
    project_ref,
)
from millpond.engine.ref.mhc import collapse_ref, expand_ref
from millpond.engine.ref.model import RefModel, RefRow, RefSequence
from millpond.engine.ref.tally import inside, multiply_ref


class RefDrafts(NamedTuple):
    """Greedy drafts and the logit that each is right."""

    token_ids: list[int]
    confidence: list[float]


def _weights(model: RefModel) -> DraftWeights:
    if model.weights.draft is None:
        raise InvariantBroken("this model has no draft stages")
    return model.weights.draft


def remember_ref(model: RefModel, sequence: RefSequence, row: RefRow, position: int) -> None:
    """Keep what the stages will attend to of a token that went through the backbone."""
    w, config = _weights(model), model.config
    with inside(Mechanism.DRAFTS):
        main = rms_norm_ref(multiply_ref(w.main_proj, row.main_hidden), w.main_norm, config.norm_eps)
        for number, stage in enumerate(w.stages):
            kv = project_kv_ref(main, stage.attention, Place(position, model.plain), config)
            sequence.drafts.setdefault(number, {})[position] = kv


def propose_ref(model: RefModel, sequence: RefSequence, token_id: int, position: int) -> RefDrafts:
    """Draft greedily after `token_id`, which was sampled for position + 1."""
    with inside(Mechanism.DRAFTS):
        hidden = _run_stages(model, sequence, token_id, position)
        return _choose(model, hidden, token_id)


def _run_stages(model: RefModel, sequence: RefSequence, token_id: int, position: int) -> list[torch.Tensor]:
    """Collapsed stream of each draft position."""
    config, shape = model.config, model.config.shape
    noise = [config.draft_noise_token_id] * (shape.num_draft_tokens - 1)
    tokens = [model.first_stream(model.weights.embed[i].float()) for i in (token_id, *noise)]
    places = [Place(position + 1 + i, model.plain) for i in range(len(tokens))]
    for number, w in enumerate(_weights(model).stages):
        inputs = [input_of_ref(stream, pre, w.attention.norm, config.norm_eps) for stream, pre in tokens]
        projected = [
            project_ref(x, w.attention, place, config) for x, place in zip(inputs, places, strict=True)
        ]
        history = sequence.drafts[number]
        window = window_ref(position, shape.window, sequence.keep_begin)
        rows = [history[p] for p in window] + [own.kv for own in projected]
        seen = [SeenRows(Mechanism.DRAFTS, rows)]  # the drafts see one another in both directions
        done = []
        for (stream, _), own, place in zip(tokens, projected, places, strict=True):
            next_pre, post, comb = mix_of_ref(stream, w.attention_mix, config)
            out = attention_ref(own.query, seen, w.attention, place)
            mixed = expand_ref(stream, out, post, comb)
            done.append(feed_forward_ref(mixed, next_pre, w, shape.draft_num_experts_per_token, config))
        tokens = done
    return [collapse_ref(stream, pre) for stream, pre in tokens]


def _choose(model: RefModel, hidden: list[torch.Tensor], token_id: int) -> RefDrafts:
    w, drafts = _weights(model), RefDrafts([], [])
    before = token_id
    for row in hidden:
        normed = rms_norm_ref(row, w.norm, model.config.norm_eps)
        markov = w.markov_embed[before].float()
        logits = multiply_ref(model.weights.head, normed) + multiply_ref(w.markov_head, markov)
        before = int(logits.argmax())
        drafts.token_ids.append(before)
        drafts.confidence.append(multiply_ref(w.confidence, torch.cat([row, markov])).item())
    return drafts
