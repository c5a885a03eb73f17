"""HTTP around the routes: bodies within limits, JSON and error responses, request ids."""

from __future__ import annotations

import asyncio
import re
import secrets
from collections.abc import Awaitable, Callable
from typing import TypeVar

import msgspec
from starlette.concurrency import run_in_threadpool
from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from millpond.config.gateway_params import GatewayParams
from millpond.core.errors import BodyTooLarge, InvalidRequest, MillpondError
from millpond.serve.gateway import openai_schema as schema
from millpond.serve.gateway.answer import make_error, retry_after_of, status_of

INLINE_BODY_BYTES = 8 << 10
"""Larger bodies are parsed and tokenised in a thread, so that running streams do not stutter."""
CLIENT_GONE_STATUS = 499
REQUEST_ID = "millpond.request_id"
"""Key of the request's id in the ASGI scope."""
_REQUEST_ID = re.compile(r"[\x21-\x7e]{1,128}")

_json = msgspec.json.Encoder().encode
_Result = TypeVar("_Result")


class ClientGone(Exception):
    """The client closed its connection: nobody is left to answer."""


async def read_body(request: Request, params: GatewayParams) -> bytes:
    """Read a body within its limits.

    Raises:
        BodyTooLarge: By its announced or its real length.
        InvalidRequest: It did not arrive in time.
    """
    limit = params.max_body_bytes
    too_large = BodyTooLarge(f"the body is larger than {limit} bytes: send less", code="body_too_large")
    announced = request.headers.get("content-length", "")
    if announced.isdigit() and int(announced) > limit:
        raise too_large
    parts: list[bytes] = []
    size = 0
    try:
        async with asyncio.timeout(params.body_deadline_s):
            async for part in request.stream():
                size += len(part)
                if size > limit:
                    raise too_large
                parts.append(part)
    except ClientDisconnect:
        raise ClientGone from None
    except TimeoutError:
        raise InvalidRequest(
            f"the body did not arrive within {params.body_deadline_s:g} s", code="request_timeout"
        ) from None
    return b"".join(parts)


async def run_for_body(work: Callable[[], _Result], body: bytes) -> _Result:
    """Do the work that a body asks for, in a thread if the body is large."""
    return work() if len(body) <= INLINE_BODY_BYTES else await run_in_threadpool(work)


def json_response(content: object, status: int = 200) -> Response:
    """A JSON response."""
    return Response(_json(content), status_code=status, media_type="application/json")


def error_response(error: MillpondError) -> Response:
    """Status, body and Retry-After of an error."""
    response = json_response(make_error(error), status_of(error))
    retry_after_s = retry_after_of(error)
    if retry_after_s is not None:
        response.headers["retry-after"] = str(retry_after_s)
    if status_of(error) == 401:
        response.headers["www-authenticate"] = "Bearer"
    return response


async def send_response(send: Send, response: Response) -> None:
    """Send a whole response through raw ASGI."""
    await send(
        {"type": "http.response.start", "status": response.status_code, "headers": response.raw_headers}
    )
    await send({"type": "http.response.body", "body": bytes(response.body)})


def on_http_error(request: Request, error: HTTPException) -> Response:
    """404, 405 and the like in the shape of all other errors."""
    path = request.url.path
    if error.status_code == 404:
        message, code = f"there is no route {path}", "route_not_found"
    elif error.status_code == 405:
        message, code = f"{path} does not take {request.method}", "method_not_allowed"
    else:
        message, code = error.detail, f"http_{error.status_code}"
    body = schema.ErrorBody(message=message, type="invalid_request_error", param=None, code=code)
    response = json_response(schema.ErrorAnswer(error=body), error.status_code)
    for name, value in (error.headers or {}).items():
        response.headers[name] = value
    return response


def on_client_gone(_request: Request, _error: Exception) -> Response:
    """Answer for nobody: the client left before its request was complete."""
    return Response(status_code=CLIENT_GONE_STATUS)


def on_bug(_request: Request, _error: Exception) -> Response:
    """Answer for our own bugs; Starlette raises the exception again, for the log."""
    body = schema.ErrorBody(
        message="the gateway failed; the log says why", type="server_error", param=None, code="internal"
    )
    return json_response(schema.ErrorAnswer(error=body), 500)


class RequestIdMiddleware:
    """Echo X-Request-Id, or make one."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI entry."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = Headers(scope=scope).get("x-request-id", "")
        scope[REQUEST_ID] = request_id = given if _REQUEST_ID.fullmatch(given) else secrets.token_hex(16)

        def with_id(message: Message) -> Awaitable[None]:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)["x-request-id"] = request_id
            return send(message)

        await self._app(scope, receive, with_id)
