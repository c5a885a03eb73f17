"""Bad input: each value is refused with the field, the value and what to do instead."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from millpond.config.gateway_params import GatewayParams
from tests.unit.serve.gateway.fake_service import (
    MAX_MODEL_LEN,
    FakeService,
    ask,
    byte_model,
    chat_body,
    completion_body,
    make_gateway,
    says,
)

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
CHAT_PROMPT = 20
ROOM = MAX_MODEL_LEN - CHAT_PROMPT
USER = {"role": "user", "content": "hi"}


def refused(path: str, body: Any, **kwargs: Any) -> dict[str, Any]:
    service = FakeService()
    gateway = make_gateway(service, **kwargs)
    response = ask(gateway, path, body)
    assert 400 <= response.status_code < 500, response.text
    assert service.submits == []
    assert gateway.admission.num_sequences == 0
    error = response.json()["error"]
    assert list(error) == ["message", "type", "param", "code"]
    return {**error, "status": response.status_code}


BAD_CHAT_FIELDS: list[tuple[dict[str, Any], str, str]] = [
    ({"messages": []}, "messages", "invalid_value"),
    ({"messages": [{"role": "user", "content": None}]}, "messages[0].content", "invalid_value"),
    ({"messages": [{"role": "user"}]}, "messages[0].content", "invalid_value"),
    ({"messages": [USER, {"role": "assistant", "content": None}]}, "messages[1].content", "invalid_value"),
    ({"messages": [{"role": "user", "content": []}]}, "messages[0].content", "invalid_value"),
    ({"messages": [{"role": "robot", "content": "x"}]}, "messages[0].role", "invalid_type"),
    ({"messages": [{"content": "x"}]}, "messages[0].role", "missing_field"),
    ({"messages": "hi"}, "messages", "invalid_type"),
    ({"messages": [{**USER, "mood": "good"}]}, "messages[0].mood", "unknown_field"),
    ({"messages": [{"role": "user", "content": "refuse me"}]}, None, "template"),
    ({"max_tokens": 0}, "max_tokens", "invalid_value"),
    ({"max_tokens": -1}, "max_tokens", "invalid_value"),
    ({"max_tokens": ROOM + 1}, "max_tokens", "context_length_exceeded"),
    ({"max_tokens": 2**31}, "max_tokens", "context_length_exceeded"),
    ({"max_tokens": 10**30}, "max_tokens", "context_length_exceeded"),
    ({"max_tokens": 1.5}, "max_tokens", "invalid_type"),
    ({"max_tokens": True}, "max_tokens", "invalid_type"),
    ({"max_tokens": "5"}, "max_tokens", "invalid_type"),
    ({"max_completion_tokens": 0}, "max_completion_tokens", "invalid_value"),
    ({"max_tokens": 4, "max_completion_tokens": 5}, "max_tokens", "invalid_value"),
    ({"min_tokens": -1}, "min_tokens", "invalid_value"),
    ({"min_tokens": 6, "max_tokens": 5}, "min_tokens", "invalid_value"),
    ({"n": 0}, "n", "invalid_value"),
    ({"n": 17}, "n", "invalid_value"),
    ({"temperature": -0.1}, "temperature", "invalid_value"),
    ({"temperature": 2.1}, "temperature", "invalid_value"),
    ({"top_p": 0}, "top_p", "invalid_value"),
    ({"top_p": 1.1}, "top_p", "invalid_value"),
    ({"top_k": -2}, "top_k", "invalid_value"),
    ({"min_p": 1.5}, "min_p", "invalid_value"),
    ({"repetition_penalty": 0}, "repetition_penalty", "invalid_value"),
    ({"presence_penalty": 3}, "presence_penalty", "invalid_value"),
    ({"frequency_penalty": -3}, "frequency_penalty", "invalid_value"),
    ({"logit_bias": {"x": 1}}, "logit_bias", "invalid_value"),
    ({"logit_bias": {"257": 1}}, "logit_bias", "invalid_value"),
    ({"logit_bias": {"-1": 1}}, "logit_bias", "invalid_value"),
    ({"logit_bias": {"5": 101}}, "logit_bias.5", "invalid_value"),
    ({"seed": -1}, "seed", "invalid_value"),
    ({"seed": 2**63}, "seed", "invalid_value"),
    ({"stop": [""]}, "stop", "invalid_value"),
    ({"stop": ["x"] * 17}, "stop", "invalid_value"),
    ({"stop": "x" * 2000}, "stop", "invalid_value"),
    ({"stop_token_ids": [257]}, "stop_token_ids[0]", "invalid_value"),
    ({"stop_token_ids": [1] * 300}, "stop_token_ids", "invalid_value"),
    ({"top_logprobs": 2}, "top_logprobs", "invalid_value"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs", "invalid_value"),
    ({"logprobs": 5}, "logprobs", "invalid_type"),
    ({"stream_options": {"include_usage": True}}, "stream_options", "invalid_value"),
    ({"stream": "yes"}, "stream", "invalid_type"),
    ({"cache_salt": ""}, "cache_salt", "invalid_value"),
    ({"cache_salt": "x" * 2000}, "cache_salt", "invalid_value"),
    ({"priority": 10**6}, "priority", "invalid_value"),
    ({"service_tier": "platinum"}, "service_tier", "invalid_value"),
    ({"tools": [{"type": "retrieval"}]}, "tools[0]", "invalid_value"),
    ({"unheard_of": 1}, "unheard_of", "unknown_field"),
    (
        {
            "messages": [
                {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{broken"}}]}
            ]
        },
        "messages[0].tool_calls[0].function.arguments",
        "invalid_value",
    ),
]


@pytest.mark.parametrize(("fields", "param", "code"), BAD_CHAT_FIELDS)
def test_a_bad_chat_value_is_named(fields: dict[str, Any], param: str | None, code: str) -> None:
    error = refused(CHAT, chat_body(**fields))
    assert (error["status"], error["param"], error["code"]) == (400, param, code)
    assert error["type"] == "invalid_request_error"
    if param is not None:
        assert f"`{param}`" in error["message"]


@pytest.mark.parametrize(
    ("fields", "param", "code"),
    [
        ({"prompt": ""}, "prompt", "invalid_value"),
        ({"prompt": []}, "prompt", "invalid_value"),
        ({"prompt": [[]]}, "prompt", "invalid_value"),
        ({"prompt": ["x", [1]]}, "prompt", "invalid_value"),
        ({"prompt": [1, "x"]}, "prompt", "invalid_value"),
        ({"prompt": [257]}, "prompt", "invalid_value"),
        ({"prompt": [-1]}, "prompt", "invalid_value"),
        ({"prompt": [2**40]}, "prompt", "invalid_value"),
        ({"prompt": ["x"] * 17}, "prompt", "invalid_value"),
        ({"prompt": ["x"] * 6, "n": 3}, "n", "invalid_value"),
        ({"prompt": None}, "prompt", "invalid_type"),
        ({"logprobs": 21}, "logprobs", "invalid_value"),
        ({"logprobs": 1, "echo": True}, "logprobs", "unsupported_parameter"),
        ({"suffix": "tail"}, "suffix", "unsupported_parameter"),
        ({"best_of": 2}, "best_of", "unsupported_parameter"),
        ({"messages": []}, "messages", "unknown_field"),
    ],
)
def test_a_bad_completion_value_is_named(fields: dict[str, Any], param: str, code: str) -> None:
    error = refused(COMPLETIONS, completion_body(**fields))
    assert (error["status"], error["param"], error["code"]) == (400, param, code)


@pytest.mark.parametrize(
    ("name", "neutral", "active"),
    [
        ("functions", [], [{"name": "f"}]),
        ("function_call", "none", "auto"),
        ("audio", None, {"voice": "x"}),
        ("modalities", ["text"], ["text", "audio"]),
        ("prediction", None, {"type": "content"}),
        ("store", False, True),
        ("metadata", {}, {"k": "v"}),
        ("parallel_tool_calls", True, False),
        ("reasoning_effort", "none", "high"),
        ("web_search_options", None, {}),
        ("response_format", {"type": "text"}, {"type": "json_object"}),
        ("tool_choice", "auto", "required"),
        ("tool_choice", "none", {"type": "function", "function": {"name": "f"}}),
    ],
)
def test_an_unsupported_field_is_accepted_at_its_neutral_value_only(
    name: str, neutral: Any, active: Any
) -> None:
    gateway = make_gateway(FakeService(says("ok")))
    for value in (neutral, None):
        assert ask(gateway, CHAT, chat_body(**{name: value})).status_code == 200
    error = refused(CHAT, chat_body(**{name: active}))
    assert (error["status"], error["param"], error["code"]) == (400, name, "unsupported_parameter")


def test_tools_are_refused_by_name_where_the_template_has_none() -> None:
    tools = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
    error = refused(CHAT, chat_body(tools=tools), model=byte_model(supports_tools=False))
    assert (error["param"], error["code"]) == ("tools", "unsupported_parameter")
    service = FakeService(says("ok"))
    gateway = make_gateway(service)
    assert ask(gateway, CHAT, chat_body(tools=tools)).status_code == 200
    assert b'"name": "f"' in bytes(list(service.submits[0].prompt_ids))
    assert ask(gateway, CHAT, chat_body(tools=tools, tool_choice="none")).status_code == 200
    assert b'"name": "f"' not in bytes(list(service.submits[1].prompt_ids))


def test_an_image_part_is_refused_as_unsupported() -> None:
    parts = [{"type": "text", "text": "look"}, {"type": "image_url", "image_url": {"url": "http://x/y.png"}}]
    error = refused(CHAT, chat_body(messages=[{"role": "user", "content": parts}]))
    assert (error["param"], error["code"]) == ("messages[0].content[1].type", "unsupported_parameter")


def test_a_conversation_with_parts_and_tool_messages_is_rendered() -> None:
    service = FakeService(says("ok"))
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    messages = [
        {"role": "developer", "content": "be brief"},
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "42", "tool_call_id": "c1"},
    ]
    assert ask(make_gateway(service), CHAT, chat_body(messages=messages)).status_code == 200
    prompt = bytes(list(service.submits[0].prompt_ids))
    assert prompt == b"system: be brief\nuser: ab\nassistant: \ntool: 42\nassistant: "


@pytest.mark.parametrize(("path", "echo"), [(CHAT, False), (COMPLETIONS, False), (COMPLETIONS, True)])
def test_bug_05_max_tokens_at_its_edges(path: str, echo: bool) -> None:
    """0, null, -1, 1, context size, context size + 1, 2**31; chat and completions, with and without echo."""
    num_prompt = CHAT_PROMPT if path == CHAT else 2
    room = MAX_MODEL_LEN - num_prompt

    def answer(max_tokens: int | None) -> tuple[int, str | None, int]:
        fields: dict[str, Any] = {"max_tokens": max_tokens}
        if echo:
            fields["echo"] = True
        service = FakeService()
        body = chat_body(**fields) if path == CHAT else completion_body(**fields)
        response = ask(make_gateway(service), path, body)
        asked = service.submits[0].sampling.max_tokens if service.submits else 0
        error = response.json().get("error")
        return response.status_code, error and error["code"], asked

    assert answer(0) == (400, "invalid_value", 0)
    assert answer(-1) == (400, "invalid_value", 0)
    assert answer(None) == (200, None, room if path == CHAT else 16)
    assert answer(1) == (200, None, 1)
    assert answer(room) == (200, None, room)
    assert answer(room + 1) == (400, "context_length_exceeded", 0)
    assert answer(MAX_MODEL_LEN) == (400, "context_length_exceeded", 0)
    assert answer(MAX_MODEL_LEN + 1) == (400, "context_length_exceeded", 0)
    assert answer(2**31) == (400, "context_length_exceeded", 0)


def test_a_prompt_that_fills_the_context_is_too_long() -> None:
    for extra, is_ok in ((-1, True), (0, False), (1000, False)):
        service = FakeService()
        body = completion_body(prompt="x" * (MAX_MODEL_LEN + extra))
        response = ask(make_gateway(service), COMPLETIONS, body)
        assert (response.status_code == 200) == is_ok
        if not is_ok:
            error = response.json()["error"]
            assert (error["code"], error["param"]) == ("context_length_exceeded", "prompt")
            assert str(MAX_MODEL_LEN + extra) in error["message"]


def test_an_unknown_model_is_404_and_an_alias_is_served_under_its_name() -> None:
    error = refused(CHAT, chat_body(model="gpt-17"))
    assert (error["status"], error["param"], error["code"]) == (404, "model", "model_not_found")
    answer = ask(make_gateway(FakeService(says("x"))), CHAT, chat_body(model="bytes-alias")).json()
    assert answer["model"] == "bytes-alias"


@pytest.mark.parametrize(
    "body",
    [b"", b"nope", b'{"model":', b"\xff\xfe", b'{"model": "\xff"}', b"[" * 100_000],
)
def test_a_body_that_is_not_json_is_refused(body: bytes) -> None:
    for path in (CHAT, COMPLETIONS, "/tokenize", "/detokenize"):
        error = refused(path, body)
        assert error["status"] == 400
        assert error["code"] in ("invalid_json", "invalid_type")


@pytest.mark.parametrize(
    "name",
    [
        "output_ids", "attempt", "request_id", "reply_to", "gateway", "tenant", "slo", "kv_transfer_params",
        "bootstrap_host", "bootstrap_room", "prompt_token_ids", "decode_address", "salt",
    ],
)  # fmt: skip
@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_bug_25_internal_fields_are_rejected(path: str, name: str) -> None:
    body = chat_body() if path == CHAT else completion_body()
    error = refused(path, {**body, name: "x"})
    assert (error["status"], error["code"], error["param"]) == (400, "unknown_field", name)


def test_a_body_over_the_limit_is_413() -> None:
    params = GatewayParams(max_body_bytes=1000)
    body = completion_body(prompt="x" * 2000)
    error = refused(COMPLETIONS, body, params=params)
    assert (error["status"], error["code"]) == (413, "body_too_large")


def test_values_are_cut_in_messages() -> None:
    error = refused(CHAT, chat_body(stop="y" * 5000))
    assert len(error["message"]) < 300


@pytest.mark.parametrize(
    "half", [r"\ud83d", r"\uDE00", r"\ud83dx\ude00", r"\ude00\ud83d", r"\ud83d\ude00\ud83d"]
)
def test_half_a_character_in_json_is_called_by_its_name(half: str) -> None:
    gateway = make_gateway(FakeService(says("ok")))
    body = json.dumps(chat_body()).replace('"hi"', f'"{half}"')
    error = ask(gateway, CHAT, body.encode()).json()["error"]
    assert error["code"] == "invalid_unicode"
    assert re.search(r"surrogate pair, \\u[dD]", error["message"])
    whole = body.replace(half, r"\ud83d\ude00")
    assert ask(gateway, CHAT, whole.encode()).status_code == 200
    broken = body.replace(half, r"\ud83d\ude00")[:-1]
    assert ask(gateway, CHAT, broken.encode()).json()["error"]["code"] == "invalid_json"
