"""Prefill of one rank: first come, first served, in chunks under a token budget."""

from __future__ import annotations

from dataclasses import dataclass

from millpond.control.rank_state import COMPUTING, RankState
from millpond.control.request_fsm import Signal
from millpond.core.blocks import Fit
from millpond.core.events import SampledToken
from millpond.core.plan import (
    HandoffFinish,
    HandoffSend,
    PrefillChunk,
    RankPlan,
    SequenceStart,
    StateCopy,
    TokenOut,
)
from millpond.core.sequence import Sequence, SequenceState, check_finish
from millpond.core.units import BLOCK_TOKENS


@dataclass(frozen=True, slots=True)
class PrefillParams:
    """Prefill scheduling of one rank."""

    max_step_tokens: int = 256
    """Tokens computed in one prefill step of one rank, >= 1. Bounds the time until a cancelled request
    is gone, since a running step is not interrupted."""
    fetch_ahead_tokens: int = 512
    """A rank pulls more requests while fewer prompt tokens than this wait on it. Small keeps the queue at
    the controller, where order is global."""
    max_held_seqs: int = 32
    """Sequences that may hold memory on a prefill rank at once, those being handed off included."""


class PrefillScheduler:
    """Plans the prefill steps of one rank."""

    def __init__(self, rank: RankState, params: PrefillParams) -> None:
        self._rank = rank
        self._params = params

    @property
    def wants_step(self) -> bool:
        """Whether a prefill step would compute something. `admit` first."""
        return any(self._rank.lines[state] for state in COMPUTING)

    @property
    def room(self) -> int:
        """Requests this rank would pull now."""
        view = self._rank.view()
        if view.num_queued > 0 or view.queued_tokens >= self._params.fetch_ahead_tokens:
            return 0
        return max(0, min(self._params.max_held_seqs - view.num_seqs, view.free_slots))

    def admit(self, reserve_blocks: int = 0) -> None:
        """Grant memory to queued sequences, strictly in order: the head is never overtaken.

        Args:
            reserve_blocks: Blocks to leave for sequences that decode on the same rank.
        """
        rank = self._rank
        for sequence in list(rank.lines[SequenceState.QUEUED].values()):
            fit = rank.memory.fits(sequence.num_tokens, reserve_blocks)
            if fit is Fit.NEVER:
                rank.refuse(sequence)
                continue
            if fit is Fit.LATER or rank.num_holding >= self._params.max_held_seqs:
                return
            if not sequence.decodes_elsewhere:
                rank.grant(sequence, sequence.num_tokens, Signal.ADMIT_LOCAL)
                continue
            rank.grant(sequence, sequence.num_tokens, Signal.ADMIT)
            slot = sequence.kv.slot
            assert slot is not None  # noqa: S101 - just granted
            rank.outbox.sends.append(
                HandoffSend(
                    request_id=sequence.spec.request_id,
                    attempt=sequence.spec.attempt,
                    rank=rank.me.rank,
                    to=sequence.assign.decode,
                    address=sequence.assign.decode_address,
                    num_tokens=sequence.num_tokens,
                    block_table=tuple(sequence.kv.block_table),
                    slot=slot,
                )
            )

    def plan(self) -> RankPlan:
        """Fill one step, oldest sequence first. Never empty if `wants_step`."""
        budget = self._params.max_step_tokens
        starts: list[SequenceStart] = []
        chunks: list[PrefillChunk] = []
        restores: list[StateCopy] = []
        keeps: list[StateCopy] = []
        for sequence in self._computing():
            if budget == 0:
                break
            if not sequence.is_on_engine:
                starts.append(self._rank.start_of(sequence))
                restore = self._rank.restore_state(sequence)
                restores += [restore] if restore is not None else []
            begin = sequence.num_computed_tokens
            borders = self._borders(sequence)
            end = min(begin + budget, sequence.num_tokens)
            end = min((border for border in borders if begin < border < end), default=end)
            chunks.append(
                PrefillChunk(sequence.spec.request_id, begin, end, is_last=end == sequence.num_tokens)
            )
            if end in borders:
                keep = self._rank.keep_state(sequence, end, is_rolling=False)
                keeps += [keep] if keep is not None else []
            budget -= end - begin
        return RankPlan(
            rank=self._rank.me.rank,
            forget=self._rank.outbox.take_forget(self._rank.me.rank),
            start=tuple(starts),
            chunks=tuple(chunks),
            restore=tuple(restores),
            keep=tuple(keeps),
        )

    def on_step_done(self, plan: RankPlan, sampled: tuple[SampledToken, ...]) -> None:
        """Book a finished step. `sampled` holds one token per last chunk, in order."""
        tokens = iter(sampled)
        by_id = {s.spec.request_id: s for s in self._computing()}
        for keep in plan.keep:
            self._rank.snapshots.commit(by_id[keep.request_id].key, keep.position, is_written=True)
        for chunk in plan.chunks:
            sequence = by_id[chunk.request_id]
            self._rank.set_computed(sequence, chunk.end)
            if chunk.is_last:
                self._on_computed(sequence, next(tokens))

    def _borders(self, sequence: Sequence) -> set[int]:
        """Positions where a chunk must end because the state is copied before it moves on.

        They are the last block border of the prompt and its branch points; none for a model without state.
        """
        if self._rank.snapshots.num_buffers == 0:
            return set()
        last = sequence.num_tokens // BLOCK_TOKENS * BLOCK_TOKENS
        points = sequence.spec.branch_points
        return {last, *(point for point in points if point < last and point % BLOCK_TOKENS == 0)} - {0}

    def _computing(self) -> list[Sequence]:
        lines = self._rank.lines
        found = [s for state in COMPUTING for s in lines[state].values()]
        return sorted(found, key=lambda s: s.arrival)

    def _on_computed(self, sequence: Sequence, token: SampledToken) -> None:
        rank = self._rank
        spec = sequence.spec
        rank.move(sequence, Signal.COMPUTED)
        rank.append_token(sequence, token.token_id)
        finish = check_finish(sequence, token.token_id, rank.max_model_len)
        output = TokenOut(
            spec.request_id, spec.attempt, token.position, token.token_id, token.logprob, token.top, finish
        )
        rank.outbox.outputs.append((spec.reply_to, output))
        if finish is not None:
            done = Signal.FINISH if sequence.state is SequenceState.RUNNING else Signal.ABORT
            rank.end(sequence, done, finish)
        elif sequence.state is SequenceState.SENDING:
            rank.outbox.finishes.append(
                HandoffFinish(spec.request_id, spec.attempt, rank.me.rank, first_token_id=token.token_id)
            )
