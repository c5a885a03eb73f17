"""Edges of a gateway under test: a byte-level model, and a service that answers on the control channel."""

from __future__ import annotations

import asyncio
import codecs
import itertools
import json
import time
from array import array
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import httpx

from millpond.config.gateway_params import GatewayParams, TenantParams
from millpond.core.chance import Chance
from millpond.core.errors import InvalidRequest
from millpond.core.events import Cancel, GatewayUp, ServiceState, StatusQuery, StatusReport, Submit, TokensOut
from millpond.core.ids import GatewayId, GroupId, RequestId
from millpond.core.plan import RequestEnded, TokenOut
from millpond.core.request import FinishReason, RequestSpec
from millpond.engine.chat_format import ChatPrompt, Conversation
from millpond.serve.gateway.app import make_app
from millpond.serve.gateway.gateway import Clocks, Gateway
from millpond.serve.gateway.kv_names import KvNames
from millpond.serve.gateway.link import ControllerLink
from millpond.serve.gateway.matcher import PrefixMatcher
from millpond.serve.gateway.served_model import ServedModel
from millpond.serve.gateway.tenants import OPEN_TENANT, Tenants

EOS = 256
VOCAB_SIZE = 257
MAX_MODEL_LEN = 200


class ByteDetokenizer:
    """Text of a sequence of bytes; token `EOS` has no text."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, token_id: int) -> str:
        return self._decoder.decode(token_bytes(token_id))

    def flush(self) -> str:
        return self._decoder.decode(b"", final=True)


def token_bytes(token_id: int) -> bytes:
    return bytes([token_id]) if token_id < EOS else b""


def encode_chat(conversation: Conversation) -> ChatPrompt:
    messages, tools = conversation.messages, conversation.tools
    if messages[0]["content"] == "refuse me":
        raise InvalidRequest("the template refuses this", code="template")
    text = "".join(f"{message['role']}: {message['content']}\n" for message in messages)
    if tools:
        text = json.dumps(list(tools)) + text
    return ChatPrompt(encode(text + ("assistant: " if conversation.add_generation_prompt else "")))


def encode(text: str) -> array[int]:
    return array("i", list(text.encode()))


def byte_model(*, supports_tools: bool = True) -> ServedModel:
    return ServedModel(
        names=("bytes", "bytes-alias"),
        vocab_size=VOCAB_SIZE,
        stop_token_ids=(EOS,),
        supports_tools=supports_tools,
        can_think=False,
        text_joiner="",
        encode_text=encode,
        encode_chat=encode_chat,
        decode=lambda ids: b"".join(map(token_bytes, ids)).decode(errors="replace"),
        token_bytes=token_bytes,
        max_token_bytes=8,
        make_detokenizer=ByteDetokenizer,
        make_chat_detokenizer=ByteDetokenizer,
    )


def letters(spec: RequestSpec) -> Iterable[int]:
    """Endless text that depends on seed and choice only."""
    chance = Chance(spec.sampling.seed, f"choice {spec.sampling.choice}")
    while True:
        yield 97 + chance.below(26)


def says(text: str) -> Callable[[RequestSpec], Iterable[int]]:
    """A service that always says the same, then ends."""
    return lambda _spec: [*text.encode(), EOS]


def worker_tokens(spec: RequestSpec, output: Iterable[int]) -> list[TokenOut]:
    """What workers send for one attempt: positions, endings and logprobs as the real ones."""
    sampling = spec.sampling
    tokens: list[TokenOut] = []
    for index, token_id in enumerate(itertools.islice(output, sampling.max_tokens)):
        finish = None
        if token_id in sampling.stop_token_ids:
            finish = FinishReason.STOP
        elif index + 1 == sampling.max_tokens:
            finish = FinishReason.LENGTH
        has_logprobs = sampling.num_logprobs >= 0
        top = tuple((60 + k, -1.0 - k) for k in range(max(sampling.num_logprobs, 0)))
        tokens.append(
            TokenOut(
                spec.request_id,
                spec.attempt,
                spec.num_prompt_tokens + index,
                token_id,
                -0.5 if has_logprobs else 0.0,
                top if has_logprobs else (),
                finish,
                num_cached_tokens=cached_tokens(spec) if index == len(spec.output_ids) else 0,
            )
        )
        if finish is not None:
            break
    return tokens[len(spec.output_ids) :]


def cached_tokens(spec: RequestSpec) -> int:
    """What workers load: all that the gateway found."""
    return spec.cached.num_tokens if spec.cached is not None else 0


@dataclass
class FakeService:
    """Answers submissions; keeps what it was sent.

    Tokens are delivered one message each, sequences in turn, from the event loop.
    """

    output: Callable[[RequestSpec], Iterable[int]] = letters
    is_full: bool = False
    """The way to it is closed."""
    is_mute: bool = False
    """It takes submissions and does not answer them."""
    ending: RequestEnded | None = None
    """Sent instead of the tokens of choice 0 after `num_before_ending`."""
    num_before_ending: int = 0
    report: str = '{"queue": {"num_queued": 0, "num_requests": 0}, "groups": {}}'
    """Its status."""
    submits: list[RequestSpec] = field(default_factory=list)
    cancels: list[RequestId] = field(default_factory=list)
    open_at_cancel: list[int] = field(default_factory=list)
    """Sequences that went on at each cancel."""
    num_announced: int = 0
    link: ControllerLink = field(init=False)

    def send(self, message: object) -> bool:
        if self.is_full:
            return False
        match message:
            case Submit(spec=spec):
                self.submits.append(spec)
                if not self.is_mute:
                    tokens = worker_tokens(spec, self.output(spec))
                    asyncio.get_running_loop().call_soon(self._say, spec, tokens, 0)
            case Cancel(request_id=request_id):
                self.cancels.append(request_id)
                self.open_at_cancel.append(self.link.num_open)
            case GatewayUp():
                self.num_announced += 1
            case StatusQuery(query_id=query_id):
                report = StatusReport(query_id, self.report)
                asyncio.get_running_loop().call_soon(self.link.on_message, report)
        return True

    def _say(self, spec: RequestSpec, tokens: list[TokenOut], index: int) -> None:
        if spec.request_id in self.cancels:
            return
        is_ending = self.ending is not None and spec.sampling.choice == 0
        if is_ending and index == self.num_before_ending:
            ending = self.ending
            self.link.on_message(RequestEnded(spec.request_id, spec.attempt, ending.reason, ending.detail))
            return
        self.link.on_message(TokensOut(GroupId("d0"), (tokens[index],)))
        if index + 1 < len(tokens):
            asyncio.get_running_loop().call_soon(self._say, spec, tokens, index + 1)


def make_gateway(
    service: FakeService,
    *,
    params: GatewayParams | None = None,
    tenants: tuple[TenantParams, ...] = (),
    model: ServedModel | None = None,
    now_ns: Callable[[], int] = time.monotonic_ns,
    max_model_len: int = MAX_MODEL_LEN,
    kv: KvNames | None = None,
    matcher: PrefixMatcher | None = None,
) -> Gateway:
    link = ControllerLink(GatewayId("gw0"), service, now_ns=now_ns)
    service.link = link
    if max_model_len:
        link.on_message(ServiceState(1, max_model_len, is_ready=True))
    salts = {name: name.encode() for name in (OPEN_TENANT, *(tenant.name for tenant in tenants))}
    return Gateway(
        gateway=GatewayId("gw0"),
        reply_to="ipc://nowhere",
        params=params or GatewayParams(),
        model=model or byte_model(),
        link=link,
        tenants=Tenants(tenants, salts),
        clocks=Clocks(now_ns, lambda: 1_700_000_000),
        kv=kv,
        matcher=matcher,
    )


def ask(
    gateway: Gateway,
    path: str,
    body: Any = None,
    *,
    method: str = "POST",
    headers: dict[str, str] | None = None,
) -> httpx.Response:
    """One HTTP exchange with the app, in a loop of its own."""
    content = body if isinstance(body, bytes | None) else json.dumps(body).encode()

    async def exchange() -> httpx.Response:
        transport = httpx.ASGITransport(app=make_app(gateway), raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://gateway") as client:
            return await client.request(method, path, content=content, headers=headers)

    return asyncio.run(exchange())


def chat_body(**fields: Any) -> dict[str, Any]:
    return {"model": "bytes", "messages": [{"role": "user", "content": "hi"}], **fields}


def completion_body(**fields: Any) -> dict[str, Any]:
    return {"model": "bytes", "prompt": "hi", **fields}


def sse_events(body: bytes) -> list[tuple[str, str]]:
    """Split a stream into (event name, data); every byte must be part of an event."""
    events = []
    *blocks, rest = body.decode().split("\n\n")
    assert rest == ""
    for block in blocks:
        name = ""
        lines = block.split("\n")
        if lines[0].startswith("event: "):
            name = lines.pop(0).removeprefix("event: ")
        assert len(lines) == 1, block
        assert lines[0].startswith("data: "), block
        events.append((name, lines[0].removeprefix("data: ")))
    return events


def streamed_texts(body: bytes, num_choices: int = 1) -> list[str]:
    """Join the deltas of each choice."""
    texts = [""] * num_choices
    for _, data in sse_events(body):
        if data == "[DONE]":
            continue
        for choice in json.loads(data)["choices"]:
            texts[choice["index"]] += (
                choice["text"] if "text" in choice else choice["delta"].get("content", "")
            )
    return texts
