"""Choose the next token of one sequence from its logits (interfaces A.10).

    raw logits -> logprobs that are reported
      + logit bias, stop tokens masked before min_tokens, penalties
      -> largest, if the temperature is 0
      / temperature -> min_p -> top_k -> top_p -> + Gumbel field -> largest

Of equal candidates the lowest token id wins, everywhere. Scores are float64; the probabilities that top_p and
logprobs add up are float32 exponentials (seven times faster) summed in float64.
"""

from __future__ import annotations

import math
from array import array
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from millpond.core.errors import DataError
from millpond.core.request import SamplingParams
from millpond.engine.gumbel import GumbelField, field_start, gumbel, least_bits

_NUM_LEADERS = 64
"""Candidates whose noise is computed before all others are judged by what they would need to win."""
_NUM_NUCLEUS = 512
"""Most likely tokens sorted first for top_p; all are, when these do not reach it."""
_MIN_TEMPERATURE = 1e-5
"""Below it logits / temperature could overflow; the largest logit wins anyway."""


TokenIds: TypeAlias = "array[int] | npt.NDArray[np.int32]"
"""Token ids, int32; read where they lie, so that a long prompt is not copied for every token."""


@dataclass(frozen=True, slots=True)
class SampledChoice:
    """The token of one position and what was asked about it."""

    token_id: int
    logprob: float = 0.0
    """Natural log of the softmax of the raw logits, before any rule; 0 if not asked for."""
    top: tuple[tuple[int, float], ...] = ()
    """(token id, logprob) of the most likely tokens, best first, if asked for."""


class Sampler:
    """Samples rows of one vocabulary size. Reuses its buffers: one thread at a time.

    Guarantees:
        The token depends on logits, sampling parameters, known tokens and position only: not on the batch,
        the worker or earlier calls.
    """

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size = vocab_size
        self._field = GumbelField(vocab_size)
        # Fresh arrays of this size cost more in page faults than the arithmetic done on them.
        self._scaled = np.empty(vocab_size, np.float64)
        self._weights = np.empty(vocab_size, np.float32)

    def sample(
        self,
        logits: npt.NDArray[np.float32],
        sampling: SamplingParams,
        prompt_ids: TokenIds,
        output_ids: TokenIds,
        position: int,
    ) -> SampledChoice:
        """Choose one token.

        Args:
            logits: [vocab], float32; not changed.
            sampling: Rules.
            prompt_ids: The client's prompt.
            output_ids: Output tokens so far.
            position: Index in the sequence of the token to be chosen = tokens known so far.

        Raises:
            DataError: The largest logit is not a finite number.
        """
        if not math.isfinite(float(logits.max())):
            raise DataError("the model produced logits that are not numbers", code="engine.logits")
        adjusted = adjust_logits(logits, sampling, prompt_ids, output_ids)
        if sampling.temperature < _MIN_TEMPERATURE:
            token_id = int(adjusted.argmax())
        else:
            token_id = self._draw(adjusted, sampling, position)
        if sampling.num_logprobs < 0:
            return SampledChoice(token_id)
        return self._with_logprobs(logits, token_id, sampling.num_logprobs)

    def _draw(self, adjusted: npt.NDArray[np.floating], sampling: SamplingParams, position: int) -> int:
        scaled = np.divide(adjusted, sampling.temperature, out=self._scaled, dtype=np.float64)
        start = field_start(sampling.seed, sampling.choice, position)
        if sampling.min_p > 0 or 0 < sampling.top_k < self.vocab_size or sampling.top_p < 1:
            kept = keep_likely(scaled, sampling, self._weights)
            return int(kept[np.argmax(scaled[kept] + gumbel(self._field.bits_of(start, kept)))])
        return self._largest_noisy(scaled, start)

    def _largest_noisy(self, scaled: npt.NDArray[np.float64], start: int) -> int:
        """Argmax of `scaled` + noise over all tokens, with little of the noise computed.

        The best of the leaders sets the mark. Everyone else has at most the leaders' floor, hence needs noise
        of at least mark - floor, which a comparison of random bits decides without a logarithm.
        """
        bits = self._field.bits(start)
        floor = lower_bound_of_largest(scaled, _NUM_LEADERS)
        is_leader = scaled >= floor
        mark = float((scaled[is_leader] + gumbel(bits[is_leader])).max())
        ids = np.flatnonzero(is_leader | (bits >= least_bits(mark - floor)))
        return int(ids[np.argmax(scaled[ids] + gumbel(bits[ids]))])

    def _with_logprobs(self, logits: npt.NDArray[np.float32], token_id: int, num_top: int) -> SampledChoice:
        best = float(logits.max())
        weights = np.subtract(logits, np.float32(best), out=self._weights)
        log_total = best + math.log(float(np.exp(weights, out=weights).sum(dtype=np.float64)))
        top = ()
        if num_top:
            ids = largest_ids(logits, num_top)
            ids = ids[np.argsort(-logits[ids], kind="stable")]
            top = tuple((int(i), float(logits[i]) - log_total) for i in ids)
        return SampledChoice(token_id, float(logits[token_id]) - log_total, top)


def adjust_logits(
    logits: npt.NDArray[np.float32], sampling: SamplingParams, prompt_ids: TokenIds, output_ids: TokenIds
) -> npt.NDArray[np.floating]:
    """Apply bias, mask and penalties.

    Returns:
        [vocab], float64; the argument itself if no rule applies.
    """
    is_held = len(output_ids) < sampling.min_tokens and bool(sampling.stop_token_ids)
    has_output_penalty = sampling.presence_penalty != 0 or sampling.frequency_penalty != 0
    if not (is_held or has_output_penalty or sampling.logit_bias or sampling.repetition_penalty != 1):
        return logits
    adjusted = logits.astype(np.float64)
    for token_id, bias in sampling.logit_bias:
        adjusted[token_id] += bias
    if sampling.repetition_penalty != 1:
        is_seen = np.zeros(len(adjusted), np.bool_)
        is_seen[np.frombuffer(prompt_ids, np.int32)] = True
        is_seen[np.frombuffer(output_ids, np.int32)] = True
        seen = np.flatnonzero(is_seen)
        values = adjusted[seen]
        penalty = sampling.repetition_penalty
        adjusted[seen] = np.where(values > 0, values / penalty, values * penalty)
    if has_output_penalty and len(output_ids):
        used, counts = np.unique(np.frombuffer(output_ids, np.int32), return_counts=True)
        adjusted[used] -= sampling.presence_penalty + sampling.frequency_penalty * counts
    if is_held:
        adjusted[list(sampling.stop_token_ids)] = -np.inf
    return adjusted


def keep_likely(
    scaled: npt.NDArray[np.float64], sampling: SamplingParams, scratch: npt.NDArray[np.float32]
) -> npt.NDArray[np.intp]:
    """Ids that min_p, top_k and top_p leave over, in this order.

    Each rule sees the probabilities that the rules before it left, normalised anew. The most likely token
    always stays.

    Args:
        scaled: [vocab], float64, logits / temperature.
        sampling: Rules.
        scratch: [vocab], float32, overwritten.

    Returns:
        Token ids, ascending, at least one.
    """
    best = float(scaled.max())
    ids = None
    if 0 < sampling.top_k < len(scaled):
        ids = largest_ids(scaled, sampling.top_k)
    if sampling.min_p > 0:
        floor = best + math.log(sampling.min_p)
        ids = np.flatnonzero(scaled >= floor) if ids is None else ids[scaled[ids] >= floor]
    if sampling.top_p < 1:
        weights = scratch[: len(scaled) if ids is None else len(ids)]
        np.subtract(scaled if ids is None else scaled[ids], best, out=weights, casting="same_kind")
        np.exp(weights, out=weights)
        nucleus = largest_ids(weights, nucleus_size(weights, sampling.top_p))
        ids = nucleus if ids is None else ids[nucleus]
    return np.arange(len(scaled)) if ids is None else ids


def nucleus_size(weights: npt.NDArray[np.float32], top_p: float) -> int:
    """Number of largest weights that together reach the share `top_p` of all, at least 1."""
    needed = top_p * float(weights.sum(dtype=np.float64))
    cumulative = np.empty(0)
    for count in (_NUM_NUCLEUS, len(weights)):
        candidates = weights
        if count < len(weights):
            candidates = weights[weights >= lower_bound_of_largest(weights, count)]
        cumulative = np.sort(candidates)[::-1].cumsum(dtype=np.float64)
        if cumulative[-1] >= needed:
            break
    return min(1 + int(np.searchsorted(cumulative, needed)), len(cumulative))


def largest_ids(values: npt.NDArray[np.floating], count: int) -> npt.NDArray[np.intp]:
    """Indices of the `count` largest values, ascending; of equal values the lowest indices."""
    if count >= len(values):
        return np.arange(len(values))
    candidates = np.flatnonzero(values >= lower_bound_of_largest(values, count))
    likely = values[candidates]
    floor = np.partition(likely, -count)[-count]
    above = candidates[likely > floor]
    equal = candidates[likely == floor][: count - len(above)]
    return np.sort(np.concatenate([above, equal]))


def lower_bound_of_largest(values: npt.NDArray[np.floating], count: int) -> float:
    """A value that at least `count` elements (or all, if fewer) reach, close to the `count`-th largest.

    Elements are dealt into at least 4 * count piles; the `count`-th largest of the piles' maxima will do, as
    each of those piles has a member that reaches it.
    """
    count = min(count, len(values))
    pile_height = len(values) // (4 * count)
    if pile_height < 2:
        return float(np.partition(values, -count)[-count])
    num_piles = len(values) // pile_height
    maxima = values[: pile_height * num_piles].reshape(pile_height, num_piles).max(axis=0)
    return float(np.partition(maxima, -count)[-count])
