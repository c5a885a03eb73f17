"""One gateway: its parts, and the life of its calls. HTTP is in `app.py` and `generate.py`."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import msgspec

from millpond.config.gateway_params import GatewayParams
from millpond.core.errors import MillpondError, OverloadError
from millpond.core.ids import GatewayId, RequestId
from millpond.core.request import CachedPrefix, KvIdentity, RequestSpec
from millpond.core.units import SECOND_NS
from millpond.serve.gateway.admission import Admission
from millpond.serve.gateway.bad_input import decode_body
from millpond.serve.gateway.call import Call
from millpond.serve.gateway.kv_names import KvNames
from millpond.serve.gateway.link import ControllerLink
from millpond.serve.gateway.matcher import PrefixMatcher
from millpond.serve.gateway.metrics import GatewayMetrics
from millpond.serve.gateway.openai_schema import ChatRequest, CompletionRequest
from millpond.serve.gateway.served_model import ServedModel
from millpond.serve.gateway.tenants import Tenant, Tenants
from millpond.serve.gateway.validate import PreparedCall, prepare_chat, prepare_completion


@dataclass(frozen=True, slots=True)
class Clocks:
    """Time as the gateway reads it."""

    monotonic_ns: Callable[[], int]
    wall_s: Callable[[], int]
    """Seconds since 1970."""


class Gateway:
    """One gateway: its parts, and what all calls share.

    Args:
        gateway: This gateway's name.
        reply_to: Endpoint of its token socket.
        params: Limits.
        model: The served model.
        link: Way to the service.
        tenants: Who may call.
        clocks: Time.
        kv: Names of the KV; None: nothing is kept.
        matcher: Looks up what is kept; None: nothing is looked up.
    """

    def __init__(
        self,
        *,
        gateway: GatewayId,
        reply_to: str,
        params: GatewayParams,
        model: ServedModel,
        link: ControllerLink,
        tenants: Tenants,
        clocks: Clocks,
        kv: KvNames | None = None,
        matcher: PrefixMatcher | None = None,
    ) -> None:
        self.gateway = gateway
        self.reply_to = reply_to
        self.params = params
        self.model = model
        self.link = link
        self.tenants = tenants
        self.clocks = clocks
        self._kv = kv
        self._matcher = matcher
        self.admission = Admission(params, clocks.monotonic_ns, lambda: link.num_waiting_tokens)
        self.metrics = GatewayMetrics(link, model.names[0])
        self.is_draining = False
        self.idle = asyncio.Event()
        """Set while no call is being answered."""
        self.idle.set()
        self._calls: set[Call] = set()
        self._rematches: set[asyncio.Task[None]] = set()
        if matcher is not None:
            link.on_new_attempt = self._look_up_again
        self.started_s = clocks.wall_s()
        self._chat = msgspec.json.Decoder(ChatRequest)
        self._completion = msgspec.json.Decoder(CompletionRequest)

    @property
    def num_calls(self) -> int:
        """Calls that are being answered."""
        return len(self._calls)

    def start_draining(self) -> None:
        """Refuse new calls from now on; running ones go on."""
        self.is_draining = True

    def abort_calls(self, error: MillpondError) -> None:
        """End all running calls with an error."""
        for call in tuple(self._calls):
            call.fail(error)

    def end_stalled_calls(self) -> None:
        """End calls whose workers or clients have been silent too long. To be called about once a second."""
        now_ns = self.clocks.monotonic_ns()
        for call in self._calls:
            call.end_if_stalled(
                now_ns,
                token_deadline_ns=int(self.params.token_deadline_s * SECOND_NS),
                client_deadline_ns=int(self.params.client_deadline_s * SECOND_NS),
            )

    def check_open(self) -> None:
        """Refuse a call that cannot be served now, before any work.

        Raises:
            OverloadError: Draining, or no complete path through the workers.
        """
        retry_after_s = self.params.retry_after_s
        if self.is_draining:
            raise OverloadError(
                "the service is shutting down", code="service.draining", retry_after_s=retry_after_s
            )
        if not self.link.takes_calls:
            raise OverloadError("no workers are ready", code="service.not_ready", retry_after_s=retry_after_s)

    def prepare(self, body: bytes, *, is_chat: bool) -> PreparedCall:
        """Parse and check a body. May take long for a long prompt; safe in a thread."""
        self.check_open()
        seed = secrets.randbelow(2**63)
        max_model_len = self.link.max_model_len
        if is_chat:
            chat = decode_body(self._chat, body)
            return prepare_chat(chat, self.model, self.params, max_model_len=max_model_len, seed=seed)
        completion = decode_body(self._completion, body)
        return prepare_completion(completion, self.model, self.params, max_model_len=max_model_len, seed=seed)

    def make_specs(self, call_id: str, prepared: PreparedCall, tenant: Tenant) -> list[RequestSpec]:
        """One spec per sequence; choices of one prompt differ in `sampling.choice`."""
        slo = tenant.pick_slo(prepared.service_tier)
        tenant.check_priority(prepared.priority)
        restore = prepared.state_restore or tenant.params.state_restore
        kv = self._kv.identity(tenant, prepared.cache_salt, restore) if self._kv is not None else None
        return [
            RequestSpec(
                request_id=RequestId(f"{call_id}-{prompt * prepared.num_choices + choice}"),
                attempt=0,
                gateway=self.gateway,
                reply_to=self.reply_to,
                prompt_ids=ids,
                sampling=replace(prepared.sampling, choice=choice),
                tenant=tenant.name,
                slo=slo,
                priority=prepared.priority,
                kv=kv,
                state_restore=restore,
            )
            for prompt, ids in enumerate(prepared.prompts)
            for choice in range(prepared.num_choices)
        ]

    async def find_cached(self, specs: list[RequestSpec], num_choices: int) -> list[RequestSpec]:
        """Look up what is kept of the prompts, each once.

        Args:
            specs: Of one call, the choices of a prompt one after the other.
            num_choices: Of each prompt.

        Returns:
            The specs, with what was found.
        """
        matcher = self._matcher
        if matcher is None:
            return specs
        questions = [matcher.match(spec.kv, spec.prompt_ids) for spec in specs[::num_choices] if spec.kv]
        results = await asyncio.gather(*questions)
        for result in results:
            self.metrics.on_matched(result)
        return [
            replace(spec, cached=results[index // num_choices].cached) for index, spec in enumerate(specs)
        ]

    def _look_up_again(self, spec: RequestSpec) -> None:
        """Look up a sequence anew before its next attempt: the last one may have left more, or less."""
        if self._matcher is None or spec.kv is None:
            self.link.submit_again(spec)
            return
        task = asyncio.get_running_loop().create_task(self._submit_again(self._matcher, spec.kv, spec))
        self._rematches.add(task)
        task.add_done_callback(self._rematches.discard)

    async def _submit_again(self, matcher: PrefixMatcher, kv: KvIdentity, spec: RequestSpec) -> None:
        try:
            result = await matcher.match(kv, spec.prompt_ids + spec.output_ids)
            self.metrics.on_matched(result)
            if result.is_whole or _num_found(result.cached) > _num_found(spec.cached):
                spec = replace(spec, cached=result.cached)
        finally:
            self.link.submit_again(spec)

    @contextmanager
    def submitted(self, specs: list[RequestSpec]) -> Iterator[Call]:
        """Submit sequences; whatever happens inside, none is left running after.

        Raises:
            OverloadError: The service takes none now, or no longer.
        """
        self.check_open()
        with self.link.open(specs) as call:
            self._calls.add(call)
            self.idle.clear()
            try:
                yield call
            finally:
                self._calls.discard(call)
                if not self._calls:
                    self.idle.set()


def _num_found(cached: CachedPrefix | None) -> int:
    return cached.num_tokens if cached is not None else 0
