"""Figures of a load run: TTFT, TPOT, end-to-end time, throughput. Pure: records in, numbers out."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from millpond.serve.loadgen.client import RequestRecord


@dataclass(frozen=True, slots=True)
class Distribution:
    """A sample of seconds. All zero when nothing was measured."""

    mean: float
    p50: float
    p90: float
    p95: float
    p99: float
    max: float


@dataclass(frozen=True, slots=True)
class LoadReport:
    """Figures over the completed requests of a run; times in seconds.

    TTFT is told three ways, since servers differ in what they send first: the first event of any kind, the
    first event that stands for a token, and the first that carries text.
    """

    num_completed: int
    num_failed: int
    errors: dict[str, int]
    """Number of failed requests by error."""
    duration_s: float
    """From the first request sent to the last answer's end."""
    num_prompt_tokens: int
    num_cached_tokens: int
    num_output_tokens: int
    requests_per_s: float
    prompt_tokens_per_s: float
    output_tokens_per_s: float
    ttft_event_s: Distribution
    ttft_token_s: Distribution
    ttft_text_s: Distribution
    tpot_s: Distribution
    """Per request: time from first to last token / (tokens - 1)."""
    inter_token_s: Distribution
    """Gaps between token events, over all requests."""
    request_s: Distribution
    """From sending to the end of the answer."""


def make_report(records: Sequence[RequestRecord]) -> LoadReport:
    """Compute the figures. Failed requests count in `num_failed` and `errors` only."""
    done = [record for record in records if not record.error]
    begin_ns = min((record.sent_ns for record in records), default=0)
    end_ns = max((record.ended_ns for record in records), default=0)
    duration_s = (end_ns - begin_ns) / 1e9
    num_prompt = sum(record.num_prompt_tokens for record in done)
    num_output = sum(record.num_output_tokens for record in done)

    def rate(count: int) -> float:
        return count / duration_s if duration_s > 0 else 0.0

    return LoadReport(
        num_completed=len(done),
        num_failed=len(records) - len(done),
        errors=dict(Counter(record.error for record in records if record.error)),
        duration_s=duration_s,
        num_prompt_tokens=num_prompt,
        num_cached_tokens=sum(record.num_cached_tokens for record in done),
        num_output_tokens=num_output,
        requests_per_s=rate(len(done)),
        prompt_tokens_per_s=rate(num_prompt),
        output_tokens_per_s=rate(num_output),
        ttft_event_s=distribution(_since_sent(done, "first_event_ns")),
        ttft_token_s=distribution(_since_sent(done, "first_token_ns")),
        ttft_text_s=distribution(_since_sent(done, "first_text_ns")),
        tpot_s=distribution([tpot for record in done if (tpot := tpot_s(record)) is not None]),
        inter_token_s=distribution(
            [(after - before) / 1e9 for record in done for before, after in pairwise(record.token_ns)]
        ),
        request_s=distribution(_since_sent(done, "ended_ns")),
    )


def distribution(sample: Sequence[float]) -> Distribution:
    """Mean, percentiles (nearest rank) and maximum."""
    if not sample:
        return Distribution(0.0, 0.0, 0.0, 0.0, 0.0, 0.0)
    ordered = sorted(sample)

    def percentile(percent: int) -> float:
        return ordered[math.ceil(percent * len(ordered) / 100) - 1]

    return Distribution(
        sum(ordered) / len(ordered),
        percentile(50),
        percentile(90),
        percentile(95),
        percentile(99),
        ordered[-1],
    )


def _since_sent(records: Sequence[RequestRecord], field_name: str) -> list[float]:
    instants = [(record.sent_ns, getattr(record, field_name)) for record in records]
    return [(at_ns - sent_ns) / 1e9 for sent_ns, at_ns in instants if at_ns >= 0]


def tpot_s(record: RequestRecord) -> float | None:
    """Time per output token after the first; None if there were not two."""
    if record.num_output_tokens < 2 or record.last_token_ns <= record.first_token_ns:
        return None
    return (record.last_token_ns - record.first_token_ns) / 1e9 / (record.num_output_tokens - 1)
