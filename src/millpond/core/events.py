"""What happened. Frozen data that shells feed to state machines with `advance(now_ns, event)`.

Everything in `ALL` may cross a process border (interfaces A.5) and stand in a journal.
"""

from __future__ import annotations

from dataclasses import dataclass

from millpond.core.ids import DpRank, GatewayId, GroupId, RequestId
from millpond.core.plan import Assign, SequenceEnd, TokenOut
from millpond.core.request import RequestSpec
from millpond.core.units import BLOCK_TOKENS
from millpond.core.views import RankView

# --- at a group leader ------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Assigned:
    """The controller gave this group a request."""

    assign: Assign


@dataclass(frozen=True, slots=True)
class Aborted:
    """Drop a request; unknown ids and old attempts are ignored."""

    request_id: RequestId
    attempt: int


@dataclass(frozen=True, slots=True)
class SampledToken:
    """One token that a step produced."""

    request_id: RequestId
    position: int
    """Index of the token in its sequence, prompt included."""
    token_id: int
    logprob: float = 0.0
    """Natural log of its probability before temperature; 0 when not asked for."""
    top: tuple[tuple[int, float], ...] = ()
    """(token id, logprob) of the most likely tokens, best first, when asked for."""


@dataclass(frozen=True, slots=True)
class Drafts:
    """Guesses of the tokens after the newest one of a sequence."""

    request_id: RequestId
    token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class RankReport:
    """What one rank did in a step."""

    rank: DpRank
    sampled: tuple[SampledToken, ...] = ()
    """In plan order, those of one row by position; for `num_steps` > 1 step-major."""
    drafts: tuple[Drafts, ...] = ()
    """Of the rows, in plan order, if the plan asked for any."""
    lost: tuple[tuple[RequestId, int], ...] = ()
    """(request, leading tokens that are in place after all) whose load broke before the step had what it
    needed: what the step computed of these requests is void and nothing of it is reported, the engine has
    forgotten them, and no thread copies into their blocks any more. The load stays open for its state."""


@dataclass(frozen=True, slots=True)
class StepDone:
    """All ranks finished the step."""

    step: int
    reports: tuple[RankReport, ...]


@dataclass(frozen=True, slots=True)
class HandoffSent:
    """Prefill side: the receiver confirmed every byte of the sequence. The blocks may be freed."""

    request_id: RequestId
    attempt: int


@dataclass(frozen=True, slots=True)
class HandoffArrived:
    """Decode side: every byte is in place and verified, and the first token is known."""

    request_id: RequestId
    attempt: int
    first_token_id: int
    is_approximate: bool = False
    """As `SequenceStart.is_approximate`, of the sequence on the prefill side."""


@dataclass(frozen=True, slots=True)
class HandoffFailed:
    """Either side: the transfer will not complete. No thread touches the blocks any more."""

    request_id: RequestId
    attempt: int
    why: str


@dataclass(frozen=True, slots=True)
class HandoffClosed:
    """Answer to `HandoffClose`: no thread touches the blocks any more."""

    request_id: RequestId
    attempt: int


@dataclass(frozen=True, slots=True)
class Loaded:
    """Prefill side, answer to `LoadStart`: so much is there, or its first row is.

    Other rows may still be on their way: a swap-in waits for them. What does not come after all is told by
    `RankReport.lost`.
    """

    request_id: RequestId
    attempt: int
    num_tokens: int
    """Leading tokens, a multiple of 128, at most what was asked for; 0: nothing."""
    state_position: int = -1
    """Leading tokens of which a snapshot of the state is at hand, at most `num_tokens`; -1: none."""
    is_approximate: bool = False
    """Some of it was computed downstream of a bounded replay, or may have been."""
    refused: str = ""
    """Why there was no load at all: as `LoadRefused.reason`, `no_daemon`, `daemon_lost`. Empty if there was
    one, whatever came of it."""


@dataclass(frozen=True, slots=True)
class Tick:
    """Time passed with nothing else to say; lets expiries run while idle."""


# --- at the controller ------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class RankInfo:
    """Fixed facts of one rank."""

    rank: DpRank
    data_address: str
    """Where its handoff receiver listens; empty for prefill-only ranks."""
    num_blocks: int
    num_slots: int
    min_computed_tokens: int = 1
    """As `Engine.min_computed_tokens`."""
    max_drafts: int = 0
    """As `Engine.max_drafts`."""
    can_load: bool = False
    """Its host has a node daemon: it answers `LoadStart`, and keeps full blocks and state."""
    has_state: bool = False
    """The model has window state beside its blocks."""
    replay_tokens: int = 0
    """As `Engine.replay_tokens`."""
    num_home_blocks: int = 0
    """As `Engine.num_home_blocks`; used on prefill ranks only."""
    num_rows: int = 1
    """Rows of a block: so many home blocks does one staging block serve."""

    @property
    def max_tokens(self) -> int:
        """Most tokens of one sequence that its memory can hold."""
        num_streamed = min(self.num_home_blocks, self.num_blocks * self.num_rows)
        return max(self.num_blocks, num_streamed) * BLOCK_TOKENS


@dataclass(frozen=True, slots=True)
class GroupUp:
    """A group leader introduced itself, or re-introduced itself to a restarted controller."""

    group: GroupId
    incarnation: int
    """Larger after each restart of the group."""
    role: str
    """`prefill`, `decode` or `mixed`."""
    max_model_len: int
    max_num_seqs: int
    ranks: tuple[RankInfo, ...]
    running: tuple[tuple[RequestId, int], ...] = ()
    """(request, attempt) it holds; empty for a fresh process."""
    seen_assigns: int = 0
    """Assignments of this incarnation that the leader has received so far, from whichever controller."""


@dataclass(frozen=True, slots=True)
class Fetch:
    """A leader reports its ranks, what ended, and how many requests it can take now.

    The views replace the controller's picture of these ranks; assignments made since are added by the
    controller itself until the leader's `seen_assigns` counts them.
    """

    group: GroupId
    incarnation: int
    views: tuple[RankView, ...]
    room: int
    """Requests this group would pull now; 0 for decode-only groups, which pull by their views."""
    seen_assigns: int
    """Assignments of this incarnation that the leader has received so far."""
    started: tuple[tuple[RequestId, int], ...] = ()
    """(request, attempt) whose KV is complete on this decode group."""
    ended: tuple[SequenceEnd, ...] = ()


@dataclass(frozen=True, slots=True)
class GroupDown:
    """A group is gone: its process died, or its lease ran out."""

    group: GroupId
    incarnation: int
    why: str


@dataclass(frozen=True, slots=True)
class GatewayUp:
    """A gateway introduced itself."""

    gateway: GatewayId


@dataclass(frozen=True, slots=True)
class GatewayDown:
    """A gateway is gone: abort its requests."""

    gateway: GatewayId


@dataclass(frozen=True, slots=True)
class Submit:
    """A gateway asks for a sequence to be generated."""

    spec: RequestSpec


@dataclass(frozen=True, slots=True)
class Cancel:
    """A gateway no longer wants a request (client left, stop string found)."""

    request_id: RequestId


# --- worker to gateway ------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class TokensOut:
    """All tokens of one step for one gateway."""

    group: GroupId
    tokens: tuple[TokenOut, ...]


# --- controller to gateway --------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ServiceState:
    """What a gateway must know about the service. Sent on `GatewayUp` and when it changes."""

    controller_incarnation: int
    """Changes when the controller restarted: the gateway re-submits what it still waits for."""
    max_model_len: int
    """0 while no complete prefill and decode path is up."""
    is_ready: bool


# --- status: never fed to a state machine -------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Telemetry:
    """A group's own counters and gauges, leader to controller, about once a second while they change."""

    group: GroupId
    incarnation: int
    pid: int
    values: tuple[tuple[str, float], ...]
    """(metric name, value)."""


@dataclass(frozen=True, slots=True)
class StatusQuery:
    """Asks the controller for its status."""

    query_id: int


@dataclass(frozen=True, slots=True)
class StatusReport:
    """Answer to `StatusQuery`."""

    query_id: int
    json_text: str
    """Object with `controller`, `groups`, `queue`; meant for people and metrics, not for decisions."""


ALL: tuple[type, ...] = (
    Assigned,
    Aborted,
    RankReport,
    StepDone,
    HandoffSent,
    HandoffArrived,
    HandoffFailed,
    HandoffClosed,
    Loaded,
    Tick,
    RankInfo,
    GroupUp,
    Fetch,
    GroupDown,
    GatewayUp,
    GatewayDown,
    Submit,
    Cancel,
    TokensOut,
    ServiceState,
    Telemetry,
    StatusQuery,
    StatusReport,
)
