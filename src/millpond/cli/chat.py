"""`millpond chat`: talk to a running service."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any

import typer

from millpond.cli.options import DEFAULT_URL, ApiKey, ModelName, ServerUrl, auth_headers

if TYPE_CHECKING:
    import httpx

Message = dict[str, str]


def chat(
    url: ServerUrl = DEFAULT_URL,
    model: ModelName = None,
    api_key: ApiKey = None,
    system: Annotated[str | None, typer.Option(help="System message.")] = None,
    once: Annotated[
        str | None, typer.Option(help="Send this one message, print the answer, and end.")
    ] = None,
    max_tokens: Annotated[int | None, typer.Option(min=1, help="Longest answer.")] = None,
    temperature: Annotated[float | None, typer.Option(min=0, help="0 is greedy.")] = None,
    seed: Annotated[int | None, typer.Option(min=0, help="Makes answers repeatable.")] = None,
) -> None:
    """Hold a conversation; answers appear as they are made. End with Ctrl-D, forget with /new."""
    import httpx

    from millpond.serve.loadgen.server import ServerInfo

    timeout = httpx.Timeout(10, read=600)
    with httpx.Client(base_url=url, headers=auth_headers(api_key), timeout=timeout) as http:
        optional = {"max_tokens": max_tokens, "temperature": temperature, "seed": seed}
        fields = {name: value for name, value in optional.items() if value is not None}
        fields["model"] = ServerInfo(http, model).model
        start = [{"role": "system", "content": system}] if system else []
        if once is not None:
            _answer(http, fields, [*start, {"role": "user", "content": once}])
            return
        typer.secho(f"{fields['model']} at {url}. Ctrl-D ends, /new starts over.", dim=True)
        _converse(http, fields, start)


def _converse(http: httpx.Client, fields: dict[str, Any], start: list[Message]) -> None:
    messages = list(start)
    while (text := _read_line()) is not None:
        if text == "/new":
            messages = list(start)
        elif text:
            messages.append({"role": "user", "content": text})
            messages.append({"role": "assistant", "content": _answer(http, fields, messages)})


def _read_line() -> str | None:
    try:
        return input("> ").strip()
    except (EOFError, KeyboardInterrupt):
        typer.echo()
        return None


def _answer(http: httpx.Client, fields: dict[str, Any], messages: list[Message]) -> str:
    parts: list[str] = []
    was_reasoning = False
    for reasoning, part in stream_answer(http, {**fields, "messages": messages}):
        if reasoning:
            typer.secho(reasoning, nl=False, dim=True)
        elif part:
            typer.echo("\n" + part if was_reasoning else part, nl=False)
            parts.append(part)
        was_reasoning = bool(reasoning) or (was_reasoning and not part)
    typer.echo()
    return "".join(parts)


def stream_answer(http: httpx.Client, body: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Send a chat request and yield (reasoning, text of the answer) as they come; one of them is empty.

    Raises:
        DataError: The service refused it or gave up.
        ServerUnreachable: Nobody answers, or the connection broke.
    """
    import httpx

    from millpond.core.errors import DataError
    from millpond.serve.loadgen.client import error_text, parse_event
    from millpond.serve.loadgen.server import ServerUnreachable

    try:
        with http.stream("POST", "/v1/chat/completions", json={**body, "stream": True}) as response:
            if response.status_code != httpx.codes.OK:
                raise DataError(error_text(response.read()), code="chat.refused")
            for line in response.iter_lines():
                if not line.startswith("data:") or line.endswith("[DONE]"):
                    continue
                event = parse_event(line.removeprefix("data:"))
                if "error" in event:
                    raise DataError(str(event["error"]["message"]), code="chat.failed")
                for choice in event["choices"]:
                    delta = choice["delta"]
                    yield delta.get("reasoning_content") or "", delta.get("content") or ""
    except httpx.HTTPError as error:
        raise ServerUnreachable(f"the connection broke: {error}", code="chat.connection") from error
