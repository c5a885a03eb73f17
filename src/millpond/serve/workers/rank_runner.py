"""Carries out one rank's part of a plan: engine, KV sender, KV receiver, and the line to the node daemon.

The same object serves the leader's own rank and, in its own process, every other rank.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from millpond.core.errors import InvariantBroken
from millpond.core.events import RankInfo, RankReport
from millpond.core.ids import DpRank, RequestId
from millpond.core.plan import GroupPlan, PrefillChunk, RankPlan
from millpond.core.ports import Engine
from millpond.core.units import BLOCK_TOKENS, ceil_div
from millpond.serve.transfer.receiver import HandoffReceiver
from millpond.serve.transfer.sender import HandoffSender
from millpond.serve.workers.rank_kv import RankKv


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
        unloads=tuple(end for end in plan.unloads if end.rank == rank),
        loads=tuple(start for start in plan.loads if start.rank == rank),
        swaps=tuple(swap for swap in plan.swaps if swap.rank == rank),
    )


def has_work(plan: GroupPlan) -> bool:
    """Whether a rank's slice contains anything."""
    transfers = plan.sends or plan.receives or plan.finishes or plan.closes
    return bool(plan.ranks or transfers or plan.unloads or plan.loads or plan.swaps)


@dataclass(slots=True)
class _Progress:
    """Between the layers of a step: waits for loaded rows, and tells the sender which rows are complete."""

    sender: HandoffSender | None
    kv: RankKv | None
    loading: tuple[RequestId, ...]
    """Requests of this step that a load may have to bring rows for."""
    sending: list[tuple[RequestId, int, int]]
    """(request, attempt, blocks complete after this step)."""
    lost: set[RequestId] = field(default_factory=set[RequestId])
    """Those whose rows will not come: what the step computes of them from here on is void."""

    def on_row_needed(self, row: int) -> None:
        if self.kv is not None and self.loading:
            self.lost |= self.kv.wait_for(self.loading, row)

    def on_row_ready(self, row: int) -> None:
        for request_id, attempt, num_blocks in self.sending:
            if self.sender is not None and request_id not in self.lost:
                self.sender.rows_ready(request_id, attempt, row, num_blocks)


@dataclass(slots=True)
class RankRunner:
    """One rank's engine and its transfer threads.

    Args:
        sender: None on decode-only ranks.
        receiver: None on prefill-only ranks.
        kv: None on hosts without a node daemon.
    """

    rank: DpRank
    engine: Engine
    sender: HandoffSender | None
    receiver: HandoffReceiver | None
    kv: RankKv | None = None

    @property
    def info(self) -> RankInfo:
        """Fixed facts of this rank."""
        address = self.receiver.address if self.receiver is not None else ""
        return RankInfo(
            rank=self.rank,
            data_address=address,
            num_blocks=self.engine.num_blocks,
            num_slots=self.engine.num_slots,
            min_computed_tokens=self.engine.min_computed_tokens,
            max_drafts=self.engine.max_drafts,
            can_load=self.kv is not None,
            has_state=self.engine.layout.state_bytes > 0,
            replay_tokens=self.engine.replay_tokens,
            num_home_blocks=self.engine.num_home_blocks,
            num_rows=len(self.engine.layout.rows),
        )

    def carry_out(self, plan: GroupPlan) -> RankReport | None:
        """Do what a slice says; returns the report if it contains a step."""
        if self.kv is not None:
            self.kv.end_loads(plan.unloads)
        self._order_transfers(plan)
        if self.kv is not None:
            self.kv.start_loads(plan.loads, plan.swaps)
        elif plan.loads or plan.swaps:
            raise InvariantBroken(f"rank {self.rank} cannot load")
        if not plan.ranks:
            return None
        (part,) = plan.ranks
        return self._step(part)

    def _step(self, part: RankPlan) -> RankReport:
        if self.kv is None:
            return self.engine.execute(part, self._progress(part, frozenset()))
        lost = self.kv.before_step(part)
        progress = self._progress(part, lost)
        begin_ns = time.thread_time_ns()
        report = self.engine.execute(part, progress)
        self.kv.compute_ns += time.thread_time_ns() - begin_ns
        if progress is not None and progress.lost:
            report = self._drop(report, progress.lost)
        self.kv.after_step(part, report)
        return report

    def _drop(self, report: RankReport, lost: set[RequestId]) -> RankReport:
        """Take out what was computed of sequences whose load broke."""
        if self.kv is None:
            raise InvariantBroken("a load broke that nobody carries out")
        for request_id in lost:
            self.engine.forget(request_id)
        return replace(
            report,
            sampled=tuple(token for token in report.sampled if token.request_id not in lost),
            drafts=tuple(drafts for drafts in report.drafts if drafts.request_id not in lost),
            lost=tuple((request_id, self.kv.settle(request_id)) for request_id in sorted(lost)),
        )

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

    @staticmethod
    def _order_sends(sender: HandoffSender, plan: GroupPlan) -> None:
        for close in plan.closes:
            sender.close_request(close)
        for send in plan.sends:
            sender.start(send)
        for finish in plan.finishes:
            sender.finish(
                finish.request_id,
                finish.attempt,
                finish.first_token_id,
                is_approximate=finish.is_approximate,
            )

    def _progress(self, part: RankPlan, lost: Iterable[RequestId]) -> _Progress | None:
        """None if nobody has to know of the step's rows."""
        if not part.chunks:
            return None
        attempts = self.sender.open_attempts() if self.sender is not None else {}
        sending = [
            (chunk.request_id, attempts[chunk.request_id], _num_complete_blocks(chunk))
            for chunk in part.chunks
            if chunk.request_id in attempts
        ]
        loading = self.kv.loading(part.chunks) if self.kv is not None else ()
        return (
            _Progress(self.sender, self.kv, loading, sending, set(lost))
            if sending or loading or lost
            else None
        )

    def stop(self) -> None:
        """Stop the threads."""
        if self.kv is not None:
            self.kv.stop()
        if self.sender is not None:
            self.sender.stop()
        if self.receiver is not None:
            self.receiver.stop()


def _num_complete_blocks(chunk: PrefillChunk) -> int:
    return ceil_div(chunk.end, BLOCK_TOKENS) if chunk.is_last else chunk.end // BLOCK_TOKENS
