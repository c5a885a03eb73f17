"""What the load generator records, against a server whose every instant is known (virtual time)."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from millpond.serve.loadgen.client import RequestRecord, StreamClient
from millpond.serve.loadgen.drive import run_closed_loop
from millpond.serve.loadgen.inputs import LoadRequest
from millpond.serve.loadgen.report import distribution, make_report

MS = 1_000_000


class Clock:
    def __init__(self) -> None:
        self.now_ns = 0


class TimedStream(httpx.AsyncByteStream):
    """Sends each part after advancing the clock to its instant."""

    def __init__(self, clock: Clock, parts: list[tuple[int, Any]]) -> None:
        self.clock = clock
        self.parts = parts

    async def __aiter__(self) -> AsyncIterator[bytes]:
        for at_ms, event in self.parts:
            self.clock.now_ns = at_ms * MS
            data = event if isinstance(event, str) else json.dumps(event)
            yield f"data: {data}\n\n".encode()


def chat_chunk(delta: dict[str, Any], finish: str | None = None) -> dict[str, Any]:
    return {"choices": [{"index": 0, "delta": delta, "finish_reason": finish}]}


def record_of(parts: list[tuple[int, Any]], prompt: str | tuple[int, ...] = "hi") -> RequestRecord:
    clock = Clock()
    seen: list[httpx.Request] = []

    def answer(request: httpx.Request) -> httpx.Response:
        seen.append(request)
        return httpx.Response(200, stream=TimedStream(clock, parts))

    async def send() -> RequestRecord:
        transport = httpx.MockTransport(answer)
        async with httpx.AsyncClient(transport=transport, base_url="http://server") as http:
            client = StreamClient(http, "m", lambda: clock.now_ns, ignore_eos=True)
            return await client.send(0, LoadRequest(prompt, max_tokens=4))

    record = asyncio.run(send())
    body = json.loads(seen[0].content)
    assert body["max_tokens"] == 4
    assert ("messages" in body) == isinstance(prompt, str)
    return record


def test_bug_64_first_event_token_and_text_are_told_apart():
    record = record_of(
        [
            (10, chat_chunk({"role": "assistant", "content": ""})),
            (25, chat_chunk({"content": ""})),
            (40, chat_chunk({"content": "Hi"})),
            (70, chat_chunk({"content": "!"})),
            (80, chat_chunk({}, "stop")),
            (85, {"choices": [], "usage": {"prompt_tokens": 9, "completion_tokens": 4,
                                           "prompt_tokens_details": {"cached_tokens": 2}}}),
            (90, "[DONE]"),
        ]
    )  # fmt: skip
    assert record.error == ""
    instants = (record.first_event_ns, record.first_token_ns, record.first_text_ns, record.last_token_ns)
    assert instants == (10 * MS, 25 * MS, 40 * MS, 70 * MS)
    assert record.ended_ns == 90 * MS
    assert (record.num_prompt_tokens, record.num_cached_tokens, record.num_output_tokens) == (9, 2, 4)
    report = make_report([record])
    assert (report.ttft_event_s.p50, report.ttft_token_s.p50, report.ttft_text_s.p50) == (0.010, 0.025, 0.040)
    assert report.tpot_s.mean == pytest.approx(0.015)
    assert report.output_tokens_per_s == pytest.approx(4 / 0.09)


def test_reasoning_and_calls_are_generated_tokens():
    call = {"index": 0, "function": {"name": "f", "arguments": "{"}}
    record = record_of(
        [
            (10, chat_chunk({"role": "assistant", "content": ""})),
            (20, chat_chunk({"reasoning_content": "Hm"})),
            (30, chat_chunk({"content": "Hi"})),
            (40, chat_chunk({"tool_calls": [call]})),
            (50, chat_chunk({}, "tool_calls")),
            (60, "[DONE]"),
        ]
    )
    assert (record.first_text_ns, record.last_token_ns, record.num_output_tokens) == (20 * MS, 40 * MS, 3)


def test_completions_stream_counts_events_without_usage():
    def chunk(text: str, finish: str | None = None) -> dict[str, Any]:
        return {"choices": [{"index": 0, "text": text, "finish_reason": finish}]}

    record = record_of([(5, chunk("a")), (7, chunk("b")), (9, chunk("", "length")), (9, "[DONE]")], (1, 2, 3))
    assert (record.first_text_ns, record.last_token_ns, record.num_output_tokens) == (5 * MS, 7 * MS, 2)
    assert record.finish_reason == "length"


@pytest.mark.parametrize(
    ("parts", "error"),
    [
        ([(1, {"error": {"message": "worker lost"}})], "worker lost"),
        ([(1, chat_chunk({"content": "x"}))], "without a finish reason"),
        ([(1, "{broken")], "no JSON"),
        ([(1, "[1]")], "no object"),
    ],
)
def test_a_broken_stream_is_a_failed_request(parts: list[tuple[int, Any]], error: str):
    record = record_of(parts)
    assert error in record.error
    report = make_report([record])
    assert (report.num_completed, report.num_failed) == (0, 1)


def test_a_refusal_and_a_broken_connection_are_failed_requests():
    def answer(request: httpx.Request) -> httpx.Response:
        if json.loads(request.content)["messages"][0]["content"] == "bad":
            return httpx.Response(429, json={"error": {"message": "too many"}})
        raise httpx.ConnectError("refused")

    async def send() -> list[RequestRecord]:
        async with httpx.AsyncClient(transport=httpx.MockTransport(answer), base_url="http://server") as http:
            client = StreamClient(http, "m", lambda: 0, ignore_eos=False)
            requests = [LoadRequest("bad", 1), LoadRequest("gone", 1)]
            return await run_closed_loop(client, requests, 2, lambda record: None)

    records = asyncio.run(send())
    assert [record.error for record in records] == ["HTTP 429: too many", "ConnectError: refused"]


def test_a_closed_loop_never_exceeds_its_concurrency():
    running = 0
    peak = 0

    class Gate(httpx.AsyncByteStream):
        async def __aiter__(self) -> AsyncIterator[bytes]:
            nonlocal running, peak
            running += 1
            peak = max(peak, running)
            for _ in range(5):
                await asyncio.sleep(0)
            running -= 1
            yield b'data: {"choices":[{"index":0,"text":"a","finish_reason":"stop"}]}\n\ndata: [DONE]\n\n'

    async def send() -> list[RequestRecord]:
        transport = httpx.MockTransport(lambda request: httpx.Response(200, stream=Gate()))
        async with httpx.AsyncClient(transport=transport, base_url="http://server") as http:
            client = StreamClient(http, "m", lambda: 0, ignore_eos=False)
            return await run_closed_loop(client, [LoadRequest((1,), 1)] * 20, 3, lambda record: None)

    records = asyncio.run(send())
    assert [record.index for record in records] == list(range(20))
    assert peak == 3


def test_percentiles_are_nearest_rank():
    sample = distribution([float(value) for value in range(1, 101)])
    assert (sample.mean, sample.p50, sample.p90, sample.p99, sample.max) == (50.5, 50.0, 90.0, 99.0, 100.0)
    assert distribution([]).max == 0.0
