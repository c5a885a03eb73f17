"""A random V4.1 checkpoint behind the whole service: what a handoff carries, and what a death costs.

Log-probabilities are compared bit for bit: one wrong byte of a block, of a window ring, of a compressor row
or of the last token ids (which the n-gram tables hash) would show in them, even where it changes no text.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from millpond.engine.model.init import init_checkpoint
from tests.integration.conftest import Service, wait_until

CONFIG = Path(__file__).parents[1] / "golden" / "data" / "tiny_a" / "config.json"
MIXED = '[[group]]\nname = "m0"\nrole = "mixed"\n'
PROMPTS = ("ab", "Once upon a time. " * 7 + "x", "x" * 128, "0123456789" * 20 + "a")
"""1 to 3 chunks; lengths even and odd (a group of two is incomplete at the handoff), below, at and above
one block; windows hold 16 tokens."""
NUM_TOKENS = 24

Token = tuple[str, float, dict[str, float]]
"""Text, its log-probability, those of the best ones."""


def complete(service: Service, prompt: str, on_token: Callable[[], object] = lambda: None) -> list[Token]:
    """Stream one greedy completion."""
    body = {"model": "model", "prompt": prompt, "max_tokens": NUM_TOKENS, "temperature": 0, "logprobs": 3}
    body |= {"ignore_eos": True, "stream": True}
    tokens: list[Token] = []
    with httpx.stream("POST", f"{service.url}/v1/completions", json=body, timeout=120) as answer:
        assert answer.status_code == 200, answer.read()
        for line in answer.iter_lines():
            if line == "data: [DONE]":
                return tokens
            if not line.startswith("data: "):
                continue
            event = json.loads(line.removeprefix("data: "))
            assert "error" not in event, event
            for choice in event["choices"]:
                if known := choice["logprobs"]:
                    parts = (known["tokens"], known["token_logprobs"], known["top_logprobs"])
                    tokens += zip(*parts, strict=True)
                on_token()
    raise AssertionError("the stream ended without [DONE]")


def complete_all(
    service: Service, disturb: Callable[[], None] | None = None, num_begun: int = 0
) -> list[list[Token]]:
    """Stream all prompts at once; call `disturb` when `num_begun` streams have begun."""
    begun = [threading.Event() for _ in PROMPTS]
    with ThreadPoolExecutor(len(PROMPTS)) as pool:
        streams = [
            pool.submit(complete, service, prompt, event.set)
            for prompt, event in zip(PROMPTS, begun, strict=True)
        ]
        if disturb is not None:
            wait_until(lambda: sum(event.is_set() for event in begun) >= num_begun, 60, "streams begin")
            disturb()
        return [stream.result(timeout=150) for stream in streams]


@pytest.mark.timeout(600)
def test_a_split_service_answers_as_an_unsplit_one_whatever_dies(
    start_service: Callable[..., Service], tmp_path: Path
) -> None:
    folder = tmp_path / "model"
    init_checkpoint(json.loads(CONFIG.read_text(encoding="utf-8")), folder, seed=5)
    engine = f'[engine]\nmodel = "{folder}"\nnumerics = "exact"\nkv_memory = 4000000\nmax_num_seqs = 8\n'
    unsplit = start_service(engine + MIXED)
    expected = [complete(unsplit, prompt) for prompt in PROMPTS]
    unsplit.stop()
    assert [len(tokens) for tokens in expected] == [NUM_TOKENS] * len(PROMPTS)
    assert len({text for tokens in expected for text, *_ in tokens}) > NUM_TOKENS

    split = start_service(engine + "[prefill]\nmax_step_tokens = 72\n[decode]\nnum_draft_tokens = 3\n")
    assert complete_all(split) == expected
    checked = 'millpond_draft_tokens_total{group="d0",source=""}'
    wait_until(lambda: checked in httpx.get(f"{split.url}/metrics").text, 30, "drafts were checked")
    arrived = f'millpond_handoff_received_total{{group="d0",source=""}} {len(PROMPTS)}.0'
    wait_until(lambda: arrived in httpx.get(f"{split.url}/metrics").text, 30, "every prompt was handed over")
    # the decode process dies under running streams, the prefill process under prompts it has not computed
    for victim, num_begun in (("d0", len(PROMPTS)), ("p0", 1)):
        split.wait_empty()
        pid = split.pid(victim)
        assert complete_all(split, lambda victim=victim: split.kill(victim), num_begun) == expected
        wait_until(lambda victim=victim, pid=pid: split.pid(victim) != pid, 60, f"{victim} started anew")
    split.wait_empty()
