"""What a gateway finds of a prompt, tells the service and answers, with real metadata in this process."""

from __future__ import annotations

import asyncio
import json
import re
import socket
import threading
import time
from array import array
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

from millpond.config.gateway_params import GatewayParams, TenantParams
from millpond.core.hashing import HashChain
from millpond.core.kv_layout import KvLayout, StatePart, uniform_layout
from millpond.core.request import KvIdentity, RequestSpec, StateRestore
from millpond.core.units import BLOCK_TOKENS
from millpond.serve.gateway.chain_cache import ChainCache
from millpond.serve.gateway.gateway import Gateway
from millpond.serve.gateway.kv_names import KvNames
from millpond.serve.gateway.matcher import MatchOutcome, MatchResult, PrefixMatcher
from millpond.store.dram_arena import SlotRef
from millpond.store.metadata.client import MetadataClient
from millpond.store.metadata.directory import BLOCKS, pack_entries
from millpond.store.net.messages import (
    Commit,
    DirectoryJoin,
    DirectoryLeave,
    DirectoryPublish,
    DropTenant,
    Failed,
    Location,
    Match,
    Matched,
)
from tests.unit.serve.gateway.fake_service import (
    FakeService,
    ask,
    cached_tokens,
    chat_body,
    completion_body,
    make_gateway,
    says,
    sse_events,
)
from tests.unit.serve.gateway.test_tenants import ALICE, bearer, sha
from tests.unit.store.metadata.shards import TOKEN, Shards, shards
from tests.unit.store.net.peers import within

ROWS = uniform_layout(2, 32, "u8").rows
PLAIN = KvNames(b"m" * 32, KvLayout(ROWS))
WITH_STATE = KvNames(b"m" * 32, KvLayout(ROWS, (StatePart(0, "window", 64, persisted=True),)))
COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"
MAX_MODEL_LEN = 1 << 20
WINDOW = 8


def make_matcher(made: Shards, deadline_ms: int = 5000) -> PrefixMatcher:
    client = MetadataClient(made.pool_map.metadata, name="gw0", token=TOKEN)
    return PrefixMatcher(client, window=WINDOW, deadline_ms=deadline_ms)


def chain_of(kv: KvIdentity, ids: array[int]) -> list[bytes]:
    chain = HashChain(kv.root)
    chain.extend(ids)
    return chain.digests


def store(made: Shards, kv: KvIdentity, ids: array[int], *, on_disk: int = 0, in_memory: int = 0) -> None:
    """Have the pool know the first `on_disk` blocks, and a host the `in_memory` blocks behind them."""
    digests = chain_of(kv, ids)
    prefix = b"".join(digest[:16] for digest in digests)
    for begin in range(0, on_disk, WINDOW):
        end = min(begin + WINDOW, on_disk)
        message = Commit(
            kv.tenant,
            kv.root[:16],
            Location(digests[end - 1], end - begin, 0, 0, begin + 1),
            begin,
            digests[begin - 1] if begin else kv.root,
            1024,
            0,
        )
        done = made.client.call(message, prefix[begin * 16 : end * 16], prefix=prefix, deadline_ns=within(10))
        assert done.count == 1
    if in_memory:
        tell = made.client.ask_directory
        tell(DirectoryJoin(BLOCKS, "h0", "h0:1", 5), deadline_ns=within(10))
        names = [digest[:16] for digest in digests[on_disk : on_disk + in_memory]]
        entries = pack_entries([(name, SlotRef(slot, 0)) for slot, name in enumerate(names)])
        assert tell(DirectoryPublish(BLOCKS, "h0", 5), entries, deadline_ns=within(10))[0].count == in_memory


def prompt(num_tokens: int, seed: int = 0) -> str:
    text = f"{seed}" + "".join(f" {number}" for number in range(num_tokens))
    return text[:num_tokens]


def ids_of(text: str) -> array[int]:
    return array("i", list(text.encode()))


@contextmanager
def gateway_with(
    made: Shards, service: FakeService, names: KvNames = PLAIN, **more: Any
) -> Iterator[Gateway]:
    matcher = make_matcher(made)
    try:
        yield make_gateway(service, kv=names, matcher=matcher, max_model_len=MAX_MODEL_LEN, **more)
    finally:
        matcher.close()


def identity(gateway: Gateway, names: KvNames = PLAIN, salt: str = "", **more: Any) -> KvIdentity:
    tenant = gateway.tenants.authenticate(more.pop("authorization", None))
    return names.identity(tenant, salt, more.pop("restore", StateRestore.REPLAY))


def usage_of(response: Any) -> tuple[int, int]:
    assert response.status_code == 200, response.text
    usage = response.json()["usage"]
    return usage["prompt_tokens"], usage["prompt_tokens_details"]["cached_tokens"]


# --- what is found --------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize(
    ("on_disk", "in_memory", "num_tokens", "expected"),
    [
        (0, 0, 1000, 0),
        (5, 0, 1000, 5),
        (16, 0, 17 * 128, 16),
        (16, 0, 16 * 128, 15),
        (16, 0, 16 * 128 + 1, 16),
        (0, 4, 1000, 4),
        (3, 4, 1000, 7),
        (3, 4, 500, 3),
        (1, 0, 128, 0),
        (1, 0, 129, 1),
        (1, 0, 5, 0),
    ],
)
def test_the_hit_is_what_disks_and_memories_have_and_one_token_is_left(
    tmp_path: Path, count: int, on_disk: int, in_memory: int, num_tokens: int, expected: int
):
    text = prompt(20 * 128)
    service = FakeService(says("x"))
    with shards(tmp_path, count) as made, gateway_with(made, service) as gateway:
        kv = identity(gateway)
        store(made, kv, ids_of(text), on_disk=on_disk, in_memory=in_memory)
        response = ask(gateway, COMPLETIONS, completion_body(prompt=text[:num_tokens]))
        assert usage_of(response) == (num_tokens, expected * BLOCK_TOKENS)
        spec = service.submits[0]
        assert spec.kv == kv
        assert cached_tokens(spec) == expected * BLOCK_TOKENS
        if expected:
            located = msgspec.msgpack.decode(spec.cached.located, type=Matched)
            digests = chain_of(kv, ids_of(text))
            for begin, where in zip(located.begins, located.extents, strict=True):
                assert digests[begin + where.num_blocks - 1] == where.digest
        else:
            assert spec.cached is None


def test_a_conversation_is_found_turn_by_turn(tmp_path: Path):
    """An independent count over the submitted ids: common blocks with what was stored before."""
    service = FakeService(says("fine, what else? " * 20))
    with shards(tmp_path, 1) as made, gateway_with(made, service) as gateway:
        messages = [{"role": "user", "content": prompt(700)}]
        stored: array[int] = array("i")
        for turn in range(5):
            body = chat_body(messages=messages, max_tokens=200)
            response = ask(gateway, CHAT, body)
            ids = service.submits[-1].prompt_ids
            num_common = 0
            while num_common < min(len(stored), len(ids)) and stored[num_common] == ids[num_common]:
                num_common += 1
            assert usage_of(response) == (len(ids), min(num_common // 128, (len(ids) - 1) // 128) * 128)
            assert turn == 0 or usage_of(response)[1] > 0
            answer = response.json()["choices"][0]["message"]["content"]
            stored = ids + ids_of(answer)
            made.client.ask_directory(DirectoryLeave(BLOCKS, "h0", 5), deadline_ns=within(10))
            store(made, identity(gateway), stored, in_memory=len(stored) // 128)
            messages += [
                {"role": "assistant", "content": answer},
                {"role": "user", "content": prompt(300, turn)},
            ]


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_streams_tell_the_same(tmp_path: Path, path: str):
    service = FakeService(says("x"))
    body, field = completion_body, {"prompt": prompt(900)}
    if path == CHAT:
        body, field = chat_body, {"messages": [{"role": "user", "content": prompt(900)}]}
    with shards(tmp_path, 1) as made, gateway_with(made, service) as gateway:
        ask(gateway, path, body(**field))
        store(made, identity(gateway), service.submits[0].prompt_ids, on_disk=3, in_memory=2)
        whole = usage_of(ask(gateway, path, body(**field)))
        streamed = ask(gateway, path, body(**field, stream=True, stream_options={"include_usage": True}))
        last = json.loads(sse_events(streamed.content)[-2][1])["usage"]
        assert whole == (last["prompt_tokens"], last["prompt_tokens_details"]["cached_tokens"])
        assert whole[1] == 5 * 128
        metrics = ask(gateway, "/metrics", method="GET").text
        assert f'millpond_prompt_tokens_total{{group="gw0",source="cached"}} {2 * whole[1]}.0' in metrics
        assert f'vllm:prefix_cache_hits_total{{model_name="bytes"}} {2 * whole[1]}.0' in metrics
        assert f'vllm:prefix_cache_queries_total{{model_name="bytes"}} {3 * whole[0]}.0' in metrics
        assert 'millpond_prefix_match_total{outcome="hit"} 2.0' in metrics
        assert 'millpond_prefix_match_total{outcome="miss"} 1.0' in metrics


def test_choices_of_one_prompt_share_one_question_and_count_once(tmp_path: Path):
    service = FakeService(says("x"))
    texts = [prompt(600, 1), prompt(800, 2), prompt(20, 3)]
    with shards(tmp_path, 1) as made, gateway_with(made, service) as gateway:
        kv = identity(gateway)
        store(made, kv, ids_of(texts[0]), on_disk=2)
        store(made, kv, ids_of(texts[1]), on_disk=4)
        response = ask(gateway, COMPLETIONS, completion_body(prompt=texts, n=3))
        assert usage_of(response) == (1420, 6 * 128)
        assert [cached_tokens(spec) // 128 for spec in service.submits] == [2, 2, 2, 4, 4, 4, 0, 0, 0]
        asked = next(iter(made.client.statuses(deadline_ns=within(10)).values())).counts["matches"]
        assert asked == 2


def test_what_workers_really_loaded_is_answered_not_what_was_found(tmp_path: Path, monkeypatch):
    """The pool said more than it had: the worker's number counts, in the answer and in the metrics."""
    monkeypatch.setattr("tests.unit.serve.gateway.fake_service.cached_tokens", lambda _spec: 128)
    with shards(tmp_path, 1) as made, gateway_with(made, FakeService(says("x"))) as gateway:
        store(made, identity(gateway), ids_of(prompt(900)), on_disk=7)
        assert usage_of(ask(gateway, COMPLETIONS, completion_body(prompt=prompt(900)))) == (900, 128)
        metrics = ask(gateway, "/metrics", method="GET").text
        assert 'millpond_prompt_tokens_total{group="gw0",source="cached"} 128.0' in metrics
        assert "millpond_prefix_matched_tokens_total 896.0" in metrics


# --- who shares -----------------------------------------------------------------------------------


BOB = TenantParams("bob", (sha("key-b"),))


def test_bug_28_salts_and_tenants_never_share(tmp_path: Path):
    service = FakeService(says("x"))
    text = prompt(900)
    with shards(tmp_path, 1) as made, gateway_with(made, service, tenants=(ALICE, BOB)) as gateway:
        alice = identity(gateway, authorization="Bearer key-a1", salt="s")
        store(made, alice, ids_of(text), on_disk=4, in_memory=3)

        def cached(key: str, **more: Any) -> int:
            body = completion_body(prompt=text, **more)
            return usage_of(ask(gateway, COMPLETIONS, body, headers=bearer(key)))[1]

        assert cached("key-a1", cache_salt="s") == cached("key-a2", cache_salt="s") == 7 * 128
        assert cached("key-a1") == cached("key-a1", cache_salt="t") == 0
        assert cached("key-b", cache_salt="s") == cached("key-b") == 0
        assert cached("key-b", cache_salt="alice") == cached("key-b", cache_salt="alices") == 0


def test_exact_requests_do_not_see_what_replays_computed(tmp_path: Path):
    service = FakeService(says("x"))
    text = prompt(900)
    carol = TenantParams("carol", (sha("key-c"),), state_restore=StateRestore.EXACT)
    with (
        shards(tmp_path, 1) as made,
        gateway_with(made, service, WITH_STATE, tenants=(ALICE, carol)) as gateway,
    ):

        def cached(key: str, **more: Any) -> int:
            body = completion_body(prompt=text, **more)
            return usage_of(ask(gateway, COMPLETIONS, body, headers=bearer(key)))[1]

        for key, default in (("key-a1", StateRestore.REPLAY), ("key-c", StateRestore.EXACT)):
            replay = identity(gateway, WITH_STATE, authorization=f"Bearer {key}")
            store(made, replay, ids_of(text), on_disk=4)
            assert cached(key, state_restore="exact") == 0
            assert service.submits[-1].state_restore is StateRestore.EXACT
            assert cached(key, state_restore="replay") == 4 * 128
            assert service.submits[-1].state_restore is StateRestore.REPLAY
            assert cached(key) == (4 * 128 if default is StateRestore.REPLAY else 0)
            assert service.submits[-1].state_restore is default


def test_a_policy_that_does_not_exist_is_refused():
    response = ask(make_gateway(FakeService()), COMPLETIONS, completion_body(state_restore="sloppy"))
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "state_restore"
    assert "exact or replay" in response.json()["error"]["message"]


# --- the service is lost, the metadata are lost, late or wrong -------------------------------------


@pytest.mark.parametrize("num_left", [4, 7, 0], ids=["as before", "more", "nothing"])
def test_a_lost_attempt_is_looked_up_anew(tmp_path: Path, num_left: int):
    """Its worker may have left more than the first attempt found; and what was found may have gone."""
    from millpond.core.plan import Resubmit

    text = prompt(900)

    class Loses(FakeService):
        def _say(self, spec: RequestSpec, tokens: list, index: int) -> None:
            if spec.attempt == 0 and index == 2:
                if num_left > 4:
                    store(made, identity(gateway), ids_of(text), on_disk=num_left)
                elif not num_left:
                    tenant = identity(gateway).tenant
                    assert made.client.call(DropTenant(tenant), prefix=b"", deadline_ns=within(10)).count > 0
                self.link.on_message(Resubmit(spec.request_id, 0, "lost"))
                return
            super()._say(spec, tokens, index)

    service = Loses(says("abcdef"))
    with shards(tmp_path, 1) as made, gateway_with(made, service) as gateway:
        store(made, identity(gateway), ids_of(text), on_disk=4)
        response = ask(gateway, COMPLETIONS, completion_body(prompt=text))
        assert response.json()["choices"][0]["text"] == "abcdef"
        assert usage_of(response)[1] == 4 * 128, "that of the attempt that answered first"
        first, second = service.submits
        assert second == replace(first, attempt=1, output_ids=second.output_ids, cached=second.cached)
        assert (second.cached.num_tokens if second.cached else 0) == num_left * 128
        assert list(second.output_ids) == list(b"ab")


def test_a_lost_attempt_keeps_what_was_found_if_nobody_answers(tmp_path: Path):
    from millpond.core.plan import Resubmit

    class Loses(FakeService):
        def _say(self, spec: RequestSpec, tokens: list, index: int) -> None:
            if spec.attempt == 0 and index == 2:
                made.servers[0].stop(20)
                self.link.on_message(Resubmit(spec.request_id, 0, "lost"))
                return
            super()._say(spec, tokens, index)

    service = Loses(says("abcdef"))
    with shards(tmp_path, 1) as made, gateway_with(made, service) as gateway:
        store(made, identity(gateway), ids_of(prompt(900)), on_disk=4)
        response = ask(gateway, COMPLETIONS, completion_body(prompt=prompt(900)))
        assert response.json()["choices"][0]["text"] == "abcdef"
        first, second = service.submits
        assert second.attempt == 1
        assert first.cached is not None
        assert second.cached == first.cached


def test_what_a_lost_attempt_left_is_no_hit_of_its_call(tmp_path: Path):
    """A cold prompt was computed for this call, though the attempt that answers has loaded it."""
    from millpond.core.plan import Resubmit

    class Loses(FakeService):
        def _say(self, spec: RequestSpec, tokens: list, index: int) -> None:
            if spec.attempt == 0:
                store(made, identity(gateway), ids_of(prompt(900)), on_disk=7)
                self.link.on_message(Resubmit(spec.request_id, 0, "lost"))
                return
            super()._say(spec, tokens, index)

    service = Loses(says("abcdef"))
    with shards(tmp_path, 1) as made, gateway_with(made, service) as gateway:
        response = ask(gateway, COMPLETIONS, completion_body(prompt=prompt(900)))
        assert usage_of(response)[1] == 0
        assert gateway.metrics.num_cached_tokens == 0
        assert [spec.cached.num_tokens if spec.cached else 0 for spec in service.submits] == [0, 7 * 128]


class Lies:
    """Metadata that say anything."""

    def __init__(self, answer: object) -> None:
        self.answer = answer
        self.is_closed = False

    def call(self, request: object, payload: bytes = b"", *, prefix: bytes, deadline_ns: int) -> object:
        assert isinstance(request, Match)
        return self.answer

    def ask_directory(self, *_args: object, **_more: object) -> tuple[object, bytes]:
        return self.answer, b"\0" * 5

    def close(self) -> None:
        self.is_closed = True


def match(matcher: PrefixMatcher, ids: array[int]):
    return asyncio.run(matcher.match(KvIdentity(b"r" * 32, 1), ids))


@pytest.mark.parametrize(
    ("answer", "num_tokens", "outcome"),
    [
        (Matched(10**9, (), ()), 384, MatchOutcome.HIT),
        (Matched(2, (), ()), 256, MatchOutcome.PARTIAL),
        (Matched(-1, (), ()), 0, MatchOutcome.FAILED),
        (Failed("io"), 0, MatchOutcome.FAILED),
    ],
)
def test_wrong_answers_are_cut_to_the_prompt_or_counted(
    answer: object, num_tokens: int, outcome: MatchOutcome
):
    lies = Lies(answer)
    matcher = PrefixMatcher(lies, window=8, deadline_ms=5000)
    result = match(matcher, ids_of(prompt(4 * 128)))
    assert (result.cached.num_tokens if result.cached else 0, result.outcome) == (num_tokens, outcome)
    matcher.close()
    assert lies.is_closed


@pytest.mark.parametrize(("mode", "outcome"), [("down", "failed"), ("frozen", "late")])
def test_without_metadata_requests_are_computed_and_counted(mode: str, outcome: str):
    service = FakeService(says("x"))
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        if mode == "down":
            server.close()
        client = MetadataClient([address], name="gw0", token=TOKEN)
        matcher = PrefixMatcher(client, window=8, deadline_ms=50)
        gateway = make_gateway(service, kv=PLAIN, matcher=matcher, max_model_len=MAX_MODEL_LEN)
        began = time.monotonic()
        assert usage_of(ask(gateway, COMPLETIONS, completion_body(prompt=prompt(900)))) == (900, 0)
        assert time.monotonic() - began < 5, "ten times what a request takes with the deadline of the match"
        spec = service.submits[0]
        assert (spec.cached, spec.kv) == (None, identity(gateway)), "what is computed is kept all the same"
        metrics = ask(gateway, "/metrics", method="GET").text
        assert f'millpond_prefix_match_total{{outcome="{outcome}"}} 1.0' in metrics
        matcher.close()


def test_frozen_metadata_do_not_pile_up_requests():
    with socket.create_server(("127.0.0.1", 0), backlog=512) as server:
        client = MetadataClient([f"127.0.0.1:{server.getsockname()[1]}"], name="gw0", token=TOKEN)
        matcher = PrefixMatcher(client, window=8, deadline_ms=50)
        kv = KvIdentity(b"r" * 32, 1)

        async def run() -> list[MatchResult]:
            return await asyncio.gather(
                *(matcher.match(kv, ids_of(prompt(900, seed))) for seed in range(300))
            )

        began = time.monotonic()
        results = asyncio.run(run())
        matcher.close()
        assert time.monotonic() - began < 10, (
            "four threads would need 3 s one after the other, and wait no more"
        )
        assert {result.cached for result in results} == {None}
        assert {result.outcome for result in results} <= {MatchOutcome.LATE, MatchOutcome.FAILED}
        assert MatchOutcome.LATE in {result.outcome for result in results}


def test_metadata_that_come_back_are_asked_again(tmp_path: Path):
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
    client = MetadataClient([address], name="gw0", token=TOKEN)
    matcher = PrefixMatcher(client, window=8, deadline_ms=2000)
    assert match(matcher, ids_of(prompt(900))).outcome is MatchOutcome.FAILED
    with shards(tmp_path, 1) as made:
        client._seeds = made.pool_map.metadata  # its old port may be somebody else's by now
        deadline = time.monotonic() + 20
        while match(matcher, ids_of(prompt(900))).outcome is not MatchOutcome.MISS:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        matcher.close()


def test_a_pool_that_is_not_looked_up_still_keeps():
    service = FakeService(says("x"))
    gateway = make_gateway(service, kv=PLAIN, max_model_len=MAX_MODEL_LEN, params=GatewayParams(match=False))
    assert usage_of(ask(gateway, COMPLETIONS, completion_body(prompt=prompt(900)))) == (900, 0)
    assert (service.submits[0].kv is not None, service.submits[0].cached) == (True, None)


def test_a_service_without_a_pool_names_nothing():
    service = FakeService(says("x"))
    ask(make_gateway(service), COMPLETIONS, completion_body())
    assert (service.submits[0].kv, service.submits[0].cached) == (None, None)


# --- long prompts ---------------------------------------------------------------------------------


class WatchedChains(ChainCache):
    """Notes in which thread it hashes."""

    def __init__(self) -> None:
        super().__init__()
        self.threads: list[threading.Thread] = []

    def digests(self, root: bytes, ids: array[int], num_blocks: int) -> tuple[bytes, ...]:
        self.threads.append(threading.current_thread())
        return super().digests(root, ids, num_blocks)


def test_a_prompt_of_200k_tokens_does_not_hold_the_loop(tmp_path: Path):
    ids = array("i", [at * 7919 % 50_000 for at in range(200_000)])
    kv = KvIdentity(b"r" * 32, 1)
    with shards(tmp_path, 1) as made:
        store(made, kv, ids, in_memory=1500)
        matcher = make_matcher(made)
        chains = matcher._chains = WatchedChains()

        async def run() -> None:
            found = await matcher.match(kv, ids)
            assert found.cached.num_tokens == 1500 * 128
            assert chains.threads.pop() is not threading.current_thread()
            assert chains.num_hashed == 1562
            assert (await matcher.match(kv, ids)).cached == found.cached
            assert chains.num_hashed == 1562, "the session's next turn pays for what is new"
            await matcher.match(kv, ids[:4000])
            assert chains.threads.pop() is threading.current_thread(), "short ones are quicker where they are"

        asyncio.run(run())
        matcher.close()


def test_metric_names_are_unique_with_the_service_report(tmp_path: Path):
    values = {"millpond_prompt_tokens_total:computed": 5.0}
    report = {
        "queue": {"num_queued": 0, "num_requests": 0},
        "groups": {"p0": {"role": "prefill", "ranks": [], "values": values}},
    }
    service = FakeService(says("x"), report=json.dumps(report))
    text = ask(make_gateway(service), "/metrics", method="GET").text
    kinds = re.findall(r"^# TYPE (\S+) ", text, re.MULTILINE)
    assert len(kinds) == len(set(kinds))
    assert 'millpond_prompt_tokens_total{group="p0",source="computed"} 5.0' in text
    assert 'millpond_prompt_tokens_total{group="gw0",source="cached"} 0.0' in text
