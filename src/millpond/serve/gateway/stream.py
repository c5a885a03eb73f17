"""Pieces as server-sent events, in exactly OpenAI's grammar.

    stream  := chunk* [usage] done | chunk* error
    choice  := role? delta* finish        (chunks of several choices interleave; role in chat only)

`finish_reason` is null in every chunk but the last of a choice, and that one carries no text. There is
one event per token; a token whose text is held back has an event of its own only if logprobs or ids
were asked for (they belong to the token), else its text joins the choice's next event. The token that
completes a tool call has several: one with its id and name, then its arguments in fragments of one JSON
text. With `include_usage` every chunk has a `usage` field, null in all but the last, whose `choices` are
empty.

The constant bytes of a chunk are made once per call and choice, so that a token costs one JSON string.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import msgspec

from millpond.core.errors import MillpondError
from millpond.core.events import TokenOut
from millpond.serve.gateway.answer import (
    AnswerHead,
    chat_logprob,
    completion_logprobs,
    make_error,
)
from millpond.serve.gateway.assembly import CallPart, Piece
from millpond.serve.gateway.openai_schema import CallDelta, ChatLogprobs, FinishWord, FunctionDelta, Usage
from millpond.serve.gateway.served_model import ServedModel
from millpond.serve.gateway.validate import PreparedCall

DONE = b"data: [DONE]\n\n"

_json = msgspec.json.Encoder().encode


class EventFormat(Protocol):
    """One of the two kinds of chunk."""

    def events(self, pieces: Sequence[Piece]) -> bytes:
        """The events of some pieces, joined; each is complete."""
        ...

    def end(self, usage: Usage) -> bytes:
        """What follows the last piece: usage if asked for, then `[DONE]`."""
        ...


def make_format(head: AnswerHead, prepared: PreparedCall, model: ServedModel) -> EventFormat:
    """Make the event format of a call."""
    return ChatFormat(head, prepared, model) if prepared.is_chat else CompletionFormat(head, prepared, model)


def error_event(error: MillpondError) -> bytes:
    """The last event of a stream that cannot go on."""
    return b"event: error\ndata: " + _json(make_error(error)) + b"\n\n"


class _Format:
    """Constant bytes that both kinds share."""

    def __init__(self, head: AnswerHead, prepared: PreparedCall, model: ServedModel, kind: str) -> None:
        self._prepared = prepared
        self._model = model
        self._has_logprobs = prepared.sampling.num_logprobs >= 0
        fields = {
            "id": head.id,
            "object": kind,
            "created": head.created,
            "model": head.model,
            "system_fingerprint": head.system_fingerprint,
        }
        self._head = b"data: " + _json(fields)[:-1] + b',"choices":['
        self._tail = b'],"usage":null}\n\n' if prepared.include_usage else b"]}\n\n"

    def end(self, usage: Usage) -> bytes:
        """See `EventFormat`."""
        if not self._prepared.include_usage:
            return DONE
        return self._head + b'],"usage":' + _json(usage) + b"}\n\n" + DONE


class ChatFormat(_Format):
    """Chunks of `/v1/chat/completions`."""

    def __init__(self, head: AnswerHead, prepared: PreparedCall, model: ServedModel) -> None:
        super().__init__(head, prepared, model, "chat.completion.chunk")
        self._has_role = [False] * prepared.num_sequences
        self._open = [self._head + b'{"index":%d,"delta":' % index for index in range(prepared.num_sequences)]
        self._plain_end = b'},"logprobs":null,"finish_reason":null}' + self._tail

    def events(self, pieces: Sequence[Piece]) -> bytes:
        """See `EventFormat`."""
        out: list[bytes] = []
        for piece in pieces:
            index = piece.choice
            begin = self._open[index]
            if not self._has_role[index]:
                self._has_role[index] = True
                out.append(begin + b'{"role":"assistant","content":""' + self._plain_end)
            end = self._plain_end
            parts = piece.parts
            if self._has_logprobs and piece.token is not None:
                logprobs = _json(ChatLogprobs(content=[chat_logprob(piece.token, self._model)]))
                end = b'},"logprobs":' + logprobs + b',"finish_reason":null}' + self._tail
                parts = parts or ("",)
            for part in parts:
                if isinstance(part, CallPart):
                    for delta in _call_deltas(part):
                        out.append(begin + b'{"tool_calls":[' + _json(delta) + b"]" + end)
                        end = self._plain_end
                elif isinstance(part, str):
                    out.append(begin + b'{"content":' + _json(part) + end)
                else:
                    out.append(begin + b'{"reasoning_content":' + _json(part.text) + end)
                end = self._plain_end
            if piece.finish is not None:
                reason = piece.finish.encode()
                out.append(begin + b'{},"logprobs":null,"finish_reason":"' + reason + b'"}' + self._tail)
        return b"".join(out)


def _call_deltas(part: CallPart) -> list[CallDelta]:
    """What makes up a call: its name, then its arguments piece by piece."""
    function = FunctionDelta(name=part.name, arguments="")
    return [
        CallDelta(index=part.index, id=part.id, type="function", function=function),
        *(CallDelta(index=part.index, function=FunctionDelta(arguments=text)) for text in part.fragments),
    ]


class CompletionFormat(_Format):
    """Chunks of `/v1/completions`."""

    def __init__(self, head: AnswerHead, prepared: PreparedCall, model: ServedModel) -> None:
        super().__init__(head, prepared, model, "text_completion")
        self._has_details = self._has_logprobs or prepared.has_token_ids
        self._text = [self._head + b'{"index":%d,"text":' % index for index in range(prepared.num_sequences)]
        self._echo = [prepared.echo[index // prepared.num_choices] for index in range(prepared.num_sequences)]
        self._offset = [0] * prepared.num_sequences
        self._plain_end = b',"logprobs":null,"finish_reason":null}' + self._tail

    def events(self, pieces: Sequence[Piece]) -> bytes:
        """See `EventFormat`."""
        out: list[bytes] = []
        for piece in pieces:
            index = piece.choice
            if echo := self._echo[index]:
                self._echo[index] = ""
                out.append(self._text[index] + _json(echo) + self._plain_end)
            text = piece.content
            if self._has_details and piece.token is not None:
                out.append(self._with_details(index, text, piece.token))
            elif text:
                out.append(self._text[index] + _json(text) + self._plain_end)
            if piece.finish is not None:
                out.append(self._last(index, piece.finish))
        return b"".join(out)

    def _with_details(self, index: int, text: str, token: TokenOut) -> bytes:
        packed = b"null"
        if self._has_logprobs:
            logprobs = completion_logprobs((token,), self._model, self._offset[index])
            self._offset[index] += len(logprobs.tokens[0])
            packed = _json(logprobs)
        ids = b',"token_ids":[%d]' % token.token_id if self._prepared.has_token_ids else b""
        return (
            self._text[index]
            + _json(text)
            + b',"logprobs":'
            + packed
            + b',"finish_reason":null'
            + ids
            + b"}"
            + self._tail
        )

    def _last(self, index: int, finish: FinishWord) -> bytes:
        reason = finish.encode()
        return self._text[index] + b'"","logprobs":null,"finish_reason":"' + reason + b'"}' + self._tail
