"""Whole answers, and the parts that streamed ones share with them: logprobs, usage, errors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from millpond.core.errors import (
    ClientError,
    DeadlineExceeded,
    Forbidden,
    MillpondError,
    OverloadError,
    RateLimited,
    Unauthorized,
)
from millpond.core.events import TokenOut
from millpond.serve.gateway import openai_schema as schema
from millpond.serve.gateway.assembly import Piece
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


def make_usage(prepared: PreparedCall, num_output_tokens: int) -> schema.Usage:
    """Token counts of a call."""
    num_prompt_tokens = prepared.num_prompt_tokens
    return schema.Usage(
        prompt_tokens=num_prompt_tokens,
        completion_tokens=num_output_tokens,
        total_tokens=num_prompt_tokens + num_output_tokens,
        prompt_tokens_details=schema.PromptTokensDetails(cached_tokens=0),
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
    num_output_tokens: int,
) -> schema.ChatAnswer | schema.CompletionAnswer:
    """Join all pieces of a call to its whole answer."""
    texts = [[prepared.echo[index // prepared.num_choices]] for index in range(prepared.num_sequences)]
    tokens: list[list[TokenOut]] = [[] for _ in texts]
    finish = ["stop"] * len(texts)
    for piece in pieces:
        texts[piece.choice].append(piece.text)
        if piece.token is not None:
            tokens[piece.choice].append(piece.token)
        if piece.finish is not None:
            finish[piece.choice] = piece.finish.value
    usage = make_usage(prepared, num_output_tokens)
    has_logprobs = prepared.sampling.num_logprobs >= 0
    if prepared.is_chat:
        chat_choices = [
            schema.ChatChoice(
                index=index,
                message=schema.AnswerMessage(content="".join(texts[index])),
                logprobs=schema.ChatLogprobs(content=[chat_logprob(each, model) for each in tokens[index]])
                if has_logprobs
                else None,
                finish_reason=finish[index],  # type: ignore[arg-type]
            )
            for index in range(len(texts))
        ]
        return schema.ChatAnswer(
            id=head.id,
            created=head.created,
            model=head.model,
            system_fingerprint=head.system_fingerprint,
            choices=chat_choices,
            usage=usage,
        )
    choices = [
        schema.CompletionChoice(
            index=index,
            text="".join(texts[index]),
            logprobs=completion_logprobs(tokens[index], model, 0) if has_logprobs else None,
            finish_reason=finish[index],  # type: ignore[arg-type]
        )
        for index in range(len(texts))
    ]
    return schema.CompletionAnswer(
        id=head.id,
        created=head.created,
        model=head.model,
        system_fingerprint=head.system_fingerprint,
        choices=choices,
        usage=usage,
    )


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
