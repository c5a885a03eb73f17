"""Keeps what a rank computes: full blocks, and window states, go to the host's node daemon after each step.

A block is kept once all its 128 tokens are known for good and computed. It is copied into a slot of the
arena that the rank was lent; if there is none, it is tried again after later steps, as long as the sequence
is here. Nothing waits for the daemon.
"""

from __future__ import annotations

import time
from array import array
from collections.abc import Iterable
from dataclasses import dataclass, field

from millpond.core.events import RankReport
from millpond.core.hashing import HashChain
from millpond.core.ids import BlockId, RequestId
from millpond.core.node_messages import SnapshotPut
from millpond.core.plan import RankPlan, SequenceStart, StateCopy
from millpond.core.ports import Engine
from millpond.core.request import KvIdentity
from millpond.core.units import BLOCK_TOKENS, SECOND_NS
from millpond.serve.node.client import NodeClient, PutSlot


@dataclass(slots=True)
class _Kept:
    """One sequence as far as it is known here."""

    request_id: RequestId
    attempt: int
    kv: KvIdentity
    is_approximate: bool
    token_ids: array[int]
    block_table: list[BlockId]
    num_put: int
    """Leading blocks that are kept, here or by others."""
    chain: HashChain
    num_computed: int = 0
    """Leading tokens that are known for good and computed."""
    has_put: bool = False
    rolling: bytes = b""
    """Digest under which its newest rolling state is kept."""

    @property
    def num_full(self) -> int:
        return self.num_computed // BLOCK_TOKENS

    def digests(self, num_blocks: int) -> list[bytes]:
        """Of the first blocks."""
        begin, end = self.chain.num_tokens, num_blocks * BLOCK_TOKENS
        if end > begin:
            self.chain.extend(self.token_ids[begin:end])
        return self.chain.digests[:num_blocks]


@dataclass(slots=True)
class PersistStats:
    """Counters of one rank."""

    num_blocks: int = 0
    num_skipped: int = 0
    """Full blocks whose sequence went before there was a slot for them."""
    num_states: int = 0
    seconds: float = 0.0
    """CPU time of the engine's thread."""


@dataclass(slots=True)
class Persister:
    """Of one rank. The engine's thread only."""

    engine: Engine
    node: NodeClient
    stats: PersistStats = field(default_factory=PersistStats)
    _kept: dict[RequestId, _Kept] = field(default_factory=dict[RequestId, _Kept])

    def forget(self, request_ids: Iterable[RequestId]) -> None:
        """These sequences are gone, or begin anew."""
        for request_id in request_ids:
            kept = self._kept.pop(request_id, None)
            if kept is None:
                continue
            self.stats.num_skipped += max(0, kept.num_full - kept.num_put)
            if kept.has_put:
                self.node.close_put(kept.request_id, kept.attempt)

    def after_step(self, part: RankPlan, report: RankReport) -> None:
        """Keep what the step completed. Sequences that the report calls lost must be forgotten after it."""
        begin_ns = time.thread_time_ns()
        for start in part.start:
            self._start(start)
        self._note(part, report)
        for kept in self._kept.values():
            if kept.num_full > kept.num_put:
                self._put(kept)
        lost = {request_id for request_id, _ in report.lost}
        for copy in part.keep:
            if copy.request_id not in lost:
                self._keep_state(copy)
        self.stats.seconds += (time.thread_time_ns() - begin_ns) / SECOND_NS

    def _start(self, start: SequenceStart) -> None:
        self.forget((start.request_id,))
        if start.kv is None:
            return
        self._kept[start.request_id] = _Kept(
            request_id=start.request_id,
            attempt=start.attempt,
            kv=start.kv,
            is_approximate=start.is_approximate,
            token_ids=start.token_ids[:],
            block_table=list(start.block_table),
            num_put=start.num_stored_blocks,
            chain=HashChain(start.kv.root),
        )

    def _note(self, part: RankPlan, report: RankReport) -> None:
        """Bring what is known of the sequences up to date."""
        lost = {request_id for request_id, _ in report.lost}
        for chunk in part.chunks:
            kept = self._kept.get(chunk.request_id)
            if kept is not None and chunk.request_id not in lost:
                kept.num_computed = chunk.end
        for token in report.sampled:
            kept = self._kept.get(token.request_id)
            if kept is not None:
                kept.token_ids.append(token.token_id)
        for row in part.rows:
            kept = self._kept.get(row.request_id)
            if kept is not None:
                kept.block_table.extend(row.new_blocks)
                kept.num_computed = len(kept.token_ids) - 1  # the newest one was sampled, not computed

    def _put(self, kept: _Kept) -> None:
        slots: list[PutSlot] = []
        first = kept.num_put
        for block in kept.block_table[first : kept.num_full]:
            slot = self.node.take_slot()
            if slot is None:
                break
            self._copy(block, slot)
            slots.append(slot)
        if not slots:
            return
        kept.num_put += len(slots)
        kept.has_put = True
        self.stats.num_blocks += len(slots)
        self.node.put(
            kept.request_id,
            kept.attempt,
            kept.kv,
            first,
            kept.digests(kept.num_put),
            slots,
            is_approximate=kept.is_approximate,
        )

    def _copy(self, block: BlockId, slot: PutSlot) -> None:
        target = slot.view.data
        begin = 0
        for row, layout in enumerate(self.engine.layout.rows):
            end = begin + layout.num_bytes
            target[begin:end] = self.engine.read_row(block, row)
            begin = end

    def _keep_state(self, copy: StateCopy) -> None:
        kept = self._kept.get(copy.request_id)
        if kept is None or kept.num_computed < copy.position or copy.position % BLOCK_TOKENS:
            return  # drafts were wrong: the border was not reached
        digest = kept.digests(copy.position // BLOCK_TOKENS)[-1]
        replaces = kept.rolling if copy.is_rolling and kept.rolling != digest else b""
        if copy.is_rolling:
            kept.rolling = digest
        state = bytes(self.engine.read_state(copy.slot))
        self.stats.num_states += 1
        self.node.snapshot(
            SnapshotPut(kept.kv, digest, copy.position, state, replaces, is_approximate=kept.is_approximate)
        )
