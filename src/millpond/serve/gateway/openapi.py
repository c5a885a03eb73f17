"""The OpenAPI document, made from the msgspec types of `openai_schema`."""

from __future__ import annotations

from typing import Any

import msgspec

from millpond.serve.gateway import openai_schema as schema

_REF = "#/components/schemas/{name}"

_POSTS: dict[str, tuple[type, type, type | None, str]] = {
    "/v1/chat/completions": (
        schema.ChatRequest,
        schema.ChatAnswer,
        schema.ChatChunk,
        "Answer a conversation",
    ),
    "/v1/completions": (
        schema.CompletionRequest,
        schema.CompletionAnswer,
        schema.CompletionAnswer,
        "Continue a text",
    ),
    "/tokenize": (
        schema.TokenizeRequest,
        schema.TokenizeAnswer,
        None,
        "Token ids of a prompt or conversation",
    ),
    "/detokenize": (schema.DetokenizeRequest, schema.DetokenizeAnswer, None, "Text of token ids"),
}
"""Path -> (request, answer, streamed event, summary)."""

_GETS: dict[str, tuple[type | None, str]] = {
    "/v1/models": (schema.ModelList, "Served models"),
    "/v1/models/{name}": (schema.ModelCard, "One served model"),
    "/health": (None, "The process is up"),
    "/ready": (None, "The service takes requests and makes progress"),
    "/metrics": (None, "Prometheus metrics"),
    "/version": (None, "Version of the software"),
    "/openapi.json": (None, "This document"),
}
"""Path -> (answer, summary)."""


def make_document(version: str) -> dict[str, Any]:
    """Make the OpenAPI 3.1 document."""
    kinds: list[type] = [schema.ErrorAnswer]
    for request, answer, event, _ in _POSTS.values():
        kinds += [kind for kind in (request, answer, event) if kind is not None and kind not in kinds]
    kinds += [answer for answer, _ in _GETS.values() if answer is not None]
    _, components = msgspec.json.schema_components(kinds, ref_template=_REF)
    paths: dict[str, Any] = {}
    for path, (request, answer, event, summary) in _POSTS.items():
        content = {"application/json": {"schema": _ref(answer)}}
        if event is not None:
            content["text/event-stream"] = {"schema": _ref(event)}
        paths[path] = {
            "post": {
                "summary": summary,
                "requestBody": {"required": True, "content": {"application/json": {"schema": _ref(request)}}},
                "responses": {"200": {"description": "OK", "content": content}, "default": _ERROR},
            }
        }
    for path, (answer, summary) in _GETS.items():
        ok: dict[str, Any] = {"description": "OK"}
        if answer is not None:
            ok["content"] = {"application/json": {"schema": _ref(answer)}}
        operation: dict[str, Any] = {"summary": summary, "responses": {"200": ok, "default": _ERROR}}
        if "{name}" in path:
            operation["parameters"] = [
                {"name": "name", "in": "path", "required": True, "schema": {"type": "string"}}
            ]
        paths[path] = {"get": operation}
    return {
        "openapi": "3.1.0",
        "info": {"title": "Millpond", "version": version},
        "paths": paths,
        "components": {
            "schemas": components,
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{}, {"key": []}],
    }


def _ref(kind: type) -> dict[str, str]:
    return {"$ref": _REF.format(name=kind.__name__)}


_ERROR: dict[str, Any] = {
    "description": "What went wrong",
    "content": {"application/json": {"schema": _ref(schema.ErrorAnswer)}},
}
