"""What a run says, as plain JSON values."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from millpond.core.request import FinishReason
from millpond.core.units import SECOND_NS
from millpond.sim.sim_gateway import Stream

PERCENTILES = (50, 90, 99)
FINISHED = (FinishReason.STOP, FinishReason.LENGTH)


def percentile(values: Sequence[float], percent: int) -> float:
    """Smallest value that at least `percent` of 100 values do not exceed; 0 without values."""
    if not values:
        return 0.0
    ordered = sorted(values)
    return ordered[max(0, -(-len(ordered) * percent // 100) - 1)]


def summarise(streams: Sequence[Stream]) -> dict[str, object]:
    """Latencies and throughput of all ended streams. Times in seconds of virtual time."""
    finished = [stream for stream in streams if stream.reason in FINISHED]
    ttft = [(s.token_times_ns[0] - s.submitted_ns) / SECOND_NS for s in finished]
    tpot = [
        (s.token_times_ns[-1] - s.token_times_ns[0]) / (len(s.token_times_ns) - 1) / SECOND_NS
        for s in finished
        if len(s.token_times_ns) > 1
    ]
    num_tokens = sum(len(stream.token_times_ns) for stream in streams)
    num_prompt = sum(stream.spec.num_prompt_tokens for stream in finished)
    num_cached = sum(stream.num_cached_tokens for stream in finished)
    begin_ns = min((stream.submitted_ns for stream in streams), default=0)
    end_ns = max((stream.token_times_ns[-1] for stream in finished), default=begin_ns)
    seconds = (end_ns - begin_ns) / SECOND_NS
    return {
        "num_requests": len(streams),
        "reasons": dict(sorted(Counter(s.reason.value for s in streams if s.reason is not None).items())),
        "num_output_tokens": num_tokens,
        "num_prompt_tokens": num_prompt,
        "num_cached_tokens": num_cached,
        "hit_ratio": num_cached / num_prompt if num_prompt else 0.0,
        "seconds": seconds,
        "output_tokens_per_s": num_tokens / seconds if seconds else 0.0,
        "ttft_s": _spread(ttft),
        "tpot_s": _spread(tpot),
    }


def _spread(values: Sequence[float]) -> dict[str, float]:
    mean = sum(values) / len(values) if values else 0.0
    return {"mean": mean} | {f"p{percent}": percentile(values, percent) for percent in PERCENTILES}
