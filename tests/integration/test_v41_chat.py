"""Chats with a random V4.1 checkpoint behind the whole service."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from millpond.engine.model.chat_encoding import CONTROL_TEXTS
from millpond.engine.model.init import init_checkpoint
from millpond.engine.model_files import locate_model
from millpond.engine.tokenizer_files import load_tokenizer
from tests.integration.conftest import Service

CONFIG = Path(__file__).parents[1] / "golden" / "data" / "tiny_a" / "config.json"
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}


@pytest.mark.timeout(170)
def test_chats_with_a_random_checkpoint(start_service: Callable[..., Service], tmp_path: Path) -> None:
    folder = tmp_path / "model"
    init_checkpoint(json.loads(CONFIG.read_text(encoding="utf-8")), folder, seed=5)
    control_ids = load_tokenizer(locate_model(str(folder)), CONTROL_TEXTS).control_ids
    service = start_service(
        f'[engine]\nmodel = "{folder}"\nnumerics = "exact"\nkv_memory = 4000000\nmax_num_seqs = 8\n'
        '[[group]]\nname = "m0"\nrole = "mixed"\n'
    )

    def chat(**fields: Any) -> dict[str, Any]:
        body = {"model": "model", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 8, **fields}
        answer = httpx.post(f"{service.url}/v1/chat/completions", json=body, timeout=60)
        assert answer.status_code == 200, answer.text
        return answer.json()

    # The model has nothing to say; a bias makes it write the end of its thoughts, over and over.
    bias = {str(control_ids["</think>"]): 100}
    answer = chat(logit_bias=bias)
    message = answer["choices"][0]["message"]
    assert (message["reasoning_content"], message["content"]) == ("", "</think>" * 7)
    assert answer["usage"]["completion_tokens_details"] == {"reasoning_tokens": 1}

    fields = {"seed": 3, "ignore_eos": True, "min_tokens": 8}
    thinking = chat(**fields)["choices"][0]
    assert thinking["message"]["reasoning_content"]
    assert (thinking["message"]["content"], thinking["finish_reason"]) == ("", "length")
    plain = chat(**fields, thinking=False)
    assert plain["choices"][0]["message"]["reasoning_content"] == ""
    assert plain["usage"]["completion_tokens_details"] == {"reasoning_tokens": 0}
    body = {"messages": [{"role": "user", "content": "hi"}], "thinking": False}
    counts = [
        httpx.post(f"{service.url}/tokenize", json=body | tools, timeout=60).json()["count"]
        for tools in ({}, {"tools": [TOOL]})
    ]
    assert counts[0] == plain["usage"]["prompt_tokens"] < counts[1]
    service.wait_empty()
