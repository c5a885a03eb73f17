"""Whole answers, and the parts that streamed ones share with them: logprobs, usage, errors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from msgspec import UNSET, UnsetType

from millpond.core.errors import (
    ClientError,
    DeadlineExceeded,
    Forbidden,
    InvariantBroken,
    MillpondError,
    OverloadError,
    RateLimited,
    Unauthorized,
)
from millpond.core.events import TokenOut
from millpond.engine.chat_format import Reasoning
from millpond.serve.gateway import openai_schema as schema
from millpond.serve.gateway.assembly import CallPart, Piece
from millpond.serve.gateway.served_model import ServedModel
from millpond.serve.gateway.validate import PreparedCall

MIN_LOGPROB = -9999.0
"""Stands for minus infinity, which JSON cannot say. Source: OpenAI API reference, logprobs."""


@dataclass(frozen=True, slots=True)
class AnswerHead:
    """What every answer and every chunk of a call carries."""

    id: str
    created: int
    """Seconds since 1970."""
    model: str
    system_fingerprint: str


def make_usage(
    prepared: PreparedCall, *, num_cached_tokens: int, num_output_tokens: int, num_reasoning_tokens: int
) -> schema.Usage:
    """Token counts of a call."""
    details: schema.CompletionTokensDetails | UnsetType = UNSET
    if prepared.make_parser is not None:
        details = schema.CompletionTokensDetails(reasoning_tokens=num_reasoning_tokens)
    num_prompt_tokens = prepared.num_prompt_tokens
    return schema.Usage(
        prompt_tokens=num_prompt_tokens,
        completion_tokens=num_output_tokens,
        total_tokens=num_prompt_tokens + num_output_tokens,
        prompt_tokens_details=schema.PromptTokensDetails(cached_tokens=num_cached_tokens),
        completion_tokens_details=details,
    )


def chat_logprob(token: TokenOut, model: ServedModel) -> schema.TokenLogprob:
    """One position in the form of chat completions."""

    def fields(token_id: int) -> tuple[str, list[int]]:
        data = model.token_bytes(token_id)
        return data.decode(errors="replace"), list(data)

    text, data = fields(token.token_id)
    top: list[schema.TopLogprob] = []
    for token_id, logprob in token.top:
        top_text, top_data = fields(token_id)
        top.append(schema.TopLogprob(token=top_text, logprob=max(logprob, MIN_LOGPROB), bytes=top_data))
    return schema.TokenLogprob(
        token=text, logprob=max(token.logprob, MIN_LOGPROB), bytes=data, top_logprobs=top
    )


def completion_logprobs(
    tokens: Sequence[TokenOut], model: ServedModel, offset: int
) -> schema.CompletionLogprobs:
    """Some positions in the form of completions.

    Args:
        tokens: Consecutive tokens of one choice.
        model: Gives the tokens' text.
        offset: Characters before the first of them, counted by token texts.
    """
    out = schema.CompletionLogprobs(text_offset=[], token_logprobs=[], tokens=[], top_logprobs=[])
    for token in tokens:
        text = model.token_bytes(token.token_id).decode(errors="replace")
        top: dict[str, float] = {}
        for token_id, logprob in token.top:
            # Ids that stand for parts of characters may share a text: keep the likelier one.
            top.setdefault(model.token_bytes(token_id).decode(errors="replace"), max(logprob, MIN_LOGPROB))
        top.setdefault(text, max(token.logprob, MIN_LOGPROB))
        out.text_offset.append(offset)
        out.token_logprobs.append(max(token.logprob, MIN_LOGPROB))
        out.tokens.append(text)
        out.top_logprobs.append(top)
        offset += len(text)
    return out


def make_answer(
    head: AnswerHead,
    prepared: PreparedCall,
    model: ServedModel,
    pieces: Sequence[Piece],
    usage: schema.Usage,
) -> schema.ChatAnswer | schema.CompletionAnswer:
    """Join all pieces of a call to its whole answer."""
    by_choice: list[list[Piece]] = [[] for _ in range(prepared.num_sequences)]
    for piece in pieces:
        by_choice[piece.choice].append(piece)
    fields = {
        "id": head.id,
        "created": head.created,
        "model": head.model,
        "system_fingerprint": head.system_fingerprint,
        "usage": usage,
    }
    if prepared.is_chat:
        chat = [_chat_choice(index, each, prepared, model) for index, each in enumerate(by_choice)]
        return schema.ChatAnswer(choices=chat, **fields)
    choices = [_completion_choice(index, each, prepared, model) for index, each in enumerate(by_choice)]
    return schema.CompletionAnswer(choices=choices, **fields)


def _chat_choice(
    index: int, pieces: Sequence[Piece], prepared: PreparedCall, model: ServedModel
) -> schema.ChatChoice:
    content = "".join(piece.content for piece in pieces)
    parts = [part for piece in pieces for part in piece.parts]
    calls = [
        schema.AnsweredCall(
            id=part.id,
            function=schema.AnsweredFunction(name=part.name, arguments="".join(part.fragments)),
        )
        for part in parts
        if isinstance(part, CallPart)
    ]
    message = schema.AnswerMessage(content=None if calls and not content else content)
    if prepared.make_parser is not None:
        message.reasoning_content = "".join(part.text for part in parts if isinstance(part, Reasoning))
    if calls:
        message.tool_calls = calls
    logprobs = None
    if prepared.sampling.num_logprobs >= 0:
        logprobs = schema.ChatLogprobs(content=[chat_logprob(token, model) for token in _tokens(pieces)])
    return schema.ChatChoice(index=index, message=message, logprobs=logprobs, finish_reason=_finish(pieces))


def _completion_choice(
    index: int, pieces: Sequence[Piece], prepared: PreparedCall, model: ServedModel
) -> schema.CompletionChoice:
    text = prepared.echo[index // prepared.num_choices] + "".join(piece.content for piece in pieces)
    logprobs = None
    if prepared.sampling.num_logprobs >= 0:
        logprobs = completion_logprobs(_tokens(pieces), model, 0)
    choice = schema.CompletionChoice(index=index, text=text, logprobs=logprobs, finish_reason=_finish(pieces))
    if prepared.has_token_ids:
        choice.token_ids = [token.token_id for token in _tokens(pieces)]
    return choice


def _tokens(pieces: Sequence[Piece]) -> list[TokenOut]:
    return [piece.token for piece in pieces if piece.token is not None]


def _finish(pieces: Sequence[Piece]) -> schema.FinishWord:
    finish = pieces[-1].finish
    if finish is None:
        raise InvariantBroken("an answer is made of a choice that has not ended")
    return finish


def make_error(error: MillpondError) -> schema.ErrorAnswer:
    """Error body in the shape of OpenAI's."""
    return schema.ErrorAnswer(
        error=schema.ErrorBody(
            message=error.message, type=_type_of(error), param=error.param, code=error.code
        )
    )


def status_of(error: MillpondError) -> int:
    """HTTP status of an error."""
    if isinstance(error, ClientError):
        return error.status
    if isinstance(error, OverloadError):
        return 503
    return 504 if isinstance(error, DeadlineExceeded) else 500


def retry_after_of(error: MillpondError) -> int | None:
    """Seconds after which the same call may be tried again, if that makes sense."""
    return error.retry_after_s if isinstance(error, OverloadError | RateLimited) else None


def _type_of(error: MillpondError) -> str:
    match error:
        case Unauthorized():
            return "authentication_error"
        case Forbidden():
            return "permission_error"
        case RateLimited():
            return "rate_limit_error"
        case ClientError():
            return "invalid_request_error"
        case OverloadError():
            return "service_unavailable_error"
        case _:
            return "server_error"
