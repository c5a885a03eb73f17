"""From token events to pieces of text: the one path that streamed and whole answers share.

A piece is what one token adds to one choice. A token whose text is held back (half a character, or the
beginning of what may become a stop string) makes a piece without text; its text joins a later piece.
"""

from __future__ import annotations

from collections.abc import Sequence

from millpond.core.errors import (
    ContextTooLong,
    MillpondError,
    OverloadError,
    WorkerLost,
)
from millpond.core.events import TokenOut
from millpond.core.request import FinishReason
from millpond.serve.gateway.link import Call, CallEvent, Ending
from millpond.serve.gateway.served_model import Detokenizer, ServedModel
from millpond.serve.gateway.stop import StopMatcher
from millpond.serve.gateway.validate import PreparedCall


class Piece:
    """What one token adds to one choice of a call."""

    __slots__ = ("choice", "finish", "text", "token")

    def __init__(self, choice: int, text: str, token: TokenOut | None, finish: FinishReason | None) -> None:
        self.choice = choice
        self.text = text
        self.token = token
        """None for the token that ended the choice without being part of its text."""
        self.finish = finish
        """STOP or LENGTH on the last piece of a choice."""


class _Choice:
    """Text of one sequence so far."""

    __slots__ = ("detokenizer", "is_done", "matcher", "num_tokens")

    def __init__(self, detokenizer: Detokenizer, stop: tuple[str, ...]) -> None:
        self.detokenizer = detokenizer
        self.matcher = StopMatcher(stop) if stop else None
        self.num_tokens = 0
        self.is_done = False


class Assembly:
    """Pieces of one call, all choices.

    Args:
        prepared: The call.
        model: Gives the detokenizers.
        call: Where sequences are cancelled once their text is complete.
    """

    def __init__(self, prepared: PreparedCall, model: ServedModel, call: Call) -> None:
        self._call = call
        self._min_tokens = prepared.sampling.min_tokens
        self._stop_ids = frozenset(prepared.sampling.stop_token_ids)
        self._choices = [
            _Choice(model.make_detokenizer(), prepared.stop) for _ in range(prepared.num_sequences)
        ]
        self._num_running = len(self._choices)

    @property
    def is_done(self) -> bool:
        """Every choice has its last piece."""
        return self._num_running == 0

    @property
    def num_output_tokens(self) -> int:
        """Tokens of all choices, ending tokens included."""
        return sum(choice.num_tokens for choice in self._choices)

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
        choice.num_tokens += 1
        finish = token.finish
        if finish is None:
            text = choice.detokenizer.push(token.token_id)
            # Like stop tokens, stop strings count only after `min_tokens`.
            if choice.matcher is not None and text and choice.num_tokens > self._min_tokens:
                text, is_stopped = choice.matcher.push(text)
                if is_stopped:
                    self._call.cancel(index)
                    return self._last(index, choice, text, token, FinishReason.STOP)
            return Piece(index, text, token, None)
        if finish is not FinishReason.STOP and finish is not FinishReason.LENGTH:
            raise error_of(Ending(finish, "the sequence was ended by its worker"))
        is_text = not (finish is FinishReason.STOP and token.token_id in self._stop_ids)
        text = choice.detokenizer.push(token.token_id) if is_text else ""
        text += choice.detokenizer.flush()
        if choice.matcher is not None and choice.num_tokens > self._min_tokens:
            text, is_stopped = choice.matcher.push(text)
            if is_stopped:
                finish = FinishReason.STOP
            else:
                text += choice.matcher.flush()
        return self._last(index, choice, text, token if is_text else None, finish)

    def _last(
        self, index: int, choice: _Choice, text: str, token: TokenOut | None, finish: FinishReason
    ) -> Piece:
        choice.is_done = True
        self._num_running -= 1
        return Piece(index, text, token, finish)


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
