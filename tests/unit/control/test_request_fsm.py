"""The whole grid of (state, signal), written out once more, independently of the table."""

from __future__ import annotations

import pytest

from millpond.control.request_fsm import EXTERNAL, NEXT, Signal, next_state
from millpond.core.errors import InvariantBroken
from millpond.core.sequence import SequenceState

# `.` stays, `!` is our own bug, anything else is the next state.
GRID = """
state         admit   admit_local   expect    computed finish preempt abort   sent  arrived fail  closed
queued        prefill prefill_local receiving !        ended  !       ended   .     .       .     .
prefill       !       !             !         sending  !      !       closing .     .       ended .
prefill_local !       !             !         running  !      !       ended   .     .       .     .
sending       !       !             !         !        !      !       closing ended .       ended .
receiving     !       !             !         !        !      !       closing .     running ended .
running       !       !             !         !        ended  ended   ended   .     .       .     .
closing       !       !             !         !        !      !       .       ended ended   ended ended
ended         !       !             !         !        !      !       .       .     .       .     .
"""

HEAD, *ROWS = [line.split() for line in GRID.strip().splitlines()]
CASES = [(row[0], signal, cell) for row in ROWS for signal, cell in zip(HEAD[1:], row[1:], strict=True)]


def test_grid_is_complete():
    assert {row[0] for row in ROWS} == {state.value for state in SequenceState}
    assert set(HEAD[1:]) == {signal.value for signal in Signal}


@pytest.mark.parametrize(("state", "signal", "cell"), CASES, ids=[f"{a}-{b}" for a, b, _ in CASES])
def test_transition(state, signal, cell):
    old, signal = SequenceState(state), Signal(signal)
    if cell == "!":
        with pytest.raises(InvariantBroken):
            next_state(old, signal)
    else:
        assert next_state(old, signal) is (old if cell == "." else SequenceState(cell))


def test_external_signals_are_total():
    for state in SequenceState:
        for signal in EXTERNAL:
            next_state(state, signal)


def test_nothing_leaves_the_end():
    assert not [pair for pair in NEXT if pair[0] is SequenceState.ENDED]


def test_memory_that_threads_touch_is_freed_only_after_they_confirm():
    """From a state with transfer threads, only their own word leads to the end."""
    touched = {
        SequenceState.PREFILL,
        SequenceState.SENDING,
        SequenceState.RECEIVING,
        SequenceState.CLOSING,
    }
    words = {Signal.SENT, Signal.ARRIVED, Signal.FAIL, Signal.CLOSED}
    freeing = {signal for (old, signal), new in NEXT.items() if old in touched and new is SequenceState.ENDED}
    assert freeing <= words
