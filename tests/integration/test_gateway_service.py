"""The public API of the whole service: choices, stop strings and logprobs of a real model; an abort storm."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

import httpx

from tests.integration.conftest import Service

DEADLINE_S = 120.0
PROMPT = "Once upon a time, a miller"


def whole(service: Service, **fields: Any) -> dict[str, Any]:
    """One completion that is not streamed."""
    body = {"model": "smollm2-135m", "prompt": PROMPT, **fields}
    response = httpx.post(f"{service.url}/v1/completions", json=body, timeout=DEADLINE_S)
    assert response.status_code == 200, response.text
    return response.json()


def streamed(service: Service, num_choices: int = 1, **fields: Any) -> list[str]:
    """Texts of one streamed completion."""
    texts = [""] * num_choices
    body = {"model": "smollm2-135m", "prompt": PROMPT, "n": num_choices, "stream": True, **fields}
    with httpx.stream("POST", f"{service.url}/v1/completions", json=body, timeout=DEADLINE_S) as response:
        lines = [line.removeprefix("data: ") for line in response.iter_lines() if line]
    assert lines[-1] == "[DONE]"
    for line in lines[:-1]:
        for choice in json.loads(line)["choices"]:
            texts[choice["index"]] += choice["text"]
    return texts


def test_a_real_model_behind_the_api(start_service: Callable[..., Service]) -> None:
    service = start_service('[engine]\nnumerics = "exact"\n')
    check_eight_choices(service)
    check_stop_strings(service)
    check_logprobs(service)
    service.wait_empty()


def check_eight_choices(service: Service) -> None:
    """bug_06: distinct, reproducible, and equal streamed or not; the prompt counts once."""
    answer = whole(service, n=8, seed=5, max_tokens=6, temperature=1.5)
    texts = [choice["text"] for choice in answer["choices"]]
    assert len(set(texts)) == 8
    assert streamed(service, 8, seed=5, max_tokens=6, temperature=1.5) == texts
    assert answer["usage"]["prompt_tokens"] < 20
    unseeded = {choice["text"] for choice in whole(service, n=2, max_tokens=6, temperature=1.5)["choices"]}
    assert len(unseeded) == 2
    assert not unseeded & set(texts)


def check_stop_strings(service: Service) -> None:
    """bug_01: a stop string that spans tokens cuts both forms at the same place, through both workers."""
    fields = {"max_tokens": 12, "temperature": 0, "ignore_eos": True}
    full = whole(service, **fields)["choices"][0]["text"]
    for begin, length in ((9, 4), (20, 11)):
        stop = full[begin : begin + length]
        expected = full[: full.index(stop)]
        answer = whole(service, **fields, stop=[stop])["choices"][0]
        assert (answer["text"], answer["finish_reason"]) == (expected, "stop")
        assert streamed(service, **fields, stop=[stop]) == [expected]


def check_logprobs(service: Service) -> None:
    """Greedy tokens are the most likely ones and make up the text, first token (prefill) included."""
    answer = whole(service, max_tokens=6, temperature=0, ignore_eos=True, logprobs=3)["choices"][0]
    logprobs = answer["logprobs"]
    assert "".join(logprobs["tokens"]) == answer["text"]
    assert len(logprobs["tokens"]) == 6
    for chosen, top in zip(logprobs["token_logprobs"], logprobs["top_logprobs"], strict=True):
        assert len(top) == 3
        assert chosen == max(top.values())
        assert chosen < 0


def test_bug_16_an_abort_storm_leaves_nothing_behind(
    start_service: Callable[..., Service], synthetic_toml: str
) -> None:
    """200 of 400 streams leave within moments; the others end whole, and every block and slot is free."""
    service = start_service(synthetic_toml)
    port = int(service.url.rsplit(":", 1)[1])

    async def stream(index: int) -> int:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        prompt = f"{index} " + "water " * (index % 50)
        body = json.dumps(
            {
                "model": "synthetic",
                "prompt": prompt,
                "max_tokens": 8,
                "stream": True,
                "ignore_eos": True,
                "seed": index,
            }
        )
        head = "POST /v1/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\n"
        writer.write(f"{head}Content-Length: {len(body)}\r\n\r\n{body}".encode())
        await writer.drain()
        if index % 2:
            if index % 4 == 1:
                await reader.read(1)
            writer.transport.abort()
            return 0
        received = await reader.read()
        writer.close()
        return received.count(b'"finish_reason":"length"') + received.count(b"[DONE]")

    async def storm() -> list[int]:
        async with asyncio.timeout(DEADLINE_S):
            return await asyncio.gather(*(stream(index) for index in range(400)))

    assert asyncio.run(storm()) == [2, 0] * 200
    service.wait_empty()
    assert httpx.get(f"{service.url}/ready").status_code == 200
    metrics = httpx.get(f"{service.url}/metrics").text.splitlines()
    assert "millpond_sequences_running 0.0" in metrics
    assert "millpond_sequences_waiting 0.0" in metrics
