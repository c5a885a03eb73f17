"""The estimator of `policies.cost` against two counts: that of the plain twins, and torch's own."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

import numpy as np
import torch

from benchmarks.v41_meter import count_with_torch
from millpond.core.units import BLOCK_TOKENS, ceil_div
from millpond.core.work import Mechanism, WorkKind
from millpond.engine.model.caches import Caches
from millpond.engine.model.model import V41Model
from millpond.engine.model.step import Span
from millpond.engine.ref.dspark import propose_ref, remember_ref
from millpond.engine.ref.model import RefModel, RefSequence
from millpond.engine.ref.tally import Tally, counting
from millpond.policies.cost import FLOPS, Cost, TokenRange


def flops_by_mechanism(tally: Tally) -> dict[Mechanism, int]:
    """Floating-point operations that the twins counted."""
    sums: Counter[Mechanism] = Counter()
    for (mechanism, _), multiply_adds in tally.multiply_adds.items():
        sums[mechanism] += FLOPS * multiply_adds
    return dict(sums)


@torch.inference_mode()
def count_range(model: RefModel, sequence: RefSequence, tokens: TokenRange) -> Tally:
    """Run positions [begin, end) through the plain twin and count."""
    with counting() as tally:
        for position in range(tokens.begin, tokens.end):
            row = model.run(sequence, position)
            if row is None:
                continue
            if model.weights.draft is not None:
                remember_ref(model, sequence, row, position)
            if position >= tokens.end - tokens.num_logits:
                model.logits(row)
    return tally


@torch.inference_mode()
def count_proposal(model: RefModel, sequence: RefSequence, position: int) -> Tally:
    """Count one proposal of the draft stages after `position`."""
    with counting() as tally:
        propose_ref(model, sequence, sequence.token_ids[position], position)
    return tally


def estimate_error(
    model: RefModel,
    cost: Cost,
    token_ids: Sequence[int],
    borders: Iterable[int],
    *,
    num_decoded: int,
    keep_begin: int,
) -> float:
    """Largest relative error of the estimate over a prompt's chunks and the decode rows after it.

    Args:
        model: The plain twin.
        cost: The estimator.
        token_ids: The prompt, then the decoded tokens.
        borders: Where the prompt is cut, ascending.
        num_decoded: How many of the tokens are decode rows.
        keep_begin: Decoder layers run from here on; 0 on all.
    """
    length = len(token_ids)
    prompt = length - num_decoded
    sequence = RefSequence(token_ids, keep_begin=keep_begin)
    begin, errors = 0, []
    for end in [*borders, prompt, *range(prompt + 1, length + 1)]:
        tokens = TokenRange(begin, end, int(end >= prompt), keep_begin)
        counted = sum(flops_by_mechanism(count_range(model, sequence, tokens)).values())
        errors.append(abs(cost.flops(tokens).total - counted) / counted)
        begin = end
    return max(errors)


def linear_error(
    model: V41Model,
    cost: Cost,
    token_ids: Sequence[int],
    borders: Iterable[int],
    *,
    num_decoded: int,
    keep_begin: int,
) -> float:
    """Like `estimate_error`, of the linear part against torch's counter over the engine.

    Only torch's own products count: call this where native kernels are out of reach.
    """
    shape, length = model.config.shape, len(token_ids)
    prompt = length - num_decoded
    table = tuple(range(1, 1 + ceil_div(length, BLOCK_TOKENS)))
    caches = Caches(shape, model.numerics, len(table), 1, model.device)
    ids = np.array(token_ids, dtype=np.int32)
    begin, errors = 0, []
    for end in [*borders, prompt, *range(prompt + 1, length + 1)]:
        span = Span(ids, begin, end, table, slot=0, keep_begin=keep_begin)
        is_last = end >= prompt
        counted = count_with_torch(model, caches, [span], with_logits=is_last).total(WorkKind.LINEAR)
        estimate = cost.flops(TokenRange(begin, end, int(is_last), keep_begin)).linear
        errors.append(abs(estimate - counted) / counted)
        begin = end
    return max(errors)
