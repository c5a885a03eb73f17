"""The sampler against an obvious twin, against the exact distribution, and rule by rule."""

from __future__ import annotations

import math
from array import array
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from millpond.core.errors import DataError
from millpond.core.request import SamplingParams
from millpond.engine.gumbel import gumbel_ref
from millpond.engine.sampler import Sampler, largest_ids, lower_bound_of_largest, nucleus_size

PLAIN = SamplingParams(max_tokens=100, seed=11)
GREEDY = replace(PLAIN, temperature=0.0)
NONE = array("i")


def sample_ref(
    logits: list[float], rules: SamplingParams, prompt: list[int], output: list[int], position: int
) -> int:
    """Interfaces A.10 with every step spelled out, token by token."""
    scores = list(logits)
    for token, bias in rules.logit_bias:
        scores[token] += bias
    for token in set(prompt) | set(output):
        penalty = rules.repetition_penalty
        scores[token] = scores[token] / penalty if scores[token] > 0 else scores[token] * penalty
    for token, count in Counter(output).items():
        scores[token] -= rules.presence_penalty + rules.frequency_penalty * count
    if len(output) < rules.min_tokens:
        for token in rules.stop_token_ids:
            scores[token] = -math.inf
    best_first = sorted(range(len(scores)), key=lambda token: (-scores[token], token))
    if rules.temperature == 0:
        return best_first[0]
    scores = [score / rules.temperature for score in scores]
    top = scores[best_first[0]]
    kept = best_first[: rules.top_k] if rules.top_k else best_first
    if rules.min_p > 0:
        kept = [token for token in kept if scores[token] >= top + math.log(rules.min_p)]
    if rules.top_p < 1:
        weights = [math.exp(scores[token] - top) for token in kept]
        total, reached, count = sum(weights), 0.0, 0
        while count < len(kept) and reached < rules.top_p * total:
            reached += weights[count]
            count += 1
        kept = kept[: max(1, count)]
    noisy = {token: scores[token] + gumbel_ref(rules.seed, rules.choice, position, token) for token in kept}
    return min(noisy, key=lambda token: (-noisy[token], token))


def draw(sampler: Sampler, logits: np.ndarray, rules: SamplingParams, num_draws: int) -> np.ndarray:
    tokens = [sampler.sample(logits, rules, NONE, NONE, position).token_id for position in range(num_draws)]
    return np.bincount(tokens, minlength=len(logits))


def chi_square_passes(counts: np.ndarray, probabilities: np.ndarray) -> bool:
    """Pearson's test at the 99.9 % point (Wilson-Hilferty); impossible tokens must not occur."""
    possible = probabilities > 0
    expected = probabilities[possible] * counts.sum()
    statistic = ((counts[possible] - expected) ** 2 / expected).sum()
    freedom = possible.sum() - 1
    limit = freedom * (1 - 2 / (9 * freedom) + 3.09 * math.sqrt(2 / (9 * freedom))) ** 3
    return counts[~possible].sum() == 0 and statistic < limit


def softmax(values: np.ndarray) -> np.ndarray:
    weights = np.exp(values - values.max())
    return weights / weights.sum()


@st.composite
def cases(draw):
    vocab = draw(st.integers(2, 40))
    # Few distinct values: ties must be common, or their rule is not tested.
    logits = draw(st.lists(st.integers(-6, 6), min_size=vocab, max_size=vocab))
    token = st.integers(0, vocab - 1)
    tokens = st.lists(token, max_size=12)
    rules = SamplingParams(
        max_tokens=50,
        seed=draw(st.integers(0, 2**63 - 1)),
        choice=draw(st.integers(0, 3)),
        temperature=draw(st.sampled_from([0.0, 0.5, 1.0, 3.0])),
        top_k=draw(st.sampled_from([0, 1, 2, 5, 100])),
        top_p=draw(st.sampled_from([1.0, 0.97, 0.613, 0.011])),
        min_p=draw(st.sampled_from([0.0, 0.0301, 0.51, 1.0])),
        repetition_penalty=draw(st.sampled_from([1.0, 1.3, 0.7])),
        presence_penalty=draw(st.sampled_from([0.0, 0.5, -1.0])),
        frequency_penalty=draw(st.sampled_from([0.0, 0.25])),
        logit_bias=tuple(draw(st.lists(st.tuples(token, st.sampled_from([-100.0, -1.5, 2.0])), max_size=2))),
        stop_token_ids=tuple(draw(st.lists(token, max_size=1))),
        min_tokens=draw(st.sampled_from([0, 3])),
    )
    return logits, rules, draw(tokens), draw(tokens), draw(st.integers(0, 5000))


@settings(max_examples=400)
@given(cases())
def test_sample_equals_its_twin(case) -> None:
    logits, rules, prompt, output, position = case
    choice = Sampler(len(logits)).sample(
        np.array(logits, np.float32), rules, array("i", prompt), array("i", output), position
    )
    assert choice.token_id == sample_ref([float(x) for x in logits], rules, prompt, output, position)


@pytest.mark.parametrize("temperature", [0.3, 1.0, 8.0])
@pytest.mark.parametrize("spread", [0.0, 1.0, 4.0])
def test_leaving_out_noise_never_changes_the_winner(temperature: float, spread: float) -> None:
    from millpond.engine.gumbel import GumbelField, field_start, gumbel

    vocab = 5003
    rng = np.random.default_rng(3)
    sampler, field = Sampler(vocab), GumbelField(vocab)
    rules = replace(PLAIN, temperature=temperature)
    for position in range(40):
        logits = (rng.normal(size=vocab) * spread).astype(np.float32)
        noisy = logits.astype(np.float64) / temperature + gumbel(field.bits(field_start(11, 0, position)))
        assert sampler.sample(logits, rules, NONE, NONE, position).token_id == noisy.argmax()


@pytest.mark.parametrize("temperature", [0.6, 1.0, 2.5])
def test_draws_follow_the_softmax(temperature: float) -> None:
    logits = np.array([0.0, 1.0, 2.0, -1.0, 0.5, 0.5, 3.0, -3.0], np.float32)
    counts = draw(Sampler(8), logits, replace(PLAIN, temperature=temperature), 6000)
    assert chi_square_passes(counts, softmax(logits.astype(np.float64) / temperature))


def test_draws_over_seeds_and_choices_follow_the_softmax() -> None:
    logits = np.array([0.0, 1.0, 2.0, -1.0], np.float32)
    sampler = Sampler(4)
    tokens = [
        sampler.sample(logits, replace(PLAIN, seed=seed, choice=choice), NONE, NONE, 7).token_id
        for seed in range(1000)
        for choice in range(4)
    ]
    assert chi_square_passes(np.bincount(tokens, minlength=4), softmax(logits.astype(np.float64)))


def test_a_wrong_distribution_fails_the_statistical_test() -> None:
    logits = np.array([0.0, 1.0, 2.0, -1.0], np.float32)
    counts = draw(Sampler(4), logits, replace(PLAIN, temperature=1.1), 6000)
    assert not chi_square_passes(counts, softmax(logits.astype(np.float64)))


@pytest.mark.parametrize(
    ("rules", "num_kept"),
    [
        (replace(PLAIN, top_k=3), 3),
        (replace(PLAIN, top_p=0.9), 3),
        (replace(PLAIN, min_p=0.3), 2),
        (replace(PLAIN, top_k=4, top_p=0.7), 2),
    ],
    ids=["top_k", "top_p", "min_p", "top_k then top_p"],
)
def test_filtered_draws_follow_the_renormalised_softmax(rules: SamplingParams, num_kept: int) -> None:
    logits = np.array([0.0, 1.0, 2.0, -1.0, 3.0, -3.0], np.float32)
    exact = softmax(logits.astype(np.float64))
    exact[np.argsort(-exact)[num_kept:]] = 0
    assert chi_square_passes(draw(Sampler(6), logits, rules, 4000), exact / exact.sum())


def test_text_does_not_depend_on_other_rows() -> None:
    rng = np.random.default_rng(1)
    rows = [rng.normal(size=600).astype(np.float32) * 3 for _ in range(20)]
    rules = [replace(PLAIN, seed=i, top_p=0.9 if i % 2 else 1.0, num_logprobs=2) for i in range(20)]
    alone = [Sampler(600).sample(rows[i], rules[i], NONE, NONE, i) for i in range(20)]
    shared = Sampler(600)
    together = {i: shared.sample(rows[i], rules[i], NONE, NONE, i) for i in rng.permutation(20).tolist()}
    assert [together[i] for i in range(20)] == alone


def test_bug_06_choices_of_one_call_differ_and_repeat() -> None:
    logits = np.zeros(1000, np.float32)
    texts = [
        [
            Sampler(1000).sample(logits, replace(PLAIN, choice=choice), NONE, NONE, position).token_id
            for position in range(5)
        ]
        for choice in (*range(8), 0)
    ]
    assert len({tuple(tokens) for tokens in texts[:8]}) == 8
    assert texts[8] == texts[0]


def test_logits_are_not_changed() -> None:
    logits = np.arange(50, dtype=np.float32)
    before = logits.copy()
    rules = replace(PLAIN, repetition_penalty=2.0, logit_bias=((3, 5.0),), top_p=0.5, num_logprobs=3)
    Sampler(50).sample(logits, rules, array("i", [1]), array("i", [2]), 2)
    assert np.array_equal(logits, before)


def test_known_tokens_can_grow_after_sampling() -> None:
    prompt, output = array("i", [1]), array("i", [2])
    rules = replace(PLAIN, repetition_penalty=2.0, presence_penalty=1.0)
    output.append(Sampler(50).sample(np.zeros(50, np.float32), rules, prompt, output, 2).token_id)
    assert len(output) == 2


@given(
    values=st.lists(st.integers(-3, 3), min_size=1, max_size=400),
    count=st.integers(1, 400),
)
def test_largest_ids_prefer_low_ids_among_equals(values: list[int], count: int) -> None:
    count = min(count, len(values))
    array_ = np.array(values, np.float32)
    best_first = sorted(range(len(values)), key=lambda i: (-values[i], i))
    assert largest_ids(array_, count).tolist() == sorted(best_first[:count])
    assert (array_ >= lower_bound_of_largest(array_, count)).sum() >= count


@given(seed=st.integers(0, 50), top_p=st.floats(0.01, 1.0), spread=st.sampled_from([0.1, 3.0]))
def test_nucleus_is_the_smallest_that_reaches_top_p(seed: int, top_p: float, spread: float) -> None:
    weights = np.exp(np.random.default_rng(seed).normal(size=3000) * spread).astype(np.float32)
    size = nucleus_size(weights, top_p)
    best_first = np.sort(weights.astype(np.float64))[::-1]
    needed = top_p * best_first.sum()
    assert best_first[:size].sum() >= needed * (1 - 1e-9)
    assert size == 1 or best_first[: size - 1].sum() < needed * (1 + 1e-9)


def test_logprobs_are_those_of_the_raw_logits() -> None:
    logits = np.array([1.0, 3.0, 2.0, 3.0, -4.0], np.float32)
    rules = replace(GREEDY, num_logprobs=3, logit_bias=((4, 100.0),), temperature=0.0)
    choice = Sampler(5).sample(logits, rules, NONE, NONE, 1)
    exact = np.log(softmax(logits.astype(np.float64)))
    assert choice.token_id == 4
    assert choice.logprob == pytest.approx(exact[4], abs=1e-6)
    assert [token for token, _ in choice.top] == [1, 3, 2]
    assert [logprob for _, logprob in choice.top] == pytest.approx([exact[1], exact[3], exact[2]], abs=1e-6)


@pytest.mark.parametrize(("num_logprobs", "num_top"), [(-1, 0), (0, 0), (2, 2), (99, 5)])
def test_as_many_logprobs_as_asked_for(num_logprobs: int, num_top: int) -> None:
    choice = Sampler(5).sample(
        np.zeros(5, np.float32), replace(GREEDY, num_logprobs=num_logprobs), NONE, NONE, 1
    )
    assert len(choice.top) == num_top
    assert (choice.logprob != 0) == (num_logprobs >= 0)


def test_greedy_takes_the_lowest_of_equals() -> None:
    logits = np.array([0.0, 2.0, 2.0, 1.0], np.float32)
    assert Sampler(4).sample(logits, GREEDY, NONE, NONE, 1).token_id == 1
    assert Sampler(4).sample(logits, replace(GREEDY, temperature=1e-30), NONE, NONE, 1).token_id == 1


@pytest.mark.parametrize("num_output", [0, 1, 2, 3])
def test_stop_token_waits_for_min_tokens(num_output: int) -> None:
    rules = replace(GREEDY, stop_token_ids=(2,), min_tokens=2)
    output = array("i", [0] * num_output)
    token = Sampler(3).sample(np.array([0, 1, 2], np.float32), rules, NONE, output, num_output).token_id
    assert token == (1 if num_output < 2 else 2)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_logits_that_are_no_numbers_are_an_error(value: float) -> None:
    logits = np.full(4, value, np.float32)
    with pytest.raises(DataError, match="not numbers"):
        Sampler(4).sample(logits, PLAIN, NONE, NONE, 1)


def test_logits_may_rule_tokens_out() -> None:
    logits = np.full(400, -np.inf, np.float32)
    logits[[7, 300]] = 0
    for rules in (PLAIN, replace(PLAIN, top_p=0.9), replace(PLAIN, top_k=5), replace(PLAIN, min_p=0.1)):
        counts = draw(Sampler(400), logits, rules, 60)
        assert set(np.flatnonzero(counts)) == {7, 300}
