"""Life of a sequence on one group: the one transition table.

Internal signals come from the scheduler itself; a pair that the table lacks is our bug. External
signals come from other processes, late, twice or never asked for: each is defined in every state.
"""

from __future__ import annotations

from enum import Enum

from millpond.core.errors import InvariantBroken
from millpond.core.sequence import SequenceState as S


class Signal(Enum):
    """What moves a sequence on."""

    ADMIT = "admit"
    """Memory granted; KV will be handed to another rank."""
    ADMIT_LOCAL = "admit_local"
    """Memory granted; this rank also decodes."""
    EXPECT = "expect"
    """Decode side: memory granted, KV expected."""
    COMPUTED = "computed"
    """Last chunk done, sequence goes on."""
    FINISH = "finish"
    """Stop token or length."""
    PREEMPT = "preempt"
    """Gives way; will be re-submitted."""
    ABORT = "abort"
    """External: client left, attempt superseded, or peer group lost."""
    SENT = "sent"
    """External: receiver confirmed every byte."""
    ARRIVED = "arrived"
    """External: every byte is here and verified."""
    FAIL = "fail"
    """External: the transfer will not complete and no thread touches the blocks."""
    CLOSED = "closed"
    """External: no thread touches the blocks."""


EXTERNAL = frozenset({Signal.ABORT, Signal.SENT, Signal.ARRIVED, Signal.FAIL, Signal.CLOSED})

NEXT: dict[tuple[S, Signal], S] = {
    (S.QUEUED, Signal.ADMIT): S.PREFILL,
    (S.QUEUED, Signal.ADMIT_LOCAL): S.PREFILL_LOCAL,
    (S.QUEUED, Signal.EXPECT): S.RECEIVING,
    (S.QUEUED, Signal.FINISH): S.ENDED,  # refused: it can never fit
    (S.PREFILL, Signal.COMPUTED): S.SENDING,
    (S.PREFILL_LOCAL, Signal.COMPUTED): S.RUNNING,
    (S.RUNNING, Signal.FINISH): S.ENDED,
    (S.RUNNING, Signal.PREEMPT): S.ENDED,
    (S.QUEUED, Signal.ABORT): S.ENDED,
    (S.PREFILL, Signal.ABORT): S.CLOSING,
    (S.PREFILL_LOCAL, Signal.ABORT): S.ENDED,
    (S.SENDING, Signal.ABORT): S.CLOSING,
    (S.RECEIVING, Signal.ABORT): S.CLOSING,
    (S.RUNNING, Signal.ABORT): S.ENDED,
    (S.SENDING, Signal.SENT): S.ENDED,
    (S.CLOSING, Signal.SENT): S.ENDED,
    (S.RECEIVING, Signal.ARRIVED): S.RUNNING,
    (S.CLOSING, Signal.ARRIVED): S.ENDED,
    (S.PREFILL, Signal.FAIL): S.ENDED,
    (S.SENDING, Signal.FAIL): S.ENDED,
    (S.RECEIVING, Signal.FAIL): S.ENDED,
    (S.CLOSING, Signal.FAIL): S.ENDED,
    (S.CLOSING, Signal.CLOSED): S.ENDED,
}
"""External pairs that are not listed leave the state as it is."""


def next_state(state: S, signal: Signal) -> S:
    """Return the state after `signal`.

    Raises:
        InvariantBroken: An internal signal in a state that does not know it.
    """
    found = NEXT.get((state, signal))
    if found is not None:
        return found
    if signal in EXTERNAL:
        return state
    raise InvariantBroken(f"no transition from {state.value} on {signal.value}")
