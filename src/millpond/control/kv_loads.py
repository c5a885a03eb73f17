"""Cached KV of one rank's sequences: ordered while they wait, swapped in when they are granted memory.

queued     the load is wanted, then ordered (`LoadStart`), then answered (`Loaded`)
refused    for lack of room or time, while others are before it: wanted again when its turn is near
           a sequence that was awaited for long is overtaken: those behind it do not wait for its load
admitted   `SwapIn` into the leading blocks; the prefill begins where `policies.resume` says
lost       the engine has forgotten the sequence: it begins anew with what is in place
computed   `LoadEnd`, as at any other end (`RankState.move`)
"""

from __future__ import annotations

from millpond.control.rank_state import WAITING, RankState
from millpond.core.blocks import Fit
from millpond.core.errors import InvariantBroken
from millpond.core.events import Loaded
from millpond.core.plan import LoadEnd, LoadStart, SwapIn
from millpond.core.request import StateRestore
from millpond.core.sequence import KvLoad, LoadState, Sequence, SequenceState
from millpond.core.units import BLOCK_TOKENS, MILLISECOND_NS
from millpond.policies.resume import Resumption, resume

OVERTAKE_NS = 50 * MILLISECOND_NS
"""A load of which nothing has come for so long does not hold up others any more: enough for what comes from
memory or a healthy disk, little beside a prompt that is computed."""

MAX_RETRIES = 2
"""A load is ordered once more when one sequence at most is before its own, and once more when none is."""
RETRIED = frozenset({"no_room", "deadline"})
"""Refusals that say nothing of the load, but of when it was ordered."""


class KvLoads:
    """Loads of one rank.

    Args:
        rank: Its sequences.
        max_ahead: Loads that may be ordered and whose sequences are not computed yet, >= 1.
    """

    def __init__(self, rank: RankState, max_ahead: int) -> None:
        self._rank = rank
        self._max_ahead = max_ahead

    def want(self, sequence: Sequence) -> None:
        """Note what the gateway found of a new sequence, if this rank can load it."""
        cached = sequence.spec.cached
        if cached is None or sequence.spec.kv is None or not self._rank.info.can_load:
            return
        num_tokens = min(cached.num_tokens, sequence.num_tokens - 1) // BLOCK_TOKENS * BLOCK_TOKENS
        if num_tokens > 0:
            sequence.load = KvLoad(num_tokens)
            sequence.num_cached_tokens = num_tokens

    @staticmethod
    def is_awaited(sequence: Sequence) -> bool:
        """Whether a sequence cannot begin because what it will have is not known."""
        return sequence.load is not None and sequence.load.state is not LoadState.ANSWERED

    @staticmethod
    def is_overtaken(sequence: Sequence) -> bool:
        """Whether others go before a sequence, since nothing comes of what it waits for. Ends when its load
        is answered, at the latest at the load's deadline.
        """
        return sequence.load is not None and sequence.load.is_overtaken

    @staticmethod
    def overtake(now_ns: int, sequence: Sequence) -> bool:
        """Whether those behind an awaited sequence go before it from now on: it was awaited for long."""
        load = sequence.load
        if load is None:
            return False
        if load.awaited_ns is None:
            load.awaited_ns = now_ns
        has_had_its_time = load.num_retries > 0 and load.state is LoadState.WANTED
        load.is_overtaken = has_had_its_time or now_ns - load.awaited_ns >= OVERTAKE_NS
        return load.is_overtaken

    def order(self, now_ns: int) -> None:
        """Order the loads of queued sequences, in their order, as far ahead as allowed."""
        rank = self._rank
        lines = rank.lines
        waiting = lines[SequenceState.QUEUED].values()
        loads = [s.load for state in WAITING for s in lines[state].values() if s.load is not None]
        num_open = sum(load.state is not LoadState.WANTED for load in loads)
        for sequence in waiting:
            load, spec = sequence.load, sequence.spec
            if load is None or load.state is not LoadState.WANTED:
                continue
            if load.num_retries and self._num_before(sequence) > MAX_RETRIES - load.num_retries:
                continue  # it would find no room again
            if num_open >= self._max_ahead:
                return
            if rank.memory.fits(sequence.num_tokens) is Fit.NEVER:
                continue  # will be refused when its turn comes
            assert spec.kv is not None and spec.cached is not None  # noqa: S101, PT018 - `want` saw them
            load.state = LoadState.ORDERED
            if load.awaited_ns is None:
                load.awaited_ns = now_ns
            num_open += 1
            rank.outbox.loads.append(
                LoadStart(
                    request_id=spec.request_id,
                    attempt=spec.attempt,
                    rank=rank.me.rank,
                    kv=spec.kv,
                    token_ids=sequence.token_ids[: load.num_tokens],
                    located=spec.cached.located,
                    wants_state=rank.info.has_state,
                )
            )

    def on_answer(self, sequence: Sequence, answer: Loaded) -> None:
        """Learn what will be there. Only the first answer to an order counts."""
        load = sequence.load
        if load is None or load.state is not LoadState.ORDERED:
            return
        is_early = load.num_retries < MAX_RETRIES and self._num_before(sequence) > 0
        if answer.refused in RETRIED and is_early:
            self._retry(sequence, load)
            return
        load.state = LoadState.ANSWERED
        load.is_overtaken = False
        self._shorten(sequence, load, answer.num_tokens)
        if 0 < answer.state_position <= load.num_tokens:
            load.state_position = answer.state_position
        load.is_approximate = answer.is_approximate
        self._rank.set_progress(sequence, num_computed_tokens=0, num_cached_tokens=load.num_tokens)

    def admit(self, sequence: Sequence) -> None:
        """Let a sequence that was just granted memory begin after what was loaded of it."""
        load = sequence.load
        if load is None:
            return
        num_loaded = self._begin(sequence, load)
        if num_loaded == 0:
            self._rank.end_load(sequence)
            return
        spec = sequence.spec
        table = tuple(sequence.kv.block_table[: num_loaded // BLOCK_TOKENS])
        self._rank.outbox.swaps.append(SwapIn(spec.request_id, spec.attempt, self._rank.me.rank, table))

    def lose(self, sequence: Sequence, num_tokens: int) -> None:
        """Begin anew with the `num_tokens` leading tokens that are in place.

        Raises:
            InvariantBroken: It did not begin with a load.
        """
        load = sequence.load
        if load is None or load.state is not LoadState.ANSWERED:
            raise InvariantBroken(f"{sequence.key} lost what it never loaded")
        # At least one block less each time, so that nothing begins anew for ever.
        self._shorten(sequence, load, min(num_tokens, load.num_tokens - BLOCK_TOKENS))
        if load.state_position > load.num_tokens:
            load.state_position = -1
        sequence.is_on_engine = False
        self._begin(sequence, load)

    def _retry(self, sequence: Sequence, load: KvLoad) -> None:
        spec = sequence.spec
        load.state = LoadState.WANTED
        load.num_retries += 1
        load.awaited_ns = None
        self._rank.outbox.unloads.append(LoadEnd(spec.request_id, spec.attempt, self._rank.me.rank))

    def _num_before(self, sequence: Sequence) -> int:
        """Sequences that came before one and are not computed yet."""
        lines = self._rank.lines
        return sum(other.arrival < sequence.arrival for state in WAITING for other in lines[state].values())

    @staticmethod
    def _shorten(sequence: Sequence, load: KvLoad, num_tokens: int) -> None:
        load.num_tokens = max(0, min(num_tokens, load.num_tokens)) // BLOCK_TOKENS * BLOCK_TOKENS
        sequence.num_stored_blocks = load.num_tokens // BLOCK_TOKENS

    def _inherits(self, sequence: Sequence, load: KvLoad, chosen: Resumption) -> bool:
        """Whether a sequence is approximate by what it begins with.

        What an exact request finds never is: it looks under names of its own. So a load that only may be
        approximate, since it comes from another host's memory, is not.
        """
        may_replay = self._rank.info.has_state and sequence.spec.state_restore is StateRestore.REPLAY
        return may_replay and load.is_approximate and chosen.num_loaded_tokens > 0

    def _begin(self, sequence: Sequence, load: KvLoad) -> int:
        """Set where the prefill begins. Returns the leading tokens whose blocks it needs."""
        chosen = resume(
            load.num_tokens,
            load.state_position,
            sequence.num_tokens,
            self._rank.info,
            sequence.spec.state_restore,
        )
        sequence.write_begin = chosen.write_begin
        sequence.restores_state = chosen.restores_state
        sequence.is_approximate = chosen.is_approximate or self._inherits(sequence, load, chosen)
        self._rank.set_progress(sequence, chosen.begin, chosen.begin)
        return chosen.num_loaded_tokens
