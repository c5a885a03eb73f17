"""From token events to pieces of answers: the one path that streamed and whole answers share.

    ids -> text -> reasoning, content and calls (where replies have them) -> content up to a stop string

A piece is what one token adds to one choice. A token whose text is held back (half a character, the beginning
of what may become a marker or a stop string, a call that is not complete) makes a piece without parts; its
text joins a later piece. Stop strings come last and see content only, so that they can neither cut a marker
nor be found in one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from millpond.core.errors import (
    ContextTooLong,
    MillpondError,
    OverloadError,
    WorkerLost,
)
from millpond.core.events import TokenOut
from millpond.core.request import FinishReason
from millpond.engine.chat_format import Reasoning, ReplyCall, ReplyParser, ReplyPart
from millpond.serve.gateway.call import Call, CallEvent, Ending
from millpond.serve.gateway.openai_schema import FinishWord
from millpond.serve.gateway.served_model import Detokenizer, ServedModel
from millpond.serve.gateway.stop import StopMatcher
from millpond.serve.gateway.validate import PreparedCall


@dataclass(frozen=True, slots=True)
class CallPart:
    """One complete tool call of a choice."""

    index: int
    id: str
    name: str
    fragments: tuple[str, ...]
    """Its arguments: joined they are the text of a JSON object."""


Part = str | Reasoning | CallPart
"""Part of a choice; a string is content."""


class Piece:
    """What one token adds to one choice of a call."""

    __slots__ = ("choice", "finish", "parts", "token")

    def __init__(
        self, choice: int, parts: Sequence[Part], token: TokenOut | None, finish: FinishWord | None
    ) -> None:
        self.choice = choice
        self.parts = parts
        """In order; no text is empty."""
        self.token = token
        """None for the token that ended the choice without being part of its text."""
        self.finish: FinishWord | None = finish
        """On the last piece of a choice."""

    @property
    def content(self) -> str:
        """Text of the answer proper."""
        return "".join(part for part in self.parts if isinstance(part, str))


class _Choice:
    """One sequence so far."""

    __slots__ = (
        "detokenizer",
        "is_done",
        "matcher",
        "num_cached_tokens",
        "num_calls",
        "num_prompt_tokens",
        "num_reasoning_tokens",
        "num_tokens",
        "parser",
    )

    def __init__(
        self,
        num_prompt_tokens: int,
        detokenizer: Detokenizer,
        parser: ReplyParser | None,
        stop: tuple[str, ...],
    ) -> None:
        self.detokenizer = detokenizer
        self.parser = parser
        self.matcher = StopMatcher(stop) if stop else None
        self.num_prompt_tokens = num_prompt_tokens
        self.num_tokens = 0
        self.num_cached_tokens = 0
        self.num_reasoning_tokens = 0
        self.num_calls = 0
        self.is_done = False


class Assembly:
    """Pieces of one call, all choices.

    Args:
        prepared: The call.
        model: Gives the detokenizers.
        call: Where sequences are cancelled once their text is complete.
        call_id: The call's id; ids of tool calls derive from it, so that they stay the same whatever happens.
    """

    def __init__(self, prepared: PreparedCall, model: ServedModel, call: Call, call_id: str) -> None:
        self._call = call
        self._call_id = call_id
        self._min_tokens = prepared.sampling.min_tokens
        self._stop_ids = frozenset(prepared.sampling.stop_token_ids)
        make_detokenizer = model.make_chat_detokenizer if prepared.is_chat else model.make_detokenizer
        make_parser = prepared.make_parser
        self._choices = [
            _Choice(len(ids), make_detokenizer(), make_parser() if make_parser else None, prepared.stop)
            for ids in prepared.prompts
            for _ in range(prepared.num_choices)
        ]
        self._num_running = len(self._choices)
        self._firsts = self._choices[:: prepared.num_choices]
        """Of each prompt: what is said of the prompt is what became of its first choice."""

    @property
    def is_done(self) -> bool:
        """Every choice has its last piece."""
        return self._num_running == 0

    @property
    def num_output_tokens(self) -> int:
        """Tokens of all choices, ending tokens included."""
        return sum(choice.num_tokens for choice in self._choices)

    @property
    def num_cached_tokens(self) -> int:
        """Prompt tokens that were loaded and not computed, each prompt once."""
        return sum(choice.num_cached_tokens for choice in self._firsts)

    @property
    def num_started_tokens(self) -> int:
        """Tokens of the prompts that have been computed: their first token has come."""
        return sum(choice.num_prompt_tokens for choice in self._firsts if choice.num_tokens)

    @property
    def num_reasoning_tokens(self) -> int:
        """Those of them up to the end of the reasoning, its marker included."""
        return sum(choice.num_reasoning_tokens for choice in self._choices)

    def take(self, events: Sequence[CallEvent]) -> list[Piece]:
        """Make the pieces of some events; events of a choice after its last piece are dropped.

        Raises:
            MillpondError: A sequence ended without a complete text.
        """
        pieces: list[Piece] = []
        for index, event in events:
            choice = self._choices[index]
            if choice.is_done:
                continue
            if isinstance(event, Ending):
                raise error_of(event)
            pieces.append(self._piece(index, choice, event))
        return pieces

    def _piece(self, index: int, choice: _Choice, token: TokenOut) -> Piece:
        if not choice.num_tokens:
            # At least one token of a prompt is computed, whatever a worker says; and what a lost attempt has
            # left to the next was computed for this call.
            most = min(self._call.num_found_tokens(index), choice.num_prompt_tokens - 1)
            choice.num_cached_tokens = min(token.num_cached_tokens, most)
        choice.num_tokens += 1
        if choice.parser is not None and choice.parser.is_reasoning:
            choice.num_reasoning_tokens += 1
        finish = token.finish
        if finish is None:
            text = choice.detokenizer.push(token.token_id)
            parts, is_stopped = self._parts(index, choice, text, is_last=False)
            if is_stopped:
                self._call.cancel(index)
                return self._last(index, choice, parts, token, FinishReason.STOP)
            return Piece(index, parts, token, None)
        if finish is not FinishReason.STOP and finish is not FinishReason.LENGTH:
            raise error_of(Ending(finish, "the sequence was ended by its worker"))
        is_text = not (finish is FinishReason.STOP and token.token_id in self._stop_ids)
        text = choice.detokenizer.push(token.token_id) if is_text else ""
        text += choice.detokenizer.flush()
        parts, is_stopped = self._parts(index, choice, text, is_last=True)
        if is_stopped:
            finish = FinishReason.STOP
        return self._last(index, choice, parts, token if is_text else None, finish)

    def _parts(self, index: int, choice: _Choice, text: str, *, is_last: bool) -> tuple[Sequence[Part], bool]:
        """Parts that some text adds, and whether a stop string ended them."""
        parser, matcher = choice.parser, choice.matcher
        if parser is None and matcher is None:
            return (text,) if text else (), False
        replies: Sequence[ReplyPart] = (text,)
        if parser is not None:
            replies = parser.push(text) + (parser.flush() if is_last else [])
        parts: list[Part] = []
        for reply in replies:
            if not isinstance(reply, str):
                if matcher is not None:
                    parts.append(matcher.flush())
                parts.append(self._call_part(index, choice, reply) if isinstance(reply, ReplyCall) else reply)
            # Like stop tokens, stop strings count only after `min_tokens`.
            elif matcher is not None and choice.num_tokens > self._min_tokens:
                content, is_stopped = matcher.push(reply)
                parts.append(content)
                if is_stopped:
                    return [part for part in parts if part], True
            else:
                parts.append(reply)
        if is_last and matcher is not None:
            parts.append(matcher.flush())
        return [part for part in parts if part], False

    def _call_part(self, index: int, choice: _Choice, call: ReplyCall) -> CallPart:
        number = choice.num_calls
        choice.num_calls += 1
        return CallPart(number, f"call_{self._call_id}_{index}_{number}", call.name, call.fragments)

    def _last(
        self, index: int, choice: _Choice, parts: Sequence[Part], token: TokenOut | None, finish: FinishReason
    ) -> Piece:
        choice.is_done = True
        self._num_running -= 1
        if finish is FinishReason.LENGTH:
            return Piece(index, parts, token, "length")
        return Piece(index, parts, token, "tool_calls" if choice.num_calls else "stop")


def error_of(ending: Ending) -> MillpondError:
    """The error a client gets for a sequence that ended without a complete text."""
    match ending.reason:
        case FinishReason.REFUSED:
            return ContextTooLong(
                f"the request can never fit this service: {ending.detail}", code="request_too_large"
            )
        case FinishReason.ABORTED:
            return OverloadError(
                f"the request was ended by the service: {ending.detail}",
                code="request_aborted",
                retry_after_s=1,
            )
        case _:
            return WorkerLost(
                f"the service gave up on this request: {ending.detail}", code="generation_failed"
            )
