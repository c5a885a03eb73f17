"""Carries out rank plans with a DeepSeek-V4.1 model."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch

from millpond.core.errors import ConfigError, InvariantBroken
from millpond.core.events import RankReport, SampledToken
from millpond.core.ids import BlockId, RequestId, SlotId
from millpond.core.plan import DecodeRow, PrefillChunk, RankPlan, SequenceStart
from millpond.core.ports import LayerObserver
from millpond.core.request import SamplingParams
from millpond.core.units import BLOCK_TOKENS
from millpond.engine.memory import MemoryPlan
from millpond.engine.model.caches import Caches
from millpond.engine.model.dspark import DraftHead
from millpond.engine.model.model import V41Model
from millpond.engine.model.step import Span, make_step
from millpond.engine.sampler import Sampler


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


class V41Engine:
    """Implements `core.ports.Engine`. Decides nothing: every block and every token range is in the plan."""

    def __init__(
        self, model: V41Model, memory: MemoryPlan, *, max_model_len: int, num_kept_tokens: int
    ) -> None:
        """Allocate the caches.

        Args:
            model: The model.
            memory: Blocks and slots.
            max_model_len: Most tokens of one sequence.
            num_kept_tokens: Decoder layers run on this many last tokens of a prompt only (they add no
                long-range KV); 0 runs them on all, which is exact.

        Raises:
            ConfigError: Fewer tokens are kept than decoding looks back on.
        """
        shape = model.config.shape
        if 0 < num_kept_tokens < shape.ring_rows:
            raise ConfigError(
                f"{num_kept_tokens} kept tokens; decoding looks back on {shape.ring_rows}",
                param="engine.num_kept_tokens",
            )
        self._model = model
        self._caches = Caches(shape, model.numerics, memory.num_blocks, memory.num_slots, model.device)
        self._draft = None if model.weights.draft is None else DraftHead(model, model.weights.draft)
        self._sampler = Sampler(shape.vocab_size)
        self._sequences: dict[RequestId, _Sequence] = {}
        self._num_kept = num_kept_tokens
        self.layout = self._caches.layout
        self.num_blocks = memory.num_blocks
        self.num_slots = memory.num_slots
        self.vocab_size = shape.vocab_size
        self.max_model_len = max_model_len
        self.min_computed_tokens = max(1, num_kept_tokens)

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
        row_done = observer.on_row_ready if observer is not None and plan.chunks else None
        out = self._model.forward(ctx, row_done=row_done)
        if self._draft is not None:
            self._draft.remember(ctx, out.main_hidden)
        ends = step.decoder.row_begins + step.decoder.counts - 1
        return RankReport(plan.rank, self._sample(pieces, ends, out.hidden))

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
        return self._piece(row.request_id, sequence, row.position, row.position + 1, is_sampled=True)

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
        sampled = [(piece, end) for piece, end in zip(pieces, ends.tolist(), strict=True) if piece.is_sampled]
        if not sampled:
            return ()
        rows = torch.tensor([end for _, end in sampled], device=hidden.device)
        logits = self._model.logits(hidden[rows]).cpu().numpy()
        tokens = []
        for (piece, _), row_logits in zip(sampled, logits, strict=True):
            sequence, ids = piece.sequence, piece.sequence.tokens.ids
            choice = self._sampler.sample(
                row_logits,
                sequence.sampling,
                array("i", ids[: sequence.num_prompt_tokens].tobytes()),
                array("i", ids[sequence.num_prompt_tokens :].tobytes()),
                piece.span.end,
            )
            sequence.tokens.append(choice.token_id)
            token = SampledToken(
                piece.request_id, piece.span.end, choice.token_id, choice.logprob, choice.top
            )
            tokens.append(token)
        return tuple(tokens)

    def read_row(self, block: BlockId, row: int) -> memoryview:
        """Bytes of one row of one block; on a CPU the memory itself, elsewhere a copy."""
        return self._caches.row_bytes(block, row).cpu().numpy().data.toreadonly()

    def write_row(self, block: BlockId, row: int, data: memoryview) -> None:
        """Replace one row of one block."""
        _replace(self._caches.row_bytes(block, row), data)

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
