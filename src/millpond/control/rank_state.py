"""All sequences of one rank, by state, with the memory they hold.

`move` is the only way to change a sequence's state, and it carries out what the new state demands:
ending gives memory back, closing asks the shell to stop the transfer threads first.
"""

from __future__ import annotations

from millpond.control.kv_allocator import KvAllocator
from millpond.control.outbox import Outbox
from millpond.control.request_fsm import Signal, next_state
from millpond.core.events import RankInfo
from millpond.core.ids import RankRef
from millpond.core.plan import HandoffClose, LoadEnd, SequenceEnd, SequenceStart, StateCopy
from millpond.core.request import FinishReason
from millpond.core.sequence import LoadState, Sequence, SequenceState
from millpond.core.units import BLOCK_TOKENS
from millpond.core.views import RankView

Key = tuple[str, int]

COMPUTING = (SequenceState.PREFILL, SequenceState.PREFILL_LOCAL)
WAITING = (SequenceState.QUEUED, *COMPUTING)
HOLDING = (
    *COMPUTING,
    SequenceState.SENDING,
    SequenceState.RECEIVING,
    SequenceState.RUNNING,
    SequenceState.CLOSING,
)


class RankState:
    """Sequences of one DP rank.

    Lines are insertion-ordered, so every walk over them has one order: that in which the sequences
    entered the state.
    """

    def __init__(
        self, me: RankRef, info: RankInfo, memory: KvAllocator, outbox: Outbox, max_model_len: int
    ) -> None:
        self.me = me
        self.info = info
        self.memory = memory
        self.outbox = outbox
        self.max_model_len = max_model_len
        self.lines: dict[SequenceState, dict[Key, Sequence]] = {
            state: {} for state in SequenceState if state is not SequenceState.ENDED
        }
        self._kv_tokens = 0
        self._queued_tokens = 0
        self._queued_kv_tokens = 0

    def add(self, sequence: Sequence) -> None:
        """Queue a new sequence."""
        self.lines[SequenceState.QUEUED][sequence.key] = sequence
        self._queued_tokens += sequence.num_todo_tokens
        self._queued_kv_tokens += sequence.num_tokens

    def find(self, key: Key) -> Sequence | None:
        """Return the sequence of (request, attempt), if this rank has it."""
        for line in self.lines.values():
            if key in line:
                return line[key]
        return None

    def grant(self, sequence: Sequence, num_tokens: int, signal: Signal) -> None:
        """Give memory for `num_tokens` and move the sequence on. `memory.fits` must have said OK."""
        self.memory.grant(sequence, num_tokens)
        self._kv_tokens += sequence.num_tokens
        self.move(sequence, signal)

    def start_of(self, sequence: Sequence, num_stored_blocks: int) -> SequenceStart:
        """Make the engine's introduction to a sequence and note that it happened."""
        slot = sequence.kv.slot
        assert slot is not None  # noqa: S101 - only sequences with memory are started
        sequence.is_on_engine = True
        return SequenceStart(
            request_id=sequence.spec.request_id,
            attempt=sequence.spec.attempt,
            token_ids=sequence.token_ids[:],
            num_prompt_tokens=sequence.spec.num_prompt_tokens,
            sampling=sequence.spec.sampling,
            block_table=tuple(sequence.kv.block_table),
            slot=slot,
            kv=sequence.spec.kv,
            num_stored_blocks=num_stored_blocks,
            is_approximate=sequence.is_approximate,
            staging=tuple(sequence.kv.staging),
        )

    def keeps_state(self, sequence: Sequence) -> bool:
        """Whether the state of a sequence is kept where it can be gone back to."""
        return self.info.has_state and self.info.can_load and sequence.spec.kv is not None

    @staticmethod
    def copy_of_state(sequence: Sequence, position: int, *, is_rolling: bool = False) -> StateCopy:
        """Order a copy of a sequence's state, from its slot or to it."""
        slot = sequence.kv.slot
        assert slot is not None  # noqa: S101 - only sequences with memory are computed
        return StateCopy(sequence.spec.request_id, position, slot, is_rolling)

    def set_progress(self, sequence: Sequence, num_computed_tokens: int, num_cached_tokens: int) -> None:
        """Note what of a prefill is done and what needs no doing."""
        self._queued_tokens -= sequence.num_todo_tokens
        sequence.num_computed_tokens = num_computed_tokens
        sequence.num_cached_tokens = num_cached_tokens
        self._queued_tokens += sequence.num_todo_tokens

    def end_load(self, sequence: Sequence) -> None:
        """Give back the load of a sequence, if it was ordered and is open."""
        load, sequence.load = sequence.load, None
        if load is not None and load.state is not LoadState.WANTED:
            spec = sequence.spec
            self.outbox.unloads.append(LoadEnd(spec.request_id, spec.attempt, self.me.rank))

    def append_token(self, sequence: Sequence, token_id: int) -> None:
        """Add a sampled token to a sequence that holds memory."""
        sequence.token_ids.append(token_id)
        self._kv_tokens += 1

    def move(self, sequence: Sequence, signal: Signal) -> SequenceState:
        """Apply a signal and do what the new state demands. Returns the new state."""
        old = sequence.state
        new = next_state(old, signal)
        if new is old:
            return new
        key = sequence.key
        del self.lines[old][key]
        if old is SequenceState.QUEUED:
            self._queued_kv_tokens -= sequence.num_tokens
        if old in WAITING and new not in WAITING:
            self._queued_tokens -= sequence.num_todo_tokens
            self.end_load(sequence)
        sequence.state = new
        if new in (SequenceState.CLOSING, SequenceState.ENDED) and sequence.is_on_engine:
            # At once, not when the memory is freed: a new attempt of the same request may start first.
            self.outbox.forget.setdefault(self.me.rank, []).append(sequence.spec.request_id)
            sequence.is_on_engine = False
        if new is SequenceState.ENDED:
            if sequence.holds_memory:
                self._kv_tokens -= sequence.num_tokens
            self.memory.release(sequence)
            return new
        if new is SequenceState.CLOSING:
            self.outbox.closes.append(
                HandoffClose(sequence.spec.request_id, sequence.spec.attempt, self.me.rank)
            )
        self.lines[new][key] = sequence
        return new

    def refuse(self, sequence: Sequence) -> None:
        """End a queued sequence that this rank can never hold."""
        memory = self.memory
        home = f" and {memory.num_home_blocks} home blocks" if memory.num_home_blocks else ""
        detail = (
            f"{sequence.num_tokens} tokens do not fit the {memory.num_blocks} blocks{home} of {self.me.group}"
        )
        self.end(sequence, Signal.FINISH, FinishReason.REFUSED, detail)

    def end(self, sequence: Sequence, signal: Signal, reason: FinishReason | None, detail: str = "") -> None:
        """Move to an end and tell the controller. None asks for re-submission.

        Nothing is told of a sequence that was ending already, or that the signal does not end.
        """
        before = sequence.state
        if self.move(sequence, signal) is not before and before is not SequenceState.CLOSING:
            self.outbox.ended.append(
                SequenceEnd(sequence.spec.request_id, sequence.spec.attempt, reason, detail)
            )

    @property
    def num_holding(self) -> int:
        """Sequences that hold memory."""
        return sum(len(self.lines[state]) for state in HOLDING)

    def view(self) -> RankView:
        """Return the picture that the controller's policies read."""
        return RankView(
            rank=self.me.rank,
            num_seqs=self.num_holding,
            num_queued=len(self.lines[SequenceState.QUEUED]),
            queued_tokens=self._queued_tokens,
            kv_tokens=self._kv_tokens,
            free_blocks=self.memory.num_free_blocks,
            free_slots=self.memory.num_free_slots,
            queued_kv_tokens=self._queued_kv_tokens,
        )

    def check(self) -> list[str]:
        """Return violated laws of this rank."""
        problems = self.memory.check()
        holders = [s for state in HOLDING for s in self.lines[state].values()]
        blocks = sum(s.kv.num_blocks for s in holders)
        home = sum(s.kv.num_home_blocks for s in holders)
        memory = self.memory
        if blocks + memory.num_free_blocks != memory.num_blocks:
            problems.append(f"{blocks} blocks held + {memory.num_free_blocks} free != {memory.num_blocks}")
        if home + memory.num_free_home_blocks != memory.num_home_blocks:
            problems.append(
                f"{home} home blocks held + {memory.num_free_home_blocks} free != {memory.num_home_blocks}"
            )
        if len(holders) + memory.num_free_slots != memory.num_slots:
            problems.append(f"{len(holders)} slots held + {memory.num_free_slots} free != {memory.num_slots}")
        problems += [f"{s.key} is {s.state.value} without memory" for s in holders if not s.holds_memory]
        problems += [
            f"{s.key} is {s.state.value} on line {state.value}"
            for state, line in self.lines.items()
            for s in line.values()
            if s.state is not state
        ]
        if sum(s.num_tokens for s in holders) != self._kv_tokens:
            problems.append(f"kv_tokens is {self._kv_tokens}, should be {sum(s.num_tokens for s in holders)}")
        waiting = [s for state in WAITING for s in self.lines[state].values()]
        queued = sum(s.num_todo_tokens for s in waiting)
        if queued != self._queued_tokens:
            problems.append(f"queued_tokens is {self._queued_tokens}, should be {queued}")
        to_hold = sum(s.num_tokens for s in self.lines[SequenceState.QUEUED].values())
        if to_hold != self._queued_kv_tokens:
            problems.append(f"queued_kv_tokens is {self._queued_kv_tokens}, should be {to_hold}")
        return problems + self._check_loads(holders)

    def _check_loads(self, holders: list[Sequence]) -> list[str]:
        """Return violated laws: a load is open while its sequence waits or is computed, and never below 0."""
        queued = list(self.lines[SequenceState.QUEUED].values())
        problems = [
            f"{s.key} is {s.state.value} with an open load"
            for s in holders
            if s.load is not None and (s.state not in COMPUTING or s.load.state is not LoadState.ANSWERED)
        ]
        problems += [
            f"{s.key} has a load of {s.load.num_tokens} of {s.num_tokens} tokens"
            for s in (*queued, *holders)
            if s.load is not None
            and (s.load.num_tokens % BLOCK_TOKENS or not 0 <= s.load.num_tokens < s.num_tokens)
        ]
        problems += [
            f"{s.key} begins at {s.num_cached_tokens} of {s.num_tokens} tokens"
            for s in (*queued, *holders)
            if not 0 <= s.num_cached_tokens < s.num_tokens
        ]
        return problems
