"""Keep what people wrote text: no string of theirs may become a control token of the prompt around it.

A chat encoding writes control tokens around what people wrote. Before that each of their strings is
protected: a mark (a Unicode noncharacter that none of them contains) is put inside every control token that
it spells, and at either end where it could be one part of a control token that its neighbour completes.
Control tokens are then looked for in the whole text; those spelled by people are split by the mark and not
found; and the marks are removed (`Tokenizer.encode_trusted`). Whatever handles the strings in between meets
strings that look and behave as before.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from millpond.core.errors import InvalidRequest

_MARKS = [chr(code) for code in range(0xFDD0, 0xFDF0)]
"""The noncharacters that Unicode reserves for a program's own use."""


class TextGuard:
    """Splits control tokens that a client's strings spell, alone or with what stands next to them."""

    def __init__(self, control_texts: Iterable[str]) -> None:
        """Args:
        control_texts: Control tokens by their text.
        """
        texts = sorted(control_texts)
        begins = "|".join(map(re.escape, texts)) or r"(?!)"
        # A lookahead, so that a token which begins inside another one is split as well.
        self._first_letter = re.compile(f"(?=(?:{begins}))(.)", re.DOTALL)
        self._heads = frozenset(text[:length] for text in texts for length in range(1, len(text)))
        self._tails = frozenset(text[-length:] for text in texts for length in range(1, len(text)))
        self._max_length = max(map(len, texts), default=1) - 1

    def protect(self, value: Any, mark: str) -> Any:
        """The same value with marks in its strings; numbers, booleans and None as they are."""
        match value:
            case str():
                return self._protect_text(value, mark)
            case Mapping():
                return {self.protect(key, mark): self.protect(item, mark) for key, item in value.items()}
            case list() | tuple():
                return [self.protect(item, mark) for item in value]
            case _:
                return value

    def _protect_text(self, text: str, mark: str) -> str:
        lengths = range(1, min(self._max_length, len(text)) + 1)
        is_tail = any(text[:length] in self._tails for length in lengths)
        is_head = any(text[-length:] in self._heads for length in lengths)
        text = self._first_letter.sub(rf"\1{mark}", text)
        return (mark if is_tail else "") + text + (mark if is_head else "")


def pick_mark(values: Sequence[Any]) -> str:
    """Pick a mark that none of the strings in some values contains.

    Raises:
        InvalidRequest: They contain all of them.
    """
    used = set().union(*map(set, all_texts(values)))
    for mark in _MARKS:
        if mark not in used:
            return mark
    raise InvalidRequest(
        "the messages contain all 32 Unicode noncharacters U+FDD0 to U+FDEF", code="invalid_unicode"
    )


def all_texts(value: Any) -> Iterator[str]:
    """Every string in a value, keys included."""
    match value:
        case str():
            yield value
        case Mapping():
            for key, item in value.items():
                yield from all_texts(key)
                yield from all_texts(item)
        case list() | tuple():
            for item in value:
                yield from all_texts(item)
        case _:
            pass
