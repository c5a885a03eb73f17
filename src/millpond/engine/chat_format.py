"""What every chat encoding takes and gives, whichever model it belongs to."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol


@dataclass(frozen=True, slots=True)
class Conversation:
    """A checked conversation, to be written out as a prompt."""

    messages: Sequence[Mapping[str, Any]]
    """OpenAI messages of the roles system, user, assistant and tool; `content` is a text, and the arguments
    of calls are objects."""
    tools: Sequence[Mapping[str, Any]] = ()
    """OpenAI tools."""
    add_generation_prompt: bool = True
    """End with the opening of the assistant's turn."""
    reasoning_effort: int | None = None
    """1 to 100: think first, about so hard. None: answer at once."""
    response_schema: Mapping[str, Any] | None = None
    """JSON schema that the model is asked to follow."""
    must_call: bool = False
    """The reply begins inside a block of calls that the prompt opens."""


@dataclass(frozen=True, slots=True)
class Reasoning:
    """What a model thinks before it answers."""

    text: str


@dataclass(frozen=True, slots=True)
class ReplyCall:
    """One complete tool call of a reply."""

    name: str
    fragments: tuple[str, ...]
    """Its arguments: joined they are the text of a JSON object."""


ReplyPart = str | Reasoning | ReplyCall
"""Part of a reply; a string is content."""


class ReplyParser(Protocol):
    """Tells reasoning, content and tool calls of one growing reply apart.

    Guarantees:
        The parts do not depend on how the reply is cut into pieces, neighbouring texts of one kind joined.
    """

    @property
    def is_reasoning(self) -> bool:
        """What comes next is reasoning, as far as is known."""
        ...

    def push(self, text: str) -> list[ReplyPart]:
        """Take the next piece; give what is certain now, no text empty."""
        ...

    def flush(self) -> list[ReplyPart]:
        """What is left at the end of the reply."""
        ...


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """A conversation as a model reads it."""

    ids: array[int]
    """int32."""
    make_parser: Callable[[], ReplyParser] | None = None
    """Makes the parser of one reply; None: a reply is content and nothing else."""
