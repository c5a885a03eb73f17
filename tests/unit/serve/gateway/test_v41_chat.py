"""Chats with V4.1 behind the API: its real tokenizer and encoding, replies said by the test."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from millpond.config.gateway_params import EffortParams, GatewayParams
from millpond.engine.model.chat_encoding import CONTROL_TEXTS
from millpond.engine.model.config import load_config
from millpond.engine.model.dsml import CALLS_BEGIN, DSML, render_calls
from millpond.engine.model.init_tokenizer import make_tokenizer
from millpond.engine.model_files import ModelFiles
from millpond.engine.tokenizer import Tokenizer
from millpond.engine.tokenizer_files import load_tokenizer
from millpond.serve.gateway.model_loading import make_v41_model
from millpond.serve.gateway.served_model import ServedModel
from tests.unit.engine.model.test_reply_parser import block, invoke, parameter
from tests.unit.serve.gateway.fake_service import FakeService, ask, make_gateway, sse_events

CHAT = "/v1/chat/completions"
CONFIG = Path(__file__).parents[3] / "golden" / "data" / "tiny_a" / "config.json"
TOOL = {"type": "function", "function": {"name": "f", "description": "d", "parameters": {"type": "object"}}}
CALL_TEXT = block(invoke("f", parameter("s", 'x"\n'), parameter("n", "1", "false")), invoke("g"))


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder = tmp_path_factory.mktemp("tokenizer")
    make_tokenizer(load_config(CONFIG)).save(folder)
    return load_tokenizer(ModelFiles("hf", "tiny", (), folder), CONTROL_TEXTS)


@pytest.fixture(scope="module")
def model(tokenizer: Tokenizer) -> ServedModel:
    return make_v41_model(("v41",), tokenizer)


def says(tokenizer: Tokenizer, text: str) -> FakeService:
    """A model that says a text, its control tokens as such, and ends."""
    ids = [*tokenizer.encode_trusted(text), tokenizer.stop_ids[0]]
    return FakeService(lambda _spec: ids)


def body(**fields: Any) -> dict[str, Any]:
    return {"model": "v41", "messages": [{"role": "user", "content": "hi"}], **fields}


class Exchange:
    """One call, whole and streamed."""

    def __init__(self, tokenizer: Tokenizer, model: ServedModel, text: str, **fields: Any) -> None:
        self.service = says(tokenizer, text)
        gateway = make_gateway(self.service, model=model, max_model_len=5000)
        whole = ask(gateway, CHAT, body(**fields))
        assert whole.status_code == 200, whole.text
        self.answer = whole.json()
        ChatCompletion.model_validate(self.answer)
        fields = {**fields, "stream": True, "stream_options": {"include_usage": True}}
        events = sse_events(ask(gateway, CHAT, body(**fields)).content)
        assert events[-1] == ("", "[DONE]")
        self.chunks = [json.loads(data) for _, data in events[:-1]]
        for chunk in self.chunks:
            ChatCompletionChunk.model_validate(chunk)

    @property
    def message(self) -> dict[str, Any]:
        return self.answer["choices"][0]["message"]

    @property
    def finish(self) -> str:
        return self.answer["choices"][0]["finish_reason"]

    def joined(self) -> dict[str, Any]:
        """The streamed message, put together as a client does."""
        message: dict[str, Any] = {"content": "", "reasoning_content": "", "tool_calls": []}
        calls = message["tool_calls"]
        for chunk in self.chunks:
            for choice in chunk["choices"]:
                delta = choice["delta"]
                for name in ("content", "reasoning_content"):
                    message[name] += delta.get(name, "")
                for call in delta.get("tool_calls", ()):
                    if call["index"] == len(calls):
                        calls.append({"id": call["id"], "type": call["type"], "function": call["function"]})
                    else:
                        assert set(call) == {"index", "function"}
                        assert set(call["function"]) == {"arguments"}
                        calls[call["index"]]["function"]["arguments"] += call["function"]["arguments"]
                if choice["finish_reason"]:
                    message["finish"] = choice["finish_reason"]
        return message


# --- answers --------------------------------------------------------------------------------------


def test_reasoning_and_answer_come_apart(tokenizer: Tokenizer, model: ServedModel) -> None:
    exchange = Exchange(tokenizer, model, "\nwhy\n</think>\n\nbecause\n")
    assert exchange.message["reasoning_content"] == "why"
    assert exchange.message["content"] == "because\n"
    assert "tool_calls" not in exchange.message
    assert exchange.finish == "stop"
    details = exchange.answer["usage"]["completion_tokens_details"]
    assert details == {"reasoning_tokens": len("\nwhy\n") + 1}
    assert exchange.chunks[-1]["usage"] == exchange.answer["usage"]


def test_calls_come_whole_and_in_fragments(tokenizer: Tokenizer, model: ServedModel) -> None:
    exchange = Exchange(tokenizer, model, "why</think>so" + CALL_TEXT, tools=[TOOL])
    calls = exchange.message["tool_calls"]
    assert [call["function"]["name"] for call in calls] == ["f", "g"]
    assert [json.loads(call["function"]["arguments"]) for call in calls] == [{"s": 'x"\n', "n": 1}, {}]
    assert exchange.finish == "tool_calls"
    assert exchange.message["content"] == "so"
    fragments = [
        call["function"]["arguments"]
        for chunk in exchange.chunks
        for choice in chunk["choices"]
        for call in choice["delta"].get("tool_calls", ())
        if call["index"] == 0
    ]
    assert fragments == ["", '{"s": "x\\"\\n"', ', "n": 1', "}"]


def test_content_is_null_when_there_are_only_calls(tokenizer: Tokenizer, model: ServedModel) -> None:
    exchange = Exchange(tokenizer, model, "</think>" + CALL_TEXT, tools=[TOOL])
    assert exchange.message["content"] is None
    assert exchange.message["reasoning_content"] == ""


def test_ids_of_calls_follow_from_the_request(tokenizer: Tokenizer, model: ServedModel) -> None:
    exchange = Exchange(tokenizer, model, "</think>" + CALL_TEXT, tools=[TOOL], n=2)
    stem = exchange.answer["id"].removeprefix("chatcmpl-")
    ids = [call["id"] for choice in exchange.answer["choices"] for call in choice["message"]["tool_calls"]]
    assert ids == [f"call_{stem}_{choice}_{index}" for choice in (0, 1) for index in (0, 1)]
    assert max(map(len, ids)) <= 40


def test_a_call_cut_by_max_tokens_is_text_and_says_length(tokenizer: Tokenizer, model: ServedModel) -> None:
    text = "t</think>so" + CALL_TEXT
    num_tokens = len(tokenizer.encode_trusted(text[: text.index("</" + DSML)]))
    exchange = Exchange(tokenizer, model, text, tools=[TOOL], max_tokens=num_tokens)
    assert exchange.finish == "length"
    assert (
        exchange.message["content"]
        == text.removeprefix("t</think>")[: text.index("</" + DSML) - len("t</think>")]
    )
    assert "tool_calls" not in exchange.message
    assert exchange.joined()["content"] == exchange.message["content"]


def test_without_tools_markup_is_text(tokenizer: Tokenizer, model: ServedModel) -> None:
    exchange = Exchange(tokenizer, model, "t</think>so" + CALL_TEXT)
    assert exchange.message["content"] == "so" + CALL_TEXT


def test_logprobs_have_an_entry_for_every_token(tokenizer: Tokenizer, model: ServedModel) -> None:
    text = "why</think>so" + CALL_TEXT
    exchange = Exchange(tokenizer, model, text, tools=[TOOL], logprobs=True)
    tokens = [entry["token"] for entry in exchange.answer["choices"][0]["logprobs"]["content"]]
    assert "".join(tokens) == text
    streamed = [
        entry["token"]
        for chunk in exchange.chunks
        for choice in chunk["choices"]
        if choice["logprobs"]
        for entry in choice["logprobs"]["content"]
    ]
    assert streamed == tokens


STOPS = ["think>", "</", "ink", "<", DSML[1:3], "invoke", "x", ">", "</think>so", "\n\n", CALLS_BEGIN, "lm"]


@pytest.mark.parametrize("stop", STOPS)
def test_bug_02_a_stop_string_cuts_no_marker_and_is_found_in_none(
    tokenizer: Tokenizer, model: ServedModel, stop: str
) -> None:
    exchange = Exchange(tokenizer, model, "think x</think>so be it" + CALL_TEXT, tools=[TOOL], stop=[stop])
    assert exchange.message["reasoning_content"] == "think x"
    assert exchange.message["content"] == "so be it"
    assert len(exchange.message["tool_calls"]) == 2
    assert exchange.finish == "tool_calls"


@pytest.mark.parametrize("stop", ["</", "</t", "<", "be it", "<|", "it</"])
def test_bug_02_a_stop_string_ends_content_even_where_a_marker_might_begin(
    tokenizer: Tokenizer, model: ServedModel, stop: str
) -> None:
    text = "so be it</tag> <| " + stop
    exchange = Exchange(tokenizer, model, f"think {stop}</think>" + text, tools=[TOOL], stop=[stop])
    assert exchange.message["reasoning_content"] == f"think {stop}"
    assert exchange.message["content"] == text[: text.index(stop)]
    assert exchange.finish == "stop"
    assert exchange.service.cancels or text.index(stop) + len(stop) == len(text)


def test_bug_02_no_stop_string_spans_a_call(tokenizer: Tokenizer, model: ServedModel) -> None:
    exchange = Exchange(tokenizer, model, "</think>E" + CALL_TEXT + "\nND", tools=[TOOL], stop=["END"])
    assert exchange.message["content"] == "END"
    assert exchange.finish == "tool_calls"
    texts = [choice["delta"] for chunk in exchange.chunks for choice in chunk["choices"]]
    kinds = [next(iter(delta)) for delta in texts if delta and "role" not in delta]
    assert kinds == ["content", *["tool_calls"] * 6, *["content"] * 2]


pieces = st.lists(
    st.sampled_from(
        [
            "a",
            "\n",
            "<",
            "</think>",
            "<think>",
            CALLS_BEGIN,
            "한",
            "</",
            CALL_TEXT,
            invoke("f"),
            block("x"),
            "END",
            "E",
        ]
    ),
    max_size=8,
).map("".join)


@settings(max_examples=60)
@given(pieces, st.booleans(), st.sampled_from([[], ["END"], ["<"], ["think>"]]), st.booleans())
def test_bug_02_streamed_and_whole_answers_are_one(
    tokenizer: Tokenizer, model: ServedModel, text: str, is_thinking: bool, stop: list[str], has_tools: bool
) -> None:
    tools = [TOOL] if has_tools else []
    exchange = Exchange(tokenizer, model, text, tools=tools, stop=stop, thinking=is_thinking)
    joined, message = exchange.joined(), exchange.message
    assert joined["content"] == (message["content"] or "")
    assert joined["reasoning_content"] == message["reasoning_content"]
    assert joined["finish"] == exchange.finish
    assert re.sub("call_[0-9a-f]+", "", json.dumps(joined["tool_calls"])) == re.sub(
        "call_[0-9a-f]+", "", json.dumps(message.get("tool_calls", []))
    )
    for call in joined["tool_calls"]:
        assert isinstance(json.loads(call["function"]["arguments"]), dict)


# --- requests -------------------------------------------------------------------------------------


def prompt_of(
    tokenizer: Tokenizer, model: ServedModel, params: GatewayParams | None = None, **fields: Any
) -> str:
    """The prompt that reaches the workers."""
    service = says(tokenizer, "x")
    gateway = make_gateway(service, model=model, max_model_len=5000, params=params)
    answer = ask(gateway, CHAT, body(**fields))
    assert answer.status_code == 200, answer.text
    ids = ask(
        gateway, "/tokenize", {name: value for name, value in body(**fields).items() if name != "tool_choice"}
    )
    if "tool_choice" not in fields and "response_format" not in fields:
        assert ids.json()["tokens"] == list(service.submits[0].prompt_ids)
    return tokenizer.decode(service.submits[0].prompt_ids, keep_control=True)


@pytest.mark.parametrize(
    ("fields", "effort"),
    [
        ({}, 75),
        ({"thinking": True}, 75),
        ({"thinking": {"type": "enabled"}}, 75),
        ({"chat_template_kwargs": {"thinking": True}}, 75),
        ({"chat_template_kwargs": {"enable_thinking": True, "reasoning_effort": 3}}, 3),
        ({"reasoning_effort": "low"}, 50),
        ({"reasoning_effort": "max", "thinking": True}, 100),
        ({"reasoning_effort": 1}, 1),
        ({"reasoning_effort": 75, "chat_template_kwargs": {"reasoning_effort": "high"}}, 75),
        ({"reasoning_effort": "none"}, None),
        ({"thinking": False}, None),
        ({"thinking": {"type": "disabled"}, "reasoning_effort": "none"}, None),
        ({"chat_template_kwargs": {"thinking": False}}, None),
        ({"chat_template_kwargs": {"enable_thinking": False}}, None),
    ],
)
def test_ways_to_say_how_hard_to_think(
    tokenizer: Tokenizer, model: ServedModel, fields: dict[str, Any], effort: int | None
) -> None:
    prompt = prompt_of(tokenizer, model, **fields)
    assert prompt.endswith("</think>" if effort is None else "<think>")
    assert (f"Reasoning Effort: {effort} " in prompt) == (effort is not None)


def test_the_operator_decides_defaults_and_names(tokenizer: Tokenizer, model: ServedModel) -> None:
    params = GatewayParams(thinks_by_default=False, efforts=EffortParams(low=25, high=50))
    assert prompt_of(tokenizer, model, params).endswith("</think>")
    assert "Effort: 25 " in prompt_of(tokenizer, model, params, reasoning_effort="low")
    assert "Effort: 50 " in prompt_of(tokenizer, model, params, thinking=True)


CALL = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
HISTORY = [
    {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
    {"role": "assistant", "content": None, "reasoning_content": "why", "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "c1", "content": "42"},
]


def test_a_history_with_calls_and_results_is_written_out(tokenizer: Tokenizer, model: ServedModel) -> None:
    prompt = prompt_of(tokenizer, model, messages=HISTORY, tools=[TOOL])
    assert "<｜User｜>a\n\nb<｜Assistant｜><think>why</think>\n\n" + CALLS_BEGIN in prompt
    assert prompt.endswith("<｜User｜><tool_result>42</tool_result><｜Assistant｜><think>")
    renamed = [dict(message) for message in HISTORY]
    renamed[1]["reasoning"] = renamed[1].pop("reasoning_content")
    assert prompt_of(tokenizer, model, messages=renamed, tools=[TOOL]) == prompt


def test_what_a_model_answered_can_be_sent_back(tokenizer: Tokenizer, model: ServedModel) -> None:
    exchange = Exchange(tokenizer, model, "why</think>so" + CALL_TEXT, tools=[TOOL])
    message = {name: value for name, value in exchange.message.items() if name != "refusal"}
    results = [
        {"role": "tool", "tool_call_id": call["id"], "content": "r"}
        for call in reversed(message["tool_calls"])
    ]
    messages = [{"role": "user", "content": "hi"}, message, *results]
    prompt = prompt_of(tokenizer, model, messages=messages, tools=[TOOL])
    calls = render_calls([("f", {"s": 'x"\n', "n": 1}), ("g", {})])
    assert f"<think>why</think>so\n\n{calls}<｜end" in prompt


def test_a_forced_call_is_opened_in_the_prompt(tokenizer: Tokenizer, model: ServedModel) -> None:
    other = {"type": "function", "function": {"name": "g"}}
    fields = {"tools": [TOOL, other], "thinking": False}
    required = prompt_of(tokenizer, model, **fields, tool_choice="required")
    assert required.endswith(f"</think>\n\n{CALLS_BEGIN}\n")
    named = prompt_of(tokenizer, model, **fields, tool_choice={"type": "function", "function": {"name": "g"}})
    assert named.endswith(f"</think>\n\n{CALLS_BEGIN}\n")
    assert ('"name": "f"' in required, '"name": "f"' in named) == (True, False)
    inside = CALL_TEXT.split(CALLS_BEGIN + "\n")[1]
    exchange = Exchange(tokenizer, model, inside, **fields, tool_choice="required")
    assert len(exchange.message["tool_calls"]) == 2
    assert exchange.finish == "tool_calls"
    exchange = Exchange(tokenizer, model, "I cannot", **fields, tool_choice="required")
    assert (exchange.message["content"], exchange.finish) == ("I cannot", "stop")


def test_a_schema_is_asked_for_in_the_prompt(tokenizer: Tokenizer, model: ServedModel) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "array"}}}
    assert "## Response Format:" in prompt_of(tokenizer, model, response_format=form)
    assert "## Response Format:" not in prompt_of(tokenizer, model, response_format={"type": "text"})


def assistant(**fields: Any) -> list[dict[str, Any]]:
    return [{"role": "assistant", "content": "x", **fields}]


RESULT = {"role": "tool", "tool_call_id": "c1", "content": "x"}
BAD: list[tuple[dict[str, Any], str, str]] = [
    ({"reasoning_effort": 0}, "reasoning_effort", "invalid_value"),
    ({"reasoning_effort": 101}, "reasoning_effort", "invalid_value"),
    ({"reasoning_effort": "hard"}, "reasoning_effort", "invalid_value"),
    ({"reasoning_effort": 5.5}, "reasoning_effort", "invalid_type"),
    ({"reasoning_effort": True}, "reasoning_effort", "invalid_type"),
    ({"reasoning_effort": "low", "thinking": False}, "reasoning_effort", "invalid_value"),
    (
        {"reasoning_effort": 1, "chat_template_kwargs": {"reasoning_effort": 2}},
        "chat_template_kwargs.reasoning_effort",
        "invalid_value",
    ),
    (
        {"thinking": True, "chat_template_kwargs": {"thinking": False}},
        "chat_template_kwargs.thinking",
        "invalid_value",
    ),
    ({"thinking": {"type": "maybe"}}, "thinking.type", "invalid_type"),
    ({"chat_template_kwargs": {"x": 1}}, "chat_template_kwargs.x", "unknown_field"),
    ({"tool_choice": "required", "thinking": False}, "tool_choice", "invalid_value"),
    ({"tool_choice": "required", "tools": [TOOL]}, "tool_choice", "invalid_value"),
    ({"tool_choice": "any", "tools": [TOOL]}, "tool_choice", "invalid_value"),
    (
        {"tool_choice": {"type": "function", "function": {"name": "h"}}, "tools": [TOOL], "thinking": False},
        "tool_choice.function.name",
        "invalid_value",
    ),
    (
        {"tools": [{"type": "function", "function": {"name": 'f"'}}]},
        "tools[0].function.name",
        "invalid_value",
    ),
    ({"tools": [{"type": "function", "function": {}}]}, "tools[0].function.name", "invalid_value"),
    (
        {"tools": [TOOL, {"type": "function", "function": {"name": "g", "parameters": []}}]},
        "tools[1].function.parameters",
        "invalid_value",
    ),
    (
        {"tools": [{"type": "function", "function": {"name": "g", "description": 1}}]},
        "tools[0].function.description",
        "invalid_value",
    ),
    (
        {"tools": [{"type": "function", "function": {"name": "g", "strict": True}}]},
        "tools[0].function.strict",
        "unsupported_parameter",
    ),
    ({"parallel_tool_calls": False, "tools": [TOOL]}, "parallel_tool_calls", "unsupported_parameter"),
    ({"response_format": {"type": "json_object"}}, "response_format", "unsupported_parameter"),
    ({"response_format": {"type": "xml"}}, "response_format.type", "invalid_value"),
    ({"response_format": {"type": "json_schema"}}, "response_format.json_schema", "invalid_value"),
    (
        {
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "n", "schema": {}, "strict": True},
            }
        },
        "response_format.json_schema.strict",
        "unsupported_parameter",
    ),
    ({"messages": [RESULT]}, "messages[0].tool_call_id", "invalid_value"),
    ({"messages": [*HISTORY, RESULT]}, "messages[3].tool_call_id", "invalid_value"),
    ({"messages": HISTORY[:2]}, "messages", "invalid_value"),
    ({"messages": [*HISTORY[:2], HISTORY[0]]}, "messages[2]", "invalid_value"),
    (
        {"messages": [*HISTORY[:2], {**RESULT, "tool_call_id": None}]},
        "messages[2].tool_call_id",
        "invalid_value",
    ),
    (
        {"messages": assistant(tool_calls=[{**CALL, "id": None}])},
        "messages[0].tool_calls[0].id",
        "invalid_value",
    ),
    (
        {"messages": assistant(tool_calls=[{**CALL, "function": {"name": "f", "arguments": "[1]"}}])},
        "messages[0].tool_calls[0].function.arguments",
        "invalid_value",
    ),
    (
        {"messages": assistant(tool_calls=[{**CALL, "function": {"name": "", "arguments": "{}"}}])},
        "messages[0].tool_calls[0].function.name",
        "invalid_value",
    ),
    ({"messages": assistant(reasoning="a", reasoning_content="b")}, "messages[0].reasoning", "invalid_value"),
    (
        {"messages": [{"role": "user", "content": "x", "reasoning_content": "r"}]},
        "messages[0].reasoning_content",
        "invalid_value",
    ),
    (
        {"messages": [{"role": "user", "content": "x", "tool_calls": [CALL]}]},
        "messages[0].tool_calls",
        "invalid_value",
    ),
    (
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:,"}}]}]},
        "messages[0].content[0].type",
        "unsupported_parameter",
    ),
]


@pytest.mark.parametrize(("fields", "param", "code"), BAD)
def test_what_cannot_be_honoured_is_refused_by_name(
    tokenizer: Tokenizer, model: ServedModel, fields: dict[str, Any], param: str, code: str
) -> None:
    service = says(tokenizer, "x")
    gateway = make_gateway(service, model=model, max_model_len=5000)
    paths = [CHAT]
    if not {"tool_choice", "response_format", "parallel_tool_calls"} & set(fields):
        paths.append("/tokenize")
    for path in paths:
        answer = ask(gateway, path, body(**fields))
        assert answer.status_code == 400, answer.text
        error = answer.json()["error"]
        assert (error["param"], error["code"]) == (param, code), error
        assert f"`{param}`" in error["message"]
    assert service.submits == []
