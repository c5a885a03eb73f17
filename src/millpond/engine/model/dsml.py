"""DSML: how V4.1 writes tool calls, and reads them back from a growing text.

    <｜DSML｜ calls>
    <｜DSML｜ invoke name="look_up">
    <｜DSML｜ parameter name="query" string="true">any text</｜DSML｜ parameter>
    <｜DSML｜ parameter name="limit" string="false">10</｜DSML｜ parameter>
    </｜DSML｜ invoke>
    </｜DSML｜ calls>

A string parameter is written as it is, up to its end tag; any other as JSON.

Source: v41_model.md section 13; the tags are a format, equal in the public encodings of vLLM and SGLang.
"""

from __future__ import annotations

import json
import re
from collections.abc import Generator, Mapping, Sequence
from typing import Any, NoReturn

from millpond.engine.chat_format import ReplyCall

DSML = "｜DSML｜"
CALLS_BEGIN = f"<{DSML} calls>"
CALLS_END = f"</{DSML} calls>"
INVOKE_BEGIN = f"<{DSML} invoke"
INVOKE_END = f"</{DSML} invoke>"
PARAMETER_BEGIN = f"<{DSML} parameter"
PARAMETER_END = f"</{DSML} parameter>"

MAX_HEADER_CHARS = 1024
"""Attributes of one tag; longer ones are no call."""
_HEADER_LEAD = ' name="'
_HEADER_END = '">'
_INVOKE_HEADER = re.compile(r' name="(?P<name>[^"\n]+)')
_PARAMETER_HEADER = re.compile(r' name="(?P<name>[^\n]+)" string="(?P<is_string>true|false)')


def to_json(value: object) -> str:
    """JSON as V4.1 was trained on it: one line, blanks after separators, no escapes beyond the needed."""
    return json.dumps(value, ensure_ascii=False)


def render_calls(calls: Sequence[tuple[str, Mapping[str, Any]]]) -> str:
    """Write a block of calls.

    Args:
        calls: (name, arguments), at least one.
    """
    invokes = [
        f'{INVOKE_BEGIN} name="{name}">\n{_render_arguments(arguments)}\n{INVOKE_END}'
        for name, arguments in calls
    ]
    return "\n".join((CALLS_BEGIN, *invokes, CALLS_END))


def _render_arguments(arguments: Mapping[str, Any]) -> str:
    lines: list[str] = []
    for name, value in arguments.items():
        is_string = "true" if isinstance(value, str) else "false"
        text = value if isinstance(value, str) else to_json(value)
        lines.append(f'{PARAMETER_BEGIN} name="{name}" string="{is_string}">{text}{PARAMETER_END}')
    return "\n".join(lines)


class CallBlock:
    """The inside of a block of calls, read as it grows.

    Calls are given out whole, each when its end tag is there, so that nobody ever holds half a call.

    Attributes:
        is_closed: The block's end tag was read.
        is_broken: What came is no call.
        unread: Text since the last call that was given out, up to the end of the block or to where it is
            broken.
        rest: What follows a closed or broken block.
    """

    __slots__ = ("_at", "_begin", "_steps", "_text", "is_broken", "is_closed")

    def __init__(self) -> None:
        self.is_closed = False
        self.is_broken = False
        self._text = ""
        self._begin = 0
        self._at = 0
        self._steps = self._read()

    @property
    def unread(self) -> str:
        """See the class."""
        is_over = self.is_closed or self.is_broken
        return self._text[self._begin : self._at if is_over else len(self._text)]

    @property
    def rest(self) -> str:
        """See the class."""
        return self._text[self._at :]

    def push(self, text: str) -> list[ReplyCall]:
        """Take the next piece of text and give the calls that it completes.

        Not to be called once the block is closed or broken.
        """
        self._text += text
        calls: list[ReplyCall] = []
        for call in self._steps:
            if call is None:
                break
            calls.append(call)
        return calls

    def _read(self) -> Generator[ReplyCall | None]:
        """Give each call, and None whenever more text is needed."""
        try:
            while (yield from self._tag(INVOKE_BEGIN, CALLS_END)) == INVOKE_BEGIN:
                header = yield from self._header(_INVOKE_HEADER)
                arguments = yield from self._arguments()
                self._begin = self._at
                yield ReplyCall(header["name"], arguments)
            self.is_closed = True
        except _BrokenCallError:
            self.is_broken = True

    def _arguments(self) -> Generator[None, None, tuple[str, ...]]:
        fragments: list[str] = []
        names: set[str] = set()
        while (yield from self._tag(PARAMETER_BEGIN, INVOKE_END)) == PARAMETER_BEGIN:
            header = yield from self._header(_PARAMETER_HEADER)
            value = yield from self._value()
            name = header["name"]
            if name in names:
                raise _BrokenCallError
            names.add(name)
            text = to_json(value) if header["is_string"] == "true" else _checked_json(value)
            fragments.append(f"{', ' if fragments else '{'}{to_json(name)}: {text}")
        return (*fragments, "}") if fragments else ("{}",)

    def _tag(self, *tags: str) -> Generator[None, None, str]:
        """Skip white space and read one of some tags."""
        while True:
            while self._text[self._at : self._at + 1].isspace():
                self._at += 1
            for tag in tags:
                if self._text.startswith(tag, self._at):
                    self._at += len(tag)
                    return tag
            if not any(tag.startswith(self._text[self._at :]) for tag in tags):
                raise _BrokenCallError
            yield

    def _header(self, pattern: re.Pattern[str]) -> Generator[None, None, re.Match[str]]:
        """Read the attributes of a tag and its end."""
        begin = self._at
        while (end := self._text.find(_HEADER_END, begin)) < 0:
            lead = self._text[begin : begin + len(_HEADER_LEAD)]
            if not _HEADER_LEAD.startswith(lead) or len(self._text) - begin > MAX_HEADER_CHARS + 1:
                raise _BrokenCallError
            yield
        match = pattern.fullmatch(self._text, begin, end)
        if match is None or end - begin > MAX_HEADER_CHARS:
            raise _BrokenCallError
        self._at = end + len(_HEADER_END)
        return match

    def _value(self) -> Generator[None, None, str]:
        """Read a parameter's value and its end tag."""
        begin = search = self._at
        while (end := self._text.find(PARAMETER_END, search)) < 0:
            search = max(begin, len(self._text) - len(PARAMETER_END) + 1)
            yield
        self._at = end + len(PARAMETER_END)
        return self._text[begin:end]


class _BrokenCallError(Exception):
    """The text is no call; caught where the block is read."""


def _checked_json(text: str) -> str:
    try:
        json.loads(text, parse_constant=_refuse_constant)
    except (ValueError, RecursionError):
        raise _BrokenCallError from None
    return text.strip()


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON")
