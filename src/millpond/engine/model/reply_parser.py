"""Tell reasoning, content and tool calls of a V4.1 reply apart, however the reply is cut into pieces.

    thinking mode:  reasoning </think> content [calls]
    chat mode:      content [calls]

- Line breaks next to a marker belong to it. What may become a marker is held back, and no more than that.
- Calls are read only if the request has tools, and also where `</think>` was forgotten before them.
- What looks like calls and is none (broken, empty or cut off) stays the text it is. Nothing is ever lost.

Source: v41_model.md section 13; behaviour of the official `deepseek-recipe` 0.2.0, which drops broken calls.
"""

from __future__ import annotations

from millpond.engine.chat_format import Reasoning, ReplyPart
from millpond.engine.model.dsml import CALLS_BEGIN, CALLS_END, CallBlock

THINK_BEGIN = "<think>"
THINK_END = "</think>"


class V41ReplyParser:
    """One reply; see `ReplyParser`."""

    __slots__ = ("_block", "_head", "_held", "_reads_calls", "_skips_breaks", "is_reasoning")

    def __init__(self, *, is_reasoning: bool, reads_calls: bool, is_in_calls: bool = False) -> None:
        """Args:
        is_reasoning: The prompt ends with `<think>`.
        reads_calls: The request has tools.
        is_in_calls: The prompt ends with the begin of a block of calls.
        """
        self.is_reasoning = is_reasoning
        self._reads_calls = reads_calls
        self._held = ""
        self._skips_breaks = True
        self._block = CallBlock() if is_in_calls else None
        self._head = ""
        """What stands before the block's inside, while the block has given no call."""

    def push(self, text: str) -> list[ReplyPart]:
        """See `ReplyParser`."""
        parts: list[ReplyPart] = []
        while text:
            if self._block is None:
                text = self._in_text(text, parts)
            else:
                text = self._in_block(text, self._block, parts)
        return parts

    def flush(self) -> list[ReplyPart]:
        """See `ReplyParser`."""
        parts: list[ReplyPart] = []
        text, self._held = self._held, ""
        if self._block is not None:
            text = self._head + self._block.unread
            # After a call the rest of the block is markup, even if its end tag was cut off.
            if not self._head and CALLS_END.startswith(text.strip()):
                text = ""
            self._block = None
        self._say(text, parts)
        return parts

    def _in_text(self, text: str, parts: list[ReplyPart]) -> str:
        """Read up to the next marker; give what follows it."""
        text, self._held = self._held + text, ""
        if self._skips_breaks:
            text = text.lstrip("\n")
            self._skips_breaks = not text
        markers = self._markers()
        found = [(begin, marker) for marker in markers if (begin := text.find(marker)) >= 0]
        if not found:
            border = _hold_border(text, markers)
            self._held = text[border:]
            self._say(text[:border], parts)
            return ""
        begin, marker = min(found)
        before = text[:begin].rstrip("\n")
        self._say(before, parts)
        if marker == THINK_END:
            self.is_reasoning = False
            self._skips_breaks = True
        else:
            self._block = CallBlock()
            self._head = text[len(before) : begin] + marker
        return text[begin + len(marker) :]

    def _in_block(self, text: str, block: CallBlock, parts: list[ReplyPart]) -> str:
        """Read calls; give what follows the block."""
        if calls := block.push(text):
            self._head = ""
            self.is_reasoning = False
            parts += calls
        if not (block.is_closed or block.is_broken):
            return ""
        self._block = None
        if block.is_broken or self._head:
            self._say(self._head + block.unread, parts)
        else:
            self._skips_breaks = True
        return block.rest

    def _markers(self) -> tuple[str, ...]:
        thinking = (THINK_END,) if self.is_reasoning else ()
        return (*thinking, CALLS_BEGIN) if self._reads_calls else thinking

    def _say(self, text: str, parts: list[ReplyPart]) -> None:
        if not text:
            return
        last = parts[-1] if parts else None
        if self.is_reasoning:
            if isinstance(last, Reasoning):
                text = last.text + text
                parts.pop()
            parts.append(Reasoning(text))
        elif isinstance(last, str):
            parts[-1] = last + text
        else:
            parts.append(text)


def _hold_border(text: str, markers: tuple[str, ...]) -> int:
    """Where the end of a text begins that may become part of a marker; its end if none may."""
    if not markers:
        return len(text)
    # Every marker begins with its only "<".
    begin = text.rfind("<")
    if begin < 0 or not any(marker.startswith(text[begin:]) for marker in markers):
        begin = len(text)
    return len(text[:begin].rstrip("\n"))
