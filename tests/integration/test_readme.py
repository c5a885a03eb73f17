"""The examples of the README work as printed, with the default model and the default config."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.integration.conftest import Service

README = (Path(__file__).parents[2] / "README.md").read_text()


def examples(language: str) -> list[str]:
    found = re.findall(rf"^```{language}\n(.*?)^```", README, re.DOTALL | re.MULTILINE)
    assert found
    return found


def run(command: list[str], text: str | None = None) -> str:
    result = subprocess.run(command, input=text, capture_output=True, text=True, timeout=120, check=False)
    assert result.returncode == 0, result.stderr
    return result.stdout


@pytest.mark.timeout(600)  # a whole service with a real model, on cores that others may keep busy
def test_every_example_of_the_readme_works_as_printed(start_service: Callable[..., Service]):
    service = start_service(has_pool=True)

    def on_this_port(example: str) -> str:
        return example.replace("http://127.0.0.1:8000", service.url)

    answers = [run(["bash", "-e", "-c", on_this_port(example)]) for example in examples("bash")]
    assert not [answer for answer in answers if '"error"' in answer]
    models, chat, stream, completion, tokens, ready = answers
    assert json.loads(models)["data"][0]["id"] == "smollm2-135m"
    assert "Paris" in json.loads(chat)["choices"][0]["message"]["content"]
    assert stream.rstrip().endswith("data: [DONE]")
    assert '"completion_tokens"' in stream
    assert len(json.loads(completion)["choices"]) == 2
    assert json.loads(tokens)["count"] > 2
    assert json.loads(ready)["status"] == "ready"

    for example in examples("python"):
        assert len(run([sys.executable, "-"], on_this_port(example)).split()) > 3

    spoken = run(
        [sys.executable, "-m", "millpond.cli.main", "chat", "--url", service.url, "--temperature", "0"],
        "What is the capital of France?\nAnd of Germany?\nAnd of Italy?\n",
    )
    assert [city for city in ("Paris", "Berlin", "Rome") if city not in spoken] == []
    assert_official_client_holds_a_conversation(service.url)
    service.wait_empty()


def assert_official_client_holds_a_conversation(url: str) -> None:
    """Three streamed turns whose answers make sense only with the turns before."""
    from openai import OpenAI

    messages: list[dict[str, str]] = []
    with OpenAI(base_url=f"{url}/v1", api_key="none", timeout=120) as client:
        for question, expected in (
            ("What is the capital of France?", "Paris"),
            ("And of Germany?", "Berlin"),
            ("And of Italy?", "Rome"),
        ):
            messages.append({"role": "user", "content": question})
            stream = client.chat.completions.create(
                model="smollm2-135m", messages=messages, temperature=0, max_tokens=48, stream=True
            )
            answer = "".join(chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices)
            assert expected in answer
            messages.append({"role": "assistant", "content": answer})
