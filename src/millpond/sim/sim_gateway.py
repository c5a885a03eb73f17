"""A gateway without HTTP: owns the token logs and submits again what was lost."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from millpond.core.errors import InvariantBroken
from millpond.core.events import Cancel, GatewayUp, ServiceState, Submit, TokensOut
from millpond.core.hashing import HashChain
from millpond.core.ids import GatewayId, RequestId
from millpond.core.plan import RequestEnded, Resubmit, TokenOut
from millpond.core.request import CachedPrefix, FinishReason, RequestSpec, TokenIds, token_ids
from millpond.core.units import BLOCK_TOKENS, SECOND_NS
from millpond.sim.kernel import Kernel
from millpond.sim.kv_pool import KvPool
from millpond.sim.network import Network
from millpond.sim.sim_engine import token_at

HEARTBEAT_NS = SECOND_NS


@dataclass(slots=True)
class Stream:
    """What one client sees."""

    spec: RequestSpec
    submitted_ns: int
    token_times_ns: list[int] = field(default_factory=list[int])
    reason: FinishReason | None = None
    detail: str = ""
    num_cached_tokens: int = 0
    """Leading tokens that the first attempt did not compute."""
    ahead: dict[int, tuple[int, TokenOut]] = field(default_factory=dict[int, tuple[int, TokenOut]])

    @property
    def next_position(self) -> int:
        """Position of the next token that the client waits for."""
        return self.spec.num_prompt_tokens + len(self.token_times_ns)

    @property
    def output_ids(self) -> TokenIds:
        """Every token that the client has."""
        sampling, num_prompt = self.spec.sampling, self.spec.num_prompt_tokens
        return token_ids(token_at(sampling, num_prompt + i) for i in range(len(self.token_times_ns)))

    def resubmission(self, attempt: int) -> RequestSpec:
        """The request with every token that the client has."""
        return replace(self.spec, attempt=attempt, output_ids=self.output_ids)


class SimGateway:
    """One gateway.

    Tokens bypass the kernel's heap: they wait in a heap of their own until the gateway looks, since they
    change nothing but its logs. So several decode steps can pass between two events of the kernel.
    """

    def __init__(
        self,
        name: GatewayId,
        order: int,
        kernel: Kernel,
        network: Network,
        on_end: Callable[[Stream], None],
        pool: KvPool | None,
    ) -> None:
        self.name = name
        self.streams: dict[RequestId, Stream] = {}
        """Open ones."""
        self.num_resubmitted = 0
        self._order = order
        self._kernel = kernel
        self._network = network
        self._on_end = on_end
        self._pool = pool
        self._incarnation: int | None = None
        self._tokens: list[tuple[int, int, TokenOut]] = []
        self._num_tokens = 0
        network.attach(name, order, self._on_message)
        self._beat()

    def submit(self, spec: RequestSpec) -> Stream:
        """A client asks."""
        stream = self.streams[spec.request_id] = Stream(self._match(spec), self._kernel.now_ns)
        self._send(Submit(stream.spec))
        return stream

    def _match(self, spec: RequestSpec) -> RequestSpec:
        """Find out what of a prompt is kept."""
        if self._pool is None:
            return spec
        kv = self._pool.identity(spec.state_restore)
        chain = HashChain(kv.root)
        chain.extend(spec.prompt_ids)
        num_blocks = min(self._pool.num_leading(chain.digests), (spec.num_known_tokens - 1) // BLOCK_TOKENS)
        return replace(spec, kv=kv, cached=CachedPrefix(num_blocks * BLOCK_TOKENS) if num_blocks else None)

    def cancel(self, request_id: RequestId) -> None:
        """The client left."""
        self.settle()
        stream = self.streams.get(request_id)
        if stream is not None:
            self._end(stream, FinishReason.ABORTED, "cancelled")
            self._send(Cancel(request_id))

    def put_tokens(self, arrival_ns: int, message: TokensOut) -> None:
        """Tokens are on their way."""
        for token in message.tokens:
            self._num_tokens += 1
            heapq.heappush(self._tokens, (arrival_ns, self._num_tokens, token))
            if token.finish is not None:
                self._kernel.at(arrival_ns, self._order, self.settle)

    def settle(self) -> None:
        """Take in the tokens that have arrived by now."""
        while self._tokens and self._tokens[0][0] <= self._kernel.now_ns:
            arrival_ns, _, token = heapq.heappop(self._tokens)
            self._on_token(arrival_ns, token)

    def _on_token(self, arrival_ns: int, token: TokenOut) -> None:
        stream = self.streams.get(token.request_id)
        if stream is None or token.attempt != stream.spec.attempt or token.position < stream.next_position:
            return
        if token.token_id != token_at(stream.spec.sampling, token.position):
            raise InvariantBroken(f"wrong token for {token.request_id} at {token.position}")
        if token.attempt == 0 and token.position == stream.spec.num_prompt_tokens:
            stream.num_cached_tokens = token.num_cached_tokens
        stream.ahead.setdefault(token.position, (arrival_ns, token))
        while (found := stream.ahead.pop(stream.next_position, None)) is not None:
            stream.token_times_ns.append(arrival_ns)
            if found[1].finish is not None:
                self._end(stream, found[1].finish, "")

    def _on_message(self, message: object) -> None:
        self.settle()
        if isinstance(message, ServiceState):
            before, self._incarnation = self._incarnation, message.controller_incarnation
            if before is not None and before != self._incarnation:
                for stream in self.streams.values():
                    self._send(Submit(stream.resubmission(stream.spec.attempt)))
        elif isinstance(message, Resubmit | RequestEnded):
            stream = self.streams.get(message.request_id)
            if stream is None or stream.spec.attempt != message.attempt:
                return
            if isinstance(message, RequestEnded):
                self._end(stream, message.reason, message.detail)
            else:
                self.num_resubmitted += 1
                stream.ahead.clear()
                stream.spec = stream.resubmission(message.attempt + 1)
                self._send(Submit(stream.spec))

    def _end(self, stream: Stream, reason: FinishReason, detail: str) -> None:
        del self.streams[stream.spec.request_id]
        stream.reason, stream.detail = reason, detail
        self._on_end(stream)

    def _send(self, message: object) -> None:
        self._network.send(self.name, "controller", message)

    def _beat(self) -> None:
        if self._network.is_attached(self.name):
            self._send(GatewayUp(self.name))
            self._kernel.after(HEARTBEAT_NS, self._order, self._beat)
