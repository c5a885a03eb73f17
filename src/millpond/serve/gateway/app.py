"""The routes. Everything that is decided is decided elsewhere; this turns HTTP into calls and back."""

from __future__ import annotations

from array import array
from typing import Any

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp

import millpond
from millpond.core.errors import InvalidRequest, MillpondError
from millpond.serve.gateway import openai_schema as schema
from millpond.serve.gateway.bad_input import decode_body, refuse
from millpond.serve.gateway.conversation import make_conversation
from millpond.serve.gateway.gateway import Gateway
from millpond.serve.gateway.generate import GenerateEndpoint
from millpond.serve.gateway.http_io import (
    ClientGone,
    RequestIdMiddleware,
    error_response,
    json_response,
    on_bug,
    on_client_gone,
    on_http_error,
    read_body,
    run_for_body,
)
from millpond.serve.gateway.metrics import CONTENT_TYPE
from millpond.serve.gateway.openapi import make_document
from millpond.serve.gateway.service_metrics import render_service
from millpond.serve.gateway.tenants import Tenant
from millpond.serve.gateway.thinking import pick_effort
from millpond.serve.gateway.validate import check_model

REPORT_DEADLINE_S = 1.0
"""Time the controller gets to answer a scrape; without it the gateway's own metrics are given."""


def make_app(gateway: Gateway) -> ASGIApp:
    """Make the ASGI app of one gateway."""
    small = _SmallRoutes(gateway)
    routes = [
        Route("/v1/chat/completions", GenerateEndpoint(gateway, is_chat=True), methods=["POST"]),
        Route("/v1/completions", GenerateEndpoint(gateway, is_chat=False), methods=["POST"]),
        Route("/v1/models", small.models, methods=["GET"]),
        Route("/v1/models/{name:path}", small.model, methods=["GET"]),
        Route("/tokenize", small.tokenize, methods=["POST"]),
        Route("/detokenize", small.detokenize, methods=["POST"]),
        Route("/health", small.health, methods=["GET"]),
        Route("/ready", small.ready, methods=["GET"]),
        Route("/metrics", small.metrics, methods=["GET"]),
        Route("/version", small.version, methods=["GET"]),
        Route("/openapi.json", small.openapi, methods=["GET"]),
    ]

    def on_error(_request: Request, error: MillpondError) -> Response:
        gateway.metrics.on_refused(error.code)
        return error_response(error)

    def on_too_deep(request: Request, _error: RecursionError) -> Response:
        error = InvalidRequest("the body is nested too deeply: flatten it", code="nested_too_deeply")
        return on_error(request, error)

    handlers: dict[Any, Any] = {
        MillpondError: on_error,
        RecursionError: on_too_deep,
        ClientGone: on_client_gone,
        HTTPException: on_http_error,
        Exception: on_bug,
    }
    app = Starlette(routes=routes, exception_handlers=handlers)
    app.router.redirect_slashes = False  # a path we do not have is 404, in the shape of every other error
    return RequestIdMiddleware(app)


class _SmallRoutes:
    """All routes but the two that generate."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway
        self._tokenize = msgspec.json.Decoder(schema.TokenizeRequest)
        self._detokenize = msgspec.json.Decoder(schema.DetokenizeRequest)

    async def models(self, request: Request) -> Response:
        self._tenant(request)
        return json_response(schema.ModelList(data=[self._card(name) for name in self._gateway.model.names]))

    async def model(self, request: Request) -> Response:
        self._tenant(request)
        name = request.path_params["name"]
        check_model(name, self._gateway.model)
        return json_response(self._card(name))

    def _card(self, name: str) -> schema.ModelCard:
        return schema.ModelCard(
            id=name, created=self._gateway.started_s, max_model_len=self._gateway.link.max_model_len
        )

    async def tokenize(self, request: Request) -> Response:
        self._tenant(request)
        body = await read_body(request, self._gateway.params)

        def make_ids() -> array[int]:
            asked = decode_body(self._tokenize, body)
            if asked.model is not None:
                check_model(asked.model, self._gateway.model)
            if (asked.prompt is None) == (asked.messages is None):
                refuse("prompt", asked.prompt, "give either `prompt` or `messages`")
            if asked.messages is not None:
                model = self._gateway.model
                conversation = make_conversation(
                    asked.messages,
                    asked.tools,
                    model,
                    reasoning_effort=pick_effort(asked, self._gateway.params, can_think=model.can_think),
                    add_generation_prompt=asked.add_generation_prompt,
                )
                return model.encode_chat(conversation).ids
            return self._gateway.model.encode_text(asked.prompt or "")

        ids = (await run_for_body(make_ids, body)).tolist()
        answer = schema.TokenizeAnswer(
            tokens=ids, count=len(ids), max_model_len=self._gateway.link.max_model_len
        )
        return json_response(answer)

    async def detokenize(self, request: Request) -> Response:
        self._tenant(request)
        body = await read_body(request, self._gateway.params)

        def make_text() -> str:
            asked = decode_body(self._detokenize, body)
            if asked.model is not None:
                check_model(asked.model, self._gateway.model)
            for token_id in asked.tokens:
                if not 0 <= token_id < self._gateway.model.vocab_size:
                    refuse("tokens", token_id, f"token ids go from 0 to {self._gateway.model.vocab_size - 1}")
            return self._gateway.model.decode(asked.tokens)

        return json_response(schema.DetokenizeAnswer(prompt=await run_for_body(make_text, body)))

    async def health(self, _request: Request) -> Response:
        return json_response({"status": "ok"})

    async def ready(self, _request: Request) -> Response:
        silence_s = self._gateway.link.silence_s()
        if self._gateway.is_draining:
            why = "draining"
        elif not self._gateway.link.is_ready:
            why = "no workers are ready"
        elif silence_s > self._gateway.params.ready_silence_s:
            why = f"work waits and no token was produced for {silence_s:.0f} s"
        else:
            return json_response({"status": "ready"})
        return json_response({"status": "not ready", "why": why}, status=503)

    async def metrics(self, _request: Request) -> Response:
        report = await self._gateway.link.fetch_report(REPORT_DEADLINE_S)
        metrics = self._gateway.metrics
        service = render_service(report, self._gateway.gateway, metrics.num_cached_tokens)
        return Response(metrics.render() + service, media_type=CONTENT_TYPE)

    async def version(self, _request: Request) -> Response:
        return json_response({"version": millpond.__version__})

    async def openapi(self, _request: Request) -> Response:
        return json_response(make_document(millpond.__version__))

    def _tenant(self, request: Request) -> Tenant:
        return self._gateway.tenants.authenticate(request.headers.get("authorization"))
