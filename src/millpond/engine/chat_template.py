"""Render conversations through the model's own Jinja template and encode them safely (see `text_guard`)."""

from __future__ import annotations

import json
from array import array
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

import jinja2
import jinja2.ext
import jinja2.meta
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox

from millpond.core.errors import InvalidRequest, ModelFormatError
from millpond.engine.text_guard import TextGuard, pick_mark
from millpond.engine.tokenizer import Tokenizer

FALLBACK_TEMPLATE = (
    "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)
"""For models without a template of their own."""

_KNOWN_ROLES = frozenset({"system", "developer", "user", "assistant", "tool", "function"})
"""Roles may form control tokens (`<|user|>`) and are ours; any other role is a client's string."""


def _utc_now() -> datetime:
    return datetime.now(UTC)


class ChatTemplate:
    """A model's chat template together with its tokenizer.

    Attributes:
        supports_tools: The template makes use of `tools`.
    """

    def __init__(self, tokenizer: Tokenizer, now: Callable[[], datetime] = _utc_now) -> None:
        """Args:
        tokenizer: Gives the template's source and encodes what it writes.
        now: Date that templates print.

        Raises:
            ModelFormatError: The template is not valid Jinja.
        """
        source = tokenizer.chat_template or FALLBACK_TEMPLATE
        environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols, _GenerationTag]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _refuse
        environment.globals["strftime_now"] = lambda form: now().strftime(form)
        try:
            self._template = environment.from_string(source)
            self.supports_tools = "tools" in jinja2.meta.find_undeclared_variables(environment.parse(source))
        except jinja2.TemplateError as error:
            raise ModelFormatError(f"chat template: {error}", code="model.chat_template") from error
        self._tokenizer = tokenizer
        self._guard = TextGuard(tokenizer.control_ids)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] = (),
        add_generation_prompt: bool = True,
    ) -> str:
        """Write out a conversation.

        Args:
            messages: OpenAI messages; `content` is a text.
            tools: OpenAI tools.
            add_generation_prompt: End with the opening of the assistant's turn.

        Raises:
            InvalidRequest: The template refuses the conversation.
        """
        try:
            return self._template.render(
                messages=messages,
                tools=tools or None,
                documents=None,
                add_generation_prompt=add_generation_prompt,
                **self._tokenizer.named_tokens,
            )
        except (jinja2.TemplateError, TypeError, ValueError, LookupError) as error:
            raise InvalidRequest(
                f"the model's chat template cannot render these messages: {error}",
                code="invalid_messages",
                param="messages",
            ) from error

    def encode(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] = (),
        add_generation_prompt: bool = True,
    ) -> array[int]:
        """Ids of a conversation, int32. Control tokens come from the template only.

        Raises:
            InvalidRequest: The template refuses the conversation, or the text is not valid Unicode.
        """
        mark = pick_mark([*messages, *tools])
        protected = [
            {
                name: value if name == "role" and value in _KNOWN_ROLES else self._guard.protect(value, mark)
                for name, value in message.items()
            }
            for message in messages
        ]
        safe_tools = [self._guard.protect(tool, mark) for tool in tools]
        text = self.render(protected, safe_tools, add_generation_prompt)
        return self._tokenizer.encode_trusted(text, mark)


class _GenerationTag(jinja2.ext.Extension):
    """`{% generation %}`: marks the assistant's text for training; here it only renders what it encloses."""

    tags = {"generation"}  # noqa: RUF012 - declared so by the base class

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        """Give back the enclosed nodes."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _refuse(message: str) -> None:
    raise jinja2.TemplateError(message)
