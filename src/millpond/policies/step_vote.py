"""Which kind of step a mixed group takes: pure votes over rank views."""

from __future__ import annotations

from dataclasses import dataclass

from millpond.core.plan import StepKind


@dataclass(frozen=True, slots=True)
class StepVoteParams:
    """When a mixed group leaves decoding for prefill."""

    all_vote_interval: int = 70
    """Every so many decode steps: prefill if every rank wants it, >= 1."""
    any_vote_interval: int = 100
    """Every so many decode steps: prefill if one rank wants it, >= 1."""
    max_prefill_run: int = 4
    """Prefill steps in a row while sequences wait to decode, >= 1. Bounds the gap between two tokens of a
    running stream under endless prefill."""


def pick_step_kind(
    wants_prefill: tuple[bool, ...],
    wants_decode: tuple[bool, ...],
    decode_steps: int,
    prefill_run: int,
    params: StepVoteParams,
) -> StepKind | None:
    """Pick the step of a group whose ranks both prefill and decode.

    Args:
        wants_prefill: Per rank, whether it has prefill work that its memory allows.
        wants_decode: Per rank, whether a sequence runs.
        decode_steps: Decode steps since the last prefill step; 0 right after one.
        prefill_run: Prefill steps since the last decode step.
        params: Intervals.

    Returns:
        None when nobody wants anything: the group parks.

    Source:
        interfaces A.7; the published engine votes ALL every 70 and ANY every 100 decode steps. The bound
        on the prefill run is ours: with one rank the ALL vote right after a prefill never ends otherwise.
    """
    if not any(wants_prefill):
        return StepKind.DECODE if any(wants_decode) else None
    if not any(wants_decode):
        return StepKind.PREFILL
    if prefill_run >= params.max_prefill_run:
        return StepKind.DECODE
    if decode_steps > 0 and decode_steps % params.any_vote_interval == 0:
        return StepKind.PREFILL
    if decode_steps % params.all_vote_interval == 0 and all(wants_prefill):
        return StepKind.PREFILL
    return StepKind.DECODE


def max_decode_steps(decode_steps: int, params: StepVoteParams) -> int:
    """Decode steps until the next vote could choose prefill, >= 1."""
    to_all = params.all_vote_interval - decode_steps % params.all_vote_interval
    to_any = params.any_vote_interval - decode_steps % params.any_vote_interval
    return min(to_all, to_any)
