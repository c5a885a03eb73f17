"""Writes v41_chat.json: conversations as the official encoder of DeepSeek-V4.1 writes them out.

Needs the package deepseek-recipe 0.2.0 (MIT), which nothing else here uses. Shares nothing with `millpond`.
Run `python tests/golden/make_v41_chat.py > tests/golden/v41_chat.json`.
"""

from __future__ import annotations

import itertools
import json
from typing import Any

from deepseek_recipe import ChatCompletionRequest, ConversionOptions, DeepseekV41Encoding

SYSTEM = {"role": "system", "content": "Be brief.\nSay é."}
USER = {"role": "user", "content": "What is in <file>?\n"}
LATER = {"role": "system", "content": "It is late."}
PLAIN = {"role": "assistant", "content": "An answer.\n", "reasoning_content": "First thoughts\n"}
SILENT = {"role": "assistant", "content": "No thoughts."}
CALLS = {
    "role": "assistant",
    "content": "Let me look.",
    "reasoning_content": "Need tools.",
    "tool_calls": [
        {
            "id": "c1",
            "type": "function",
            "function": {"name": "read", "arguments": '{"path": "a \\"b\\"\\n<c>"}'},
        },
        {
            "id": "c2",
            "type": "function",
            "function": {
                "name": "count",
                "arguments": '{"n": 3, "deep": {"x": [1.5, null, true, "é"]}, "s": ""}',
            },
        },
        {"id": "c3", "type": "function", "function": {"name": "count", "arguments": "{}"}},
    ],
}
RESULTS = [
    {"role": "tool", "tool_call_id": "c3", "content": "three"},
    {"role": "tool", "tool_call_id": "c1", "content": "one\n"},
    {"role": "tool", "tool_call_id": "c2", "content": "two"},
]
MORE = {"role": "user", "content": "And then?"}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "read",
            "description": "Reads a «file».",
            "parameters": {
                "type": "object",
                "properties": {"path": {"type": "string"}},
                "required": ["path"],
            },
        },
    },
    {
        "type": "function",
        "function": {"name": "count", "description": "Counts.", "parameters": {"type": "object"}},
    },
]
SCHEMA = {"type": "object", "properties": {"größe": {"type": "number"}}}

CONVERSATIONS: list[list[dict[str, Any]]] = [
    [USER],
    [SYSTEM, USER],
    [SYSTEM, LATER, USER],
    [USER, MORE],
    [SYSTEM, USER, PLAIN, MORE],
    [USER, SILENT, MORE, PLAIN, LATER],
    [SYSTEM, USER, CALLS, *RESULTS],
    [USER, CALLS, *RESULTS, MORE],
    [SYSTEM, USER, CALLS, *RESULTS, PLAIN, LATER, MORE],
    [USER, PLAIN, SILENT, MORE, CALLS, *RESULTS, PLAIN],
    [PLAIN, USER],
    [SYSTEM],
    [{"role": "system", "content": ""}, USER],
]
EFFORTS = {None: None, "low": 50, "max": 100}


def official(messages: list, tools: list, effort: str | None, schema: dict | None, *, must_call: bool) -> str:
    body: dict[str, Any] = {"model": "DeepSeek-V4.1-Flash", "messages": messages}
    if tools:
        body["tools"] = tools
    if must_call:
        body["tool_choice"] = "required"
    if schema is not None:
        body["response_format"] = {"type": "json_schema", "json_schema": {"name": "n", "schema": schema}}
    if effort is None:
        body["thinking"] = {"type": "disabled"}
    else:
        body["reasoning_effort"] = effort
    request = ChatCompletionRequest(body).convert(ConversionOptions())
    return DeepseekV41Encoding().render_conversation(request.conversation).prompt


def main() -> None:
    cases = []
    options = itertools.product(CONVERSATIONS, ([], TOOLS), EFFORTS, (None, SCHEMA))
    for number, (messages, tools, effort, schema) in enumerate(options):
        if (schema is not None and number % 4) or (effort == "low" and number % 3):
            continue
        must_call = bool(tools) and effort is None and number % 2 == 0
        cases.append(
            {
                "messages": messages,
                "tools": tools,
                "effort": EFFORTS[effort],
                "schema": schema,
                "must_call": must_call,
                "prompt": official(messages, tools, effort, schema, must_call=must_call),
            }
        )
    lines = [json.dumps(case, ensure_ascii=False) for case in cases]
    print("[\n" + ",\n".join(lines) + "\n]")


if __name__ == "__main__":
    main()
