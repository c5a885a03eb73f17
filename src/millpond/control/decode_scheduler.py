"""Decode of one rank: continuous batching; per running sequence and step one token, or more with drafts."""

from __future__ import annotations

import math
from dataclasses import dataclass

from millpond.control.rank_state import Key, RankState
from millpond.control.request_fsm import Signal
from millpond.core.blocks import Fit
from millpond.core.events import HandoffArrived, RankReport
from millpond.core.ids import BlockId
from millpond.core.plan import DecodeRow, HandoffReceive, RankPlan, SequenceStart, StateCopy, TokenOut
from millpond.core.sequence import Sequence, SequenceState, check_finish
from millpond.core.units import BLOCK_TOKENS


@dataclass(frozen=True, slots=True)
class DecodeParams:
    """Decode scheduling of one rank."""

    reserve_blocks_per_seq: float = 0.25
    """Blocks kept free per running sequence when a new one asks for memory, so that growth rarely has to
    preempt; rounded up. >= 0."""
    num_draft_tokens: int = 0
    """Tokens that a model with a draft head guesses and checks per sequence and step; 0 for none. A text
    does not depend on it."""


class DecodeScheduler:
    """Plans the decode steps of one rank."""

    def __init__(self, rank: RankState, params: DecodeParams) -> None:
        self._rank = rank
        self._params = params
        self._num_drafts = min(params.num_draft_tokens, rank.info.max_drafts)

    @property
    def wants_step(self) -> bool:
        """Whether a sequence runs."""
        return bool(self._rank.lines[SequenceState.RUNNING])

    @property
    def reserve_blocks(self) -> int:
        """Blocks to leave free for the growth of what runs."""
        return math.ceil(self._params.reserve_blocks_per_seq * len(self._rank.lines[SequenceState.RUNNING]))

    def admit(self) -> None:
        """Grant memory to sequences whose KV is to come, strictly in order.

        Strict order matters: with every rank granting in order of assignment, the oldest request of the
        cluster always has both its memories, so prefill and decode cannot wait for each other in a ring.
        """
        rank = self._rank
        for sequence in list(rank.lines[SequenceState.QUEUED].values()):
            fit = rank.memory.fits(sequence.num_tokens, self.reserve_blocks)
            if fit is Fit.NEVER:
                rank.refuse(sequence)
                continue
            if fit is Fit.LATER:
                return
            rank.grant(sequence, sequence.num_tokens, Signal.EXPECT)
            slot = sequence.kv.slot
            assert slot is not None  # noqa: S101 - just granted
            rank.outbox.receives.append(
                HandoffReceive(
                    request_id=sequence.spec.request_id,
                    attempt=sequence.spec.attempt,
                    rank=rank.me.rank,
                    num_tokens=sequence.num_tokens,
                    block_table=tuple(sequence.kv.block_table),
                    slot=slot,
                )
            )

    def on_arrived(self, sequence: Sequence, arrived: HandoffArrived) -> None:
        """KV and first token are here: run. Only the first report of it counts."""
        before = sequence.state
        if (
            self._rank.move(sequence, Signal.ARRIVED) is not before
            and sequence.state is SequenceState.RUNNING
        ):
            sequence.num_computed_tokens = sequence.num_tokens
            sequence.is_approximate = arrived.is_approximate
            self._rank.append_token(sequence, arrived.first_token_id)
            self._rank.outbox.started.append((sequence.spec.request_id, sequence.spec.attempt))

    def max_steps(self, asked: int) -> int:
        """Steps that can run without anything changing in between, at most `asked`, at least 1.

        Nothing changes while no sequence needs a new block, none can finish, and none can sample a stop. How
        far drafts bring a sequence is known after each step only.
        """
        if self._num_drafts:
            return 1
        steps = asked
        for sequence in self._rank.lines[SequenceState.RUNNING].values():
            sampling = sequence.spec.sampling
            to_block_end = BLOCK_TOKENS - (sequence.num_tokens - 1) % BLOCK_TOKENS
            to_length = min(
                sampling.max_tokens - sequence.num_output_tokens,
                self._rank.max_model_len - sequence.num_tokens,
            )
            steps = min(steps, to_block_end, to_length)
            if sampling.stop_token_ids:
                steps = min(steps, sampling.min_tokens - sequence.num_output_tokens)
        return max(steps, 1)

    def make_room(self) -> dict[Key, tuple[BlockId, ...]]:
        """Give every running sequence the block its next token needs, preempting the youngest if need be.

        Drafts for which no block is free are dropped.

        Returns:
            New blocks by sequence key, for the sequences that still run.
        """
        rank = self._rank
        new_blocks: dict[Key, tuple[BlockId, ...]] = {}
        for sequence in sorted(rank.lines[SequenceState.RUNNING].values(), key=lambda s: s.arrival):
            if sequence.state is not SequenceState.RUNNING:
                continue
            sequence.draft_ids = sequence.draft_ids[: self._num_useful_drafts(sequence)]
            with_drafts = rank.memory.grow(sequence, sequence.num_tokens + len(sequence.draft_ids))
            if with_drafts is not None:
                new_blocks[sequence.key] = with_drafts
                continue
            sequence.draft_ids = ()
            while (blocks := rank.memory.grow(sequence, sequence.num_tokens)) is None:
                victim = max(rank.lines[SequenceState.RUNNING].values(), key=lambda s: s.arrival)
                new_blocks.pop(victim.key, None)
                rank.end(victim, Signal.PREEMPT, None, "preempted: decode memory is full")
                if victim is sequence:
                    break
            else:
                new_blocks[sequence.key] = blocks
        return new_blocks

    def plan(self, new_blocks: dict[Key, tuple[BlockId, ...]], num_steps: int) -> RankPlan:
        """One row per running sequence, in order of assignment.

        The state of those that the last of `num_steps` steps brings to a block border is kept; with drafts,
        the rank's report shows whether they came so far.
        """
        starts: list[SequenceStart] = []
        rows: list[DecodeRow] = []
        keeps: list[StateCopy] = []
        for sequence in self._running():
            blocks = new_blocks[sequence.key]
            if not sequence.is_on_engine:
                # Prefill keeps the full blocks of what it computed. The table has the new blocks already.
                num_stored = sequence.spec.num_known_tokens // BLOCK_TOKENS
                starts.append(self._rank.start_of(sequence, num_stored))
                blocks = ()
            begin = sequence.num_tokens - 1
            rows.append(DecodeRow(sequence.spec.request_id, begin, blocks, sequence.draft_ids))
            border = (begin + num_steps + len(sequence.draft_ids)) // BLOCK_TOKENS * BLOCK_TOKENS
            if border > begin and self._rank.keeps_state(sequence):
                keeps.append(self._rank.copy_of_state(sequence, border, is_rolling=True))
        return RankPlan(
            rank=self._rank.me.rank,
            forget=self._rank.outbox.take_forget(self._rank.me.rank),
            start=tuple(starts),
            rows=tuple(rows),
            keep=tuple(keeps),
            num_drafts=self._num_drafts,
        )

    def on_step_done(self, report: RankReport) -> None:
        """Book a finished step; tokens are step-major when the plan spanned several steps."""
        rank = self._rank
        by_id = {s.spec.request_id: s for s in rank.lines[SequenceState.RUNNING].values()}
        for token in report.sampled:
            sequence = by_id[token.request_id]
            if sequence.state is not SequenceState.RUNNING:
                continue  # it ended with an earlier token of this step
            spec = sequence.spec
            sequence.num_computed_tokens = sequence.num_tokens
            sequence.draft_ids = ()
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
            )
            rank.outbox.outputs.append((spec.reply_to, output))
            if finish is not None:
                rank.end(sequence, Signal.FINISH, finish)
        for drafts in report.drafts:
            by_id[drafts.request_id].draft_ids = drafts.token_ids

    def _num_useful_drafts(self, sequence: Sequence) -> int:
        """Drafts that may still become tokens: one token more is sampled than drafts are right."""
        to_length = sequence.spec.sampling.max_tokens - sequence.num_output_tokens
        return min(to_length, self._rank.max_model_len - sequence.num_tokens) - 1

    def _running(self) -> list[Sequence]:
        return sorted(self._rank.lines[SequenceState.RUNNING].values(), key=lambda s: s.arrival)
