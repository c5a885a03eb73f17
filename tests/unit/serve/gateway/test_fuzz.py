"""Whatever a client sends, it gets an answer or a 4xx that says why, and nothing stays behind."""

from __future__ import annotations

import json
from typing import Any

import hypothesis.strategies as st
import msgspec
import pytest
from hypothesis import given, settings

from millpond.serve.gateway import openai_schema as schema
from tests.unit.serve.gateway.fake_service import (
    FakeService,
    ask,
    chat_body,
    completion_body,
    make_gateway,
    sse_events,
)

CHAT_FIELDS = [field.name for field in msgspec.structs.fields(schema.ChatRequest)]
COMPLETION_FIELDS = [field.name for field in msgspec.structs.fields(schema.CompletionRequest)]
LEAVES = (
    st.none()
    | st.booleans()
    | st.integers(-3, 300)
    | st.sampled_from([2**31, 2**63, 2**64, -(2**63), 10**40])
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.sampled_from(["", "auto", "none", "text", "x", "END", "\0", "한", "\U0010ffff"])
)
VALUES = st.recursive(
    LEAVES,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["role", "content", "type", "text", "5", "name", "function"]), inner, max_size=3
        )
    ),
    max_leaves=6,
)


@pytest.mark.parametrize("is_chat", [True, False])
@settings(max_examples=120)
@given(data=st.data())
def test_any_values_of_any_fields_are_answered_or_refused(is_chat: bool, data: st.DataObject) -> None:
    names = CHAT_FIELDS if is_chat else COMPLETION_FIELDS
    fields = data.draw(st.dictionaries(st.sampled_from(names), VALUES, max_size=4))
    base = {"max_tokens": 3, "model": "bytes"}
    body: dict[str, Any] = {**(chat_body(**base) if is_chat else completion_body(**base)), **fields}
    gateway = make_gateway(FakeService())
    response = ask(gateway, "/v1/chat/completions" if is_chat else "/v1/completions", body)

    if response.status_code == 200:
        if body.get("stream") is True:
            assert sse_events(response.content)[-1] == ("", "[DONE]")
        else:
            kind = schema.ChatAnswer if is_chat else schema.CompletionAnswer
            msgspec.json.decode(response.content, type=kind)
    else:
        assert 400 <= response.status_code < 500, (body, response.text)
        error = json.loads(response.content)["error"]
        assert error["message"]
        assert error["code"]
    assert gateway.link.num_open == 0
    assert gateway.admission.num_sequences == 0


@settings(max_examples=60)
@given(st.data())
def test_damaged_bytes_are_answered_or_refused(data: st.DataObject) -> None:
    body = bytearray(json.dumps(chat_body(max_tokens=2, stop=["a"], n=2)).encode())
    for _ in range(data.draw(st.integers(1, 3))):
        begin = data.draw(st.integers(0, len(body) - 1))
        body[begin : begin + data.draw(st.integers(0, 3))] = data.draw(st.binary(max_size=3))
    response = ask(make_gateway(FakeService()), "/v1/chat/completions", bytes(body))
    assert response.status_code < 500, (bytes(body), response.text)
