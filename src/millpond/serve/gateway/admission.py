"""Is there room for one more call: the tenant's own limits (429) and the service's (503), at once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from millpond.config.gateway_params import GatewayParams
from millpond.core.errors import InvalidRequest, OverloadError, RateLimited
from millpond.core.units import SECOND_NS, ceil_div
from millpond.serve.gateway.tenants import Tenant

MINUTE_NS = 60 * SECOND_NS


@dataclass(slots=True)
class RateBucket:
    """A limit per minute that may be overdrawn once: what is taken is known only afterwards."""

    per_minute: int
    """0: no limit."""
    level: float
    now_ns: int

    def wait_s(self, now_ns: int) -> int:
        """Whole seconds until something may be taken; 0 for now."""
        if self.per_minute == 0:
            return 0
        gained = (now_ns - self.now_ns) * self.per_minute / MINUTE_NS
        self.level = min(float(self.per_minute), self.level + gained)
        self.now_ns = now_ns
        # A call needs a whole unit. Until then tell how long that takes.
        missing = 1.0 - self.level
        return 0 if missing <= 0 else max(1, ceil_div(int(missing * MINUTE_NS / self.per_minute), SECOND_NS))

    def take(self, amount: int) -> None:
        """Take, possibly below zero."""
        if self.per_minute:
            self.level -= amount


@dataclass(slots=True)
class _Use:
    """What one tenant uses now."""

    calls: RateBucket
    tokens: RateBucket
    num_sequences: int = 0


@dataclass(slots=True)
class Permit:
    """Room held by one call. Leaving the `with` block gives it back."""

    admission: Admission
    use: _Use
    num_sequences: int
    num_output_tokens: int = field(default=0)
    """Set by the call before it ends; charged to the tenant's rate."""

    def __enter__(self) -> Permit:
        return self

    def __exit__(self, *_exc: object) -> None:
        self.admission.num_sequences -= self.num_sequences
        self.use.num_sequences -= self.num_sequences
        self.use.tokens.take(self.num_output_tokens)


class Admission:
    """Sequences in flight, by tenant and in all.

    Args:
        params: Limits of the service.
        now_ns: Monotonic clock.
        waiting_tokens: Prompt tokens that wait for their first token now.
    """

    def __init__(
        self, params: GatewayParams, now_ns: Callable[[], int], waiting_tokens: Callable[[], int]
    ) -> None:
        self._params = params
        self._now_ns = now_ns
        self._waiting_tokens = waiting_tokens
        self._uses: dict[str, _Use] = {}
        self.num_sequences = 0
        """In flight over all tenants."""

    def admit(self, tenant: Tenant, num_sequences: int, num_prompt_tokens: int) -> Permit:
        """Take room for a call, or say no at once and change nothing.

        Raises:
            RateLimited: A limit of the tenant.
            OverloadError: A limit of the service.
        """
        use = self._use(tenant)
        self._check_tenant(tenant, use, num_sequences)
        params = self._params
        if self.num_sequences + num_sequences > params.max_sequences:
            raise OverloadError(
                f"{self.num_sequences} sequences are in flight, the limit is {params.max_sequences}",
                code="service.sequences",
                retry_after_s=params.retry_after_s,
            )
        waiting = self._waiting_tokens()
        # An empty queue takes any prompt: the limit bounds waiting, not the length of one request.
        if waiting and waiting + num_prompt_tokens > params.max_waiting_tokens:
            raise OverloadError(
                f"{waiting} prompt tokens are waiting, the limit is {params.max_waiting_tokens}",
                code="service.waiting_tokens",
                retry_after_s=params.retry_after_s,
            )
        use.calls.take(1)
        use.tokens.take(num_prompt_tokens)
        use.num_sequences += num_sequences
        self.num_sequences += num_sequences
        return Permit(self, use, num_sequences)

    def check_early(self, tenant: Tenant) -> None:
        """Refuse before any work on the body when even the smallest call would be refused.

        Raises:
            RateLimited: A limit of the tenant.
            OverloadError: A limit of the service.
        """
        self._check_tenant(tenant, self._use(tenant), 1)
        if self.num_sequences + 1 > self._params.max_sequences:
            raise OverloadError(
                f"{self.num_sequences} sequences are in flight, the limit is {self._params.max_sequences}",
                code="service.sequences",
                retry_after_s=self._params.retry_after_s,
            )

    def _use(self, tenant: Tenant) -> _Use:
        use = self._uses.get(tenant.name)
        if use is None:
            now_ns = self._now_ns()
            calls, tokens = tenant.params.requests_per_minute, tenant.params.tokens_per_minute
            use = _Use(RateBucket(calls, calls, now_ns), RateBucket(tokens, tokens, now_ns))
            self._uses[tenant.name] = use
        return use

    def _check_tenant(self, tenant: Tenant, use: _Use, num_sequences: int) -> None:
        limit = tenant.params.max_sequences
        if limit and num_sequences > limit:
            # Not 429: it would never be let through.
            raise InvalidRequest(
                f"`n` makes {num_sequences} sequences, this key may have {limit} in flight; ask for fewer",
                code="tenant.sequences",
                param="n",
            )
        if limit and use.num_sequences + num_sequences > limit:
            raise RateLimited(
                f"this key has {use.num_sequences} sequences in flight, its limit is {limit}",
                code="tenant.sequences",
                retry_after_s=1,
            )
        now_ns = self._now_ns()
        if wait_s := use.calls.wait_s(now_ns):
            raise RateLimited(
                f"this key may make {use.calls.per_minute} calls a minute",
                code="tenant.requests_per_minute",
                retry_after_s=wait_s,
            )
        if wait_s := use.tokens.wait_s(now_ns):
            raise RateLimited(
                f"this key may use {use.tokens.per_minute} tokens a minute",
                code="tenant.tokens_per_minute",
                retry_after_s=wait_s,
            )
