"""The whole model against its plain twin, token by token: chunks, decode, replays, drafts, images."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch

from millpond.engine.model.image_plan import plan_image
from millpond.engine.model.numerics import FP32
from millpond.engine.model.vision import VisionTower
from millpond.engine.ref.dspark import propose_ref, remember_ref
from millpond.engine.ref.model import RefModel, RefSequence
from millpond.engine.ref.vision import embed_image_ref
from tests.golden.v41_case import tiny_weights
from tests.unit.engine.model.tiny_v41 import Hand, prompt, tiny_model
from tests.unit.engine.model.tiny_vision import small_tower

LENGTH = 37
PROMPT = 35


def run_ref(model, sequence, begin, end):
    """Hidden rows of the tokens that reach the end: position -> [hidden]."""
    hidden = {}
    for position in range(begin, end):
        row = model.run(sequence, position)
        if row is not None:
            remember_ref(model, sequence, row, position)
            hidden[position] = model.hidden(row)
    return hidden


@pytest.fixture(scope="module")
def ref():
    config, weights, token_map = tiny_weights("tiny_a")
    return RefModel(config, weights, token_map.tolist())


@pytest.fixture(scope="module")
def whole(ref):
    """A sequence that ran from its first token, and its hidden rows."""
    with torch.inference_mode():
        sequence = RefSequence(prompt(LENGTH).tolist())
        return sequence, run_ref(ref, sequence, 0, LENGTH)


def close(ours, wanted):
    """Relative to the stream's largest value, as the golden sets are compared."""
    assert (ours - wanted).abs().max() <= 2e-5 * wanted.abs().max()


@pytest.mark.parametrize("borders", [(), (16,), (1, 2, 7, 24, 33)])
def test_chunks_and_decode_steps_compute_what_the_twin_does(whole, borders):
    ids, hand = prompt(LENGTH), Hand(tiny_model(FP32))
    edges = [0, *borders, *range(PROMPT, LENGTH + 1)]
    ours = torch.cat([hand.run(("s", ids, begin, end)) for begin, end in pairwise(edges)])
    close(ours, torch.stack([whole[1][position] for position in range(LENGTH)]))


def test_decoder_layers_on_the_kept_tail_only(ref):
    ids, keep, hand = prompt(LENGTH), 14, Hand(tiny_model(FP32))
    with torch.inference_mode():
        sequence = RefSequence(ids.tolist(), keep_begin=keep)
        wanted = run_ref(ref, sequence, 0, LENGTH)
        drafts = propose_ref(ref, sequence, 7, LENGTH - 1)
    edges = [0, 9, 21, *range(PROMPT, LENGTH + 1)]
    options = {"keep_begin": keep}
    ours = torch.cat([hand.run(("s", ids, begin, end, options)) for begin, end in pairwise(edges)])
    assert list(wanted) == list(range(keep, LENGTH))
    close(ours, torch.stack(list(wanted.values())))
    assert hand.drafts(("s", 7, LENGTH - 1)).token_ids[0].tolist() == drafts.token_ids


def test_windows_rebuilt_before_a_hit(ref, whole):
    """Entries below the hit exist; windows are made anew over the tokens before it."""
    ids, begin, hit, hand = prompt(LENGTH), 12, 24, Hand(tiny_model(FP32))
    sequence = RefSequence(ids.tolist(), window_begin=begin, write_begin=hit)
    for layer in ref.config.shape.kv_sources:
        count = hit // layer.ratio
        sequence.entries[layer.layer] = list(whole[0].entries[layer.layer][:count])
        sequence.keys[layer.layer] = list(whole[0].keys[layer.layer][:count])
    with torch.inference_mode():
        wanted = run_ref(ref, sequence, begin, LENGTH)
    hand.run(("s", ids, 0, hit))
    hand.caches.slots.fill_(0x7F)
    options = {"window_begin": begin, "write_begin": hit}
    ours = [hand.run(("s", ids, a, b, options)) for a, b in ((begin, 19), (19, hit + 3), (hit + 3, LENGTH))]
    close(torch.cat(ours), torch.stack(list(wanted.values())))


def test_drafts(ref, whole):
    ids, hand = prompt(LENGTH), Hand(tiny_model(FP32))
    hand.run(("s", ids, 0, LENGTH))
    with torch.inference_mode():
        wanted = propose_ref(ref, whole[0], 11, LENGTH - 1)
    ours = hand.drafts(("s", 11, LENGTH - 1))
    assert ours.token_ids[0].tolist() == wanted.token_ids
    torch.testing.assert_close(ours.confidence[0], torch.tensor(wanted.confidence), rtol=1e-4, atol=1e-4)


def test_images():
    config, w = small_tower()
    plan = plan_image(9, 8, config)
    assert (plan.patch_rows, plan.patch_columns) == (4, 5)  # neither is a multiple of the cell
    patches = torch.randn(20, 12, generator=torch.Generator().manual_seed(5))
    ours = VisionTower(config, w, FP32).embed(patches, plan)
    torch.testing.assert_close(ours, embed_image_ref(patches, 4, 5, w, config), rtol=1e-5, atol=1e-5)
