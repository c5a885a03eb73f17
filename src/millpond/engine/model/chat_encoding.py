"""V4.1's chat encoding: from a conversation to the prompt that the model was trained on.

    prompt    := BOS [<｜System｜> effort] turn* [header]
    system    := <｜System｜> text [tools] [response format]
    user      := <｜User｜> texts and tool results that follow each other, with empty lines between
    assistant := header [reasoning </think>] content [calls] EOS
    header    := <｜Assistant｜> (<think> | </think>)

Earlier turns keep their reasoning in thinking mode with tools, and drop it otherwise.

Source: v41_model.md section 13. Tokens and prompt texts are the trained format, as in the public encodings
of vLLM (`deepseek_v41_encoding.py`), SGLang (`encoding_dsv41.py`) and `deepseek-recipe` 0.2.0; where these
differ (two assistant messages in a row, an assistant message first or last) the last one is followed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from millpond.core.errors import ModelFormatError
from millpond.engine.chat_format import ChatPrompt, Conversation
from millpond.engine.model.dsml import (
    CALLS_BEGIN,
    CALLS_END,
    DSML,
    INVOKE_BEGIN,
    INVOKE_END,
    PARAMETER_BEGIN,
    PARAMETER_END,
    render_calls,
    to_json,
)
from millpond.engine.model.reply_parser import THINK_BEGIN, THINK_END, V41ReplyParser
from millpond.engine.text_guard import TextGuard, pick_mark
from millpond.engine.tokenizer import Tokenizer

BOS, EOS = "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>"
SYSTEM, USER, ASSISTANT = "<｜System｜>", "<｜User｜>", "<｜Assistant｜>"
CONTROL_TEXTS = (BOS, EOS, SYSTEM, USER, ASSISTANT, THINK_BEGIN, THINK_END, DSML)
"""Every token that the encoding is made of."""
REPLY_TEXTS = (THINK_BEGIN, THINK_END, DSML)
"""Those of them that a reply's parser reads as text."""
TEXT_JOINER = "\n\n"
"""Between the parts of one message, and of one turn."""

_EFFORT = "Reasoning Effort: {} (range 1-100, the higher the value, the more thorough the reasoning)\n\n"
_TOOLS = f"""## Tools

You have access to a set of tools to help answer the user's question. You can invoke tools by writing a \
"{CALLS_BEGIN}" block like the following:

{CALLS_BEGIN}
{INVOKE_BEGIN} name="$TOOL_NAME">
{PARAMETER_BEGIN} name="$PARAMETER_NAME" string="true|false">$PARAMETER_VALUE{PARAMETER_END}
...
{INVOKE_END}
{INVOKE_BEGIN} name="$TOOL_NAME2">
...
{INVOKE_END}
{CALLS_END}

String parameters should be specified as is and set `string="true"`. For all other types (numbers, booleans, \
arrays, objects), pass the value in JSON format and set `string="false"`.

If thinking_mode is enabled (triggered by {THINK_BEGIN}), you MUST output your complete reasoning inside \
{THINK_BEGIN}...{THINK_END} BEFORE any tool calls or final response.

Otherwise, output directly after {THINK_END} with tool calls or final response.

### Available Tool Schemas

"""
_TOOLS_END = """

You MUST strictly follow the above defined tool name and parameter schemas to invoke tool calls.
"""
_RESPONSE_FORMAT = "## Response Format:\n\nYou MUST strictly adhere to the following schema to reply:\n"


class V41ChatEncoding:
    """The chat encoding of one V4.1 checkpoint."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        """Args:
        tokenizer: Has the tokens of the encoding.

        Raises:
            ModelFormatError: It lacks one of them.
        """
        missing = [text for text in CONTROL_TEXTS if text not in tokenizer.control_ids]
        if missing:
            raise ModelFormatError(
                f"the tokenizer lacks {missing[0]!r}, which V4.1's chat encoding needs",
                code="model.tokenizer",
                param="added_tokens",
            )
        self._tokenizer = tokenizer
        self._guard = TextGuard(tokenizer.control_ids)

    def encode(self, conversation: Conversation) -> ChatPrompt:
        """Ids of a conversation and how to read the reply. Control tokens come from the encoding only.

        Raises:
            InvalidRequest: A text is not valid Unicode.
        """
        schema = conversation.response_schema
        mark = pick_mark([conversation.messages, conversation.tools, schema])
        text = render(
            Conversation(
                messages=[_guarded(message, self._guard, mark) for message in conversation.messages],
                tools=self._guard.protect(conversation.tools, mark),
                add_generation_prompt=conversation.add_generation_prompt,
                reasoning_effort=conversation.reasoning_effort,
                response_schema=self._guard.protect(schema, mark),
                must_call=conversation.must_call,
            )
        )
        make_parser = partial(
            V41ReplyParser,
            is_reasoning=conversation.reasoning_effort is not None,
            reads_calls=bool(conversation.tools),
            is_in_calls=conversation.must_call,
        )
        return ChatPrompt(self._tokenizer.encode_trusted(text, mark), make_parser)


def _guarded(message: Mapping[str, Any], guard: TextGuard, mark: str) -> dict[str, Any]:
    return {name: value if name == "role" else guard.protect(value, mark) for name, value in message.items()}


def render(conversation: Conversation) -> str:
    """Write out a conversation as text, control tokens included."""
    turns = _make_turns(conversation.messages)
    sections = _sections(conversation)
    if sections and not (turns and turns[0].role == "system"):
        turns.insert(0, _Turn("system"))
    is_thinking = conversation.reasoning_effort is not None
    keeps_reasoning = is_thinking and bool(conversation.tools)
    out = [BOS]
    if is_thinking:
        out.append(SYSTEM + _EFFORT.format(conversation.reasoning_effort))
    for index, turn in enumerate(turns):
        if turn.role == "system":
            is_open = index == 0 and is_thinking
            texts = (turn.text, *sections) if index == 0 else (turn.text,)
            out.append(("" if is_open else SYSTEM) + "\n\n".join(texts))
        elif turn.role == "user":
            out.append(USER + turn.write_parts())
        else:
            out.append(ASSISTANT + (THINK_BEGIN + turn.reasoning if keeps_reasoning else "") + THINK_END)
            out.append(turn.text + EOS)
    if conversation.add_generation_prompt:
        out.append(ASSISTANT + (THINK_BEGIN if is_thinking else THINK_END))
        if conversation.must_call:
            out.append(f"\n\n{CALLS_BEGIN}\n")
    return "".join(out)


@dataclass(frozen=True, slots=True)
class _Part:
    """Part of a user turn."""

    text: str
    call_number: int | None = None
    """For the result of a call: which of the calls."""


@dataclass(frozen=True, slots=True)
class _Turn:
    """What one side says at once."""

    role: str
    text: str = ""
    reasoning: str = ""
    parts: list[_Part] = field(default_factory=list[_Part])
    """Of a user turn."""

    def write_parts(self) -> str:
        """Texts where they stand; results in the places of results, in the order of their calls."""
        results = sorted(
            (part for part in self.parts if part.call_number is not None),
            key=lambda part: part.call_number or 0,
        )
        in_order = iter(results)
        return TEXT_JOINER.join(
            part.text if part.call_number is None else next(in_order).text for part in self.parts
        )


def _make_turns(messages: Sequence[Mapping[str, Any]]) -> list[_Turn]:
    turns: list[_Turn] = []
    number_by_id: dict[str, int] = {}
    for message in messages:
        role, content = message["role"], message["content"]
        if role in ("user", "tool"):
            if not turns or turns[-1].role != "user":
                turns.append(_Turn("user"))
            part = _Part(content)
            if role == "tool":
                number = number_by_id.get(message.get("tool_call_id", ""), 0)
                part = _Part(f"<tool_result>{content}</tool_result>", number)
            turns[-1].parts.append(part)
        elif role == "system":
            if content:
                turns.append(_Turn("system", content))
        else:
            calls = message.get("tool_calls", ())
            if calls:
                number_by_id = {call["id"]: number for number, call in enumerate(calls)}
                functions = [(call["function"]["name"], call["function"]["arguments"]) for call in calls]
                content += "\n\n" + render_calls(functions)
            turns.append(_Turn("assistant", content, message.get("reasoning_content", "")))
    return turns


def _sections(conversation: Conversation) -> list[str]:
    sections: list[str] = []
    if conversation.tools:
        schemas = "\n".join(to_json(tool["function"]) for tool in conversation.tools)
        sections.append(_TOOLS + schemas + _TOOLS_END)
    if conversation.response_schema is not None:
        sections.append(_RESPONSE_FORMAT + to_json(conversation.response_schema))
    return sections
