"""Carries out rank plans with a Llama-family decoder."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from millpond.core.errors import DataError, InvariantBroken
from millpond.core.events import RankReport, SampledToken
from millpond.core.ids import BlockId, RequestId, SlotId
from millpond.core.plan import DecodeRow, PrefillChunk, RankPlan, SequenceStart
from millpond.core.ports import LayerObserver
from millpond.core.request import SamplingParams
from millpond.core.units import BLOCK_TOKENS
from millpond.engine.kv_tensors import KvTensors
from millpond.engine.layers import DecoderLayers, RowSpan, StepRows
from millpond.engine.llama_config import LlamaConfig
from millpond.engine.sampler import Sampler
from millpond.engine.streaming import StreamedSpan
from millpond.engine.swap.methods import CopyMethod, PerBlockCopy
from millpond.engine.weights import LlamaWeights


@dataclass(slots=True)
class _Sequence:
    """What the engine remembers of a sequence between steps."""

    token_ids: array[int]
    num_prompt_tokens: int
    sampling: SamplingParams
    block_table: list[BlockId]
    staging: tuple[BlockId, ...]
    is_plain_greedy: bool


@dataclass(frozen=True, slots=True)
class _Piece:
    """Tokens [begin, end) of one sequence in this step."""

    request_id: RequestId
    sequence: _Sequence
    begin: int
    end: int
    is_sampled: bool


def _is_plain_greedy(sampling: SamplingParams) -> bool:
    """Whether the choice is the bare argmax, once min_tokens no longer forbids stop tokens."""
    return (
        sampling.temperature == 0
        and sampling.repetition_penalty == 1
        and sampling.presence_penalty == 0
        and sampling.frequency_penalty == 0
        and not sampling.logit_bias
        and sampling.num_logprobs < 0
    )


class LlamaEngine:
    """Implements `core.ports.Engine`. Decides nothing: every block and every token range is in the plan."""

    def __init__(
        self,
        config: LlamaConfig,
        weights: LlamaWeights,
        kv: KvTensors,
        layers: DecoderLayers,
        *,
        num_slots: int,
        max_model_len: int,
        swap_method: CopyMethod | None = None,
    ) -> None:
        """Put the parts together; see `load.load_engine`."""
        self.layout = kv.layout
        self.num_blocks = kv.num_blocks
        self.num_home_blocks = kv.num_home_blocks
        self.num_slots = num_slots
        self.vocab_size = config.vocab_size
        self.max_model_len = max_model_len
        self.min_computed_tokens = 1
        self.max_drafts = 0
        self.replay_tokens = 0
        self._swap_method: CopyMethod = swap_method or PerBlockCopy()
        self._config = config
        self._embedding = weights.embedding
        self._kv = kv
        self._layers = layers
        self._sampler = Sampler(config.vocab_size)
        self._sequences: dict[RequestId, _Sequence] = {}

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
        hidden, rows = self._gather(pieces)
        streamed = self._stream(pieces, rows)
        watch = observer if plan.chunks else None
        if streamed or watch is not None:
            self._run_by_layer(hidden, rows, streamed, watch)
        else:
            self._layers.run(hidden, rows, 0, self._config.num_layers)
        return RankReport(plan.rank, self._sample(pieces, rows, hidden))

    def _run_by_layer(
        self,
        hidden: torch.Tensor,
        rows: StepRows,
        streamed: list[StreamedSpan],
        watch: LayerObserver | None,
    ) -> None:
        for layer in range(self._config.num_layers):
            if watch is not None:
                watch.on_row_needed(layer)
            for span in streamed:
                span.bring(layer)
            self._layers.run(hidden, rows, layer, layer + 1)
            for span in streamed:
                span.take(layer)
            if watch is not None:
                watch.on_row_ready(layer)

    def _start(self, start: SequenceStart) -> None:
        if not 0 <= start.slot < self.num_slots:
            raise InvariantBroken(f"slot {start.slot} of {start.request_id} is outside this rank's memory")
        self._sequences[start.request_id] = _Sequence(
            token_ids=start.token_ids[:],
            num_prompt_tokens=start.num_prompt_tokens,
            sampling=start.sampling,
            block_table=list(start.block_table),
            staging=start.staging,
            is_plain_greedy=_is_plain_greedy(start.sampling),
        )

    def _known(self, request_id: RequestId) -> _Sequence:
        sequence = self._sequences.get(request_id)
        if sequence is None:
            raise InvariantBroken(f"the plan names {request_id}, which was never started here")
        return sequence

    def _chunk(self, chunk: PrefillChunk) -> _Piece:
        sequence = self._known(chunk.request_id)
        if not 0 <= chunk.begin < chunk.end <= len(sequence.token_ids):
            raise InvariantBroken(
                f"chunk [{chunk.begin}, {chunk.end}) of {chunk.request_id}, "
                f"which has {len(sequence.token_ids)} tokens"
            )
        if chunk.is_last != (chunk.end == len(sequence.token_ids)):
            raise InvariantBroken(
                f"chunk of {chunk.request_id} ends at {chunk.end} with is_last {chunk.is_last}"
            )
        return self._piece(chunk.request_id, sequence, chunk.begin, chunk.end, is_sampled=chunk.is_last)

    def _row(self, row: DecodeRow) -> _Piece:
        sequence = self._known(row.request_id)
        sequence.block_table.extend(row.new_blocks)
        if row.position != len(sequence.token_ids) - 1:
            raise InvariantBroken(
                f"row at {row.position} of {row.request_id}, which has {len(sequence.token_ids)} tokens"
            )
        return self._piece(row.request_id, sequence, row.position, row.position + 1, is_sampled=True)

    def _piece(
        self, request_id: RequestId, sequence: _Sequence, begin: int, end: int, *, is_sampled: bool
    ) -> _Piece:
        if end > self.max_model_len:
            raise InvariantBroken(f"{request_id} reaches {end} tokens, the limit is {self.max_model_len}")
        table = sequence.block_table
        if end > len(table) * BLOCK_TOKENS:
            raise InvariantBroken(f"{request_id} needs {end} tokens of KV but has {len(table)} blocks")
        if sequence.staging:
            self._check_streamed(request_id, sequence)
        elif not all(0 < block <= self.num_blocks for block in table[begin // BLOCK_TOKENS :]):
            raise InvariantBroken(f"{request_id} has a block outside this rank's memory")
        return _Piece(request_id, sequence, begin, end, is_sampled)

    def _check_streamed(self, request_id: RequestId, sequence: _Sequence) -> None:
        table, staging = sequence.block_table, sequence.staging
        if not all(0 < block - self.num_blocks <= self.num_home_blocks for block in table):
            raise InvariantBroken(f"{request_id} is streamed and has a block that is no home block")
        if not all(0 < block <= self.num_blocks for block in staging):
            raise InvariantBroken(f"{request_id} is staged outside this rank's memory")
        if len(staging) * len(self.layout.rows) < len(table):
            raise InvariantBroken(f"{request_id}: {len(staging)} blocks cannot stage {len(table)}")

    def _gather(self, pieces: list[_Piece]) -> tuple[torch.Tensor, StepRows]:
        """Embed the step's tokens; [rows, hidden], float32."""
        spans: list[RowSpan] = []
        at = 0
        for piece in pieces:
            spans.append(RowSpan(at, at + piece.end - piece.begin, piece.begin))
            at = spans[-1].end
        tables = np.zeros((len(pieces), max(len(p.sequence.block_table) for p in pieces)), dtype=np.int32)
        for index, piece in enumerate(pieces):
            if not piece.sequence.staging:
                table = piece.sequence.block_table
                tables[index, : len(table)] = self._kv.first_rows(table)
        counts = [piece.end - piece.begin for piece in pieces]
        token_ids = np.concatenate(
            [np.frombuffer(p.sequence.token_ids[p.begin : p.end], np.int32) for p in pieces]
        )
        if token_ids.min() < 0 or token_ids.max() >= self.vocab_size:
            raise InvariantBroken(f"token ids {token_ids.min()} ... {token_ids.max()} of {self.vocab_size}")
        positions = np.concatenate([np.arange(p.begin, p.end, dtype=np.int32) for p in pieces])
        sequences = np.repeat(np.arange(len(pieces), dtype=np.int32), counts)
        device = self._embedding.device
        rows = StepRows(
            spans=tuple(spans),
            positions=torch.from_numpy(positions).to(device),
            sequences=torch.from_numpy(sequences).to(device),
            tables=torch.from_numpy(tables).to(device),
        )
        hidden = self._embedding[torch.from_numpy(token_ids).to(device)].float()
        return hidden, rows

    def _stream(self, pieces: list[_Piece], rows: StepRows) -> list[StreamedSpan]:
        """The spans of sequences that live in home blocks; their tables are theirs to fill."""
        return [
            StreamedSpan(
                self._kv,
                self._swap_method,
                rows.tables[index],
                piece.sequence.block_table,
                piece.sequence.staging,
                piece.begin,
                piece.end,
            )
            for index, piece in enumerate(pieces)
            if piece.sequence.staging
        ]

    def _sample(self, pieces: list[_Piece], rows: StepRows, hidden: torch.Tensor) -> tuple[SampledToken, ...]:
        sampled = [
            (piece, span.end - 1) for piece, span in zip(pieces, rows.spans, strict=True) if piece.is_sampled
        ]
        if not sampled:
            return ()
        last_rows = torch.tensor([row for _, row in sampled], device=hidden.device)
        logits = self._layers.logits(hidden[last_rows]).cpu().numpy()
        tokens = []
        for (piece, _), row_logits in zip(sampled, logits, strict=True):
            token = self._choose(piece, row_logits)
            piece.sequence.token_ids.append(token.token_id)
            tokens.append(token)
        return tuple(tokens)

    def _choose(self, piece: _Piece, logits: np.ndarray) -> SampledToken:
        """Choose the token after the piece; logits [vocab], float32."""
        sequence = piece.sequence
        sampling, num_prompt = sequence.sampling, sequence.num_prompt_tokens
        if sequence.is_plain_greedy and len(sequence.token_ids) - num_prompt >= sampling.min_tokens:
            token_id = int(logits.argmax())
            if not np.isfinite(logits[token_id]):  # argmax stops at the first that is not a number
                raise DataError("the model produced logits that are not numbers", code="engine.logits")
            return SampledToken(piece.request_id, piece.end, token_id)
        choice = self._sampler.sample(
            logits,
            sampling,
            sequence.token_ids[:num_prompt],
            sequence.token_ids[num_prompt:],
            piece.end,
        )
        return SampledToken(piece.request_id, piece.end, choice.token_id, choice.logprob, choice.top)

    def read_row(self, block: BlockId, row: int) -> memoryview:
        """Bytes of one row of one block."""
        return self._kv.read_row(block, row)

    def write_row(self, block: BlockId, row: int, data: memoryview) -> None:
        """Replace one row of one block."""
        self._kv.write_row(block, row, data)

    def write_rows(
        self, blocks: Sequence[BlockId], row: int, source: memoryview, items: Sequence[int]
    ) -> None:
        """Replace one row of several blocks at once."""
        self._kv.write_rows(blocks, row, source, items, self._swap_method)

    def read_state(self, slot: SlotId) -> memoryview:
        """Nothing: a plain decoder has no state beside its KV."""
        return memoryview(b"")

    def write_state(self, slot: SlotId, data: memoryview) -> None:
        """Accept the empty state of a plain decoder."""
        if data.nbytes:
            raise InvariantBroken(f"state of {data.nbytes} bytes for a model that has none")

    def forget(self, request_id: RequestId) -> None:
        """Drop the record of a sequence; unknown ids are ignored."""
        self._sequences.pop(request_id, None)
