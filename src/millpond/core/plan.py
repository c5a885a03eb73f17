"""What to do next. Frozen data that state machines return and shells carry out.

Everything in `ALL` may cross a process border (interfaces A.5) and stand in a journal.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from millpond.core.ids import BlockId, DpRank, GroupId, RankRef, RequestId, SlotId
from millpond.core.request import FinishReason, KvIdentity, RequestSpec, SamplingParams, TokenIds


class StepKind(StrEnum):
    """What every rank of a group does in one step."""

    PREFILL = "prefill"
    DECODE = "decode"


class ReadPath(StrEnum):
    """Side whose storage NIC loads the hit KV."""

    PREFILL_SIDE = "prefill_side"
    DECODE_SIDE = "decode_side"


@dataclass(frozen=True, slots=True)
class SequenceStart:
    """A sequence the engine has not seen yet. Precedes its first chunk or row."""

    request_id: RequestId
    attempt: int
    token_ids: TokenIds
    """Known tokens, int32: prompt, then output so far (after a handoff the first sampled token too)."""
    num_prompt_tokens: int
    """Leading tokens that are the client's prompt; penalties tell prompt from output by it."""
    sampling: SamplingParams
    block_table: tuple[BlockId, ...]
    slot: SlotId
    kv: KvIdentity | None = None
    """Under which its full blocks are kept for others; None: they are not."""
    num_stored_blocks: int = 0
    """Leading blocks that are kept already, or that another rank keeps."""
    is_approximate: bool = False
    """It begins with a bounded replay, or with KV or a state from downstream of one: what is computed of it
    is flagged where it is kept."""
    staging: tuple[BlockId, ...] = ()
    """Not empty: the sequence is streamed. Its table is of home blocks, and while a layer is computed, its
    row of the table's i-th block is at place i of these blocks, each of which has a place for every row."""


@dataclass(frozen=True, slots=True)
class PrefillChunk:
    """Compute tokens `[begin, end)` of a sequence. The table already covers `end`."""

    request_id: RequestId
    begin: int
    end: int
    is_last: bool
    """The chunk ends at the last known token: its logits are sampled."""
    write_begin: int = 0
    """Block KV of tokens below exists and is not written again. Above the `begin` of a sequence's first
    chunk, this asks for a bounded replay: windows are rebuilt from `begin` on and see nothing below it.
    Otherwise what lies below `begin` is all there, state slot included.
    """


@dataclass(frozen=True, slots=True)
class DecodeRow:
    """Compute one token of a sequence, and guesses of those after it, and sample the next.

    Guesses count as far as each is the token that is sampled in its place; one more token is sampled than
    were right.
    """

    request_id: RequestId
    position: int
    """Position of the input token = known tokens - 1. The sampled token gets position + 1."""
    new_blocks: tuple[BlockId, ...]
    """Blocks to append to the sequence's table before the step."""
    draft_ids: tuple[int, ...] = ()
    """Guesses for position + 1 and so on; the table covers them."""


@dataclass(frozen=True, slots=True)
class StateCopy:
    """Copy a sequence's state between its slot and a snapshot."""

    request_id: RequestId
    position: int
    """Leading tokens that the state stands for. The slot may have gone on by as many as a ring looks back."""
    slot: SlotId
    is_rolling: bool = False
    """Kept while decoding: takes the place of the sequence's older rolling one."""


@dataclass(frozen=True, slots=True)
class RankPlan:
    """One rank's part of one step. All may be empty: an idle rank of a busy group.

    Order of execution: `forget`, `start`, `restore`, chunks or rows, `keep`.
    """

    rank: DpRank
    forget: tuple[RequestId, ...] = ()
    """Sequences whose blocks and slot were given back; unknown ids are ignored."""
    start: tuple[SequenceStart, ...] = ()
    chunks: tuple[PrefillChunk, ...] = ()
    rows: tuple[DecodeRow, ...] = ()
    restore: tuple[StateCopy, ...] = ()
    """From the snapshot that came with the load to the slot, before a sequence's first chunk, which begins
    at `position`."""
    keep: tuple[StateCopy, ...] = ()
    """From the slot to a snapshot, once the step is computed and if it came so far: not with a lost load, nor
    with drafts that were wrong."""
    num_drafts: int = 0
    """Guesses to make for each row's sequence after the step, for a later one; at most as many as the
    engine can."""


@dataclass(frozen=True, slots=True)
class HandoffSend:
    """Prefill side: stream this sequence's KV to the decode rank while it is computed."""

    request_id: RequestId
    attempt: int
    rank: DpRank
    """Local prefill rank that holds the KV."""
    to: RankRef
    address: str
    """Data address of the receiving rank."""
    num_tokens: int
    block_table: tuple[BlockId, ...]
    slot: SlotId


@dataclass(frozen=True, slots=True)
class HandoffReceive:
    """Decode side: blocks and slot are allocated; accept this sequence's KV into them."""

    request_id: RequestId
    attempt: int
    rank: DpRank
    num_tokens: int
    block_table: tuple[BlockId, ...]
    slot: SlotId


@dataclass(frozen=True, slots=True)
class HandoffClose:
    """Stop sending or receiving for this request. Answered by `HandoffClosed`, after which no thread
    touches the blocks; only then are they freed.
    """

    request_id: RequestId
    attempt: int
    rank: DpRank


@dataclass(frozen=True, slots=True)
class HandoffFinish:
    """Prefill side: the last chunk is computed and its token sampled; send what is left and finish."""

    request_id: RequestId
    attempt: int
    rank: DpRank
    first_token_id: int
    is_approximate: bool = False
    """As `SequenceStart.is_approximate`: the decode rank must flag what it keeps."""


@dataclass(frozen=True, slots=True)
class LoadStart:
    """Let the host's node daemon bring the KV of leading tokens into its arena. Answered by `Loaded`.

    Orders of one rank are carried out first come, first served, as far as the arena has room, so that those
    of waiting requests are a prefetch.
    """

    request_id: RequestId
    attempt: int
    rank: DpRank
    kv: KvIdentity
    token_ids: TokenIds
    """The leading tokens, int32, a multiple of 128."""
    located: bytes
    """As `CachedPrefix.located`."""
    wants_state: bool
    """Bring a snapshot of the window state too: the last one at or before the end of the load."""


@dataclass(frozen=True, slots=True)
class SwapIn:
    """Copy loaded rows into these blocks, in row order, as they come. The engine waits for a row when it
    needs it.
    """

    request_id: RequestId
    attempt: int
    rank: DpRank
    block_table: tuple[BlockId, ...]
    """Of the leading blocks that are loaded."""


@dataclass(frozen=True, slots=True)
class LoadEnd:
    """The load is not needed any more. Once this is carried out, no thread writes to the blocks. Unknown
    ones are ignored.
    """

    request_id: RequestId
    attempt: int
    rank: DpRank


@dataclass(frozen=True, slots=True)
class TokenOut:
    """One generated token, worker to gateway. The gateway drops positions it already has and messages
    of older attempts.
    """

    request_id: RequestId
    attempt: int
    position: int
    """Index of the token in its sequence, prompt included."""
    token_id: int
    logprob: float = 0.0
    top: tuple[tuple[int, float], ...] = ()
    finish: FinishReason | None = None
    """Set on the last token."""
    num_cached_tokens: int = 0
    """On the first token of an attempt: leading tokens that were loaded and not computed."""


@dataclass(frozen=True, slots=True)
class SequenceEnd:
    """A sequence ended on this group. `reason` None means it must be re-submitted (preempted, or its
    handoff failed).
    """

    request_id: RequestId
    attempt: int
    reason: FinishReason | None
    detail: str = ""


@dataclass(frozen=True, slots=True)
class GroupPlan:
    """One step of a DP group: the same kind on every rank.

    Besides the step itself it carries what the shell must start or report first: tokens of the step
    before, handoffs, endings. `ranks` is empty when there is nothing to compute; then no `StepDone` is
    due, and `step` is the number that the next real step will have.
    """

    step: int
    kind: StepKind
    num_steps: int
    ranks: tuple[RankPlan, ...]
    sends: tuple[HandoffSend, ...] = ()
    receives: tuple[HandoffReceive, ...] = ()
    finishes: tuple[HandoffFinish, ...] = ()
    closes: tuple[HandoffClose, ...] = ()
    outputs: tuple[tuple[str, TokenOut], ...] = ()
    """(token socket of the gateway, token)."""
    started: tuple[tuple[RequestId, int], ...] = ()
    """(request, attempt) whose KV is complete on this decode rank: prefill is no longer needed."""
    ended: tuple[SequenceEnd, ...] = ()
    unloads: tuple[LoadEnd, ...] = ()
    """Carried out before everything else: the blocks may be somebody else's in this very plan."""
    loads: tuple[LoadStart, ...] = ()
    swaps: tuple[SwapIn, ...] = ()


@dataclass(frozen=True, slots=True)
class Assign:
    """Controller to leader: this request is yours to prefill, decode or both.

    The prefill leader gets one with `prefill` in its group, the decode leader one with `decode` in
    its group; a mixed group gets a single one.
    """

    spec: RequestSpec
    prefill: RankRef
    decode: RankRef
    decode_address: str
    """Data address of the decode rank."""
    read_path: ReadPath = ReadPath.PREFILL_SIDE


@dataclass(frozen=True, slots=True)
class AbortOn:
    """Controller to leader: drop this request and free everything it holds."""

    group: GroupId
    request_id: RequestId
    attempt: int


@dataclass(frozen=True, slots=True)
class Resubmit:
    """Controller to gateway: this attempt is lost; submit the next one with the token log."""

    request_id: RequestId
    attempt: int
    why: str


@dataclass(frozen=True, slots=True)
class RequestEnded:
    """Controller to gateway: terminal answer for a request that no worker will answer."""

    request_id: RequestId
    attempt: int
    reason: FinishReason
    detail: str


@dataclass(frozen=True, slots=True)
class Introduce:
    """Controller to leader: I do not know you (I restarted); send `GroupUp`."""

    group: GroupId


@dataclass(frozen=True, slots=True)
class RestartGroup:
    """Controller to supervisor: this group is silent; kill it and start it anew."""

    group: GroupId
    incarnation: int
    why: str


@dataclass(frozen=True, slots=True)
class DispatchPlan:
    """What the controller sends next."""

    assigns: tuple[Assign, ...] = ()
    aborts: tuple[AbortOn, ...] = ()
    resubmits: tuple[tuple[str, Resubmit], ...] = ()
    """(gateway id, message)."""
    ended: tuple[tuple[str, RequestEnded], ...] = ()
    """(gateway id, message)."""
    introduce: tuple[Introduce, ...] = ()
    restarts: tuple[RestartGroup, ...] = ()


ALL: tuple[type, ...] = (
    RankPlan,
    HandoffSend,
    HandoffReceive,
    HandoffClose,
    HandoffFinish,
    LoadStart,
    SwapIn,
    LoadEnd,
    TokenOut,
    SequenceEnd,
    GroupPlan,
    Assign,
    AbortOn,
    Resubmit,
    RequestEnded,
    Introduce,
    RestartGroup,
    DispatchPlan,
)
