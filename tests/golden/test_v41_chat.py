"""Prompts equal those of the official encoder, character by character."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from millpond.engine.chat_format import Conversation
from millpond.engine.model.chat_encoding import render

CASES = json.loads(Path(__file__).with_name("v41_chat.json").read_text(encoding="utf-8"))


def as_checked(message: dict[str, Any]) -> dict[str, Any]:
    """A message as the gateway hands it on: arguments are objects."""
    calls = [
        {**call, "function": {**call["function"], "arguments": json.loads(call["function"]["arguments"])}}
        for call in message.get("tool_calls", ())
    ]
    return message | ({"tool_calls": calls} if calls else {})


@pytest.mark.parametrize("number", range(len(CASES)))
def test_prompts_are_those_of_the_official_encoder(number: int) -> None:
    case = CASES[number]
    conversation = Conversation(
        messages=[as_checked(message) for message in case["messages"]],
        tools=case["tools"],
        reasoning_effort=case["effort"],
        response_schema=case["schema"],
        must_call=case["must_call"],
    )
    assert render(conversation) == case["prompt"]
