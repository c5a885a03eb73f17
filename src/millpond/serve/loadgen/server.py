"""What the load generator asks the server before it starts: model name, ordinary tokens, token counts."""

from __future__ import annotations

from typing import Any

import httpx

from millpond.core.errors import DataError, TransientError

VOCABULARY_TEXT = (
    "water mill pond wheel stone grain river bank bridge road field tree leaf root cloud rain wind snow light"
    " house door window table chair paper letter number table garden flower bird horse sheep"
    " iron copper glass morning evening summer winter north south east west one two three four five six seven"
)
"""Ordinary words; their tokens make up synthetic prompts, so that none of them is a control token."""


class ServerInfo:
    """Asks one server about its model. Blocking; used before the load starts."""

    def __init__(self, http: httpx.Client, model: str | None = None) -> None:
        self._http = http
        self._card = self._model_card(model)
        self.model = str(self._card["id"])

    @property
    def max_model_len(self) -> int:
        """Most tokens of a sequence; a very large number if the server does not tell."""
        return int(self._card.get("max_model_len") or 1 << 40)

    def vocabulary(self) -> list[int]:
        """Ordinary token ids of the model, ascending."""
        return sorted(set(self._tokenize(VOCABULARY_TEXT)))

    def count_tokens(self, text: str) -> int:
        """Length of a text in the model's tokens."""
        return len(self._tokenize(text))

    def _model_card(self, name: str | None) -> dict[str, Any]:
        """What the server lists about a model; about the first one without a name."""
        models = call_server(self._http, "GET", "/v1/models").json().get("data", [])
        if not models and name is None:
            raise DataError("the server lists no model; name one with --model", code="bench.no_model")
        named = [card for card in models if name is None or card["id"] == name]
        return named[0] if named else {"id": name}

    def _tokenize(self, text: str) -> list[int]:
        body = {"model": self.model, "prompt": text}
        return call_server(self._http, "POST", "/tokenize", body).json()["tokens"]


class ServerUnreachable(TransientError):
    """Nobody answers at the server's address."""


def call_server(
    http: httpx.Client, method: str, path: str, body: dict[str, Any] | None = None
) -> httpx.Response:
    """Call a route and return its answer.

    Raises:
        ServerUnreachable: Nobody answers.
        DataError: The answer is an error.
    """
    try:
        response = http.request(method, path, json=body)
        response.raise_for_status()
    except httpx.HTTPStatusError as error:
        message = f"{method} {path}: HTTP {error.response.status_code}: {error.response.text[:200]}"
        raise DataError(message, code="bench.server") from error
    except httpx.HTTPError as error:
        message = f"no answer from {http.base_url}: {error}; is the service running?"
        raise ServerUnreachable(message, code="bench.unreachable") from error
    return response
