"""Check the messages and tools of a request and make the `Conversation` that a chat encoding writes out."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from millpond.engine.chat_format import Conversation
from millpond.serve.gateway.bad_input import refuse, refuse_unsupported
from millpond.serve.gateway.openai_schema import Message, NamedToolChoice, ResponseFormat, ToolCall
from millpond.serve.gateway.served_model import ServedModel

_FUNCTION_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")
"""Source: OpenAI API reference, functions; the dot is in use with other services."""
_TOOL_CHOICES = ("none", "auto", "required")


def make_conversation(
    messages: Sequence[Message],
    tools: Sequence[dict[str, Any]] | None,
    model: ServedModel,
    *,
    tool_choice: str | NamedToolChoice | None = None,
    response_format: ResponseFormat | None = None,
    reasoning_effort: int | None = None,
    add_generation_prompt: bool = True,
) -> Conversation:
    """Check a conversation.

    Raises:
        InvalidRequest: Naming the field.
    """
    offered, must_call = _tools(tools or [], tool_choice, model, is_thinking=reasoning_effort is not None)
    return Conversation(
        messages=_plain_messages(messages, model.text_joiner),
        tools=offered,
        add_generation_prompt=add_generation_prompt,
        reasoning_effort=reasoning_effort,
        response_schema=_response_schema(response_format, model),
        must_call=must_call,
    )


# --- messages -------------------------------------------------------------------------------------


def _plain_messages(messages: Sequence[Message], text_joiner: str) -> list[dict[str, Any]]:
    if not messages:
        refuse("messages", [], "give at least one message")
    plain: list[dict[str, Any]] = []
    open_ids: list[str] = []
    """Calls of the last assistant message that have no result yet."""
    for index, message in enumerate(messages):
        at = f"messages[{index}]"
        plain.append(_plain_message(message, at, text_joiner))
        if message.role == "tool":
            if message.tool_call_id not in open_ids:
                refuse(
                    f"{at}.tool_call_id",
                    message.tool_call_id,
                    "give the id of a call in the assistant message before it, once",
                )
            open_ids.remove(message.tool_call_id)
            continue
        _check_answered(open_ids, at)
        open_ids = [call["id"] for call in plain[-1].get("tool_calls", ())]
    _check_answered(open_ids, "messages")
    return plain


def _check_answered(open_ids: list[str], at: str) -> None:
    if open_ids:
        refuse(at, open_ids[0], "this tool call has no result: give a tool message with this `tool_call_id`")


def _plain_message(message: Message, at: str, text_joiner: str) -> dict[str, Any]:
    if message.content is None and not (message.role == "assistant" and message.tool_calls):
        refuse(f"{at}.content", None, "give a string or a list of text parts")
    content = message.content
    if isinstance(content, list):
        if not content:
            refuse(f"{at}.content", [], "give at least one text part")
        content = text_joiner.join(part.text for part in content)
    _check_role_fields(message, at)
    # Encodings know no developer role; it is the newer name of system. Source: OpenAI API reference.
    plain: dict[str, Any] = {"role": "system" if message.role == "developer" else message.role}
    plain["content"] = content if content is not None else ""
    reasoning = message.reasoning_content
    if reasoning is None:
        reasoning = message.reasoning
    elif message.reasoning not in (None, reasoning):
        refuse(f"{at}.reasoning", message.reasoning, "it contradicts `reasoning_content`: give one of them")
    optional = {
        "name": message.name,
        "tool_call_id": message.tool_call_id,
        "reasoning_content": reasoning,
    }
    plain |= {name: value for name, value in optional.items() if value is not None}
    if message.tool_calls:
        plain["tool_calls"] = [
            _plain_tool_call(call, f"{at}.tool_calls[{index}]")
            for index, call in enumerate(message.tool_calls)
        ]
    return plain


def _check_role_fields(message: Message, at: str) -> None:
    """Refuse fields that do not belong to the message's role."""
    for name, value, role in (
        ("tool_calls", message.tool_calls, "assistant"),
        ("reasoning_content", message.reasoning_content, "assistant"),
        ("reasoning", message.reasoning, "assistant"),
        ("tool_call_id", message.tool_call_id, "tool"),
    ):
        if value is not None and message.role != role:
            shown = "[...]" if isinstance(value, list) else value
            refuse(f"{at}.{name}", shown, f"only a message of role {role} has it; remove it")
    if message.refusal is not None:
        refuse_unsupported(f"{at}.refusal", "leave it out")


def _plain_tool_call(call: ToolCall, at: str) -> dict[str, Any]:
    _check_function_name(f"{at}.function.name", call.function.name)
    # Encodings expect the object, the API carries its text.
    try:
        arguments = json.loads(call.function.arguments or "{}")
    except (ValueError, RecursionError):
        arguments = None
    if not isinstance(arguments, dict):
        refuse(f"{at}.function.arguments", call.function.arguments, "give a JSON object as text")
    if not call.id:
        refuse(f"{at}.id", call.id, "give the id by which a tool message refers to it")
    return {
        "type": "function",
        "id": call.id,
        "function": {"name": call.function.name, "arguments": arguments},
    }


# --- tools ----------------------------------------------------------------------------------------


def _tools(
    tools: Sequence[dict[str, Any]],
    choice: str | NamedToolChoice | None,
    model: ServedModel,
    *,
    is_thinking: bool,
) -> tuple[list[dict[str, Any]], bool]:
    """Tools to offer, and whether the reply has to begin with a call."""
    for index, tool in enumerate(tools):
        _check_tool(tool, f"tools[{index}]")
    if isinstance(choice, str) and choice not in _TOOL_CHOICES:
        refuse("tool_choice", choice, f"give {', '.join(_TOOL_CHOICES)} or name a function")
    if tools and choice != "none" and not model.supports_tools:
        refuse_unsupported("tools", "the chat template of this model has no place for them")
    match choice:
        case None | "auto":
            return list(tools), False
        case "none":
            return [], False
        case _:
            return _forced_tools(tools, choice, model, is_thinking=is_thinking), True


def _forced_tools(
    tools: Sequence[dict[str, Any]],
    choice: str | NamedToolChoice,
    model: ServedModel,
    *,
    is_thinking: bool,
) -> list[dict[str, Any]]:
    """Tools one of which has to be called."""
    name = choice.function.name if isinstance(choice, NamedToolChoice) else None
    if not model.can_think:
        refuse_unsupported("tool_choice", "with this model only `none` and `auto` are")
    if not tools:
        refuse("tool_choice", name or choice, "give `tools` to choose from")
    if is_thinking:
        remedy = "a model that thinks first decides for itself; set `thinking` to false, or choose auto"
        refuse("tool_choice", name or choice, remedy)
    if name is None:
        return list(tools)
    # The model sees the chosen tool alone. Source: deepseek-recipe 0.2.0.
    named = [tool for tool in tools if tool["function"]["name"] == name]
    if not named:
        refuse("tool_choice.function.name", name, "give the name of one of `tools`")
    return named


def _check_tool(tool: Mapping[str, Any], at: str) -> None:
    function = tool.get("function")
    if tool.get("type") != "function" or not isinstance(function, dict):
        refuse(at, tool, 'give {"type": "function", "function": {"name": ..., ...}}')
    _check_function_name(f"{at}.function.name", function.get("name"))
    description, parameters = function.get("description"), function.get("parameters")
    if description is not None and not isinstance(description, str):
        refuse(f"{at}.function.description", description, "give a string")
    if parameters is not None and not isinstance(parameters, dict):
        refuse(f"{at}.function.parameters", parameters, "give a JSON schema")
    if function.get("strict"):
        refuse_unsupported(f"{at}.function.strict", "calls cannot be forced into a schema yet; leave it out")


def _check_function_name(param: str, name: object) -> None:
    if not isinstance(name, str) or not _FUNCTION_NAME.fullmatch(name):
        refuse(param, name, "give 1 to 64 letters, digits, dots, dashes or underscores")


# --- response format ------------------------------------------------------------------------------


def _response_schema(form: ResponseFormat | None, model: ServedModel) -> Mapping[str, Any] | None:
    if form is None or form.type == "text":
        return None
    if form.type not in ("json_object", "json_schema"):
        refuse("response_format.type", form.type, "give text or json_schema")
    if form.type == "json_object" or not model.can_think:
        refuse_unsupported(
            "response_format", "an answer cannot be forced into a form yet; ask for it in a message"
        )
    if form.json_schema is None or form.json_schema.schema is None:
        refuse("response_format.json_schema", None, 'give {"name": ..., "schema": {...}}')
    if form.json_schema.strict:
        refuse_unsupported(
            "response_format.json_schema.strict",
            "an answer cannot be forced into a schema yet; without `strict` the model is asked to follow it",
        )
    return form.json_schema.schema
