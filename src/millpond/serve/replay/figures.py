"""Figures of a replay. Pure: records and counts in, numbers out."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from millpond.serve.loadgen.report import Distribution, distribution, tpot_s
from millpond.serve.replay.player import SessionRecord

LEVELS = {"memory": "host memory", "peers": "other hosts", "pool": "disks"}
"""Source of loaded blocks, as counted by node daemons, by what it is."""
_LINKS = {
    "handoff, prefill to decode": "millpond_handoff_send_num_bytes",
    "swap-in, host memory to engine": "millpond_swap_in_bytes_total",
}
_FALLBACKS = (
    "millpond_prefix_match_total:partial",
    "millpond_prefix_match_total:late",
    "millpond_prefix_match_total:failed",
    "millpond_node_loads_refused_total",
    "millpond_node_shortened_total",
    "millpond_node_matches_failed_total",
    "millpond_node_directory_failed_total",
    "millpond_node_peer_reads_failed_total",
    "millpond_node_pool_reads_total:lost",
    "millpond_node_pool_reads_total:late",
    "millpond_node_pool_bad_shards_total",
    "millpond_node_snapshots_total:missed",
    "millpond_node_snapshots_total:missized",
    "millpond_node_snapshots_total:late",
    "millpond_node_spills_failed_total",
    "millpond_node_blocks_given_up_total",
    "millpond_node_puts_skipped_total",
    "millpond_persist_skipped_total",
    "millpond_persist_states_lost_total",
    "millpond_swap_in_broken_total",
    "millpond_loads_refused_total",
    "millpond_loads_voided_total",
    "millpond_loads_lost_total",
    "millpond_replays_total",
    "millpond_handoff_failed_total",
    "millpond_preemptions_total",
    "millpond_request_resubmitted_total",
)


@dataclass(frozen=True, slots=True)
class ReplayFigures:
    """What a replay showed; times in seconds, tokens of completed turns."""

    num_sessions: int
    num_turns: int
    num_failed: int
    errors: dict[str, int]
    """Failed turns by error."""
    duration_s: float
    jct_s: Distribution
    """Of a session, from its first request to the end of its last answer, pauses included."""
    turn_s: Distribution
    ttft_s: Distribution
    """To the first token of a turn."""
    tpot_s: Distribution
    """Per turn, mean time per token after the first."""
    num_prompt_tokens: int
    num_output_tokens: int
    num_cached_tokens: int
    num_ideal_tokens: int
    """What a cache that forgets nothing could have had, in whole blocks of the same session."""
    cached_share: float
    """Of the prompt tokens."""
    cached_over_ideal: float | None
    """None where nothing could be had. More than 1 if sessions share their beginnings."""
    num_answers_not_told: int
    """Turns that went on from other tokens than the model's, since the server did not tell them."""
    loaded_share_by_level: dict[str, float]
    """Of the blocks that were loaded."""
    loaded_blocks: int
    bytes_by_link: dict[str, int]
    fallbacks: dict[str, int]
    """Where something was computed, sent or kept otherwise than hoped; nothing that is 0."""
    counters: dict[str, float]
    """All counters that moved."""


def make_figures(records: Sequence[SessionRecord], counts: Mapping[str, float]) -> ReplayFigures:
    """Figures of a run.

    Args:
        records: Of all sessions.
        counts: What the service counted meanwhile; empty if it does not tell.
    """
    turns = [turn for record in records for turn in record.turns]
    done = [turn for turn in turns if not turn.request.error]
    requests = [turn.request for turn in done]
    whole = [record for record in records if record.end_ns >= 0]
    cached = sum(request.num_cached_tokens for request in requests)
    prompt = sum(request.num_prompt_tokens for request in requests)
    ideal = sum(turn.num_ideal_tokens for turn in done)
    by_level = {
        text: counts.get(f"millpond_node_blocks_loaded_total:{key}", 0.0) for key, text in LEVELS.items()
    }
    loaded = sum(by_level.values())
    begin_ns = min((record.begin_ns for record in records if record.begin_ns >= 0), default=0)
    end_ns = max((turn.request.ended_ns for turn in turns), default=0)
    return ReplayFigures(
        num_sessions=len(records),
        num_turns=len(turns),
        num_failed=len(turns) - len(done),
        errors=dict(Counter(turn.request.error for turn in turns if turn.request.error)),
        duration_s=(end_ns - begin_ns) / 1e9,
        jct_s=distribution([(record.end_ns - record.begin_ns) / 1e9 for record in whole]),
        turn_s=distribution([(request.ended_ns - request.sent_ns) / 1e9 for request in requests]),
        ttft_s=distribution(
            [(one.first_token_ns - one.sent_ns) / 1e9 for one in requests if one.first_token_ns >= 0]
        ),
        tpot_s=distribution([tpot for request in requests if (tpot := tpot_s(request)) is not None]),
        num_prompt_tokens=prompt,
        num_output_tokens=sum(request.num_output_tokens for request in requests),
        num_cached_tokens=cached,
        num_ideal_tokens=ideal,
        cached_share=cached / prompt if prompt else 0.0,
        cached_over_ideal=cached / ideal if ideal else None,
        num_answers_not_told=sum(not turn.has_own_answer for turn in done),
        loaded_share_by_level={name: count / loaded if loaded else 0.0 for name, count in by_level.items()},
        loaded_blocks=int(loaded),
        bytes_by_link={name: int(counts.get(counter, 0)) for name, counter in _LINKS.items()},
        fallbacks={
            name: int(count) for name, count in counts.items() if count and name.startswith(_FALLBACKS)
        },
        counters=dict(counts),
    )
