"""Bounded replays: which bytes they must leave alone, and where they are exact."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch

from tests.unit.engine.model.tiny_v41 import EXACT, Hand, prompt, tiny_model

MODES = ["bf16", "fp32"]


@pytest.fixture(scope="module")
def models():
    return {mode: tiny_model(numerics) for mode, numerics in EXACT.items()}


def run_kept(hand, name, ids, keep, borders=()):
    """Prefill with decoder layers on the last `keep` tokens only."""
    edges = [0, *borders, len(ids)]
    options = {"keep_begin": max(0, len(ids) - keep)}
    spans = [(name, ids, a, b, options) for a, b in pairwise(edges)]
    return torch.cat([hand.run(span) for span in spans])


@pytest.mark.parametrize("mode", MODES)
def test_decoder_replay_leaves_the_encoder_and_the_blocks_exact(models, mode):
    ids, keep = prompt(150), 24
    full, kept = Hand(models[mode]), Hand(models[mode])
    full.prefill("a", ids)
    hidden = run_kept(kept, "a", ids, keep)
    assert hidden.shape[0] == keep
    assert torch.isfinite(hidden).all()
    assert torch.equal(kept.entries("a", 150), full.entries("a", 150))
    encoder = range(models[mode].config.shape.num_encoder_layers)
    assert torch.equal(kept.windows("a", 150, layers=encoder), full.windows("a", 150, layers=encoder))
    assert torch.equal(kept.held("a", 150), full.held("a", 150))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("borders", [(64, 128), (127, 130, 149)])
def test_decoder_replay_does_not_depend_on_the_chunks(models, mode, borders):
    ids, keep = prompt(150), 24
    whole, cut = Hand(models[mode]), Hand(models[mode])
    assert torch.equal(run_kept(cut, "a", ids, keep, borders), run_kept(whole, "a", ids, keep))
    assert torch.equal(cut.state("a", 150), whole.state("a", 150))


@pytest.mark.parametrize("borders", [(36,), (45,), (10, 25, 47)])
def test_decoder_replay_knows_which_of_the_kept_tokens_are_of_an_image(models, borders):
    ids, keep = prompt(60), 24
    ids[20:30] = ids[44:50] = models["fp32"].config.image_token_id
    whole, cut = Hand(models["fp32"]), Hand(models["fp32"])
    kept = run_kept(whole, "a", ids, keep)
    assert torch.equal(run_kept(cut, "a", ids, keep, borders), kept)
    assert torch.equal(cut.state("a", 60), whole.state("a", 60))
    # the first kept token sees nothing of the decoder's windows but itself: alone it comes out the same
    alone = run_kept(Hand(models["fp32"]), "a", ids[: 60 - keep + 1], 1)
    assert torch.equal(kept[:1], alone)


@pytest.mark.parametrize("mode", MODES)
def test_decoder_replay_of_the_whole_prompt_is_exact(models, mode):
    ids = prompt(40)
    full, kept = Hand(models[mode]), Hand(models[mode])
    assert torch.equal(run_kept(kept, "a", ids, 40), full.prefill("a", ids))


@pytest.mark.parametrize("mode", MODES[:1])
def test_decoding_after_a_decoder_replay_needs_no_record_of_it(models, mode):
    ids, keep = prompt(160), 24
    with_record, without = Hand(models[mode]), Hand(models[mode])
    for hand in (with_record, without):
        run_kept(hand, "a", ids[:150], keep)
    for at in range(150, 154):
        options = {"keep_begin": 150 - keep}
        one = with_record.run(("a", ids, at, at + 1, options))
        assert torch.equal(one, without.run(("a", ids, at, at + 1)))


def lost_windows(hand, name, ids, hit):
    """A sequence that finds the block KV of `hit` tokens of another, but no windows."""
    hand.place("donor")
    hand.place(name)
    hand.run(("donor", ids, 0, len(ids)))
    (_, blocks_a), (_, blocks_b) = hand.places["donor"], hand.places[name]
    for a, b in zip(blocks_a[: hit // 128], blocks_b[: hit // 128], strict=True):
        hand.caches.blocks[b] = hand.caches.blocks[a]
    return blocks_b


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("borders", [(128,), (120, 131)])
def test_encoder_replay_rebuilds_windows_and_never_rewrites_the_hit(models, mode, borders):
    ids, hit = prompt(170), 128
    hand = Hand(models[mode])
    window = hand.shape.window
    blocks = lost_windows(hand, "a", ids, hit)
    before = hand.caches.blocks[blocks[0]].clone()
    begin = hit - window
    options = {"window_begin": begin, "write_begin": hit, "keep_begin": begin}
    edges = [begin, *borders, len(ids)]
    rows = [hand.run(("a", ids, x, y, options)) for x, y in pairwise(edges)]
    assert torch.isfinite(torch.cat(rows)).all()
    assert torch.equal(hand.caches.blocks[blocks[0]], before)
    slot_a, slot_donor = hand.places["a"][0], hand.places["donor"][0]
    # the first layer's windows follow from the tokens alone, so there the rebuilt rows are exact
    last = torch.arange(len(ids) - window, len(ids)) % hand.shape.ring_rows
    ring = hand.caches.windows[0].memory
    assert torch.equal(ring[slot_a, last], ring[slot_donor, last])
    again = Hand(models[mode])
    lost_windows(again, "a", ids, hit)
    whole = again.run(("a", ids, begin, len(ids), options))
    assert torch.equal(torch.cat(rows), whole)
    assert torch.equal(hand.state("a", len(ids)), again.state("a", len(ids)))
