"""The HTTP schema: what a request may contain and what an answer looks like.

Requests are strict: a field that is not listed is refused by name. Fields of the OpenAI schema that this
service cannot honour are listed too; `validate.py` takes them at their neutral value only.

Source: OpenAI API reference, chat completions and (legacy) completions; field names of vLLM for what
goes beyond it.
"""

from __future__ import annotations

from typing import Any, Literal

from msgspec import UNSET, Struct, UnsetType

# --- parts of chat messages -------------------------------------------------------------------


class TextPart(Struct, forbid_unknown_fields=True, tag_field="type", tag="text", kw_only=True):
    """Part of a message's content. Only text is supported so far."""

    text: str


class FunctionCall(Struct, forbid_unknown_fields=True, kw_only=True):
    """A function that the assistant called, arguments as JSON text."""

    name: str
    arguments: str


class ToolCall(Struct, forbid_unknown_fields=True, kw_only=True):
    """One call in an assistant message of an earlier turn."""

    function: FunctionCall
    id: str | None = None
    type: Literal["function"] = "function"
    index: int | None = None


class Message(Struct, forbid_unknown_fields=True, kw_only=True):
    """One message of a conversation."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[TextPart] | None = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    refusal: str | None = None


class StreamOptions(Struct, forbid_unknown_fields=True, kw_only=True):
    """What a stream carries besides deltas."""

    include_usage: bool = False
    include_obfuscation: bool = False


class JsonSchema(Struct, forbid_unknown_fields=True, kw_only=True):
    """A schema that the answer shall follow; `strict` asks for a guarantee."""

    name: str
    description: str | None = None
    schema: dict[str, Any] | None = None
    strict: bool | None = None


class ResponseFormat(Struct, forbid_unknown_fields=True, kw_only=True):
    """`text`; or `json_schema` without `strict`, which asks the model and guarantees nothing."""

    type: str
    json_schema: JsonSchema | None = None


class NamedFunction(Struct, forbid_unknown_fields=True, kw_only=True):
    """Names a function."""

    name: str


class NamedToolChoice(Struct, forbid_unknown_fields=True, kw_only=True):
    """The one tool to call."""

    function: NamedFunction
    type: Literal["function"] = "function"


class ThinkingSwitch(Struct, forbid_unknown_fields=True, kw_only=True):
    """DeepSeek's form of the switch."""

    type: Literal["enabled", "disabled"]


class ChatTemplateKwargs(Struct, forbid_unknown_fields=True, kw_only=True):
    """What vLLM's and SGLang's clients put here."""

    thinking: bool | None = None
    enable_thinking: bool | None = None
    reasoning_effort: str | int | None = None


# --- requests ---------------------------------------------------------------------------------


class SamplingFields(Struct, forbid_unknown_fields=True, kw_only=True):
    """What both kinds of request share."""

    model: str
    n: int | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: int | None = None
    min_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    cache_salt: str | None = None
    state_restore: str | None = None
    priority: int | None = None
    service_tier: str | None = None
    user: str | None = None


class ChatRequest(SamplingFields, forbid_unknown_fields=True, kw_only=True):
    """Body of `POST /v1/chat/completions`."""

    messages: list[Message]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | NamedToolChoice | None = None
    reasoning_effort: str | int | None = None
    thinking: bool | ThinkingSwitch | None = None
    chat_template_kwargs: ChatTemplateKwargs | None = None
    response_format: ResponseFormat | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    # Not supported: taken at the neutral value only.
    audio: Any = None
    function_call: Any = None
    functions: Any = None
    metadata: Any = None
    modalities: Any = None
    parallel_tool_calls: Any = None
    prediction: Any = None
    prompt_cache_retention: Any = None
    store: Any = None
    verbosity: Any = None
    web_search_options: Any = None


class CompletionRequest(SamplingFields, forbid_unknown_fields=True, kw_only=True):
    """Body of `POST /v1/completions`."""

    prompt: str | list[str | int | list[int]]
    echo: bool | None = None
    logprobs: int | None = None
    return_token_ids: bool | None = None
    # Not supported: taken at the neutral value only.
    best_of: Any = None
    suffix: Any = None


class TokenizeRequest(Struct, forbid_unknown_fields=True, kw_only=True):
    """Body of `POST /tokenize`: a plain prompt or a conversation."""

    model: str | None = None
    prompt: str | None = None
    messages: list[Message] | None = None
    tools: list[dict[str, Any]] | None = None
    reasoning_effort: str | int | None = None
    thinking: bool | ThinkingSwitch | None = None
    chat_template_kwargs: ChatTemplateKwargs | None = None
    add_generation_prompt: bool = True


class DetokenizeRequest(Struct, forbid_unknown_fields=True, kw_only=True):
    """Body of `POST /detokenize`."""

    tokens: list[int]
    model: str | None = None


# --- answers ----------------------------------------------------------------------------------

FinishWord = Literal["stop", "length", "tool_calls"]
"""Why a choice ended."""


class PromptTokensDetails(Struct, kw_only=True):
    """Where the prompt's KV came from."""

    cached_tokens: int = 0


class CompletionTokensDetails(Struct, kw_only=True):
    """What the output tokens were spent on."""

    reasoning_tokens: int


class Usage(Struct, kw_only=True):
    """Token counts of one call. The prompt counts once, whatever n is."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails | UnsetType = UNSET
    """Only of models that reason."""


class TopLogprob(Struct, kw_only=True):
    """One of the most likely tokens at a position."""

    token: str
    logprob: float
    bytes: list[int]


class TokenLogprob(TopLogprob, kw_only=True):
    """The chosen token at a position."""

    top_logprobs: list[TopLogprob]


class ChatLogprobs(Struct, kw_only=True):
    """Logprobs in the form of chat completions."""

    content: list[TokenLogprob]
    refusal: None = None


class CompletionLogprobs(Struct, kw_only=True):
    """Logprobs in the form of completions: parallel lists."""

    text_offset: list[int]
    token_logprobs: list[float]
    tokens: list[str]
    top_logprobs: list[dict[str, float]]


class AnsweredFunction(Struct, kw_only=True):
    """A function to call, its arguments as JSON text."""

    name: str
    arguments: str


class AnsweredCall(Struct, kw_only=True):
    """A tool call that the model made."""

    id: str
    type: Literal["function"] = "function"
    function: AnsweredFunction


class AnswerMessage(Struct, kw_only=True):
    """The assistant's message. `content` is null if there are calls and no text."""

    content: str | None
    role: Literal["assistant"] = "assistant"
    refusal: None = None
    reasoning_content: str | UnsetType = UNSET
    tool_calls: list[AnsweredCall] | UnsetType = UNSET


class ChatChoice(Struct, kw_only=True):
    """One of the n answers."""

    index: int
    message: AnswerMessage
    logprobs: ChatLogprobs | None
    finish_reason: FinishWord


class ChatAnswer(Struct, kw_only=True):
    """Answer of `POST /v1/chat/completions` without `stream`."""

    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    system_fingerprint: str | None = None


class FunctionDelta(Struct, kw_only=True):
    """What a chunk adds to a call: its name comes once, its arguments in pieces of one JSON text."""

    name: str | UnsetType = UNSET
    arguments: str


class CallDelta(Struct, kw_only=True):
    """What a chunk adds to the call number `index`."""

    index: int
    id: str | UnsetType = UNSET
    type: Literal["function"] | UnsetType = UNSET
    function: FunctionDelta


class Delta(Struct, kw_only=True):
    """What a chunk adds to a message."""

    role: Literal["assistant"] | UnsetType = UNSET
    content: str | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET
    tool_calls: list[CallDelta] | UnsetType = UNSET


class ChatChunkChoice(Struct, kw_only=True):
    """Part of one of the n answers."""

    index: int
    delta: Delta
    logprobs: ChatLogprobs | None
    finish_reason: FinishWord | None


class ChatChunk(Struct, kw_only=True):
    """One event of a streamed chat completion."""

    id: str
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    created: int
    model: str
    choices: list[ChatChunkChoice]
    system_fingerprint: str | None = None
    usage: Usage | UnsetType | None = UNSET


class CompletionChoice(Struct, kw_only=True):
    """One of the n texts; in a stream, the text that a chunk adds."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: FinishWord | None
    token_ids: list[int] | UnsetType = UNSET
    """Of the text, if they were asked for: with them a client goes on without tokenising anew."""


class CompletionAnswer(Struct, kw_only=True):
    """Answer of `POST /v1/completions`, and each event of its stream."""

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    choices: list[CompletionChoice]
    system_fingerprint: str | None = None
    usage: Usage | UnsetType | None = UNSET


class ModelCard(Struct, kw_only=True):
    """One served name."""

    id: str
    object: Literal["model"] = "model"
    created: int
    max_model_len: int
    owned_by: str = "millpond"


class ModelList(Struct, kw_only=True):
    """Answer of `GET /v1/models`."""

    data: list[ModelCard]
    object: Literal["list"] = "list"


class TokenizeAnswer(Struct, kw_only=True):
    """Answer of `POST /tokenize`."""

    tokens: list[int]
    count: int
    max_model_len: int


class DetokenizeAnswer(Struct, kw_only=True):
    """Answer of `POST /detokenize`."""

    prompt: str


class ErrorBody(Struct, kw_only=True):
    """What went wrong."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorAnswer(Struct, kw_only=True):
    """Body of every answer with a status of 400 or more, and of an `error` event in a stream."""

    error: ErrorBody
