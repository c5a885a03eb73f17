"""Carries out one rank's part of a plan: engine, KV sender, KV receiver.

The same object serves the leader's own rank and, in its own process, every other rank.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from millpond.core.errors import InvariantBroken
from millpond.core.events import RankInfo, RankReport
from millpond.core.ids import DpRank, RequestId
from millpond.core.plan import GroupPlan, PrefillChunk, RankPlan
from millpond.core.ports import Engine
from millpond.core.units import BLOCK_TOKENS, ceil_div
from millpond.serve.transfer.receiver import HandoffReceiver
from millpond.serve.transfer.sender import HandoffSender
from millpond.serve.workers.snapshot_buffers import SnapshotBuffers


def slice_for_rank(plan: GroupPlan, rank: DpRank) -> GroupPlan:
    """Return the part of a group's plan that one rank carries out."""
    return GroupPlan(
        step=plan.step,
        kind=plan.kind,
        num_steps=plan.num_steps,
        ranks=tuple(part for part in plan.ranks if part.rank == rank),
        sends=tuple(send for send in plan.sends if send.rank == rank),
        receives=tuple(receive for receive in plan.receives if receive.rank == rank),
        finishes=tuple(finish for finish in plan.finishes if finish.rank == rank),
        closes=tuple(close for close in plan.closes if close.rank == rank),
    )


def has_work(plan: GroupPlan) -> bool:
    """Whether a rank's slice contains anything."""
    return bool(plan.ranks or plan.sends or plan.receives or plan.finishes or plan.closes)


@dataclass(slots=True)
class _SendProgress:
    """Tells the sender, layer by layer, which blocks of this step's chunks are complete."""

    sender: HandoffSender
    chunks: list[tuple[RequestId, int, int]]
    """(request, attempt, blocks complete after this step)."""

    def on_row_ready(self, row: int) -> None:
        for request_id, attempt, num_blocks in self.chunks:
            self.sender.rows_ready(request_id, attempt, row, num_blocks)


@dataclass(slots=True)
class RankRunner:
    """One rank's engine and its transfer threads.

    Args:
        sender: None on decode-only ranks.
        receiver: None on prefill-only ranks.
        snapshots: Host memory for copies of state slots.
    """

    rank: DpRank
    engine: Engine
    sender: HandoffSender | None
    receiver: HandoffReceiver | None
    snapshots: SnapshotBuffers
    _attempts: dict[RequestId, int] = field(default_factory=dict[RequestId, int])
    """Attempt of each sequence that is being sent."""

    @property
    def info(self) -> RankInfo:
        """Fixed facts of this rank."""
        address = self.receiver.address if self.receiver is not None else ""
        return RankInfo(
            rank=self.rank,
            data_address=address,
            num_blocks=self.engine.num_blocks,
            num_slots=self.engine.num_slots,
            num_snapshots=len(self.snapshots),
            min_computed_tokens=self.engine.min_computed_tokens,
            max_drafts=self.engine.max_drafts,
        )

    def carry_out(self, plan: GroupPlan) -> RankReport | None:
        """Do what a slice says; returns the report if it contains a step."""
        self._order_transfers(plan)
        if not plan.ranks:
            return None
        (part,) = plan.ranks
        for copy in part.restore:
            self.engine.write_state(copy.slot, self.snapshots.read(copy.buffer))
        report = self.engine.execute(part, self._progress(part))
        for copy in part.keep:
            self.snapshots.write(copy.buffer, self.engine.read_state(copy.slot))
        return report

    def _order_transfers(self, plan: GroupPlan) -> None:
        if self.sender is not None:
            self._order_sends(self.sender, plan)
        elif self.receiver is not None:
            for close in plan.closes:
                self.receiver.close_request(close)
            for receive in plan.receives:
                self.receiver.expect(receive)
        elif plan.sends or plan.receives:
            raise InvariantBroken(f"rank {self.rank} of a mixed group neither sends nor receives KV")

    def _order_sends(self, sender: HandoffSender, plan: GroupPlan) -> None:
        for close in plan.closes:
            if self._attempts.get(close.request_id) == close.attempt:
                del self._attempts[close.request_id]
            sender.close_request(close)
        for send in plan.sends:
            self._attempts[send.request_id] = send.attempt
            sender.start(send)
        for finish in plan.finishes:
            self._attempts.pop(finish.request_id, None)
            sender.finish(finish.request_id, finish.attempt, finish.first_token_id)

    def _progress(self, part: RankPlan) -> _SendProgress | None:
        if self.sender is None:
            return None
        chunks = [
            (chunk.request_id, self._attempts[chunk.request_id], _num_complete_blocks(chunk))
            for chunk in part.chunks
            if chunk.request_id in self._attempts
        ]
        return _SendProgress(self.sender, chunks) if chunks else None

    def stop(self) -> None:
        """Stop the transfer threads."""
        if self.sender is not None:
            self.sender.stop()
        if self.receiver is not None:
            self.receiver.stop()


def _num_complete_blocks(chunk: PrefillChunk) -> int:
    return ceil_div(chunk.end, BLOCK_TOKENS) if chunk.is_last else chunk.end // BLOCK_TOKENS
