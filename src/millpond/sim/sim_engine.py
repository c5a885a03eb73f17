"""One rank's engine without numbers: checks that the plans make sense and returns predictable tokens.

It knows only what plans tell it, like a real engine, so a plan that a real engine could not carry out
(a chunk that leaves a gap, a block of two sequences, a row of a stranger) is found here.
"""

from __future__ import annotations

from dataclasses import dataclass

from millpond.core.errors import InvariantBroken
from millpond.core.events import Drafts, RankReport, SampledToken
from millpond.core.ids import BlockId, BufferId, RequestId, SlotId
from millpond.core.plan import DecodeRow, PrefillChunk, RankPlan, SequenceStart, StateCopy
from millpond.core.request import SamplingParams, TokenIds
from millpond.core.units import BLOCK_TOKENS

VOCAB_SIZE = 32_000
MAX_ROWS = 6
"""Rows of one sequence in a step, one token and its drafts, that a ring has room for."""


def token_at(sampling: SamplingParams, position: int) -> int:
    """Return the token that a request has at `position`, whoever computes it and whenever.

    Never a stop token of the request, so output lengths are what `max_tokens` says.
    """
    token = (sampling.seed * 2_654_435_761 + position * 40_503 + sampling.choice) % VOCAB_SIZE
    while token in sampling.stop_token_ids:
        token = (token + 1) % VOCAB_SIZE
    return token


@dataclass(slots=True)
class _Known:
    sampling: SamplingParams
    token_ids: TokenIds
    num_prompt_tokens: int
    num_computed_tokens: int
    rows_end: int
    """Where the last row or chunk ended, wrong drafts included."""
    slot: SlotId
    block_table: list[BlockId]


class SimEngine:
    """Sequences of one rank as its engine sees them."""

    def __init__(self) -> None:
        self._known: dict[RequestId, _Known] = {}
        self._owner_by_block: dict[BlockId, RequestId] = {}
        self._tokens_by_buffer: dict[BufferId, TokenIds] = {}
        """Tokens whose state each snapshot buffer holds."""

    @property
    def num_sequences(self) -> int:
        """Sequences that were started and not forgotten."""
        return len(self._known)

    def execute(self, plan: RankPlan, num_steps: int = 1) -> RankReport:
        """Carry out one plan.

        Raises:
            InvariantBroken: The plan contradicts what earlier plans said.
        """
        for request_id in plan.forget:
            self._forget(request_id)
        for start in plan.start:
            self._start(start)
        for copy in plan.restore:
            self._restore(copy)
        sampled = [token for chunk in plan.chunks if (token := self._compute(chunk)) is not None]
        for row in plan.rows:
            self._own(row.request_id, self._find(row.request_id), row.new_blocks)
        for step in range(num_steps):
            for row in plan.rows:
                sampled += self._decode(row, step)
        for copy in plan.keep:
            self._keep(copy)
        drafts = tuple(self._draft(row.request_id, plan.num_drafts) for row in plan.rows if plan.num_drafts)
        return RankReport(plan.rank, tuple(sampled), drafts)

    def _draft(self, request_id: RequestId, count: int) -> Drafts:
        """Guess; every third position is guessed wrong."""
        known = self._find(request_id)
        begin = len(known.token_ids)
        wrong = [(position % 3 == 0) for position in range(begin, begin + count)]
        right = [token_at(known.sampling, position) for position in range(begin, begin + count)]
        return Drafts(request_id, tuple(token + miss for token, miss in zip(right, wrong, strict=True)))

    def _restore(self, copy: StateCopy) -> None:
        known = self._find(copy.request_id)
        kept = self._tokens_by_buffer.get(copy.buffer)
        if known.slot != copy.slot or known.num_computed_tokens or kept != known.token_ids[: copy.position]:
            raise InvariantBroken(f"{copy} does not fit {copy.request_id}")
        known.num_computed_tokens = copy.position

    def _keep(self, copy: StateCopy) -> None:
        known = self._find(copy.request_id)
        # The slot has gone on by the step's drafts at most; those that were wrong did not reach the border.
        is_near = copy.position <= known.rows_end and known.num_computed_tokens - copy.position < MAX_ROWS
        if known.slot != copy.slot or not is_near:
            raise InvariantBroken(f"{copy}: {copy.request_id} is at {known.num_computed_tokens}")
        self._tokens_by_buffer[copy.buffer] = known.token_ids[: copy.position]

    def _forget(self, request_id: RequestId) -> None:
        known = self._known.pop(request_id, None)
        for block in known.block_table if known is not None else ():
            del self._owner_by_block[block]

    def _start(self, start: SequenceStart) -> None:
        if start.request_id in self._known:
            raise InvariantBroken(f"{start.request_id} was started twice")
        known = _Known(start.sampling, start.token_ids[:], start.num_prompt_tokens, 0, 0, start.slot, [])
        # A sequence that came by handoff lacks the KV of its newest token only; a row will say so.
        self._known[start.request_id] = known
        self._own(start.request_id, known, start.block_table)

    def _own(self, request_id: RequestId, known: _Known, blocks: tuple[BlockId, ...]) -> None:
        for block in blocks:
            owner = self._owner_by_block.setdefault(block, request_id)
            if owner != request_id or block in known.block_table:
                raise InvariantBroken(f"block {block} was given to {request_id}, it belongs to {owner}")
            known.block_table.append(block)

    def _compute(self, chunk: PrefillChunk) -> SampledToken | None:
        known = self._find(chunk.request_id)
        if chunk.begin != known.num_computed_tokens or not chunk.begin < chunk.end <= len(known.token_ids):
            raise InvariantBroken(
                f"chunk {chunk} after {known.num_computed_tokens} of {len(known.token_ids)} tokens"
            )
        self._require_cover(chunk.request_id, known, chunk.end)
        if chunk.is_last != (chunk.end == len(known.token_ids)):
            raise InvariantBroken(f"chunk {chunk} of {len(known.token_ids)} tokens is wrong about its end")
        known.num_computed_tokens = known.rows_end = chunk.end
        return self._sample(chunk.request_id, known) if chunk.is_last else None

    def _decode(self, row: DecodeRow, step: int) -> list[SampledToken]:
        known = self._find(row.request_id)
        position = row.position + step
        if position != len(known.token_ids) - 1:
            raise InvariantBroken(
                f"row {row}, step {step}: {row.request_id} has {len(known.token_ids)} tokens"
            )
        known.rows_end = position + 1 + len(row.draft_ids)
        self._require_cover(row.request_id, known, known.rows_end)
        sampled: list[SampledToken] = []
        for draft in (*row.draft_ids, None):
            known.num_computed_tokens = len(known.token_ids)
            sampled.append(self._sample(row.request_id, known))
            if sampled[-1].token_id != draft:
                break
        return sampled

    def _sample(self, request_id: RequestId, known: _Known) -> SampledToken:
        position = len(known.token_ids)
        for earlier in range(known.num_prompt_tokens, position)[-2:]:
            if known.token_ids[earlier] != token_at(known.sampling, earlier):
                raise InvariantBroken(f"{request_id} continues from a wrong token at {earlier}")
        token_id = token_at(known.sampling, position)
        known.token_ids.append(token_id)
        return SampledToken(request_id, position, token_id)

    def _find(self, request_id: RequestId) -> _Known:
        known = self._known.get(request_id)
        if known is None:
            raise InvariantBroken(f"{request_id} was not started")
        return known

    @staticmethod
    def _require_cover(request_id: RequestId, known: _Known, num_tokens: int) -> None:
        if len(known.block_table) * BLOCK_TOKENS < num_tokens:
            raise InvariantBroken(
                f"{len(known.block_table)} blocks do not cover {num_tokens} tokens of {request_id}"
            )
