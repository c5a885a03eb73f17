"""Prefill of one rank: first come, first served, in chunks under a token budget.

Who waits for cached KV of which nothing comes is overtaken, so that a slow disk delays nobody else.
"""

from __future__ import annotations

from dataclasses import dataclass

from millpond.control.kv_loads import KvLoads
from millpond.control.rank_state import COMPUTING, RankState
from millpond.control.request_fsm import Signal
from millpond.core.blocks import Fit
from millpond.core.errors import InvariantBroken
from millpond.core.events import Loaded, RankReport, SampledToken
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
    max_loads_ahead: int = 4
    """Loads of cached KV that a prefill rank orders before their sequences are computed, >= 1: the prefetch
    of requests that wait."""


class PrefillScheduler:
    """Plans the prefill steps of one rank."""

    def __init__(self, rank: RankState, params: PrefillParams) -> None:
        self._rank = rank
        self._params = params
        self._loads = KvLoads(rank, params.max_loads_ahead)

    @property
    def wants_step(self) -> bool:
        """Whether a prefill step would compute something. `admit` first."""
        return any(self._rank.lines[state] for state in COMPUTING)

    @property
    def room(self) -> int:
        """Requests this rank would pull now."""
        view, params = self._rank.view(), self._params
        queue = self._rank.lines[SequenceState.QUEUED].values()
        waiting = [s for s in queue if not self._loads.is_overtaken(s)]
        overtaken_tokens = sum(s.num_todo_tokens for s in queue if self._loads.is_overtaken(s))
        if view.queued_tokens - overtaken_tokens >= params.fetch_ahead_tokens:
            return 0
        room = min(params.max_held_seqs - view.num_seqs, view.free_slots) - len(queue)
        if waiting and not self._loads.is_awaited(waiting[0]):
            return 0  # it waits for memory
        if queue:
            room = min(room, params.max_loads_ahead - len(waiting))
        return max(0, room)

    def add(self, sequence: Sequence) -> None:
        """Queue a new sequence."""
        self._loads.want(sequence)
        self._rank.add(sequence)

    def on_loaded(self, sequence: Sequence, answer: Loaded) -> None:
        """Learn what of a sequence's KV will be there."""
        self._loads.on_answer(sequence, answer)

    @property
    def is_timed(self) -> bool:
        """Whether mere time may let a queued sequence go before another one."""
        queue = list(self._rank.lines[SequenceState.QUEUED].values())
        return any(self._loads.is_awaited(s) and not self._loads.is_overtaken(s) for s in queue[:-1])

    def admit(self, now_ns: int, reserve_blocks: int = 0) -> None:
        """Grant memory to queued sequences in order: the head is not overtaken, unless nothing comes of the
        cached KV that it waits for. Then order the loads of those that still wait.

        Args:
            now_ns: Time.
            reserve_blocks: Blocks to leave for sequences that decode on the same rank.
        """
        self._grant(now_ns, reserve_blocks)
        self._loads.order(now_ns)

    def _grant(self, now_ns: int, reserve_blocks: int) -> None:
        rank = self._rank
        for sequence in list(rank.lines[SequenceState.QUEUED].values()):
            fit = rank.memory.fits(sequence.num_tokens, reserve_blocks)
            if fit is Fit.NEVER:
                rank.refuse(sequence)
                continue
            if fit is Fit.LATER or rank.num_holding >= self._params.max_held_seqs:
                return
            if self._loads.is_awaited(sequence):
                if self._loads.overtake(now_ns, sequence):
                    continue
                return
            is_local = not sequence.decodes_elsewhere
            rank.grant(sequence, sequence.num_tokens, Signal.ADMIT_LOCAL if is_local else Signal.ADMIT)
            self._loads.admit(sequence)
            if is_local:
                continue
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
            begin = sequence.num_computed_tokens
            if not sequence.is_on_engine:
                starts.append(self._rank.start_of(sequence, sequence.num_stored_blocks))
                if sequence.restores_state:
                    restores.append(self._rank.copy_of_state(sequence, begin))
            borders = self._borders(sequence)
            end = min(begin + budget, sequence.num_tokens)
            end = min((border for border in borders if begin < border < end), default=end)
            is_last = end == sequence.num_tokens
            chunks.append(PrefillChunk(sequence.spec.request_id, begin, end, is_last, sequence.write_begin))
            if end in borders:
                keeps.append(self._rank.copy_of_state(sequence, end))
            budget -= end - begin
        return RankPlan(
            rank=self._rank.me.rank,
            forget=self._rank.outbox.take_forget(self._rank.me.rank),
            start=tuple(starts),
            chunks=tuple(chunks),
            restore=tuple(restores),
            keep=tuple(keeps),
        )

    def on_step_done(self, plan: RankPlan, report: RankReport) -> None:
        """Book a finished step: a token per last chunk, in order, of what was not lost."""
        tokens = iter(report.sampled)
        by_id = {s.spec.request_id: s for s in self._computing()}
        lost = dict(report.lost)
        for chunk in plan.chunks:
            if chunk.request_id in lost:
                continue
            sequence = by_id[chunk.request_id]
            self._rank.set_progress(sequence, chunk.end, sequence.num_cached_tokens)
            if chunk.is_last:
                self._on_computed(sequence, next(tokens))
        for request_id, num_tokens in lost.items():
            if request_id not in by_id:
                raise InvariantBroken(f"{request_id} lost its load and is not computed here")
            self._loads.lose(by_id[request_id], num_tokens)

    def _borders(self, sequence: Sequence) -> set[int]:
        """Positions where a chunk must end because the state is copied before it moves on.

        They are the last block border of the prompt and its branch points; none where no state is kept, and
        none amid a replay, where the windows are not full yet.
        """
        if not self._rank.keeps_state(sequence):
            return set()
        last = sequence.num_tokens // BLOCK_TOKENS * BLOCK_TOKENS
        first = max(sequence.write_begin, BLOCK_TOKENS)
        points = {last, *sequence.spec.branch_points}
        return {point for point in points if first <= point <= last and point % BLOCK_TOKENS == 0}

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
            spec.request_id,
            spec.attempt,
            token.position,
            token.token_id,
            token.logprob,
            token.top,
            finish,
            num_cached_tokens=sequence.num_cached_tokens,
        )
        rank.outbox.outputs.append((spec.reply_to, output))
        if finish is not None:
            done = Signal.FINISH if sequence.state is SequenceState.RUNNING else Signal.ABORT
            rank.end(sequence, done, finish)
        elif sequence.state is SequenceState.SENDING:
            rank.outbox.finishes.append(
                HandoffFinish(
                    request_id=spec.request_id,
                    attempt=spec.attempt,
                    rank=rank.me.rank,
                    first_token_id=token.token_id,
                    is_approximate=sequence.is_approximate,
                )
            )
