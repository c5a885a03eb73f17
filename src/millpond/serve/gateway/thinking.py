"""How hard a model shall think: one number from the several fields in which clients say it.

OpenAI's clients send `reasoning_effort`, DeepSeek's `thinking`, vLLM's and SGLang's `chat_template_kwargs`.
All of them may be sent, as long as they say the same.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import TypeVar

from millpond.config.gateway_params import MAX_EFFORT, GatewayParams
from millpond.serve.gateway.bad_input import refuse, refuse_unsupported
from millpond.serve.gateway.openai_schema import (
    ChatRequest,
    ChatTemplateKwargs,
    ThinkingSwitch,
    TokenizeRequest,
)

_OFF = "none"
_Value = TypeVar("_Value")


def pick_effort(
    fields: ChatRequest | TokenizeRequest, params: GatewayParams, *, can_think: bool
) -> int | None:
    """Pick the effort of one call.

    Args:
        fields: What the client says.
        params: Default and names.
        can_think: The model has a thinking mode.

    Returns:
        1 to 100; None for an answer without reasoning.

    Raises:
        InvalidRequest: Unknown values, fields that contradict each other, or a model that cannot think.
    """
    table = asdict(params.efforts)
    kwargs = fields.chat_template_kwargs or ChatTemplateKwargs()
    thinking = fields.thinking
    switches: dict[str, bool | None] = {
        "thinking": thinking.type == "enabled" if isinstance(thinking, ThinkingSwitch) else thinking,
        "chat_template_kwargs.thinking": kwargs.thinking,
        "chat_template_kwargs.enable_thinking": kwargs.enable_thinking,
    }
    efforts: dict[str, int | None] = {}
    for param, value in (
        ("reasoning_effort", fields.reasoning_effort),
        ("chat_template_kwargs.reasoning_effort", kwargs.reasoning_effort),
    ):
        if value is not None:
            efforts[param] = _effort(param, value, table)
            switches[param] = efforts[param] is not None
    is_on = _agreed({param: value for param, value in switches.items() if value is not None})
    effort = _agreed(efforts)
    if is_on and not can_think:
        param = next(param for param, value in switches.items() if value)
        refuse_unsupported(param, "this model has no thinking mode; leave it out")
    if not can_think or is_on is False or (is_on is None and not params.thinks_by_default):
        return None
    return table["high"] if effort is None else effort


def _effort(param: str, value: str | int, table: dict[str, int]) -> int | None:
    if isinstance(value, str):
        if value == _OFF:
            return None
        if value in table:
            return table[value]
    elif 1 <= value <= MAX_EFFORT:
        return value
    return refuse(param, value, f"give {_OFF}, {', '.join(table)} or a whole number from 1 to {MAX_EFFORT}")


def _agreed(values: dict[str, _Value]) -> _Value | None:
    """The one value of all fields that are set."""
    first: tuple[str, _Value] | None = None
    for param, value in values.items():
        if first is None:
            first = param, value
        elif first[1] != value:
            refuse(param, value, f"it contradicts `{first[0]}`: give one of them")
    return None if first is None else first[1]
