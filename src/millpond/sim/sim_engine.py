"""One rank's engine without numbers: checks that the plans make sense and returns predictable tokens.

It knows only what plans tell it, like a real engine, so a plan that a real engine could not carry out
(a chunk that leaves a gap, a block of two sequences, a row of a stranger, a beginning after KV or state that
is not there) is found here. A block or state is stood for by the digest of the tokens that it was made of.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from millpond.core.errors import InvariantBroken
from millpond.core.events import Drafts, RankInfo, RankReport, SampledToken
from millpond.core.hashing import HashChain
from millpond.core.ids import BlockId, RequestId, SlotId
from millpond.core.plan import DecodeRow, PrefillChunk, RankPlan, SequenceStart, StateCopy, SwapIn
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
class Kept:
    """A full block, or a state at its end."""

    digest: bytes
    is_approximate: bool


@dataclass(slots=True)
class _Known:
    sampling: SamplingParams
    token_ids: TokenIds
    num_prompt_tokens: int
    slot: SlotId
    is_kept: bool
    """Its full blocks are for others too."""
    chain: HashChain
    """Over the leading tokens, as far as anybody asked."""
    num_stored_blocks: int
    is_approximate: bool
    num_computed_tokens: int = 0
    rows_end: int = 0
    """Where the last row or chunk ended, wrong drafts included."""
    has_run: bool = False
    num_restored_tokens: int = 0
    """Leading tokens that the state in the slot stands for before the first chunk."""
    block_table: list[BlockId] = field(default_factory=list[BlockId])
    staging: tuple[BlockId, ...] = ()

    def digests(self, num_tokens: int) -> list[bytes]:
        """Names of the full blocks of `num_tokens` leading tokens."""
        if self.chain.num_tokens < num_tokens:
            self.chain.extend(self.token_ids[self.chain.num_tokens : num_tokens])
        return self.chain.digests[: num_tokens // BLOCK_TOKENS]


class SimEngine:
    """Sequences of one rank as its engine sees them."""

    def __init__(self, info: RankInfo) -> None:
        self._info = info
        self._known: dict[RequestId, _Known] = {}
        self._owner_by_block: dict[BlockId, RequestId] = {}
        self._loaded: dict[BlockId, tuple[RequestId, bytes]] = {}
        """What was swapped into blocks."""
        self._states: dict[SlotId, bytes] = {}
        """What was written into slots before a first chunk."""
        self._approximate: dict[RequestId, Collection[bytes]] = {}
        """What of a request's load is downstream of a replay."""

    @property
    def num_sequences(self) -> int:
        """Sequences that were started and not forgotten."""
        return len(self._known)

    def swap_in(self, swap: SwapIn, digests: Sequence[bytes], approximate: Collection[bytes] = ()) -> None:
        """Copy loaded blocks in; a load may have fewer than the swap names.

        Args:
            swap: Where to.
            digests: What.
            approximate: Blocks and states of the load that are downstream of a replay.
        """
        self._approximate[swap.request_id] = approximate
        for block, digest in zip(swap.block_table, digests, strict=False):
            self._loaded[block] = (swap.request_id, digest)

    def write_state(self, slot: SlotId, digest: bytes) -> None:
        """Copy a snapshot in."""
        self._states[slot] = digest

    def read_state(self, copy: StateCopy) -> Kept | None:
        """What the slot stands for at the copy's position; None if the step did not come so far."""
        known = self._known.get(copy.request_id)
        if known is None or len(known.token_ids) <= copy.position:
            return None
        return Kept(known.digests(copy.position)[-1], known.is_approximate)

    def take_full_blocks(self, request_id: RequestId) -> list[Kept]:
        """Blocks that are full since this was asked last and that nobody else keeps."""
        known = self._known.get(request_id)
        if known is None or not known.is_kept:
            return []
        begin, end = known.num_stored_blocks, known.num_computed_tokens // BLOCK_TOKENS
        known.num_stored_blocks = max(begin, end)
        return [Kept(digest, known.is_approximate) for digest in known.digests(end * BLOCK_TOKENS)[begin:]]

    def execute(
        self, plan: RankPlan, num_steps: int = 1, lost: Mapping[RequestId, int] | None = None
    ) -> RankReport:
        """Carry out one plan.

        Args:
            plan: What to do.
            num_steps: Decode steps.
            lost: Sequences whose load broke, and their leading tokens that are in place.

        Raises:
            InvariantBroken: The plan contradicts what earlier plans said.
        """
        lost = lost or {}
        for request_id in plan.forget:
            self._forget(request_id)
        for start in plan.start:
            self._start(start)
        for copy in plan.restore:
            self._restore(copy)
        chunks = [chunk for chunk in plan.chunks if chunk.request_id not in lost]
        sampled = [token for chunk in chunks if (token := self._compute(chunk)) is not None]
        for request_id, num_tokens in lost.items():
            self._lose(request_id, num_tokens)
        for row in plan.rows:
            self._own(row.request_id, self._find(row.request_id), row.new_blocks)
        for step in range(num_steps):
            for row in plan.rows:
                sampled += self._decode(row, step)
        for copy in plan.keep:
            if copy.request_id not in lost:
                self._keep(copy)
        drafts = tuple(self._draft(row.request_id, plan.num_drafts) for row in plan.rows if plan.num_drafts)
        return RankReport(plan.rank, tuple(sampled), drafts, tuple(lost.items()))

    def _draft(self, request_id: RequestId, count: int) -> Drafts:
        """Guess; every third position is guessed wrong."""
        known = self._find(request_id)
        begin = len(known.token_ids)
        wrong = [(position % 3 == 0) for position in range(begin, begin + count)]
        right = [token_at(known.sampling, position) for position in range(begin, begin + count)]
        return Drafts(request_id, tuple(token + miss for token, miss in zip(right, wrong, strict=True)))

    def _restore(self, copy: StateCopy) -> None:
        known = self._find(copy.request_id)
        state = self._states.pop(copy.slot, None)
        if known.slot != copy.slot or known.has_run or state != known.digests(copy.position)[-1]:
            raise InvariantBroken(f"{copy} does not fit {copy.request_id}")
        known.num_restored_tokens = copy.position

    def _keep(self, copy: StateCopy) -> None:
        known = self._find(copy.request_id)
        # The slot has gone on by the step's drafts at most; those that were wrong did not reach the border.
        is_near = copy.position <= known.rows_end and known.num_computed_tokens - copy.position < MAX_ROWS
        if known.slot != copy.slot or not is_near or copy.position % BLOCK_TOKENS:
            raise InvariantBroken(f"{copy}: {copy.request_id} is at {known.num_computed_tokens}")

    def _forget(self, request_id: RequestId) -> None:
        known = self._known.pop(request_id, None)
        for block in (*known.block_table, *known.staging) if known is not None else ():
            del self._owner_by_block[block]

    def _lose(self, request_id: RequestId, num_tokens: int) -> None:
        for block in self._find(request_id).block_table[num_tokens // BLOCK_TOKENS :]:
            self._loaded.pop(block, None)
        self._forget(request_id)

    def _start(self, start: SequenceStart) -> None:
        if start.request_id in self._known:
            raise InvariantBroken(f"{start.request_id} was started twice")
        known = _Known(
            sampling=start.sampling,
            token_ids=start.token_ids[:],
            num_prompt_tokens=start.num_prompt_tokens,
            slot=start.slot,
            is_kept=start.kv is not None,
            chain=HashChain(start.kv.root if start.kv is not None else b""),
            num_stored_blocks=start.num_stored_blocks,
            is_approximate=start.is_approximate,
        )
        # A sequence that came by handoff lacks the KV of its newest token only; a row will say so.
        self._known[start.request_id] = known
        self._own(start.request_id, known, start.block_table)
        if start.staging:
            self._stage(start, known)

    def _stage(self, start: SequenceStart, known: _Known) -> None:
        """Check that home blocks and staging are what they should be."""
        info, num_table = self._info, len(start.block_table)
        if not set(start.block_table) <= set(
            range(info.num_blocks + 1, info.num_blocks + info.num_home_blocks + 1)
        ):
            raise InvariantBroken(f"{start.request_id} is streamed from {start.block_table}")
        if not set(start.staging) <= set(range(1, info.num_blocks + 1)):
            raise InvariantBroken(f"{start.request_id} is staged in {start.staging}")
        if num_table <= info.num_blocks or len(start.staging) * info.num_rows < num_table:
            raise InvariantBroken(f"{start.request_id}: {start.staging} for {num_table} blocks")
        for block in start.staging:
            owner = self._owner_by_block.setdefault(block, start.request_id)
            if owner != start.request_id:
                raise InvariantBroken(f"block {block} was given to {start.request_id}, it belongs to {owner}")
        known.staging = start.staging

    def _own(self, request_id: RequestId, known: _Known, blocks: tuple[BlockId, ...]) -> None:
        for block in blocks:
            owner = self._owner_by_block.setdefault(block, request_id)
            if owner != request_id or block in known.block_table:
                raise InvariantBroken(f"block {block} was given to {request_id}, it belongs to {owner}")
            known.block_table.append(block)

    def _compute(self, chunk: PrefillChunk) -> SampledToken | None:
        known = self._find(chunk.request_id)
        if not known.has_run:
            self._begin(chunk, known)
        if chunk.begin != known.num_computed_tokens or not chunk.begin < chunk.end <= len(known.token_ids):
            raise InvariantBroken(
                f"chunk {chunk} after {known.num_computed_tokens} of {len(known.token_ids)} tokens"
            )
        self._require_cover(chunk.request_id, known, chunk.end)
        if chunk.is_last != (chunk.end == len(known.token_ids)):
            raise InvariantBroken(f"chunk {chunk} of {len(known.token_ids)} tokens is wrong about its end")
        known.num_computed_tokens = known.rows_end = chunk.end
        return self._sample(chunk.request_id, known) if chunk.is_last else None

    def _begin(self, chunk: PrefillChunk, known: _Known) -> None:
        """Check that the first chunk of a sequence finds all that it builds upon."""
        info = self._info
        num_loaded = max(chunk.begin, chunk.write_begin)
        last_begin = max(0, len(known.token_ids) - info.min_computed_tokens)
        if num_loaded % BLOCK_TOKENS or chunk.begin > last_begin:
            raise InvariantBroken(f"{chunk} cannot be the first of {len(known.token_ids)} tokens")
        for block, digest in zip(known.block_table, known.digests(num_loaded), strict=False):
            if self._loaded.get(block) != (chunk.request_id, digest):
                raise InvariantBroken(f"{chunk}: block {block} does not hold what it should")
        is_replay = chunk.write_begin > chunk.begin
        if is_replay and not (known.is_approximate and info.has_state):
            raise InvariantBroken(f"{chunk} of a sequence that is approximate: {known.is_approximate}")
        approximate = self._approximate.pop(chunk.request_id, ())
        if not known.is_approximate and any(each in approximate for each in known.digests(num_loaded)):
            raise InvariantBroken(f"{chunk} builds upon what is approximate, and is said to be exact")
        if is_replay and chunk.begin > chunk.write_begin - info.replay_tokens:
            raise InvariantBroken(f"{chunk} replays fewer than {info.replay_tokens} tokens")
        if info.has_state and not is_replay and chunk.begin != known.num_restored_tokens:
            raise InvariantBroken(f"{chunk} after a state of {known.num_restored_tokens} tokens")
        known.has_run = True
        known.num_computed_tokens = chunk.begin

    def _decode(self, row: DecodeRow, step: int) -> list[SampledToken]:
        known = self._find(row.request_id)
        position = row.position + step
        if position != len(known.token_ids) - 1:
            raise InvariantBroken(
                f"row {row}, step {step}: {row.request_id} has {len(known.token_ids)} tokens"
            )
        known.has_run = True
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
