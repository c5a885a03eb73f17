"""Splits what a V4.1 step spends (CPU time, counted operations) over the model's mechanisms.

The model tells an observer the name of each intermediate result. What was spent since the result before is
booked on the mechanism that made this one. Without an observer a step does not know of any of this.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch.utils.flop_counter import FlopCounterMode

from millpond.core.work import Mechanism, WorkKind
from millpond.engine.model.caches import Caches
from millpond.engine.model.dspark import DraftHead
from millpond.engine.model.model import V41Model
from millpond.engine.model.step import Span, make_step

_LINEAR, _MIXING, _ATTENTION = WorkKind.LINEAR, WorkKind.MIXING, WorkKind.ATTENTION

MADE_BY = {
    "embed": (Mechanism.EMBEDDING, _MIXING),
    "engram_ids": (Mechanism.ENGRAM, _MIXING),
    "engram_gate": (Mechanism.ENGRAM, _LINEAR),
    "x_in": (Mechanism.HYPER_CONNECTIONS, _MIXING),
    "attn_normed": (Mechanism.HYPER_CONNECTIONS, _MIXING),
    "latent": (Mechanism.COMPRESSOR, _LINEAR),
    "keys": (Mechanism.COMPRESSOR, _LINEAR),
    "attn_pre": (Mechanism.HYPER_CONNECTIONS, _LINEAR),
    "q": (Mechanism.PROJECTIONS, _LINEAR),
    "win_kv": (Mechanism.WINDOW, _ATTENTION),
    "idx_w": (Mechanism.INDEXER, _LINEAR),
    "idx_score": (Mechanism.INDEXER, _ATTENTION),
    "topk": (Mechanism.INDEXER, _ATTENTION),
    "attn_core": (Mechanism.SELECTED, _ATTENTION),
    "attn_out": (Mechanism.PROJECTIONS, _LINEAR),
    "x_mid": (Mechanism.HYPER_CONNECTIONS, _MIXING),
    "ffn_pre": (Mechanism.HYPER_CONNECTIONS, _LINEAR),
    "ffn_in": (Mechanism.HYPER_CONNECTIONS, _MIXING),
    "route_w": (Mechanism.ROUTER, _LINEAR),
    "routed_out": (Mechanism.ROUTED_EXPERTS, _LINEAR),
    "shared_out": (Mechanism.SHARED_EXPERT, _LINEAR),
    "ffn_out": (Mechanism.ROUTED_EXPERTS, _MIXING),
    "x_out": (Mechanism.HYPER_CONNECTIONS, _MIXING),
    "main_x": (Mechanism.DRAFTS, _LINEAR),
}
"""Observed name -> what was at work since the one before. Names not listed end nothing.

One softmax runs over windows and selected entries, so both are booked on the latter.
"""


@dataclass(slots=True)
class Meter:
    """An observer of steps."""

    read: Callable[[], float]
    """What was spent so far; never falls."""
    spent: defaultdict[tuple[Mechanism, WorkKind], float] = field(default_factory=lambda: defaultdict(float))
    _last: float = 0.0

    def start(self) -> None:
        """Forget what was spent since the last reading."""
        self._last = self.read()

    def __call__(self, name: str, value: torch.Tensor) -> None:
        """See `Observe`."""
        if name in MADE_BY:
            self.book(*MADE_BY[name])

    def book(self, mechanism: Mechanism, kind: WorkKind) -> None:
        """Book what was spent since the last reading."""
        now = self.read()
        self.spent[mechanism, kind] += now - self._last
        self._last = now

    def total(self, kind: WorkKind) -> float:
        """What was spent on one kind of work."""
        return sum(spent for (_, booked), spent in self.spent.items() if booked is kind)

    def by_mechanism(self) -> dict[Mechanism, float]:
        """What was spent on each mechanism, in the order of their work."""
        sums: dict[Mechanism, float] = defaultdict(float)
        for (mechanism, _), spent in self.spent.items():
            sums[mechanism] += spent
        return dict(sums)


@torch.inference_mode()
def run_metered(
    model: V41Model, caches: Caches, spans: Sequence[Span], read: Callable[[], float], *, with_logits: bool
) -> Meter:
    """Run one step as the engine does, logits of each span's last row if wanted, and meter it."""
    meter = Meter(read)
    step = make_step(spans, model.config.shape, model.device)
    ctx = model.start(step, caches, meter)
    meter.start()
    out = model.forward(ctx)
    meter.book(Mechanism.HYPER_CONNECTIONS, _MIXING)
    if model.weights.draft is not None:
        DraftHead(model, model.weights.draft).remember(ctx, out.main_hidden)
        meter.book(Mechanism.DRAFTS, _LINEAR)
    if with_logits:
        model.logits(out.hidden[step.decoder.row_begins + step.decoder.counts - 1])
        meter.book(Mechanism.HEAD, _LINEAR)
    return meter


def count_with_torch(model: V41Model, caches: Caches, spans: Sequence[Span], *, with_logits: bool) -> Meter:
    """Run one step and book torch's own count of floating-point operations."""
    with FlopCounterMode(display=False) as counter:
        return run_metered(model, caches, spans, counter.get_total_flops, with_logits=with_logits)
