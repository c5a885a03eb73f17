"""The model as the gateway sees it: names, and text <-> token ids."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from millpond.engine.chat_format import ChatPrompt, Conversation


class Detokenizer(Protocol):
    """Turns the ids of one sequence into text; see `engine.tokenizer.Detokenizer`."""

    def push(self, token_id: int) -> str:
        """New complete text after one more token; empty while a character is incomplete."""
        ...

    def flush(self) -> str:
        """What is left of an incomplete character at the end."""
        ...


@dataclass(frozen=True, slots=True)
class ServedModel:
    """What validation and streaming need of one model."""

    names: tuple[str, ...]
    """Accepted values of `model`; the first is the canonical one."""
    vocab_size: int
    stop_token_ids: tuple[int, ...]
    """End-of-sequence ids; a client may ignore them."""
    supports_tools: bool
    """The chat encoding writes `tools`."""
    can_think: bool
    """Its chat encoding has a thinking mode, can open a call and ask for a schema; replies are parsed."""
    text_joiner: str
    """Between the text parts of one message."""
    encode_text: Callable[[str], array[int]]
    """Ids of untrusted text."""
    encode_chat: Callable[[Conversation], ChatPrompt]
    """A conversation as the model reads it.

    Raises:
        InvalidRequest: If the encoding refuses the conversation.
    """
    decode: Callable[[Sequence[int]], str]
    token_bytes: Callable[[int], bytes]
    """Bytes that a token stands for."""
    max_token_bytes: int
    """Length of the longest of them."""
    make_detokenizer: Callable[[], Detokenizer]
    make_chat_detokenizer: Callable[[], Detokenizer]
    """The same for replies in a chat: tokens that their parser needs have a text."""
