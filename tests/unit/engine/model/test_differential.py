"""Exact mode: however the work is cut, batched, drafted or moved, the bits are those of one whole prefill."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.engine.model.tiny_v41 import EXACT, Hand, prompt, tiny_model

MODES = ["bf16", "fp32"]


@pytest.fixture(scope="module")
def models():
    return {mode: tiny_model(numerics) for mode, numerics in EXACT.items()}


def assert_equal(a, b, what):
    assert torch.equal(a, b), f"{what}: {int((a != b).sum())} of {a.numel()} differ"


@settings(max_examples=5)
@given(data=st.data(), mode=st.sampled_from(MODES), count=st.integers(1, 150))
def test_any_chunking_gives_the_bits_of_one_chunk(models, data, mode, count):
    ids = prompt(count, seed=count)
    borders = data.draw(st.lists(st.integers(1, 150), max_size=5))
    whole, cut = Hand(models[mode]), Hand(models[mode])
    assert_equal(cut.prefill("a", ids, borders), whole.prefill("a", ids), "hidden")
    assert_equal(cut.state("a", count), whole.state("a", count), "caches")


@settings(max_examples=4)
@given(mode=st.sampled_from(MODES), counts=st.lists(st.integers(1, 70), min_size=2, max_size=4))
def test_a_batch_gives_the_bits_of_each_alone(models, mode, counts):
    texts = {f"s{i}": prompt(count, seed=i) for i, count in enumerate(counts)}
    together = Hand(models[mode])
    hidden = together.run(*[(name, ids, 0, len(ids)) for name, ids in texts.items()]).split(counts)
    for (name, ids), rows in zip(texts.items(), hidden, strict=True):
        alone = Hand(models[mode])
        assert_equal(rows, alone.prefill(name, ids), "hidden")
        assert_equal(together.state(name, len(ids)), alone.state(name, len(ids)), "caches")


@settings(max_examples=4)
@given(mode=st.sampled_from(MODES), count=st.integers(1, 60), steps=st.integers(1, 8))
def test_decode_steps_give_the_bits_of_a_longer_prompt(models, mode, count, steps):
    ids, other = prompt(count + steps, seed=steps), prompt(40 + steps, seed=99)
    whole, hand = Hand(models[mode]), Hand(models[mode])
    wanted = whole.prefill("a", ids)[count:]
    hand.run(("a", ids, 0, count), ("b", other, 0, 40))
    rows = [
        hand.run(("b", other, 40 + i, 41 + i), ("a", ids, count + i, count + i + 1))[1] for i in range(steps)
    ]
    assert_equal(torch.stack(rows), wanted, "hidden")
    assert_equal(hand.state("a", len(ids)), whole.state("a", len(ids)), "caches")


@settings(max_examples=5)
@given(
    mode=st.sampled_from(MODES),
    count=st.integers(1, 40),
    accepted=st.lists(st.integers(0, 5), min_size=1, max_size=6),
)
def test_rows_with_drafts_give_the_bits_of_plain_decoding(models, mode, count, accepted):
    total = count + sum(accepted) + len(accepted)
    ids, wrong = prompt(total + 6, seed=total), prompt(total + 6, seed=total + 1)
    plain, hand = Hand(models[mode]), Hand(models[mode])
    wanted = plain.prefill("a", ids[:total])
    hand.run(("a", ids, 0, count))
    at, rows = count, []
    for right in accepted:
        guessed = ids.copy()
        guessed[at + 1 + right : at + 6] = wrong[at + 1 + right : at + 6]  # the rest will be rejected
        rows.append(hand.run(("a", guessed, at, at + 6))[: 1 + right])
        at += 1 + right
    assert_equal(torch.cat(rows), wanted[count:], "hidden")
    assert_equal(hand.state("a", total), plain.state("a", total), "caches")


@pytest.mark.parametrize("mode", MODES)
def test_a_prefix_hit_with_its_state_gives_the_bits_of_a_cold_start(models, mode):
    ids, hit = prompt(200), 128
    cold, hand = Hand(models[mode]), Hand(models[mode])
    wanted = cold.prefill("a", ids)
    hand.place("a")
    hand.place("b")
    hand.run(("a", ids, 0, hit))
    (slot_a, blocks_a), (slot_b, blocks_b) = hand.places["a"], hand.places["b"]
    hand.caches.blocks[blocks_b[0]] = hand.caches.blocks[blocks_a[0]]
    hand.caches.slots[slot_b] = hand.caches.slots[slot_a]
    assert_equal(hand.run(("b", ids, hit, 200)), wanted[hit:], "hidden")
    assert_equal(hand.state("b", 200), cold.state("a", 200), "caches")


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("past", [0, 1, 5])
def test_the_state_of_a_border_can_be_cut_out_a_few_rows_later(models, mode, past):
    ids, border = prompt(160), 128
    cold, hand = Hand(models[mode]), Hand(models[mode])
    wanted = cold.prefill("a", ids)
    hand.place("a")
    hand.place("b")
    hand.run(("a", ids, 0, 126))
    hand.run(("a", ids, 126, border + past))
    (slot_a, blocks_a), (slot_b, blocks_b) = hand.places["a"], hand.places["b"]
    hand.caches.blocks[list(blocks_b)] = hand.caches.blocks[list(blocks_a)]
    hand.caches.slots[slot_b] = hand.caches.slots[slot_a]
    assert_equal(hand.run(("b", ids, border, 160)), wanted[border:], "hidden")


@pytest.mark.parametrize("mode", MODES)
def test_drafts_of_a_batch_are_those_of_each_alone(models, mode):
    texts = {"a": prompt(3, seed=1), "b": prompt(40, seed=2), "c": prompt(17, seed=3)}
    hand = Hand(models[mode])
    for name, ids in texts.items():
        hand.prefill(name, ids)
    ends = [(name, 7, len(ids) - 1) for name, ids in texts.items()]
    together = hand.drafts(*ends)
    assert torch.isfinite(together.confidence).all()
    for number, end in enumerate(ends):
        alone = hand.drafts(end)
        assert_equal(together.token_ids[number], alone.token_ids[0], "drafts")
        assert_equal(together.confidence[number], alone.confidence[0], "confidence")
