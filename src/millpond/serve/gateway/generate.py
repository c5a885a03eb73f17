"""The two routes that generate: one accepted call from its body to the last byte of its answer."""

from __future__ import annotations

import asyncio
import secrets

import structlog
from starlette.requests import Request
from starlette.types import Receive, Scope, Send

import millpond
from millpond.core.errors import MillpondError
from millpond.core.units import SECOND_NS
from millpond.serve.gateway.admission import Permit
from millpond.serve.gateway.answer import AnswerHead, make_answer, make_usage
from millpond.serve.gateway.assembly import Assembly, Piece
from millpond.serve.gateway.call import Call
from millpond.serve.gateway.gateway import Gateway
from millpond.serve.gateway.http_io import (
    REQUEST_ID,
    ClientGone,
    error_response,
    json_response,
    read_body,
    run_for_body,
    send_response,
)
from millpond.serve.gateway.openai_schema import Usage
from millpond.serve.gateway.stream import error_event, make_format
from millpond.serve.gateway.validate import PreparedCall

_CHAT_ID = "chatcmpl-"

log = structlog.get_logger(__name__)


class GenerateEndpoint:
    """The two routes that generate. Raw ASGI: a token costs one `send`, a disconnect is seen at once."""

    def __init__(self, gateway: Gateway, *, is_chat: bool) -> None:
        self._gateway = gateway
        self._is_chat = is_chat

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI entry."""
        gateway = self._gateway
        request = Request(scope, receive)
        tenant = gateway.tenants.authenticate(request.headers.get("authorization"))
        gateway.check_open()
        gateway.admission.check_early(tenant)
        arrived_ns = gateway.clocks.monotonic_ns()
        body = await read_body(request, gateway.params)
        prepared = await run_for_body(lambda: gateway.prepare(body, is_chat=self._is_chat), body)
        call_id = (_CHAT_ID if self._is_chat else "cmpl-") + secrets.token_hex(12)
        specs = gateway.make_specs(call_id, prepared, tenant)
        specs = await gateway.find_cached(specs, prepared.num_choices)
        # Nothing waits between admission and submission: what is waiting would not be known yet.
        with (
            gateway.admission.admit(tenant, len(specs), prepared.num_prompt_tokens) as permit,
            gateway.submitted(specs) as call,
        ):
            gateway.metrics.on_accepted(prepared.num_prompt_tokens)
            head = AnswerHead(
                id=call_id,
                created=gateway.clocks.wall_s(),
                model=prepared.model,
                system_fingerprint=f"millpond-{millpond.__version__}",
            )
            run = _Run(gateway, prepared, call, permit, head, arrived_ns, scope[REQUEST_ID])
            # The watcher is a task of its own, once per call; it ends the call, not this task.
            async with asyncio.TaskGroup() as tasks:
                watcher = tasks.create_task(_watch(receive, call))
                try:
                    await run.answer(send)
                finally:
                    watcher.cancel()


class _Run:
    """One accepted call until its answer is complete."""

    def __init__(
        self,
        gateway: Gateway,
        prepared: PreparedCall,
        call: Call,
        permit: Permit,
        head: AnswerHead,
        arrived_ns: int,
        request_id: str,
    ) -> None:
        self._gateway = gateway
        self._prepared = prepared
        self._call = call
        self._permit = permit
        self._head = head
        self._arrived_ns = arrived_ns
        self._request_id = request_id
        self._first_ns: int | None = None
        self._assembly = Assembly(prepared, gateway.model, call, head.id.removeprefix(_CHAT_ID))
        self._reason = "aborted"

    async def answer(self, send: Send) -> None:
        """Send the whole answer, or the error that ended it; nothing to a client that left."""
        try:
            async with asyncio.timeout(None) as self._call.limit:
                if self._prepared.is_stream:
                    await self._stream(send)
                else:
                    await self._whole(send)
        except (ClientGone, TimeoutError):
            # It left, or reads nothing and holds its place in every queue: returning closes its connection.
            self._reason = "aborted"
        except MillpondError as error:
            self._reason = error.code
            await send_response(send, error_response(error))
        finally:
            self._book()

    async def _next(self) -> list[Piece]:
        events = await self._call.next_events()
        if self._first_ns is None:
            self._first_ns = self._gateway.clocks.monotonic_ns()
        pieces = self._assembly.take(events)
        for piece in pieces:
            if piece.finish is not None:
                self._reason = piece.finish
        return pieces

    async def _whole(self, send: Send) -> None:
        pieces: list[Piece] = []
        while not self._assembly.is_done:
            pieces += await self._next()
        answer = make_answer(self._head, self._prepared, self._gateway.model, pieces, self._usage())
        await send_response(send, json_response(answer))

    async def _stream(self, send: Send) -> None:
        # Headers wait for the first event, so that a refusal by a worker still gets its own status.
        pieces = await self._next()
        form = make_format(self._head, self._prepared, self._gateway.model)
        await send({"type": "http.response.start", "status": 200, "headers": _STREAM_HEADERS})
        assembly = self._assembly
        try:
            while True:
                data = form.events(pieces)
                if data:
                    await send({"type": "http.response.body", "body": data, "more_body": True})
                if assembly.is_done:
                    break
                pieces = await self._next()
            data = form.end(self._usage())
        except MillpondError as error:
            self._reason = error.code
            data = error_event(error)
        await send({"type": "http.response.body", "body": data, "more_body": False})

    def _usage(self) -> Usage:
        assembly = self._assembly
        return make_usage(
            self._prepared,
            num_cached_tokens=assembly.num_cached_tokens,
            num_output_tokens=assembly.num_output_tokens,
            num_reasoning_tokens=assembly.num_reasoning_tokens,
        )

    def _book(self) -> None:
        num_tokens = self._assembly.num_output_tokens
        self._permit.num_output_tokens = num_tokens
        first_ns = self._first_ns if num_tokens else None
        ttft_s = None if first_ns is None else (first_ns - self._arrived_ns) / SECOND_NS
        latency_s = (self._gateway.clocks.monotonic_ns() - self._arrived_ns) / SECOND_NS
        num_cached_tokens = self._assembly.num_cached_tokens
        self._gateway.metrics.on_prompts(self._assembly.num_started_tokens, num_cached_tokens)
        self._gateway.metrics.on_ended(
            self._reason,
            ttft_s=ttft_s,
            latency_s=latency_s,
            num_tokens_per_choice=num_tokens / self._prepared.num_sequences,
        )
        log.info(
            "request.ended",
            call_id=self._head.id,
            request_id=self._request_id,
            reason=self._reason,
            num_prompt_tokens=self._prepared.num_prompt_tokens,
            num_cached_tokens=num_cached_tokens,
            num_output_tokens=num_tokens,
            ttft_s=ttft_s,
            latency_s=latency_s,
        )


_STREAM_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]


async def _watch(receive: Receive, call: Call) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    call.fail(ClientGone())
