"""A random V4.1 checkpoint behind the whole service."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest

from millpond.engine.model.init import init_checkpoint
from tests.integration.conftest import Service

CONFIG = Path(__file__).parents[1] / "golden" / "data" / "tiny_a" / "config.json"
MIXED = '[[group]]\nname = "m0"\nrole = "mixed"\n'
PROMPTS = ["ab", "Once upon a time. " * 7, "x" * 128, "0123456789" * 20]


def complete(service: Service, prompt: str) -> str:
    body = {"model": "model", "prompt": prompt, "max_tokens": 12, "temperature": 0, "ignore_eos": True}
    with httpx.stream(
        "POST", f"{service.url}/v1/completions", json=body | {"stream": True}, timeout=60
    ) as answer:
        assert answer.status_code == 200, answer.read()
        events = [json.loads(line[6:]) for line in answer.iter_lines() if line.startswith("data: {")]
    return "".join(event["choices"][0]["text"] for event in events if event["choices"])


@pytest.mark.timeout(170)
def test_text_over_a_handoff_is_that_of_an_unsplit_engine(
    start_service: Callable[..., Service], tmp_path: Path
) -> None:
    folder = tmp_path / "model"
    init_checkpoint(json.loads(CONFIG.read_text(encoding="utf-8")), folder, seed=5)
    engine = f'[engine]\nmodel = "{folder}"\nnumerics = "exact"\nkv_memory = 4000000\nmax_num_seqs = 8\n'
    texts = []
    for shape in ("", MIXED):
        service = start_service(engine + shape)
        texts.append([complete(service, prompt) for prompt in PROMPTS])
        service.stop()
    assert texts[0] == texts[1]
    assert all(texts[0])
