"""The small routes, and what all routes share."""

from __future__ import annotations

import json

import pytest

import millpond
from millpond.core.events import ServiceState
from millpond.core.units import SECOND_NS
from tests.unit.serve.gateway.fake_service import (
    EOS,
    MAX_MODEL_LEN,
    FakeService,
    ask,
    chat_body,
    completion_body,
    make_gateway,
    says,
    sse_events,
)

CHAT = "/v1/chat/completions"


@pytest.mark.parametrize(
    ("method", "path", "status", "code"),
    [
        ("GET", "/nowhere", 404, "route_not_found"),
        ("POST", "/v1/embeddings", 404, "route_not_found"),
        ("GET", CHAT, 405, "method_not_allowed"),
        ("DELETE", "/v1/models", 405, "method_not_allowed"),
        ("POST", "/health", 405, "method_not_allowed"),
        ("GET", "/v1/models/other", 404, "model_not_found"),
    ],
)
def test_a_wrong_route_has_the_same_error_shape(method: str, path: str, status: int, code: str) -> None:
    response = ask(make_gateway(FakeService()), path, method=method)
    assert response.status_code == status
    error = response.json()["error"]
    assert list(error) == ["message", "type", "param", "code"]
    assert error["code"] == code
    if status == 405:
        assert response.headers["allow"]


@pytest.mark.parametrize(
    ("given", "is_echoed"),
    [("abc-123", True), ("x" * 128, True), ("x" * 129, False), ("with space", False), (None, False)],
)
def test_the_request_id_is_echoed_or_made(given: str | None, is_echoed: bool) -> None:
    headers = {} if given is None else {"X-Request-Id": given}
    gateway = make_gateway(FakeService(says("x")))
    for path, body in ((CHAT, chat_body()), (CHAT, chat_body(stream=True)), (CHAT, {}), ("/nowhere", {})):
        echoed = ask(gateway, path, body, headers=headers).headers["x-request-id"]
        assert (echoed == given) == is_echoed
        assert 1 <= len(echoed) <= 128


def test_models_are_listed_under_all_names() -> None:
    gateway = make_gateway(FakeService())
    listed = ask(gateway, "/v1/models", method="GET").json()
    assert listed["object"] == "list"
    assert [card["id"] for card in listed["data"]] == ["bytes", "bytes-alias"]
    assert ask(gateway, "/v1/models/bytes", method="GET").json() == listed["data"][0]
    assert listed["data"][0]["max_model_len"] == MAX_MODEL_LEN


def test_tokenize_and_detokenize_are_inverse() -> None:
    gateway = make_gateway(FakeService())
    answer = ask(gateway, "/tokenize", {"model": "bytes", "prompt": "hé"}).json()
    assert answer == {"tokens": [104, 195, 169], "count": 3, "max_model_len": MAX_MODEL_LEN}
    text = ask(gateway, "/detokenize", {"tokens": answer["tokens"]}).json()
    assert text == {"prompt": "hé"}
    messages = {"messages": [{"role": "user", "content": "hi"}]}
    assert ask(gateway, "/tokenize", messages).json()["count"] == 20
    without = {**messages, "add_generation_prompt": False}
    assert ask(gateway, "/tokenize", without).json()["count"] == 9
    for path, body in (
        ("/tokenize", {}),
        ("/tokenize", {"prompt": "x", "messages": []}),
        ("/detokenize", {"tokens": [EOS + 1]}),
        ("/detokenize", {"tokens": [-1]}),
        ("/detokenize", {"tokens": "x"}),
    ):
        assert ask(gateway, path, body).status_code == 400
    assert ask(gateway, "/tokenize", {"model": "other", "prompt": "x"}).status_code == 404


def test_a_large_body_is_prepared_in_a_thread_with_the_same_result() -> None:
    service = FakeService(says("x"))
    gateway = make_gateway(service, max_model_len=100_000)
    ask(gateway, "/v1/completions", completion_body(prompt="y" * 60_000))
    assert service.submits[0].num_prompt_tokens == 60_000


def test_version_health_and_openapi() -> None:
    gateway = make_gateway(FakeService())
    assert ask(gateway, "/version", method="GET").json() == {"version": millpond.__version__}
    assert ask(gateway, "/health", method="GET").json() == {"status": "ok"}
    document = ask(gateway, "/openapi.json", method="GET").json()
    assert document["openapi"].startswith("3.")
    chat = document["components"]["schemas"]["ChatRequest"]
    assert chat["additionalProperties"] is False
    assert {"messages", "stop", "cache_salt", "top_k"} <= set(chat["properties"])
    text = json.dumps(document)
    for name in {part.split('"')[0] for part in text.split("#/components/schemas/")[1:]}:
        assert name in document["components"]["schemas"]
    for path in (CHAT, "/v1/completions", "/v1/models", "/tokenize", "/ready", "/metrics"):
        assert path in document["paths"]


def test_a_trailing_slash_is_another_path() -> None:
    response = ask(make_gateway(FakeService(says("x"))), f"{CHAT}/", chat_body())
    assert response.status_code == 404
    assert response.json()["error"]["message"]


def test_nothing_is_accepted_before_the_service_is_up() -> None:
    gateway = make_gateway(FakeService(says("x")), max_model_len=0)
    response = ask(gateway, CHAT, chat_body())
    assert (response.status_code, response.headers["retry-after"]) == (503, "1")
    assert response.json()["error"]["code"] == "service.not_ready"
    assert ask(gateway, "/ready", method="GET").status_code == 503
    assert ask(gateway, "/health", method="GET").status_code == 200
    gateway.link.on_message(ServiceState(1, MAX_MODEL_LEN, is_ready=True))
    assert ask(gateway, "/ready", method="GET").status_code == 200
    assert ask(gateway, CHAT, chat_body()).status_code == 200


def test_a_controller_that_was_silent_and_takes_nothing_is_503_at_once() -> None:
    service = FakeService(is_full=True)
    now = [0]
    gateway = make_gateway(service, now_ns=lambda: now[0])
    now[0] += 60 * SECOND_NS
    response = ask(gateway, CHAT, chat_body(n=2))
    assert (response.status_code, response.json()["error"]["code"]) == (503, "service.controller_busy")
    assert (gateway.link.num_open, gateway.admission.num_sequences) == (0, 0)


def test_bug_16_ready_turns_red_when_work_waits_and_no_token_comes() -> None:
    now = [0]
    gateway = make_gateway(FakeService(is_mute=True), now_ns=lambda: now[0])

    def ready_after(seconds: int) -> int:
        now[0] += seconds * SECOND_NS
        gateway.link.on_message(ServiceState(1, MAX_MODEL_LEN, is_ready=True))
        return ask(gateway, "/ready", method="GET").status_code

    assert ready_after(3600) == 200  # idle is not silence
    specs = gateway.make_specs(
        "call",
        gateway.prepare(json.dumps(chat_body()).encode(), is_chat=True),
        gateway.tenants.authenticate(None),
    )
    with gateway.submitted(specs):
        assert ready_after(29) == 200
        assert ready_after(2) == 503
        assert ask(gateway, "/health", method="GET").status_code == 200
    assert ready_after(1) == 200


def test_a_draining_gateway_refuses_with_503_and_retry_after() -> None:
    gateway = make_gateway(FakeService(says("x")))
    gateway.start_draining()
    response = ask(gateway, CHAT, chat_body())
    assert (response.status_code, response.headers["retry-after"]) == (503, "1")
    assert response.json()["error"]["code"] == "service.draining"
    assert ask(gateway, "/ready", method="GET").status_code == 503


def test_metrics_count_calls_tokens_and_refusals_under_both_names() -> None:
    gateway = make_gateway(FakeService(says("abc")))
    ask(gateway, CHAT, chat_body())
    ask(gateway, CHAT, chat_body(stream=True, max_tokens=2))
    ask(gateway, CHAT, chat_body(n=0))
    text = ask(gateway, "/metrics", method="GET").text
    for line in (
        'millpond_request_finished_total{reason="stop"} 1.0',
        'millpond_request_finished_total{reason="length"} 1.0',
        'millpond_request_refused_total{reason="invalid_value"} 1.0',
        "millpond_request_prompt_tokens_total 40.0",
        "millpond_request_output_tokens_total 6.0",
        "millpond_request_ttft_seconds_count 2.0",
        "millpond_request_tpot_seconds_count 2.0",
        "millpond_sequences_running 0.0",
        'vllm:generation_tokens_total{model_name="bytes"} 6.0',
        'vllm:prompt_tokens_total{model_name="bytes"} 40.0',
        'vllm:time_to_first_token_seconds_count{model_name="bytes"} 2.0',
        'vllm:num_requests_waiting{model_name="bytes"} 0.0',
        'vllm:request_success_total{finished_reason="stop",model_name="bytes"} 1.0',
    ):
        assert line in text.splitlines()


def test_metrics_include_what_the_controller_reports() -> None:
    rank = {
        "rank": 0, "num_seqs": 3, "num_queued": 2, "queued_tokens": 9, "kv_tokens": 8, "free_blocks": 7,
        "free_slots": 6,
    }  # fmt: skip
    values = {"millpond_prompt_tokens_total:computed": 5.0, "millpond_handoff_send_num_open": 1.0}
    report = {
        "queue": {"num_queued": 4, "num_requests": 5},
        "groups": {"p0": {"role": "prefill", "ranks": [rank], "values": values}},
    }
    gateway = make_gateway(FakeService(report=json.dumps(report)))
    lines = ask(gateway, "/metrics", method="GET").text.splitlines()
    for line in (
        "millpond_controller_up 1.0",
        "millpond_queue_requests 4.0",
        'millpond_kv_blocks_free{group="p0",rank="0",role="prefill"} 7.0',
        'millpond_prompt_tokens_total{group="p0",source="computed"} 5.0',
        'millpond_handoff_send_num_open{group="p0",source=""} 1.0',
    ):
        assert line in lines
    for name in {line.split()[2] for line in lines if line.startswith("# TYPE")}:
        assert sum(line.startswith(f"# TYPE {name} ") for line in lines) == 1, name


def test_metrics_come_without_a_controller() -> None:
    lines = ask(make_gateway(FakeService(is_full=True)), "/metrics", method="GET").text.splitlines()
    assert "millpond_controller_up 0.0" in lines
    assert "millpond_sequences_running 0.0" in lines


@pytest.mark.parametrize("logprobs", [None, 1])
def test_a_completion_has_the_ids_of_its_text_if_they_are_asked_for(logprobs: int | None) -> None:
    gateway = make_gateway(FakeService(says("mill€pond")))
    body = completion_body(max_tokens=64, return_token_ids=True, logprobs=logprobs)
    (whole,) = ask(gateway, "/v1/completions", body).json()["choices"]
    assert bytes(whole["token_ids"]).decode() == whole["text"] == "mill€pond"
    streamed = ask(gateway, "/v1/completions", body | {"stream": True}).content
    events = [json.loads(data) for _, data in sse_events(streamed) if data != "[DONE]"]
    choices = [choice for event in events for choice in event["choices"]]
    assert [id_ for choice in choices for id_ in choice.get("token_ids", ())] == whole["token_ids"]
    assert "".join(choice["text"] for choice in choices) == whole["text"]
    assert "token_ids" not in ask(gateway, "/v1/completions", completion_body()).json()["choices"][0]
