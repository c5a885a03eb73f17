"""What a group scheduler has to say with its next plan."""

from __future__ import annotations

from dataclasses import dataclass, field

from millpond.core.ids import DpRank, RequestId
from millpond.core.plan import (
    GroupPlan,
    HandoffClose,
    HandoffFinish,
    HandoffReceive,
    HandoffSend,
    LoadEnd,
    LoadStart,
    RankPlan,
    SequenceEnd,
    StepKind,
    SwapIn,
    TokenOut,
)


@dataclass(slots=True)
class Outbox:
    """Collects messages between two plans; `seal` puts them into a plan and empties it."""

    sends: list[HandoffSend] = field(default_factory=list[HandoffSend])
    receives: list[HandoffReceive] = field(default_factory=list[HandoffReceive])
    finishes: list[HandoffFinish] = field(default_factory=list[HandoffFinish])
    closes: list[HandoffClose] = field(default_factory=list[HandoffClose])
    outputs: list[tuple[str, TokenOut]] = field(default_factory=list[tuple[str, TokenOut]])
    started: list[tuple[RequestId, int]] = field(default_factory=list[tuple[RequestId, int]])
    ended: list[SequenceEnd] = field(default_factory=list[SequenceEnd])
    unloads: list[LoadEnd] = field(default_factory=list[LoadEnd])
    loads: list[LoadStart] = field(default_factory=list[LoadStart])
    swaps: list[SwapIn] = field(default_factory=list[SwapIn])
    forget: dict[DpRank, list[RequestId]] = field(default_factory=dict[DpRank, list[RequestId]])
    """Per rank: sequences that the engine must drop before the next step."""

    @property
    def is_empty(self) -> bool:
        """Whether nothing needs saying. Pending `forget`s alone wait for the next step."""
        return not (
            self.sends
            or self.receives
            or self.finishes
            or self.closes
            or self.outputs
            or self.started
            or self.ended
            or self.unloads
            or self.loads
            or self.swaps
        )

    def take_forget(self, rank: DpRank) -> tuple[RequestId, ...]:
        """Return and clear what `rank`'s engine must drop."""
        return tuple(self.forget.pop(rank, ()))

    def seal(self, step: int, kind: StepKind, num_steps: int, ranks: tuple[RankPlan, ...]) -> GroupPlan:
        """Make the plan and empty the box."""
        plan = GroupPlan(
            step=step,
            kind=kind,
            num_steps=num_steps,
            ranks=ranks,
            sends=tuple(self.sends),
            receives=tuple(self.receives),
            finishes=tuple(self.finishes),
            closes=tuple(self.closes),
            outputs=tuple(self.outputs),
            started=tuple(self.started),
            ended=tuple(self.ended),
            unloads=tuple(self.unloads),
            loads=tuple(self.loads),
            swaps=tuple(self.swaps),
        )
        self.sends.clear()
        self.receives.clear()
        self.finishes.clear()
        self.closes.clear()
        self.outputs.clear()
        self.started.clear()
        self.ended.clear()
        self.unloads.clear()
        self.loads.clear()
        self.swaps.clear()
        return plan
