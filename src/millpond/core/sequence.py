"""A sequence: the growing token list that serves a request, and the resources it holds."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from enum import Enum

from millpond.core.ids import BlockId, DpRank, RankRef, SlotId
from millpond.core.plan import Assign
from millpond.core.request import FinishReason, RequestSpec, token_ids


class SequenceState(Enum):
    """Where a sequence stands on one group. The one transition table is in `control.request_fsm`."""

    QUEUED = "queued"
    """Assigned; holds nothing."""
    PREFILL = "prefill"
    """Holds blocks and slot; chunks are computed and streamed to the decode rank."""
    PREFILL_LOCAL = "prefill_local"
    """The same on a mixed group: nobody else touches the blocks."""
    SENDING = "sending"
    """Computed; the decode rank has not confirmed every byte yet."""
    RECEIVING = "receiving"
    """Decode side: holds blocks and slot; KV is on its way."""
    RUNNING = "running"
    """Decoding."""
    CLOSING = "closing"
    """Ended, but a transfer thread may still touch the blocks."""
    ENDED = "ended"
    """Holds nothing."""


@dataclass(slots=True)
class KvPart:
    """Memory that a sequence holds on its rank."""

    block_table: list[BlockId] = field(default_factory=list[BlockId])
    slot: SlotId | None = None
    staging: list[BlockId] = field(default_factory=list[BlockId])
    """Not empty: the table is of home blocks, as `SequenceStart.staging`."""

    @property
    def num_blocks(self) -> int:
        """Blocks that are no home blocks."""
        return len(self.staging or self.block_table)

    @property
    def num_home_blocks(self) -> int:
        """Blocks in host memory."""
        return len(self.block_table) if self.staging else 0


class LoadState(Enum):
    """How far the load of a sequence's cached KV has come."""

    WANTED = "wanted"
    """Not ordered yet."""
    ORDERED = "ordered"
    """No answer yet: nothing of it has come."""
    ANSWERED = "answered"
    """What will be there is known: all of its first row is."""


@dataclass(slots=True)
class KvLoad:
    """Cached KV that a sequence waits for or begins with. Ends when its prefill is computed."""

    num_tokens: int
    """Leading tokens: hoped for, then promised, less what was lost since."""
    state: LoadState = LoadState.WANTED
    state_position: int = -1
    """Leading tokens of which the state is at hand; -1: none."""
    is_approximate: bool = False
    """As `Loaded.is_approximate`."""
    awaited_ns: int | None = None
    """Since when nothing has come of it; None while it was not ordered and nobody waited for it."""
    num_retries: int = 0
    """How often there was no room or no time for it, and it is wanted again."""
    is_overtaken: bool = False
    """Others of the queue do not wait for its sequence."""


@dataclass(slots=True)
class Sequence:
    """One attempt at one request on one rank of one group.

    `token_ids` holds the prompt, then every output token known here. `num_computed_tokens` are the
    leading ones whose KV this rank holds, or will hold when a step needs it.
    """

    assign: Assign
    rank: DpRank
    arrival: int
    """Order of assignment in this group; ties end here."""
    token_ids: array[int] = field(default_factory=token_ids)
    num_computed_tokens: int = 0
    state: SequenceState = SequenceState.QUEUED
    kv: KvPart = field(default_factory=KvPart)
    draft_ids: tuple[int, ...] = ()
    """Guesses of the tokens after the newest one, for the next decode step."""
    is_on_engine: bool = False
    """The engine has been given a `SequenceStart`."""
    load: KvLoad | None = None
    """None: nothing was to be loaded, or it is over."""
    num_cached_tokens: int = 0
    """Leading tokens that this rank does not compute; while queued, as far as is known."""
    num_stored_blocks: int = 0
    """Leading blocks that others can load already."""
    write_begin: int = 0
    """As `PrefillChunk.write_begin`."""
    restores_state: bool = False
    """It begins with a snapshot of the state after its cached tokens."""
    is_approximate: bool = False
    """As `SequenceStart.is_approximate`."""

    @property
    def spec(self) -> RequestSpec:
        """The request."""
        return self.assign.spec

    @property
    def key(self) -> tuple[str, int]:
        """(request id, attempt)."""
        return (self.spec.request_id, self.spec.attempt)

    @property
    def num_tokens(self) -> int:
        """Known tokens."""
        return len(self.token_ids)

    @property
    def num_todo_tokens(self) -> int:
        """Known tokens that are still to be computed."""
        return len(self.token_ids) - max(self.num_computed_tokens, self.num_cached_tokens)

    @property
    def num_output_tokens(self) -> int:
        """Tokens after the client's prompt, those of earlier attempts included."""
        return len(self.token_ids) - self.spec.num_prompt_tokens

    @property
    def holds_memory(self) -> bool:
        """Whether blocks or a slot are owned."""
        return self.kv.slot is not None

    @property
    def decodes_elsewhere(self) -> bool:
        """Whether the KV must be handed to another rank."""
        return self.assign.prefill != self.assign.decode


def make_sequence(assign: Assign, me: RankRef, arrival: int) -> Sequence:
    """Make the sequence of an assignment on rank `me`."""
    tokens = token_ids(assign.spec.prompt_ids)
    tokens.extend(assign.spec.output_ids)
    return Sequence(assign=assign, rank=me.rank, arrival=arrival, token_ids=tokens)


def check_finish(sequence: Sequence, token_id: int, max_model_len: int) -> FinishReason | None:
    """Tell whether `token_id`, just appended, ends the sequence.

    Args:
        sequence: With `token_id` already counted.
        token_id: The newest token.
        max_model_len: Most tokens a sequence may have.
    """
    sampling = sequence.spec.sampling
    num_output = sequence.num_output_tokens
    if num_output > sampling.min_tokens and token_id in sampling.stop_token_ids:
        return FinishReason.STOP
    if num_output >= sampling.max_tokens or sequence.num_tokens >= max_model_len:
        return FinishReason.LENGTH
    return None
