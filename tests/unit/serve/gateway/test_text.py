"""Text of answers: stop strings, half characters, choices, seeds."""

from __future__ import annotations

import json

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from millpond.core.request import RequestSpec
from tests.unit.serve.gateway.fake_service import (
    EOS,
    FakeService,
    ask,
    chat_body,
    completion_body,
    make_gateway,
    says,
    sse_events,
    streamed_texts,
)

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"


def both(gateway, path: str, body: dict) -> tuple[str, str]:
    """(streamed, whole) text of the same call."""
    streamed = ask(gateway, path, {**body, "stream": True})
    whole = ask(gateway, path, body).json()["choices"][0]
    text = whole["message"]["content"] if path == CHAT else whole["text"]
    return streamed_texts(streamed.content)[0], text


@settings(max_examples=60)
@given(st.text("abE|ND한", max_size=30), st.lists(st.text("E|ND한", min_size=1, max_size=5), max_size=3))
def test_bug_01_stop_strings_split_over_tokens_never_reach_the_client(text: str, stops: list[str]) -> None:
    gateway = make_gateway(FakeService(says(text)))
    ends = [text.find(stop) + len(stop) for stop in stops if stop in text]
    begins = [text.find(stop) for stop in stops if stop in text and text.find(stop) + len(stop) == min(ends)]
    expected = text[: min(begins)] if begins else text

    streamed, whole = both(gateway, CHAT, chat_body(stop=stops, max_tokens=100))
    assert streamed == whole == expected
    assert gateway.link.num_open == 0


def test_a_stop_string_cancels_the_sequence_and_ends_with_stop() -> None:
    service = FakeService(says("one END two END three"))
    gateway = make_gateway(service)
    response = ask(gateway, CHAT, chat_body(stop="END")).json()
    assert response["choices"][0]["message"]["content"] == "one "
    assert response["choices"][0]["finish_reason"] == "stop"
    assert response["usage"]["completion_tokens"] == len("one END")
    assert service.cancels == [service.submits[0].request_id]


def test_a_choice_that_met_its_stop_string_is_cancelled_while_the_other_goes_on() -> None:
    service = FakeService(lambda spec: b"aENDb" if spec.sampling.choice == 0 else b"c" * 50)
    response = ask(make_gateway(service), CHAT, chat_body(stop="END", n=2, max_tokens=50)).json()
    assert [choice["message"]["content"] for choice in response["choices"]] == ["a", "c" * 50]
    assert [choice["finish_reason"] for choice in response["choices"]] == ["stop", "length"]
    assert service.open_at_cancel == [1]


def test_a_held_back_beginning_of_a_stop_string_is_sent_at_the_end() -> None:
    gateway = make_gateway(FakeService(says("the EN")))
    assert both(gateway, CHAT, chat_body(stop="END")) == ("the EN", "the EN")


def test_a_stop_string_in_the_very_last_token_counts() -> None:
    gateway = make_gateway(FakeService(says("abc")))
    response = ask(gateway, CHAT, chat_body(stop="c", max_tokens=3)).json()
    assert response["choices"][0]["message"]["content"] == "ab"
    assert response["choices"][0]["finish_reason"] == "stop"


def test_stop_strings_count_only_after_min_tokens() -> None:
    gateway = make_gateway(FakeService(says("aENDbENDc")))
    for min_tokens, expected in ((0, "a"), (1, "a"), (3, "aENDb"), (4, "aENDb"), (8, "aENDbENDc")):
        streamed, whole = both(gateway, CHAT, chat_body(stop="END", min_tokens=min_tokens))
        assert streamed == whole == expected


HARD_TEXT = "안녕하세요 👩‍👩‍👧‍👦 naïve e\u0301 漢字 🏳️‍🌈 각"


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_bug_03_deltas_of_partial_characters_join_to_the_full_text(path: str) -> None:
    body = chat_body() if path == CHAT else completion_body(max_tokens=150)
    gateway = make_gateway(FakeService(says(HARD_TEXT)))
    streamed, whole = both(gateway, path, body)
    assert streamed == whole == HARD_TEXT
    raw = ask(gateway, path, {**body, "stream": True}).content
    for _, data in sse_events(raw):
        assert "\ufffd" not in data


def test_bug_03_a_character_cut_by_max_tokens_is_marked_once_in_both() -> None:
    gateway = make_gateway(FakeService(says("ab안")))
    streamed, whole = both(gateway, CHAT, chat_body(max_tokens=4))
    assert streamed == whole == "ab\ufffd"


@given(st.lists(st.integers(0, 255), max_size=30))
@settings(max_examples=40)
def test_any_bytes_give_the_same_text_streamed_and_whole(output: list[int]) -> None:
    gateway = make_gateway(FakeService(lambda _spec: [*output, EOS]))
    streamed, whole = both(gateway, CHAT, chat_body(max_tokens=40))
    assert streamed == whole == bytes(output).decode(errors="replace")


@pytest.mark.parametrize("seed", [None, 7])
def test_bug_06_eight_choices_differ_and_a_seed_reproduces_them(seed: int | None) -> None:
    service = FakeService()
    gateway = make_gateway(service)
    fields = {"n": 8, "max_tokens": 12} | ({} if seed is None else {"seed": seed})
    whole = ask(gateway, CHAT, chat_body(**fields)).json()
    texts = [choice["message"]["content"] for choice in whole["choices"]]
    assert [choice["index"] for choice in whole["choices"]] == list(range(8))
    assert len(set(texts)) == 8
    assert whole["usage"]["prompt_tokens"] == 20
    assert whole["usage"]["completion_tokens"] == 96
    assert len({spec.request_id for spec in service.submits}) == 8
    assert len({spec.sampling.seed for spec in service.submits}) == 1

    again = ask(gateway, CHAT, chat_body(**fields, stream=True))
    is_same = streamed_texts(again.content, 8) == texts
    assert is_same == (seed is not None)


def test_a_batch_of_prompts_has_its_choices_numbered_prompt_by_prompt() -> None:
    def spell(spec: RequestSpec) -> list[int]:
        return [*bytes(list(spec.prompt_ids)), *str(spec.sampling.choice).encode(), EOS]

    gateway = make_gateway(FakeService(spell))
    for prompts in (["x", "yy"], [[120], [121, 121]]):
        body = completion_body(prompt=prompts, n=2, echo=True)
        whole = ask(gateway, COMPLETIONS, body).json()
        assert [choice["text"] for choice in whole["choices"]] == ["xx0", "xx1", "yyyy0", "yyyy1"]
        assert whole["usage"]["prompt_tokens"] == 3
        streamed = ask(gateway, COMPLETIONS, {**body, "stream": True})
        assert streamed_texts(streamed.content, 4) == ["xx0", "xx1", "yyyy0", "yyyy1"]


def test_logprobs_have_one_entry_per_text_token_in_both_forms() -> None:
    gateway = make_gateway(FakeService(says("abé")))
    chat = chat_body(logprobs=True, top_logprobs=2)
    whole = ask(gateway, CHAT, chat).json()["choices"][0]["logprobs"]["content"]
    assert [entry["bytes"] for entry in whole] == [[97], [98], [195], [169]]
    assert [entry["token"] for entry in whole] == ["a", "b", "\ufffd", "\ufffd"]
    assert all(entry["logprob"] == -0.5 and len(entry["top_logprobs"]) == 2 for entry in whole)
    streamed = []
    for _, data in sse_events(ask(gateway, CHAT, {**chat, "stream": True}).content)[:-1]:
        logprobs = json.loads(data)["choices"][0]["logprobs"]
        streamed += logprobs["content"] if logprobs else []
    assert streamed == whole

    completion = completion_body(logprobs=1, prompt="p")
    old = ask(gateway, COMPLETIONS, completion).json()["choices"][0]["logprobs"]
    assert old["tokens"] == ["a", "b", "\ufffd", "\ufffd"]
    assert old["text_offset"] == [0, 1, 2, 3]
    assert old["token_logprobs"] == [-0.5] * 4
    assert old["top_logprobs"][0] == {"<": -1.0, "a": -0.5}


def test_what_the_client_asked_for_reaches_the_workers() -> None:
    service = FakeService()
    gateway = make_gateway(service)
    fields = {
        "temperature": 0.5, "top_p": 0.9, "top_k": 40, "min_p": 0.1, "repetition_penalty": 1.2,
        "presence_penalty": 0.3, "frequency_penalty": -0.4, "logit_bias": {"5": 1.5, "3": -2}, "seed": 11,
        "stop_token_ids": [9, 8], "min_tokens": 2, "max_completion_tokens": 7, "priority": 3,
        "service_tier": "flex", "user": "someone", "cache_salt": "s", "ignore_eos": True,
        "logprobs": True, "top_logprobs": 4,
    }  # fmt: skip
    ask(gateway, CHAT, chat_body(**fields))
    (spec,) = service.submits
    sampling = spec.sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p) == (0.5, 0.9, 40, 0.1)
    assert (sampling.repetition_penalty, sampling.presence_penalty) == (1.2, 0.3)
    assert (sampling.frequency_penalty, sampling.logit_bias) == (-0.4, ((3, -2.0), (5, 1.5)))
    assert (sampling.seed, sampling.stop_token_ids, sampling.min_tokens) == (11, (8, 9), 2)
    assert (sampling.max_tokens, sampling.num_logprobs) == (7, 4)
    assert (spec.priority, spec.slo, spec.tenant, spec.attempt) == (3, "bronze", "open", 0)
    assert bytes(list(spec.prompt_ids)) == b"user: hi\nassistant: "
    assert spec.reply_to == "ipc://nowhere"


def test_end_of_sequence_ids_are_stop_ids_unless_ignored() -> None:
    service = FakeService(says("x"))
    gateway = make_gateway(service)
    assert ask(gateway, CHAT, chat_body()).json()["usage"]["completion_tokens"] == 2
    assert service.submits[-1].sampling.stop_token_ids == (EOS,)
    ask(gateway, CHAT, chat_body(ignore_eos=True, max_tokens=2))
    assert service.submits[-1].sampling.stop_token_ids == ()
