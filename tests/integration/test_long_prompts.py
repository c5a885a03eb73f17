"""Prompts whose KV is several times the block memory of the prefill worker."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from millpond.core.chance import Chance
from tests.integration.conftest import Service, wait_until

BLOCK_BYTES = 2_949_120
"""Of smollm2-135m in bf16: 30 layers."""
NUM_BLOCKS = 2
SPLIT = f"""
[engine]
numerics = "exact"
[[group]]
name = "p0"
role = "prefill"
kv_memory = {(NUM_BLOCKS + 1) * BLOCK_BYTES}
[[group]]
name = "d0"
role = "decode"
"""
UNSPLIT = """
[engine]
numerics = "exact"
[[group]]
name = "m0"
role = "mixed"
"""
NUM_PROMPT = 4 * NUM_BLOCKS * 128 + 200


def prompt_of(name: str, count: int) -> list[int]:
    chance = Chance(0, name)
    return [100 + chance.below(5000) for _ in range(count)]


LONG, SHORT = prompt_of("long", NUM_PROMPT), prompt_of("short", 200)


def ask(service: Service, prompt: list[int], **fields: Any) -> tuple[int, list[int]]:
    """Cached tokens and output ids."""
    body: dict[str, Any] = {"model": "smollm2-135m", "prompt": prompt, "temperature": 0}
    body |= {"max_tokens": 12, "ignore_eos": True, "return_token_ids": True, **fields}
    response = httpx.post(f"{service.url}/v1/completions", json=body, timeout=300)
    response.raise_for_status()
    answer = response.json()
    return answer["usage"]["prompt_tokens_details"]["cached_tokens"], answer["choices"][0]["token_ids"]


def free_blocks(service: Service) -> int:
    return service.status["groups"]["p0"]["ranks"][0]["free_blocks"]


@pytest.mark.timeout(900)
def test_a_prompt_of_four_times_the_block_memory_has_the_text_of_an_unsplit_service(
    start_service: Callable[..., Service],
):
    unsplit = start_service(UNSPLIT)
    _, expected = ask(unsplit, LONG)
    _, expected_short = ask(unsplit, SHORT)
    unsplit.stop()

    service = start_service(SPLIT, has_pool=True)
    answers: list[tuple[int, list[int]]] = []
    beside = threading.Thread(target=lambda: answers.append(ask(service, SHORT)))
    beside.start()
    assert ask(service, LONG) == (0, expected)
    beside.join(120)
    assert answers == [(0, expected_short)]
    service.wait_empty()
    assert free_blocks(service) == NUM_BLOCKS

    num_full = (NUM_PROMPT - 1) // 128 * 128
    wait_until(
        lambda: ask(service, LONG[: num_full + 1], max_tokens=1)[0] == num_full, 60, "the prompt is kept"
    )
    assert ask(service, LONG) == (num_full, expected)

    with pytest.raises(httpx.ReadTimeout):
        httpx.post(
            f"{service.url}/v1/completions",
            json={"model": "smollm2-135m", "prompt": LONG, "max_tokens": 99, "cache_salt": "cold"},
            timeout=1,
        )
    service.wait_empty(60)
    assert free_blocks(service) == NUM_BLOCKS
