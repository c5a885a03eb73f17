"""Carries out rank plans with a DeepSeek-V4.1 model."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch

from millpond.core.errors import InvariantBroken
from millpond.core.events import Drafts, RankReport, SampledToken
from millpond.core.ids import BlockId, RequestId, SlotId
from millpond.core.plan import DecodeRow, PrefillChunk, RankPlan, SequenceStart
from millpond.core.ports import LayerObserver
from millpond.core.request import SamplingParams
from millpond.core.units import BLOCK_TOKENS
from millpond.engine.memory import MemoryPlan
from millpond.engine.model.caches import Caches
from millpond.engine.model.check import check_kept_tokens
from millpond.engine.model.context import StepContext
from millpond.engine.model.dspark import DraftHead
from millpond.engine.model.model import V41Model
from millpond.engine.model.step import Span, make_step
from millpond.engine.sampler import SampledChoice, Sampler
from millpond.engine.swap.methods import CopyMethod, PerBlockCopy


class _Tokens:
    """Known tokens, kept as int32 in a buffer with room to grow, so that no step copies a whole prompt."""

    def __init__(self, ids: array[int], room: int) -> None:
        self._buffer = np.empty(len(ids) + room, np.int32)
        self._buffer[: len(ids)] = np.frombuffer(ids, np.int32)
        self.count = len(ids)

    def append(self, token_id: int) -> None:
        if self.count == len(self._buffer):
            self._buffer = np.concatenate([self._buffer, np.empty_like(self._buffer)])
        self._buffer[self.count] = token_id
        self.count += 1

    @property
    def ids(self) -> npt.NDArray[np.int32]:
        return self._buffer[: self.count]

    def with_drafts(self, draft_ids: tuple[int, ...]) -> npt.NDArray[np.int32]:
        """Known tokens and guesses after them; valid until a token is appended."""
        end = self.count + len(draft_ids)
        if end > len(self._buffer):
            self._buffer = np.concatenate([self._buffer, np.empty_like(self._buffer)])
        self._buffer[self.count : end] = draft_ids
        return self._buffer[:end]


@dataclass(slots=True)
class _Sequence:
    """What the engine remembers of a sequence between steps."""

    tokens: _Tokens
    num_prompt_tokens: int
    sampling: SamplingParams
    block_table: list[BlockId]
    slot: SlotId
    keep_begin: int
    window_begin: int = 0
    has_run: bool = False


@dataclass(frozen=True, slots=True)
class _Piece:
    """A span of this step and the sequence that it belongs to."""

    request_id: RequestId
    sequence: _Sequence
    span: Span
    is_sampled: bool
    draft_ids: tuple[int, ...] = ()
    """Guesses for the span's tokens after the first."""


class V41Engine:
    """Implements `core.ports.Engine`. Decides nothing: every block and every token range is in the plan."""

    def __init__(
        self,
        model: V41Model,
        memory: MemoryPlan,
        *,
        max_model_len: int,
        num_kept_tokens: int,
        swap_method: CopyMethod | None = None,
    ) -> None:
        """Allocate the caches.

        Args:
            model: The model.
            memory: Blocks and slots.
            max_model_len: Most tokens of one sequence.
            num_kept_tokens: Decoder layers run on this many last tokens of a prompt only (they add no
                long-range KV); 0 runs them on all, which is exact.
            swap_method: How rows are copied in; None: one by one.

        Raises:
            ConfigError: Fewer tokens are kept than decoding looks back on.
        """
        shape = model.config.shape
        check_kept_tokens(num_kept_tokens, shape)
        self._model = model
        self._caches = Caches(shape, model.numerics, memory.num_blocks, memory.num_slots, model.device)
        self._draft = None if model.weights.draft is None else DraftHead(model, model.weights.draft)
        self._sampler = Sampler(shape.vocab_size)
        self._sequences: dict[RequestId, _Sequence] = {}
        self._num_kept = num_kept_tokens
        self.layout = self._caches.layout
        self.num_blocks = memory.num_blocks
        self.num_home_blocks = 0
        self.num_slots = memory.num_slots
        self.vocab_size = shape.vocab_size
        self.max_model_len = max_model_len
        self.min_computed_tokens = max(1, num_kept_tokens)
        self.max_drafts = shape.num_draft_tokens if self._draft is not None else 0
        self.replay_tokens = shape.window
        self._swap_method: CopyMethod = swap_method or PerBlockCopy()

    @torch.inference_mode()
    def execute(self, plan: RankPlan, observer: LayerObserver | None = None) -> RankReport:
        """Carry out one step; see `core.ports.Engine`."""
        for request_id in plan.forget:
            self.forget(request_id)
        for start in plan.start:
            self._start(start)
        pieces = [self._chunk(chunk) for chunk in plan.chunks] + [self._row(row) for row in plan.rows]
        if not pieces:
            return RankReport(plan.rank)
        step = make_step([piece.span for piece in pieces], self._model.config.shape, self._model.device)
        ctx = self._model.start(step, self._caches)
        out = self._model.forward(ctx, observer=observer if plan.chunks else None)
        if self._draft is not None:
            self._draft.remember(ctx, out.main_hidden)
        ends = step.decoder.row_begins + step.decoder.counts
        sampled = self._sample(pieces, ends, out.hidden)
        drafts = self._guess(ctx, pieces, plan.num_drafts) if plan.rows and plan.num_drafts else ()
        return RankReport(plan.rank, sampled, drafts)

    def _start(self, start: SequenceStart) -> None:
        if not 0 <= start.slot < self.num_slots:
            raise InvariantBroken(f"slot {start.slot} of {start.request_id} is outside this rank's memory")
        known = len(start.token_ids)
        ids = np.frombuffer(start.token_ids, np.int32)
        if known and not 0 <= ids.min() <= ids.max() < self.vocab_size:
            raise InvariantBroken(f"{start.request_id} has token ids outside the vocabulary")
        self._sequences[start.request_id] = _Sequence(
            tokens=_Tokens(start.token_ids, BLOCK_TOKENS),
            num_prompt_tokens=start.num_prompt_tokens,
            sampling=start.sampling,
            block_table=list(start.block_table),
            slot=start.slot,
            keep_begin=max(0, known - self._num_kept) if self._num_kept else 0,
        )

    def _known(self, request_id: RequestId) -> _Sequence:
        sequence = self._sequences.get(request_id)
        if sequence is None:
            raise InvariantBroken(f"the plan names {request_id}, which was never started here")
        return sequence

    def _chunk(self, chunk: PrefillChunk) -> _Piece:
        sequence = self._known(chunk.request_id)
        known = sequence.tokens.count
        if not 0 <= chunk.begin < chunk.end <= known or chunk.is_last != (chunk.end == known):
            raise InvariantBroken(
                f"chunk [{chunk.begin}, {chunk.end}), is_last {chunk.is_last}, of {chunk.request_id}, "
                f"which has {known} tokens"
            )
        if not sequence.has_run and chunk.write_begin > chunk.begin:
            sequence.window_begin = chunk.begin  # windows below are lost and not rebuilt
        elif not sequence.has_run and chunk.begin > 0 and chunk.begin + self.min_computed_tokens > known:
            raise InvariantBroken(
                f"chunk [{chunk.begin}, {chunk.end}) is the first of {chunk.request_id}; the last"
                f" {self.min_computed_tokens} of {known} tokens must be computed"
            )
        piece = self._piece(chunk.request_id, sequence, chunk.begin, chunk.end, is_sampled=chunk.is_last)
        return replace(piece, span=replace(piece.span, write_begin=chunk.write_begin))

    def _row(self, row: DecodeRow) -> _Piece:
        sequence = self._known(row.request_id)
        sequence.block_table.extend(row.new_blocks)
        if row.position != sequence.tokens.count - 1:
            raise InvariantBroken(
                f"row at {row.position} of {row.request_id}, which has {sequence.tokens.count} tokens"
            )
        if row.position - self._model.config.shape.window + 1 >= sequence.keep_begin:
            sequence.keep_begin = 0  # the window has left the prompt's unkept part behind
        end = row.position + 1 + len(row.draft_ids)
        if len(row.draft_ids) > self.max_drafts:
            raise InvariantBroken(
                f"{len(row.draft_ids)} drafts of {row.request_id}, at most {self.max_drafts}"
            )
        piece = self._piece(row.request_id, sequence, row.position, end, is_sampled=True)
        if not row.draft_ids:
            return piece
        token_ids = sequence.tokens.with_drafts(row.draft_ids)
        return replace(piece, span=replace(piece.span, token_ids=token_ids), draft_ids=row.draft_ids)

    def _piece(
        self, request_id: RequestId, sequence: _Sequence, begin: int, end: int, *, is_sampled: bool
    ) -> _Piece:
        table = sequence.block_table
        if end > self.max_model_len:
            raise InvariantBroken(f"{request_id} reaches {end} tokens, the limit is {self.max_model_len}")
        if end > len(table) * BLOCK_TOKENS:
            raise InvariantBroken(f"{request_id} needs {end} tokens of KV but has {len(table)} blocks")
        if not all(0 < block <= self.num_blocks for block in table):
            raise InvariantBroken(f"{request_id} has a block outside this rank's memory")
        sequence.has_run = True
        span = Span(
            token_ids=sequence.tokens.ids,
            begin=begin,
            end=end,
            block_table=table,
            slot=sequence.slot,
            window_begin=sequence.window_begin,
            keep_begin=sequence.keep_begin,
        )
        return _Piece(request_id, sequence, span, is_sampled)

    def _sample(
        self, pieces: list[_Piece], ends: npt.NDArray[np.int64], hidden: torch.Tensor
    ) -> tuple[SampledToken, ...]:
        """Sample after each piece's last row, with drafts after each row up to the first wrong one."""
        sampled = [(piece, end) for piece, end in zip(pieces, ends.tolist(), strict=True) if piece.is_sampled]
        if not sampled:
            return ()
        rows = [row for piece, end in sampled for row in range(end - 1 - len(piece.draft_ids), end)]
        logits = self._model.logits(hidden[torch.tensor(rows, device=hidden.device)]).cpu().numpy()
        tokens: list[SampledToken] = []
        at = 0
        for piece, _ in sampled:
            known = piece.sequence.tokens
            for row, draft in enumerate((*piece.draft_ids, None)):
                choice = self._choose(logits[at + row], piece.sequence, piece.sequence.sampling, ())
                position = known.count
                known.append(choice.token_id)
                tokens.append(
                    SampledToken(piece.request_id, position, choice.token_id, choice.logprob, choice.top)
                )
                if choice.token_id != draft:
                    break
            at += 1 + len(piece.draft_ids)
        return tuple(tokens)

    def _choose(
        self,
        logits: npt.NDArray[np.float32],
        sequence: _Sequence,
        sampling: SamplingParams,
        draft_ids: tuple[int, ...],
    ) -> SampledChoice:
        """Choose the token after a sequence's known ones and guesses of those after them."""
        ids = sequence.tokens.ids
        prompt_ids = ids[: sequence.num_prompt_tokens]
        output_ids = np.append(ids[sequence.num_prompt_tokens :], np.array(draft_ids, np.int32))
        return self._sampler.sample(
            logits, sampling, prompt_ids, output_ids, len(prompt_ids) + len(output_ids)
        )

    def _guess(self, ctx: StepContext, pieces: list[_Piece], count: int) -> tuple[Drafts, ...]:
        """Guess `count` tokens after the newest one of each sequence, with its own rules and noise."""
        if self._draft is None or count > self.max_drafts:
            raise InvariantBroken(f"{count} drafts asked for, at most {self.max_drafts} can be made")
        sequences = [piece.sequence for piece in pieces]
        rules = [replace(sequence.sampling, num_logprobs=-1) for sequence in sequences]
        guessed: list[tuple[int, ...]] = [() for _ in sequences]

        def choose(_number: int, logits: torch.Tensor) -> torch.Tensor:
            rows = logits.float().cpu().numpy()
            for i, sequence in enumerate(sequences):
                guessed[i] += (self._choose(rows[i], sequence, rules[i], guessed[i]).token_id,)
            return torch.tensor([ids[-1] for ids in guessed], device=logits.device)

        def as_tensor(values: list[int]) -> torch.Tensor:
            return torch.tensor(values, dtype=torch.int64, device=self._model.device)

        self._draft.propose(
            ctx,
            as_tensor([int(sequence.tokens.ids[-1]) for sequence in sequences]),
            as_tensor([sequence.tokens.count - 2 for sequence in sequences]),
            as_tensor([sequence.slot for sequence in sequences]),
            choose,
        )
        return tuple(
            Drafts(piece.request_id, ids[:count]) for piece, ids in zip(pieces, guessed, strict=True)
        )

    def read_row(self, block: BlockId, row: int) -> memoryview:
        """Bytes of one row of one block; on a CPU the memory itself, elsewhere a copy."""
        return self._caches.row_bytes(block, row).cpu().numpy().data.toreadonly()

    def write_row(self, block: BlockId, row: int, data: memoryview) -> None:
        """Replace one row of one block."""
        _replace(self._caches.row_bytes(block, row), data)

    def write_rows(
        self, blocks: Sequence[BlockId], row: int, source: memoryview, items: Sequence[int]
    ) -> None:
        """Replace one row of several blocks at once."""
        target = self._caches.row_memory(row)
        if target.device.type != "cpu":
            for block, item in zip(blocks, items, strict=True):
                self.write_row(block, row, memoryview(np.asarray(source)[item]))
            return
        if not all(0 < block <= self.num_blocks for block in blocks):
            raise InvariantBroken(f"a block of {list(blocks)} is outside this rank's memory")
        self._swap_method.copy(
            np.asarray(source), np.asarray(items, np.int64), target.numpy(), np.asarray(blocks, np.int64)
        )

    def read_state(self, slot: SlotId) -> memoryview:
        """Bytes of one state slot; valid for any end up to the draft length behind the newest token."""
        return self._caches.slot_bytes(slot).cpu().numpy().data.toreadonly()

    def write_state(self, slot: SlotId, data: memoryview) -> None:
        """Replace one state slot."""
        _replace(self._caches.slot_bytes(slot), data)

    def forget(self, request_id: RequestId) -> None:
        """Drop the record of a sequence; unknown ids are ignored."""
        self._sequences.pop(request_id, None)


def _replace(place: torch.Tensor, data: memoryview) -> None:
    if data.nbytes != len(place):
        raise InvariantBroken(f"{data.nbytes} bytes for a place of {len(place)}")
    place.copy_(torch.from_numpy(np.frombuffer(data, np.uint8).copy()))
