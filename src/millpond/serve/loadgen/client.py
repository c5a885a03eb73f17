"""One streamed request: what is sent, and when each kind of event came back."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any

import httpx

from millpond.core.errors import DataError
from millpond.serve.loadgen.inputs import LoadRequest


@dataclass(slots=True)
class RequestRecord:
    """What happened to one request. Instants are ns since the start of the run, -1 when it did not happen."""

    index: int
    sent_ns: int
    first_event_ns: int = -1
    """First SSE event of any kind, usually the role."""
    first_token_ns: int = -1
    """First event that stands for a token, even if its text is held back or empty."""
    first_text_ns: int = -1
    """First event with text."""
    last_token_ns: int = -1
    ended_ns: int = -1
    token_ns: list[int] = field(default_factory=list)
    """Instants of the token events."""
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_output_tokens: int = 0
    """As the server counts; the number of token events if it sends no usage."""
    finish_reason: str = ""
    text: str = ""
    """Of the answer, without reasoning and calls."""
    token_ids: list[int] = field(default_factory=list)
    """Of the answer, if the server tells them."""
    error: str = ""
    """Empty: completed."""


class StreamClient:
    """Sends requests to one OpenAI-compatible server."""

    def __init__(
        self, http: httpx.AsyncClient, model: str, now_ns: Callable[[], int], *, ignore_eos: bool
    ) -> None:
        """Args: `now_ns` tells the time since the start of the run."""
        self._http = http
        self._model = model
        self._ignore_eos = ignore_eos
        self.now_ns = now_ns

    async def send(self, index: int, request: LoadRequest) -> RequestRecord:
        """Send one request and read its stream to the end. Faults end up in the record."""
        path, body = self._body(request)
        return await self.stream(index, path, body)

    async def stream(self, index: int, path: str, body: dict[str, Any]) -> RequestRecord:
        """Post a body that asks for a stream and read that to its end. Faults end up in the record."""
        record = RequestRecord(index=index, sent_ns=self.now_ns())
        try:
            async with self._http.stream("POST", path, json=body) as response:
                if response.status_code != httpx.codes.OK:
                    record.error = f"HTTP {response.status_code}: {error_text(await response.aread())}"
                else:
                    await self._read(response, record)
        except (httpx.HTTPError, DataError) as error:
            record.error = f"{type(error).__name__}: {error}"
        record.ended_ns = self.now_ns()
        return record

    def _body(self, request: LoadRequest) -> tuple[str, dict[str, Any]]:
        body: dict[str, Any] = {
            "model": self._model,
            "max_tokens": request.max_tokens,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if self._ignore_eos:
            body["ignore_eos"] = True
        if isinstance(request.prompt, str):
            return "/v1/chat/completions", body | {"messages": [{"role": "user", "content": request.prompt}]}
        return "/v1/completions", body | {"prompt": list(request.prompt)}

    async def _read(self, response: httpx.Response, record: RequestRecord) -> None:
        async for event in sse_events(response):
            now_ns = self.now_ns()
            if record.first_event_ns < 0:
                record.first_event_ns = now_ns
            if "error" in event:
                record.error = str(event["error"].get("message", event["error"]))
                return
            if usage := event.get("usage"):
                record.num_prompt_tokens = usage["prompt_tokens"]
                record.num_output_tokens = usage["completion_tokens"]
                details = usage.get("prompt_tokens_details") or {}
                record.num_cached_tokens = details.get("cached_tokens") or 0
            for choice in event.get("choices", ()):
                _note_choice(record, choice, now_ns)
        record.num_output_tokens = record.num_output_tokens or len(record.token_ns)
        if not record.finish_reason:
            record.error = "the stream ended without a finish reason"


def _note_choice(record: RequestRecord, choice: dict[str, Any], now_ns: int) -> None:
    record.finish_reason = choice.get("finish_reason") or record.finish_reason
    record.token_ids += choice.get("token_ids") or ()
    delta = choice.get("delta")
    text = choice.get("text") if delta is None else _text_of(delta)
    record.text += (choice.get("text") if delta is None else delta.get("content")) or ""
    is_role = delta is not None and "role" in delta and not text
    if text is None or is_role or (not text and choice.get("finish_reason")):
        return
    record.token_ns.append(now_ns)
    record.last_token_ns = now_ns
    if record.first_token_ns < 0:
        record.first_token_ns = now_ns
    if text and record.first_text_ns < 0:
        record.first_text_ns = now_ns


def _text_of(delta: dict[str, Any]) -> str | None:
    """What a chat delta adds: answer, reasoning or calls are all generated tokens."""
    for name in ("content", "reasoning_content"):
        if delta.get(name) is not None:
            return delta[name]
    calls = delta.get("tool_calls")
    return "".join(call["function"].get("arguments") or "" for call in calls) if calls else None


async def sse_events(response: httpx.Response) -> AsyncIterator[dict[str, Any]]:
    """JSON objects of a server-sent event stream, until `[DONE]`.

    Raises:
        DataError: An event is no JSON object.
    """
    async for line in response.aiter_lines():
        if not line.startswith("data:"):
            continue
        data = line[5:].strip()
        if data == "[DONE]":
            return
        yield parse_event(data)


def parse_event(data: str) -> dict[str, Any]:
    """The JSON object of one event.

    Raises:
        DataError: It is none.
    """
    try:
        event = json.loads(data)
    except ValueError as error:
        raise DataError(
            f"the server sent an event that is no JSON: {data[:80]!r}", code="bench.event"
        ) from error
    if not isinstance(event, dict):
        raise DataError(f"the server sent an event that is no object: {data[:80]!r}", code="bench.event")
    return event


def error_text(body: bytes) -> str:
    """The message of an error body, or its beginning if it has another shape."""
    try:
        return str(json.loads(body)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return body[:200].decode("utf-8", "replace")
