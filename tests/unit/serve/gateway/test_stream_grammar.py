"""The grammar of streams, written down apart from the code that makes them."""

from __future__ import annotations

import itertools
import json
import re

import pytest

from millpond.core.ids import RequestId
from millpond.core.plan import RequestEnded
from millpond.core.request import FinishReason
from tests.unit.serve.gateway.fake_service import (
    FakeService,
    ask,
    chat_body,
    completion_body,
    letters,
    make_gateway,
    says,
    sse_events,
    streamed_texts,
)

CHAT_KEYS = ["id", "object", "created", "model", "system_fingerprint", "choices"]
CHOICE = re.compile("R?D*F")
"""Chunks of one choice: role (chat only), deltas, finish."""


def kind_of(choice: dict, *, is_chat: bool, has_logprobs: bool) -> str:
    """R, D or F; fails for a chunk that is none of them."""
    assert list(choice) == ["index", "delta" if is_chat else "text", "logprobs", "finish_reason"]
    content = choice["delta"] if is_chat else choice["text"]
    if choice["finish_reason"] is not None:
        assert choice["finish_reason"] in ("stop", "length")
        assert content in ({}, "")
        assert choice["logprobs"] is None
        return "F"
    if is_chat and "role" in content:
        assert content == {"role": "assistant", "content": ""}
        assert choice["logprobs"] is None
        return "R"
    text = content["content"] if is_chat else content
    assert isinstance(text, str)
    if is_chat:
        assert list(content) == ["content"]
    assert (choice["logprobs"] is not None) == has_logprobs
    assert text or has_logprobs
    return "D"


OPTIONS = list(
    itertools.product(
        (True, False), (1, 3), (False, True), (False, True), (None, "zz"), ("length", "stop"), (False, True)
    )
)


@pytest.mark.parametrize(
    ("is_chat", "num_choices", "has_logprobs", "include_usage", "stop", "ending", "echo"), OPTIONS
)
def test_bug_08_every_stream_follows_the_grammar(
    is_chat: bool,
    num_choices: int,
    has_logprobs: bool,
    include_usage: bool,
    stop: str | None,
    ending: str,
    echo: bool,
) -> None:
    if echo and (is_chat or has_logprobs):
        echo = False
    service = FakeService(says("ab") if ending == "stop" else letters)
    fields: dict = {"stream": True, "max_tokens": 6, "seed": 1, "n": num_choices}
    if has_logprobs:
        fields |= {"logprobs": True, "top_logprobs": 2} if is_chat else {"logprobs": 2}
    if include_usage:
        fields["stream_options"] = {"include_usage": True}
    if stop is not None:
        fields["stop"] = stop
    if echo:
        fields["echo"] = True
    body = chat_body(**fields) if is_chat else completion_body(**fields)
    path = "/v1/chat/completions" if is_chat else "/v1/completions"
    response = ask(make_gateway(service), path, body)

    assert response.status_code == 200
    assert response.headers["content-type"].startswith("text/event-stream")
    events = sse_events(response.content)
    assert events[-1] == ("", "[DONE]")
    chunks = [json.loads(data) for name, data in events[:-1] if name == ""]
    assert len(chunks) == len(events) - 1

    keys = [*CHAT_KEYS, "usage"] if include_usage else CHAT_KEYS
    assert all(list(chunk) == keys for chunk in chunks)
    assert {chunk["object"] for chunk in chunks} == {
        "chat.completion.chunk" if is_chat else "text_completion"
    }
    assert len({(chunk["id"], chunk["created"], chunk["model"]) for chunk in chunks}) == 1

    if include_usage:
        last = chunks.pop()
        assert last["choices"] == []
        num_output = (3 if ending == "stop" else 6) * num_choices
        num_prompt = 20 if is_chat else 2
        assert last["usage"] == {
            "prompt_tokens": num_prompt,
            "completion_tokens": num_output,
            "total_tokens": num_prompt + num_output,
            "prompt_tokens_details": {"cached_tokens": 0},
        }
        assert all(chunk["usage"] is None for chunk in chunks)

    kinds = [""] * num_choices
    for chunk in chunks:
        (choice,) = chunk["choices"]
        kinds[choice["index"]] += kind_of(choice, is_chat=is_chat, has_logprobs=has_logprobs)
        if choice["finish_reason"] is not None:
            assert choice["finish_reason"] == ending
    num_text_tokens = 2 if ending == "stop" else 6
    for kind in kinds:
        assert CHOICE.fullmatch(kind)
        assert kind.startswith("R") == is_chat
        if not (stop and ending == "length"):  # a letter z may be held back and join the next event
            assert kind.count("D") == num_text_tokens + echo

    whole = ask(make_gateway(service), path, {**body, "stream": False, "stream_options": None}).json()
    choices = whole["choices"]
    texts = [choice["message"]["content"] if is_chat else choice["text"] for choice in choices]
    assert streamed_texts(response.content, num_choices) == texts
    assert {choice["finish_reason"] for choice in choices} == {ending}


@pytest.mark.parametrize("is_chat", [True, False])
def test_one_event_per_token_and_no_coalescing(is_chat: bool) -> None:
    body = chat_body(stream=True, max_tokens=50) if is_chat else completion_body(stream=True, max_tokens=50)
    path = "/v1/chat/completions" if is_chat else "/v1/completions"
    response = ask(make_gateway(FakeService(letters)), path, body)
    assert len(sse_events(response.content)) == 50 + 2 + is_chat  # and finish, [DONE], role


def ended(reason: FinishReason) -> RequestEnded:
    return RequestEnded(RequestId("any"), 0, reason, "no memory for it")


@pytest.mark.parametrize(
    ("reason", "status", "kind"),
    [
        (FinishReason.REFUSED, 400, "invalid_request_error"),
        (FinishReason.FAILED, 500, "server_error"),
        (FinishReason.ABORTED, 503, "service_unavailable_error"),
    ],
)
@pytest.mark.parametrize("is_stream", [False, True])
def test_an_ending_before_the_first_token_has_its_own_status(
    reason: FinishReason, status: int, kind: str, is_stream: bool
) -> None:
    service = FakeService(ending=ended(reason))
    response = ask(make_gateway(service), "/v1/chat/completions", chat_body(stream=is_stream))
    assert response.status_code == status
    assert response.json()["error"]["type"] == kind
    assert "no memory for it" in response.json()["error"]["message"]


def test_an_ending_after_headers_is_an_error_event_and_nothing_more() -> None:
    service = FakeService(ending=ended(FinishReason.FAILED), num_before_ending=3)
    gateway = make_gateway(service)
    response = ask(gateway, "/v1/chat/completions", chat_body(stream=True, n=2, seed=3))
    assert response.status_code == 200
    events = sse_events(response.content)
    assert [name for name, _ in events] == [""] * (len(events) - 1) + ["error"]
    error = json.loads(events[-1][1])["error"]
    assert error["code"] == "generation_failed"
    assert set(error) == {"message", "type", "param", "code"}
    assert gateway.link.num_open == 0
    assert len(service.cancels) == 1  # the other choice


def test_a_whole_answer_that_fails_midway_is_one_error() -> None:
    service = FakeService(ending=ended(FinishReason.FAILED), num_before_ending=3)
    response = ask(make_gateway(service), "/v1/chat/completions", chat_body())
    assert response.status_code == 500
    assert response.json()["error"]["code"] == "generation_failed"
