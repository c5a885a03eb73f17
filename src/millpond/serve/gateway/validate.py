"""From a request body to a `PreparedCall`, or one error that names field, value and remedy."""

from __future__ import annotations

import json
import math
from array import array
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

from millpond.config.gateway_params import GatewayParams
from millpond.core.errors import ContextTooLong, UnknownModel
from millpond.core.request import SamplingParams, StateRestore, token_ids
from millpond.engine.chat_format import ReplyParser
from millpond.engine.text_guard import all_texts
from millpond.serve.gateway.bad_input import refuse, refuse_unsupported
from millpond.serve.gateway.conversation import make_conversation
from millpond.serve.gateway.openai_schema import ChatRequest, CompletionRequest, SamplingFields
from millpond.serve.gateway.served_model import ServedModel
from millpond.serve.gateway.thinking import pick_effort

MAX_STOP_STRINGS = 16
MAX_STOP_CHARS = 1024
MAX_STOP_TOKEN_IDS = 256
MAX_SALT_CHARS = 1024
MAX_SEED = 2**63 - 1
MAX_PRIORITY = 1000
DEFAULT_COMPLETION_TOKENS = 16
"""`max_tokens` of a completion without one. Source: OpenAI API reference."""

NEUTRAL: dict[str, tuple[Any, ...]] = {
    "audio": (),
    "best_of": (1,),
    "function_call": ("none",),
    "functions": ([],),
    "metadata": ({},),
    "modalities": (["text"],),
    "parallel_tool_calls": (True,),
    "prediction": (),
    "prompt_cache_retention": (),
    "store": (False,),
    "suffix": ("",),
    "verbosity": ("medium",),
    "web_search_options": (),
}
"""Values, besides null, at which a field that no model here honours is accepted."""


@dataclass(frozen=True, slots=True)
class PreparedCall:
    """A valid call: what to generate and how to answer."""

    is_chat: bool
    model: str
    """The name the client used."""
    prompts: tuple[array[int], ...]
    num_choices: int
    """Sequences per prompt."""
    sampling: SamplingParams
    """With choice 0; the sequences differ in it."""
    stop: tuple[str, ...]
    is_stream: bool
    include_usage: bool
    echo: tuple[str, ...]
    """Text that each prompt's answers start with: the prompt itself, or nothing."""
    cache_salt: str
    state_restore: StateRestore | None
    """None: as the tenant has it."""
    priority: int
    service_tier: str | None
    has_token_ids: bool = False
    """Answer with the ids of the text's tokens too."""
    make_parser: Callable[[], ReplyParser] | None = None
    """Makes the parser of one choice's text; None: the text is content and nothing else."""

    @property
    def num_sequences(self) -> int:
        """Sequences of the whole call."""
        return self.num_choices * len(self.prompts)

    @property
    def num_prompt_tokens(self) -> int:
        """Prompt tokens of the whole call, each prompt once."""
        return sum(map(len, self.prompts))


def prepare_chat(
    request: ChatRequest, model: ServedModel, params: GatewayParams, *, max_model_len: int, seed: int
) -> PreparedCall:
    """Check a chat request and make its prompt.

    Args:
        request: Parsed body.
        model: The served model.
        params: Limits.
        max_model_len: Longest sequence in tokens, > 0.
        seed: Used when the request has none.

    Raises:
        ClientError: Naming the field.
    """
    check_model(request.model, model)
    _check_neutral(request)
    effort = pick_effort(request, params, can_think=model.can_think)
    conversation = make_conversation(
        request.messages,
        request.tools,
        model,
        tool_choice=request.tool_choice,
        response_format=request.response_format,
        reasoning_effort=effort,
    )
    _check_count("n", request.n, params.max_choices, num_prompts=1)
    if request.top_logprobs is not None and not request.logprobs:
        refuse("top_logprobs", request.top_logprobs, "set `logprobs` to true to use it")
    num_logprobs = -1
    if request.logprobs:
        num_logprobs = _whole("top_logprobs", request.top_logprobs, 0, params.max_logprobs, 0)
    asked, limit = request.max_tokens, request.max_completion_tokens
    if asked is not None and limit is not None and asked != limit:
        refuse("max_tokens", asked, f"it contradicts `max_completion_tokens`, {limit}: give one of them")
    name = "max_completion_tokens" if asked is None else "max_tokens"
    # Before the work of rendering: a bad value should cost nothing.
    sampling = _sampling(request, model, seed=seed, num_logprobs=num_logprobs)
    stop = _stop_strings(request.stop)
    _check_bytes("messages", all_texts(conversation.messages), model, max_model_len)
    prompt = model.encode_chat(conversation)
    max_tokens = _max_tokens(
        name, limit if asked is None else asked, (prompt.ids,), "messages", max_model_len, default=None
    )
    prepared = _prepared(request, sampling, max_tokens, (prompt.ids,), stop, is_chat=True)
    return replace(prepared, make_parser=prompt.make_parser)


def prepare_completion(
    request: CompletionRequest, model: ServedModel, params: GatewayParams, *, max_model_len: int, seed: int
) -> PreparedCall:
    """Check a completion request and make its prompts. Arguments and errors as `prepare_chat`."""
    check_model(request.model, model)
    _check_neutral(request)
    prompts = _prompts(request.prompt)
    _check_count("n", request.n, params.max_choices, num_prompts=len(prompts))
    num_logprobs = -1
    if request.logprobs is not None:
        num_logprobs = _whole("logprobs", request.logprobs, 0, params.max_logprobs, 0)
        if request.echo:
            refuse_unsupported("logprobs", "not together with `echo`; leave out one of them")
    sampling = _sampling(request, model, seed=seed, num_logprobs=num_logprobs)
    stop = _stop_strings(request.stop)
    for prompt in prompts:
        if isinstance(prompt, str):
            _check_bytes("prompt", [prompt], model, max_model_len)
    ids = tuple(_prompt_ids(prompt, model) for prompt in prompts)
    max_tokens = _max_tokens(
        "max_tokens", request.max_tokens, ids, "prompt", max_model_len, default=DEFAULT_COMPLETION_TOKENS
    )
    echo = None
    if request.echo:
        echo = tuple(prompt if isinstance(prompt, str) else model.decode(prompt) for prompt in prompts)
    prepared = _prepared(request, sampling, max_tokens, ids, stop, is_chat=False, echo=echo)
    return replace(prepared, has_token_ids=bool(request.return_token_ids))


def check_model(name: str, model: ServedModel) -> None:
    """Raise `UnknownModel` unless the model is served under this name."""
    if name not in model.names:
        raise UnknownModel(
            f"`model` is {json.dumps(name)[:80]}: no such model here; served: {', '.join(model.names)}",
            code="model_not_found",
            param="model",
        )


def _check_neutral(request: SamplingFields) -> None:
    for name, accepted in NEUTRAL.items():
        value = getattr(request, name, None)
        if value is not None and not any(value == each and type(value) is type(each) for each in accepted):
            refuse_unsupported(name, "leave it out")


def _check_count(param: str, value: int | None, max_choices: int, num_prompts: int) -> None:
    limit = max_choices // num_prompts
    if limit < 1:
        refuse("prompt", f"{num_prompts} prompts", f"give at most {max_choices}")
    if value is not None and not 1 <= value <= limit:
        refuse(param, value, f"give 1 to {limit}")


def _whole(param: str, value: int | None, low: int, high: int, default: int) -> int:
    if value is None:
        return default
    if not low <= value <= high:
        refuse(param, value, f"give a whole number from {low} to {high}")
    return value


def _real(
    param: str, value: float | None, low: float, high: float, default: float, *, is_open: bool = False
) -> float:
    if value is None:
        return default
    if not math.isfinite(value) or not low <= value <= high or (is_open and value == low):
        above = f"more than {low:g} and at most {high:g}" if is_open else f"{low:g} to {high:g}"
        refuse(param, value, f"give a number {above}" if is_open else f"give a number from {above}")
    return float(value)


def _sampling(request: SamplingFields, model: ServedModel, *, seed: int, num_logprobs: int) -> SamplingParams:
    top_k = _whole("top_k", request.top_k, -1, 2**31 - 1, 0)
    stop_ids = request.stop_token_ids or []
    if len(stop_ids) > MAX_STOP_TOKEN_IDS:
        refuse("stop_token_ids", f"{len(stop_ids)} ids", f"give at most {MAX_STOP_TOKEN_IDS}")
    for index, token_id in enumerate(stop_ids):
        _whole(f"stop_token_ids[{index}]", token_id, 0, model.vocab_size - 1, 0)
    ends = () if request.ignore_eos else model.stop_token_ids
    return SamplingParams(
        max_tokens=1,  # replaced once the prompt's length is known
        seed=_whole("seed", request.seed, 0, MAX_SEED, seed),
        temperature=_real("temperature", request.temperature, 0.0, 2.0, 1.0),
        top_k=max(top_k, 0),
        top_p=_real("top_p", request.top_p, 0.0, 1.0, 1.0, is_open=True),
        min_p=_real("min_p", request.min_p, 0.0, 1.0, 0.0),
        repetition_penalty=_real(
            "repetition_penalty", request.repetition_penalty, 0.0, 10.0, 1.0, is_open=True
        ),
        presence_penalty=_real("presence_penalty", request.presence_penalty, -2.0, 2.0, 0.0),
        frequency_penalty=_real("frequency_penalty", request.frequency_penalty, -2.0, 2.0, 0.0),
        logit_bias=_logit_bias(request.logit_bias, model.vocab_size),
        stop_token_ids=tuple(sorted({*stop_ids, *ends})),
        num_logprobs=num_logprobs,
    )


def _logit_bias(bias: dict[str, float] | None, vocab_size: int) -> tuple[tuple[int, float], ...]:
    pairs: dict[int, float] = {}
    for key, value in (bias or {}).items():
        if not (key.isascii() and key.isdigit() and len(key) <= 9 and int(key) < vocab_size):
            refuse("logit_bias", key, f"its keys are token ids from 0 to {vocab_size - 1}")
        pairs[int(key)] = _real(f"logit_bias.{key}", value, -100.0, 100.0, 0.0)
    return tuple(sorted(pairs.items()))


def _stop_strings(stop: str | list[str] | None) -> tuple[str, ...]:
    strings = [stop] if isinstance(stop, str) else stop or []
    if len(strings) > MAX_STOP_STRINGS:
        refuse("stop", f"{len(strings)} strings", f"give at most {MAX_STOP_STRINGS}")
    for each in strings:
        if not 1 <= len(each) <= MAX_STOP_CHARS:
            refuse("stop", each, f"give strings of 1 to {MAX_STOP_CHARS} characters")
    return tuple(dict.fromkeys(strings))


def _prompts(prompt: str | list[str | int | list[int]]) -> list[str | list[int]]:
    if isinstance(prompt, str):
        return [prompt]
    if not prompt:
        refuse("prompt", [], "give text or token ids")
    if all(isinstance(each, int) for each in prompt):
        return [prompt]  # type: ignore[list-item]
    kinds = {type(each) for each in prompt}
    if len(kinds) > 1 or int in kinds:
        refuse("prompt", "a mixed list", "give one kind: text, texts, token ids or lists of token ids")
    return prompt  # type: ignore[return-value]


def _check_bytes(param: str, texts: Iterable[str], model: ServedModel, max_model_len: int) -> None:
    """Refuse text that cannot fit whatever its tokens are, before it costs the time to tokenise it."""
    num_bytes = sum(len(text.encode("utf-8", "surrogatepass")) for text in texts)
    if num_bytes > max_model_len * model.max_token_bytes:
        raise ContextTooLong(
            f"`{param}` has {num_bytes} bytes: the model's context is {max_model_len} tokens of at most"
            f" {model.max_token_bytes} bytes; shorten it",
            code="context_length_exceeded",
            param=param,
        )


def _prompt_ids(prompt: str | list[int], model: ServedModel) -> array[int]:
    if isinstance(prompt, str):
        ids = model.encode_text(prompt)
    else:
        for token_id in prompt:
            if not 0 <= token_id < model.vocab_size:
                refuse("prompt", token_id, f"token ids go from 0 to {model.vocab_size - 1}")
        ids = token_ids(prompt)
    if not ids:
        refuse("prompt", "", "it has no tokens; give some text")
    return ids


def _max_tokens(
    param: str,
    asked: int | None,
    prompts: tuple[array[int], ...],
    prompt_param: str,
    max_model_len: int,
    *,
    default: int | None,
) -> int:
    num_prompt_tokens = max(map(len, prompts))
    room = max_model_len - num_prompt_tokens
    if room < 1:
        raise ContextTooLong(
            f"`{prompt_param}` has {num_prompt_tokens} tokens: the model's context is {max_model_len} tokens,"
            f" one of which must be left for output; shorten it",
            code="context_length_exceeded",
            param=prompt_param,
        )
    if asked is None:
        return room if default is None else min(room, default)
    if asked < 1:
        refuse(param, asked, f"give 1 to {room}, or leave it out")
    if asked > room:
        raise ContextTooLong(
            f"`{param}` is {asked}: the context is {max_model_len} tokens and the prompt has"
            f" {num_prompt_tokens}; give at most {room}",
            code="context_length_exceeded",
            param=param,
        )
    return asked


def _state_restore(asked: str | None) -> StateRestore | None:
    if asked is None:
        return None
    if asked not in list(StateRestore):
        refuse("state_restore", asked, f"give {' or '.join(StateRestore)}")
    return StateRestore(asked)


def _prepared(
    request: SamplingFields,
    sampling: SamplingParams,
    max_tokens: int,
    prompts: tuple[array[int], ...],
    stop: tuple[str, ...],
    *,
    is_chat: bool,
    echo: tuple[str, ...] | None = None,
) -> PreparedCall:
    if request.stream_options is not None and not request.stream:
        refuse("stream_options", "{...}", "set `stream` to true to use it")
    salt = request.cache_salt or ""
    if request.cache_salt is not None and not 1 <= len(salt) <= MAX_SALT_CHARS:
        refuse("cache_salt", salt, f"give 1 to {MAX_SALT_CHARS} characters")
    return PreparedCall(
        is_chat=is_chat,
        model=request.model,
        prompts=prompts,
        num_choices=request.n or 1,
        sampling=replace(
            sampling,
            max_tokens=max_tokens,
            min_tokens=_whole("min_tokens", request.min_tokens, 0, max_tokens, 0),
        ),
        stop=stop,
        is_stream=bool(request.stream),
        include_usage=request.stream_options is not None and request.stream_options.include_usage,
        echo=echo or ("",) * len(prompts),
        cache_salt=salt,
        state_restore=_state_restore(request.state_restore),
        priority=_whole("priority", request.priority, -MAX_PRIORITY, MAX_PRIORITY, 0),
        service_tier=request.service_tier,
    )
