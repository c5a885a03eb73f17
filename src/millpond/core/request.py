"""What a client asked for, in the words of the core. Never changes once made."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, TypeAlias

from millpond.core.ids import GatewayId, RequestId

if TYPE_CHECKING:
    TokenIds: TypeAlias = "array[int]"
else:
    TokenIds = array  # array.array cannot be subscripted at run time before Python 3.12
"""Token container of the core: `array('i')`, int32 (interfaces A.1)."""


def token_ids(ids: object = ()) -> TokenIds:
    """Make the token container of the core."""
    return array("i", ids)  # type: ignore[arg-type]


class SloClass(StrEnum):
    """Service class of a request."""

    GOLD = "gold"
    SILVER = "silver"
    BRONZE = "bronze"


class FinishReason(StrEnum):
    """Why a sequence ended. Every accepted request ends with exactly one of these."""

    STOP = "stop"
    """End-of-sequence token, stop token id or stop string."""
    LENGTH = "length"
    """max_tokens or the model's context is used up."""
    ABORTED = "aborted"
    """The client left or cancelled."""
    REFUSED = "refused"
    """It can never fit: the gateway answers with a 4xx."""
    FAILED = "failed"
    """The service gave up after its retries: the gateway answers with one typed error."""


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How tokens are chosen.

    Source: interfaces A.10. Neutral values switch a rule off.
    """

    max_tokens: int
    """Output tokens at most, counted from the end of the prompt, >= 1."""
    seed: int
    """Key of the Gumbel field, 0 ... 2**63-1. Requests without a seed get one from the gateway."""
    choice: int = 0
    """Index among the n choices of one call; part of the key."""
    temperature: float = 1.0
    """>= 0; 0 is greedy."""
    top_k: int = 0
    """Keep the k largest logits; 0 keeps all."""
    top_p: float = 1.0
    """Keep the smallest set of tokens whose probability reaches top_p, in (0, 1]."""
    min_p: float = 0.0
    """Drop tokens below min_p times the largest probability, in [0, 1]."""
    repetition_penalty: float = 1.0
    """Divide positive and multiply negative logits of tokens seen in prompt or output, > 0."""
    presence_penalty: float = 0.0
    """Subtracted once from logits of tokens seen in the output."""
    frequency_penalty: float = 0.0
    """Subtracted per occurrence in the output."""
    logit_bias: tuple[tuple[int, float], ...] = ()
    """(token id, bias) pairs, added to the logits."""
    stop_token_ids: tuple[int, ...] = ()
    """Ids that end the sequence; includes end-of-sequence unless ignored. The ending id is reported."""
    min_tokens: int = 0
    """No stop token may be sampled before this many output tokens."""
    num_logprobs: int = -1
    """-1: none; k >= 0: logprob of the chosen token and of the k most likely ones."""


class StateRestore(StrEnum):
    """How the window state of a model that has one is brought back after a hit."""

    EXACT = "exact"
    """From a snapshot, and what lies behind it is computed; without one, everything is."""
    REPLAY = "replay"
    """From a snapshot close to the end of the hit, else by a bounded replay, which is approximate: what is
    computed after it is flagged so."""


@dataclass(frozen=True, slots=True)
class KvIdentity:
    """Whose KV this is: with it and the tokens, any process can name the blocks of a sequence."""

    root: bytes
    """32-byte digest before the first block (`core.hashing.root_digest`); holds model, layout and salts."""
    tenant: int
    """Number of the tenant in the pool, u32."""


@dataclass(frozen=True, slots=True)
class CachedPrefix:
    """What the gateway found of a prompt before it was scheduled. A hint until it is loaded."""

    num_tokens: int
    """Leading tokens, a multiple of 128, less than the known ones: at least one is always computed."""
    located: bytes = b""
    """Where: a packed `store.net.messages.Matched`, for the node daemon; empty: it asks itself."""


@dataclass(frozen=True, slots=True)
class RequestSpec:
    """One sequence to generate, as the gateway submits it.

    `output_ids` are the tokens the client already has: empty at first, the gateway's token log after
    a loss. A worker continues at position `len(prompt_ids) + len(output_ids)`.
    """

    request_id: RequestId
    attempt: int
    """0 at first; one more after each loss. Messages of an older attempt are void."""
    gateway: GatewayId
    reply_to: str
    """ZeroMQ endpoint of the gateway's token socket."""
    prompt_ids: TokenIds
    """int32."""
    sampling: SamplingParams
    output_ids: TokenIds = field(default_factory=token_ids)
    """int32."""
    tenant: str = ""
    slo: SloClass = SloClass.SILVER
    priority: int = 0
    """Lower runs earlier among requests of the same class."""
    branch_points: tuple[int, ...] = ()
    """Multiples of 128 where other prompts may part from this one: the state is kept there too, if the
    model has any. Others mean nothing."""
    kv: KvIdentity | None = None
    """None: nothing of it is looked up or kept."""
    cached: CachedPrefix | None = None
    state_restore: StateRestore = StateRestore.REPLAY

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens of the client's prompt."""
        return len(self.prompt_ids)

    @property
    def num_known_tokens(self) -> int:
        """Tokens whose KV a prefill has to compute: prompt and delivered output."""
        return len(self.prompt_ids) + len(self.output_ids)

    @property
    def num_uncached_tokens(self) -> int:
        """Known tokens that the gateway found no KV of."""
        return self.num_known_tokens - (self.cached.num_tokens if self.cached is not None else 0)

    @property
    def max_total_tokens(self) -> int:
        """Most tokens this sequence can ever have."""
        return len(self.prompt_ids) + self.sampling.max_tokens
