"""The default model, end to end: a chat that makes sense, and streams that survive kill -9 bit for bit."""

from __future__ import annotations

from collections.abc import Callable

import openai
import pytest

from tests.integration.conftest import Service
from tests.integration.test_service_life import NUM_STREAMS, run_streams

EXACT = '[engine]\nnumerics = "exact"\n'


@pytest.mark.timeout(300)
def test_openai_client_holds_a_three_turn_streamed_chat(start_service: Callable[..., Service]) -> None:
    service = start_service()
    client = openai.OpenAI(base_url=f"{service.url}/v1", api_key="unused", timeout=120)
    messages: list[dict[str, str]] = []
    expected = (
        ("What is the capital of France? Answer in one sentence.", "Paris"),
        ("And of Italy?", "Rome"),
        ("Which of the two cities lies in France?", "Paris"),
    )
    for question, word in expected:
        messages.append({"role": "user", "content": question})
        answer = ""
        finish = None
        stream = client.chat.completions.create(
            model="smollm2-135m", messages=messages, stream=True, temperature=0, max_tokens=40
        )
        for chunk in stream:
            answer += chunk.choices[0].delta.content or ""
            finish = chunk.choices[0].finish_reason or finish
        assert finish in ("stop", "length")
        assert word in answer, answer
        messages.append({"role": "assistant", "content": answer})
    service.wait_empty()


@pytest.mark.timeout(600)
def test_bug_24_exact_texts_survive_kill_9_of_both_workers(start_service: Callable[..., Service]) -> None:
    service = start_service(EXACT)
    undisturbed = run_streams(service, max_tokens=24, model="smollm2-135m")
    assert len(set(undisturbed)) == NUM_STREAMS
    for victim in ("p0", "d0"):
        disturbed = run_streams(
            service, lambda group=victim: service.kill(group), max_tokens=24, model="smollm2-135m"
        )
        assert disturbed == undisturbed
        service.wait_empty(60)
