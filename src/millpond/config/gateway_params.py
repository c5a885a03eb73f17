"""What an operator may set about the gateway and its tenants."""

from __future__ import annotations

from dataclasses import dataclass, field

from millpond.core.request import SloClass, StateRestore

MAX_EFFORT = 100


@dataclass(frozen=True, slots=True)
class EffortParams:
    """What the names of `reasoning_effort` mean to a model that takes numbers from 1 to 100.

    Source: v41_model.md section 13, the table of the official encoding since October 2026.
    """

    minimal: int = 50
    """`minimal`."""
    low: int = 50
    """`low`."""
    medium: int = 75
    """`medium`."""
    high: int = 75
    """`high`; also that of requests which ask for reasoning and for no effort."""
    xhigh: int = 75
    """`xhigh`."""
    max: int = 100
    """`max`."""


@dataclass(frozen=True, slots=True)
class GatewayParams:
    """The public HTTP port: address, limits, deadlines."""

    host: str = "127.0.0.1"
    """Address to bind. Loopback unless told otherwise."""
    port: int = 8000
    """TCP port; 0 takes any free one."""
    served_names: tuple[str, ...] = ()
    """Names under which the model is offered; empty: the model's own name."""
    max_body_bytes: int = 8 << 20
    """Largest request body; more is answered with 413."""
    body_deadline_s: float = 30.0
    """Time in which a request body must have arrived."""
    max_choices: int = 16
    """Largest `n` times number of prompts of one call."""
    max_logprobs: int = 20
    """Largest `top_logprobs`."""
    max_sequences: int = 1024
    """Sequences in flight over all tenants; more is answered with 503."""
    max_waiting_tokens: int = 2_000_000
    """Prompt tokens of sequences without a first token; more is answered with 503."""
    retry_after_s: int = 1
    """Value of Retry-After when the service as a whole has no room."""
    token_deadline_s: float = 300.0
    """Longest silence of a running sequence before it is cancelled with an error."""
    client_deadline_s: float = 60.0
    """Longest time a client may leave its stream unread before it is taken for gone."""
    match: bool = True
    """Look up what is kept of each prompt; without it everything is computed, and kept all the same."""
    match_deadline_ms: int = 200
    """Time that looking up a prompt may take; then it is computed, which takes longer by far. Usually it is a
    few ms."""
    ready_silence_s: float = 30.0
    """`/ready` turns red when work waits and no token was produced for so long."""
    drain_s: float = 30.0
    """Time that running streams get to finish after SIGTERM."""
    thinks_by_default: bool = True
    """Chats that do not say whether to reason first do so, if the model can."""
    efforts: EffortParams = field(default_factory=EffortParams)
    """Numbers behind the names of `reasoning_effort`."""


@dataclass(frozen=True, slots=True)
class TenantParams:
    """One holder of API keys. Without any, everybody is the one open tenant."""

    name: str
    """Name in metrics and logs."""
    key_hashes: tuple[str, ...]
    """SHA-256 of each of its keys, in hex."""
    is_enabled: bool = True
    """False: its keys are recognised and refused with 403."""
    slo: SloClass = SloClass.SILVER
    """Service class of its requests, and the best one it may ask for."""
    max_sequences: int = 0
    """Sequences in flight; 0: no limit of its own."""
    requests_per_minute: int = 0
    """Calls per minute; 0: no limit of its own."""
    tokens_per_minute: int = 0
    """Prompt and output tokens per minute; 0: no limit of its own."""
    state_restore: StateRestore = StateRestore.REPLAY
    """How the window state of a model that has one is brought back after a hit: `exact`, or `replay`, quicker
    and approximate. A request may say otherwise."""
