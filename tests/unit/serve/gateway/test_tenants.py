"""Keys, limits, classes, salts."""

from __future__ import annotations

import hashlib
import json
import stat
from pathlib import Path

import pytest

from millpond.config.gateway_params import GatewayParams, TenantParams
from millpond.core.errors import ConfigError
from millpond.core.hashing import root_digest
from millpond.core.kv_layout import KvLayout, StatePart, uniform_layout
from millpond.core.request import SloClass, StateRestore
from millpond.core.units import SECOND_NS
from millpond.serve.gateway.kv_names import KvNames
from millpond.serve.gateway.tenants import SALT_FILE, Tenants, load_salts
from tests.unit.serve.gateway.fake_service import FakeService, ask, chat_body, make_gateway, says

CHAT = "/v1/chat/completions"


def sha(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


ALICE = TenantParams("alice", (sha("key-a1"), sha("key-a2")), slo=SloClass.SILVER)
BOB = TenantParams("bob", (sha("key-b"),), is_enabled=False)


def test_without_tenants_everybody_may_call() -> None:
    service = FakeService(says("x"))
    assert ask(make_gateway(service), CHAT, chat_body()).status_code == 200
    assert service.submits[0].tenant == "open"


@pytest.mark.parametrize("path", [CHAT, "/v1/completions", "/v1/models", "/tokenize", "/detokenize"])
@pytest.mark.parametrize(
    ("headers", "status", "code"),
    [
        ({}, 401, "missing_api_key"),
        ({"Authorization": "Basic key-a1"}, 401, "missing_api_key"),
        ({"Authorization": "Bearer "}, 401, "missing_api_key"),
        (bearer("key-x"), 401, "invalid_api_key"),
        (bearer(sha("key-a1")), 401, "invalid_api_key"),
        (bearer("key-b"), 403, "api_key_disabled"),
    ],
)
def test_a_wrong_key_is_refused_everywhere(path: str, headers: dict, status: int, code: str) -> None:
    service = FakeService()
    gateway = make_gateway(service, tenants=(ALICE, BOB))
    method = "GET" if path == "/v1/models" else "POST"
    response = ask(gateway, path, chat_body(), headers=headers, method=method)
    assert (response.status_code, response.json()["error"]["code"]) == (status, code)
    assert service.submits == []


@pytest.mark.parametrize("path", ["/health", "/ready", "/metrics", "/version", "/openapi.json"])
def test_probes_need_no_key(path: str) -> None:
    gateway = make_gateway(FakeService(), tenants=(ALICE,))
    assert ask(gateway, path, method="GET").status_code == 200


@pytest.mark.parametrize("key", ["key-a1", "key-a2"])
def test_each_key_of_a_tenant_works(key: str) -> None:
    service = FakeService(says("x"))
    gateway = make_gateway(service, tenants=(ALICE, BOB))
    assert ask(gateway, CHAT, chat_body(), headers=bearer(key)).status_code == 200
    assert (service.submits[0].tenant, service.submits[0].slo) == ("alice", SloClass.SILVER)


@pytest.mark.parametrize(
    ("tier", "status", "slo"),
    [
        ("auto", 200, SloClass.SILVER),
        ("default", 200, SloClass.SILVER),
        ("flex", 200, SloClass.BRONZE),
        ("silver", 200, SloClass.SILVER),
        ("priority", 403, None),
        ("gold", 403, None),
    ],
)
def test_a_tenant_may_ask_for_less_than_its_class_but_not_for_more(tier: str, status: int, slo) -> None:
    service = FakeService(says("x"))
    gateway = make_gateway(service, tenants=(ALICE,))
    response = ask(gateway, CHAT, chat_body(service_tier=tier), headers=bearer("key-a1"))
    assert response.status_code == status
    assert [spec.slo for spec in service.submits] == ([slo] if slo else [])


def test_a_keyed_tenant_may_not_overtake_others_by_priority() -> None:
    gateway = make_gateway(FakeService(says("x")), tenants=(ALICE,))
    response = ask(gateway, CHAT, chat_body(priority=-1), headers=bearer("key-a1"))
    assert (response.status_code, response.json()["error"]["code"]) == (403, "priority_not_allowed")
    assert ask(make_gateway(FakeService(says("x"))), CHAT, chat_body(priority=-1)).status_code == 200


class Clock:
    now_ns = 0

    def __call__(self) -> int:
        return self.now_ns


def limited(**limits: int) -> tuple:
    clock = Clock()
    tenant = TenantParams("carol", (sha("key-c"),), **limits)
    gateway = make_gateway(FakeService(says("xy")), tenants=(tenant, ALICE), now_ns=clock)

    def call(key: str = "key-c", **fields):
        clock_before = clock.now_ns
        gateway.link._heard_ns = clock_before  # the fake controller says nothing by itself
        return ask(gateway, CHAT, chat_body(**fields), headers=bearer(key))

    return clock, gateway, call


def check_refusal(response, code: str, wait_s: int) -> None:
    assert response.status_code == 429
    assert response.json()["error"]["code"] == code
    assert response.json()["error"]["type"] == "rate_limit_error"
    assert response.headers["retry-after"] == str(wait_s)


def test_calls_per_minute_are_limited_per_tenant_and_come_back() -> None:
    clock, _, call = limited(requests_per_minute=2)
    assert [call().status_code for _ in range(2)] == [200, 200]
    check_refusal(call(), "tenant.requests_per_minute", 30)
    assert call("key-a1").status_code == 200
    clock.now_ns += 29 * SECOND_NS
    check_refusal(call(), "tenant.requests_per_minute", 1)
    clock.now_ns += SECOND_NS
    assert call().status_code == 200


def test_tokens_per_minute_count_prompt_and_output() -> None:
    clock, _, call = limited(tokens_per_minute=60)
    assert call().status_code == 200  # 20 prompt + 3 output
    assert call().status_code == 200
    assert call().status_code == 200  # overdrawn by 9
    check_refusal(call(), "tenant.tokens_per_minute", 10)
    clock.now_ns += 10 * SECOND_NS
    assert call().status_code == 200


def test_sequences_in_flight_are_limited_and_given_back() -> None:
    _, gateway, call = limited(max_sequences=2)
    never = call(n=3)  # asking again would not help
    assert (never.status_code, never.json()["error"]["param"]) == (400, "n")
    assert call(n=2).status_code == 200
    assert call(n=2).status_code == 200
    assert gateway.admission.num_sequences == 0


def test_the_services_own_limit_is_503_with_retry_after() -> None:
    params = GatewayParams(max_sequences=3, retry_after_s=7)
    gateway = make_gateway(FakeService(says("x")), params=params)
    response = ask(gateway, CHAT, chat_body(n=4))
    assert (response.status_code, response.headers["retry-after"]) == (503, "7")
    assert response.json()["error"]["code"] == "service.sequences"
    assert ask(gateway, CHAT, chat_body(n=3)).status_code == 200


PLAIN = KvNames(b"m" * 32, uniform_layout(2, 32, "u8"))
WITH_STATE = KvNames(
    b"m" * 32, KvLayout(uniform_layout(2, 32, "u8").rows, (StatePart(0, "window", 64, persisted=True),))
)


def test_bug_28_two_tenants_never_share_a_root_whatever_they_send() -> None:
    salts = {"alice": b"a" * 32, "bob": b"b" * 32}
    tenants = Tenants((ALICE, TenantParams("bob", (sha("key-b"),))), salts)
    alice, bob = (tenants.authenticate(f"Bearer {key}") for key in ("key-a1", "key-b"))
    texts = ["", "x", "xx", salts["bob"].decode()]
    made = [
        names.identity(tenant, text, restore).root
        for names in (PLAIN, WITH_STATE, KvNames(b"n" * 32, uniform_layout(2, 32, "u8")))
        for tenant in (alice, bob)
        for text in texts
        for restore in ((StateRestore.EXACT, StateRestore.REPLAY) if names is WITH_STATE else ("exact",))
    ]
    assert len(set(made)) == len(made)
    layout = uniform_layout(2, 32, "u8").fingerprint
    plain = PLAIN.identity(alice, "x", StateRestore.REPLAY)
    assert plain.root == root_digest(b"m" * 32, layout, b"a" * 32, b"x"), "interfaces A.1"
    assert plain == PLAIN.identity(alice, "x", StateRestore.EXACT), "without state all is exact"
    assert alice.number != bob.number
    assert alice.number == int.from_bytes(hashlib.sha256(b"a" * 32).digest()[:4], "little")


def test_salts_are_kept_in_the_state_folder(tmp_path: Path) -> None:
    state = tmp_path / "state"
    first = load_salts(state, ["alice"])
    assert stat.S_IMODE((state / SALT_FILE).stat().st_mode) == 0o600
    assert len(first["alice"]) == 32
    second = load_salts(state, ["alice", "bob"])
    assert second["alice"] == first["alice"]
    assert load_salts(state, ["bob"]) == second
    (state / SALT_FILE).write_text('{"alice": "not hex"}')
    with pytest.raises(ConfigError, match="damaged"):
        load_salts(state, ["alice"])


@pytest.mark.parametrize(
    "tenants",
    [
        (ALICE, ALICE),
        (ALICE, TenantParams("eve", (sha("key-a1"),))),
        (TenantParams("eve", ("plain-key",)),),
    ],
)
def test_tenants_that_cannot_be_told_apart_are_refused(tenants: tuple) -> None:
    with pytest.raises(ConfigError):
        Tenants(tenants, {"alice": b"", "eve": b""})


def test_keys_are_not_in_answers_or_metrics() -> None:
    gateway = make_gateway(FakeService(says("x")), tenants=(ALICE,))
    ask(gateway, CHAT, chat_body(), headers=bearer("key-a1"))
    text = ask(gateway, "/metrics", method="GET").text + json.dumps(ask(gateway, CHAT, chat_body()).json())
    assert "key-a1" not in text
