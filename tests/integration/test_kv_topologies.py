"""Cached tokens are told alike by answers, metrics and an independent count, in every shape of service.

The count knows nothing of blocks that were kept: it has the token ids of all calls, and adds up which whole
blocks of a prompt had been computed before.
"""

from __future__ import annotations

import json
import os
import signal
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from millpond.core.chance import Chance
from millpond.serve.status import fetch_pool_status
from tests.integration.conftest import Service, wait_until

BLOCK = 128
NUM_OUTPUT = 40
NUM_TURNS = 3
SHARED = 300
"""Tokens with which every session begins."""
FIRST_PROMPTS = (SHARED + 1, 4 * BLOCK, 4 * BLOCK + 1, 700, 6 * BLOCK - NUM_OUTPUT + 1)
"""Whole blocks, one token more, and an answer whose last token would fill a block but is not computed."""
DEADLINE_S = 60.0
PUT_SLOTS = 32
"""Of a rank: a block that finds none free is not kept."""

POOL = f"""
[gateway]
match_deadline_ms = 5000
[node]
put_slots = {PUT_SLOTS}
load_deadline_s = 60.0
[node.spill]
idle_s = 0.0
[pool]
data_shards = 2
parity_shards = 1
[[storage]]
name = "s0"
targets = 3
capacity = "96 MiB"
"""
"""What is computed is written at once, so that it can be polled for, and deadlines suit a busy machine."""

HOST = """
[[host]]
name = "h0"
arena = "16 MiB"
dram = "16 MiB"
"""
SPLIT = HOST
SEVERAL_RANKS = (
    HOST
    + """
[[group]]
name = "p0"
role = "prefill"
ranks = 2
[[group]]
name = "d0"
role = "decode"
ranks = 2
[[group]]
name = "d1"
role = "decode"
"""
)
MIXED_RANKS = (
    HOST
    + """
[[group]]
name = "m0"
role = "mixed"
ranks = 2
"""
)
TWO_HOSTS = (
    HOST
    + """
[[host]]
name = "h1"
arena = "16 MiB"
dram = "16 MiB"
cnic = "127.0.0.2"
snic = "127.0.0.2"
[[group]]
name = "p0"
role = "prefill"
hosts = ["h0"]
[[group]]
name = "d0"
role = "decode"
hosts = ["h1"]
"""
)


@dataclass(frozen=True)
class Call:
    """One call and its answer."""

    prompt: tuple[int, ...]
    salt: str = ""
    is_streamed: bool = False
    cached: int = -1
    output: tuple[int, ...] = ()
    text: str = ""

    @property
    def computed_blocks(self) -> set[tuple[str, tuple[int, ...]]]:
        """Whole blocks, each named by all tokens up to its end; the last token is sampled, not computed."""
        computed = (*self.prompt, *self.output[:-1])
        return {(self.salt, computed[:end]) for end in range(BLOCK, len(computed) + 1, BLOCK)}


@dataclass
class Ledger:
    """All calls of a service, and what they must have found."""

    service: Service
    calls: list[Call] = field(default_factory=list)
    blocks: set[tuple[str, tuple[int, ...]]] = field(default_factory=set)
    """Computed by calls whose blocks are kept."""

    def expected(self, call: Call) -> int:
        """Tokens of the prompt in leading blocks that were computed before; one token is always left."""
        num_cached = 0
        for end in range(BLOCK, len(call.prompt), BLOCK):
            if (call.salt, call.prompt[:end]) not in self.blocks:
                break
            num_cached = end
        return num_cached

    def add(self, calls: list[Call]) -> None:
        """Check calls that ran at once, all of them begun when what was computed before was kept."""
        assert [call.cached for call in calls] == [self.expected(call) for call in calls]
        self.calls += calls
        for call in calls:
            self.blocks |= call.computed_blocks

    def wait_kept(self) -> None:
        """Wait until disks and directory know every block: it is handed over behind the last token."""

        def are_kept() -> bool:
            shards = (fetch_pool_status(self.service.config) or {})["metadata"].values()
            known = [(shard.get("num_blocks"), shard.get("num_places")) for shard in shards]
            return known == [(len(self.blocks), len(self.blocks))]

        wait_until(are_kept, DEADLINE_S, f"{len(self.blocks)} blocks are kept")


def new_ids(name: str, count: int) -> tuple[int, ...]:
    """Random token ids of words."""
    chance = Chance(0, name)
    return tuple(1000 + chance.below(20000) for _ in range(count))


def connect(service: Service) -> httpx.Client:
    """A client of the gateway. It makes a new connection for each call: no old one can be closed under it."""
    limits = httpx.Limits(max_keepalive_connections=0)
    return httpx.Client(base_url=service.url, timeout=DEADLINE_S, limits=limits)


def ask(http: httpx.Client, call: Call, messages: list[dict[str, str]] | None = None) -> Call:
    """Carry out a call: a completion of its ids, or a chat that is rendered to them."""
    body: dict[str, Any] = {"model": "synthetic", "temperature": 0, "ignore_eos": True}
    body |= {"max_tokens": NUM_OUTPUT, "cache_salt": call.salt or None}
    path = "chat/completions" if messages else "completions"
    body |= {"messages": messages} if messages else {"prompt": call.prompt, "return_token_ids": True}
    if call.is_streamed:
        body |= {"stream": True, "stream_options": {"include_usage": True}}
    answers: list[dict[str, Any]] = []
    with http.stream("POST", f"/v1/{path}", json=body) as response:
        assert response.status_code == 200, response.read()
        if call.is_streamed:
            events = [line.removeprefix("data: ") for line in response.iter_lines() if line]
            assert events.pop() == "[DONE]"
            answers = [json.loads(event) for event in events]
        else:
            answers = [json.loads(response.read())]
    usages = [answer["usage"] for answer in answers if answer.get("usage")]
    assert len(usages) == 1
    usage = usages[0]
    assert usage["prompt_tokens"] == len(call.prompt)
    assert usage["completion_tokens"] == NUM_OUTPUT
    choices = [choice for answer in answers for choice in answer["choices"]]
    parts = [
        choice.get("delta") or choice.get("message") or {"content": choice.get("text")} for choice in choices
    ]
    return replace(
        call,
        cached=usage["prompt_tokens_details"]["cached_tokens"],
        output=tuple(token_id for choice in choices for token_id in choice.get("token_ids") or ()),
        text="".join(part.get("content") or "" for part in parts),
    )


def ask_all(http: httpx.Client, calls: list[Call]) -> list[Call]:
    """Carry out completions at once."""
    with ThreadPoolExecutor(len(calls)) as threads:
        return list(threads.map(lambda call: ask(http, call), calls))


def ask_chat(http: httpx.Client, messages: list[dict[str, str]], *, is_streamed: bool) -> list[Call]:
    """One turn of a chat, and the same without the cache: chats do not tell the ids of their answers."""
    rendered = http.post("/tokenize", json={"model": "synthetic", "messages": messages})
    prompt = tuple(rendered.raise_for_status().json()["tokens"])
    chat = ask(http, Call(prompt, is_streamed=is_streamed), messages)
    cold = ask(http, Call(prompt, f"chat of {len(messages)}"))
    assert chat.text == cold.text
    return [replace(chat, output=cold.output), cold]


def metrics(http: httpx.Client, name: str) -> Counter[str]:
    """Values of a metric, summed over groups, by `source`."""
    values: Counter[str] = Counter()
    for line in http.get("/metrics").text.splitlines():
        if line.startswith(f"{name}{{"):
            labels, _, value = line.rpartition(" ")
            values[labels.partition('source="')[2].partition('"')[0]] += round(float(value))
    return values


def check_counts(service: Service, http: httpx.Client, ledger: Ledger) -> None:
    """Compare sums over all answers with what gateway, leaders and daemons have counted."""
    num_prompt = sum(len(call.prompt) for call in ledger.calls)
    num_cached = sum(call.cached for call in ledger.calls)
    assert num_cached > 0
    expected = {"cached": num_cached, "computed": num_prompt - num_cached}
    name = "millpond_prompt_tokens_total"
    wait_until(lambda: metrics(http, name) == expected, DEADLINE_S, f"{name} is {expected}")
    num_hits = sum(call.cached > 0 for call in ledger.calls)
    num_slots = PUT_SLOTS * sum(group.ranks for group in service.config.groups)
    node = {"loads": num_hits, "loads_accepted": num_hits, "loads_shortened": 0, "puts": len(ledger.blocks)}
    nodes = {f"millpond_node_{key}_total": value for key, value in node.items()}
    nodes |= {"millpond_node_slots_pinned": 0, "millpond_node_slots_lent": num_slots}
    for name, value in nodes.items():
        wait_until(
            lambda name=name, value=value: metrics(http, name) == Counter({"": value}),
            DEADLINE_S,
            f"{name} is {value}",
        )
    assert metrics(http, "millpond_node_blocks_loaded_total").total() * BLOCK == num_cached
    service.wait_empty(DEADLINE_S)


def run_sessions(service: Service, http: httpx.Client) -> Ledger:
    """Sessions side by side, turn after turn; every other answer of each is streamed."""
    ledger = Ledger(service)
    shared = new_ids("shared", SHARED)
    ledger.add([ask(http, Call(shared))])
    prompts = [(*shared, *new_ids(f"session {n}", n - SHARED)) for n in FIRST_PROMPTS]
    messages = [{"role": "user", "content": " ".join(f"grain {i} of the mill" for i in range(60))}]
    for turn in range(NUM_TURNS):
        ledger.wait_kept()
        calls = [Call(prompt, is_streamed=(turn + i) % 2 == 0) for i, prompt in enumerate(prompts)]
        if turn:  # one that was kept to its last token, of which the last block is computed all the same
            calls.append(Call(prompts[1][: 4 * BLOCK], is_streamed=turn == 1))
        with ThreadPoolExecutor(1) as thread:
            chat = thread.submit(ask_chat, http, messages, is_streamed=turn % 2 == 0)
            calls = ask_all(http, calls)
        ledger.add([*calls, *chat.result()])
        prompts = [
            (*call.prompt, *call.output, *new_ids(f"turn {turn} {i}", 100))
            for i, call in enumerate(calls[: len(prompts)])
        ]
        messages.append({"role": "assistant", "content": chat.result()[0].text})
        messages.append({"role": "user", "content": f"turn {turn}: how much water is in the pond?"})
    ledger.wait_kept()
    warm = [call for call in ledger.calls if not call.salt]
    cold = ask_all(http, [replace(call, salt=f"cold {i}") for i, call in enumerate(warm)])
    assert [call.output for call in cold] == [call.output for call in warm]
    ledger.add(cold)
    ledger.wait_kept()
    return ledger


@pytest.mark.timeout(600)
@pytest.mark.parametrize("shape", [SPLIT, SEVERAL_RANKS, MIXED_RANKS], ids=["split", "several", "mixed"])
def test_answers_metrics_and_an_independent_count_agree(
    start_service: Callable[..., Service], synthetic_toml: str, shape: str
) -> None:
    service = start_service(synthetic_toml + POOL + shape, has_pool=True)
    with connect(service) as http:
        check_counts(service, http, run_sessions(service, http))


def pid_of_daemon(service: Service, host: str) -> int:
    """Process id of a host's node daemon."""
    return int(service.status["nodes"][f"node-{host}"]["pid"])


def arenas_of(pid: int) -> set[str]:
    """Arenas that a process has mapped."""
    lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
    return {line.split()[-1] for line in lines if line.endswith(".arena")}


@pytest.mark.timeout(600)
def test_they_agree_over_two_hosts_and_the_loss_of_a_daemon_costs_hits_at_most(
    start_service: Callable[..., Service], synthetic_toml: str, free_port: Callable[[], int]
) -> None:
    control = f"[supervise]\ncontrol_port = {free_port()}\n"
    service = start_service(synthetic_toml + POOL + control + TWO_HOSTS, has_pool=True)
    with connect(service) as http:
        ledger = run_sessions(service, http)
        check_counts(service, http, ledger)
        nodes = service.status["nodes"]
        assert nodes["node-h0"]["values"]["millpond_node_blocks_loaded_total:peers"] > 0
        assert nodes["node-h1"]["values"]["millpond_node_puts_total"] > 0

        daemons = {host: pid_of_daemon(service, host) for host in ("h0", "h1")}
        arenas = {host: arenas_of(pid) for host, pid in daemons.items()}
        assert [len(arenas[host]) for host in arenas] == [1, 1]
        assert arenas["h0"] != arenas["h1"]
        assert arenas_of(service.pid("p0")) == arenas["h0"]
        assert arenas_of(service.pid("d0")) == arenas["h1"]

        groups = {name: group["incarnation"] for name, group in service.status["groups"].items()}
        last = max((call for call in ledger.calls if not call.salt), key=lambda call: len(call.prompt))
        prompt = (*last.prompt, *last.output, *new_ids("after the loss", 100))
        os.kill(daemons["h1"], signal.SIGKILL)
        call = ask(http, Call(prompt))
        assert call.cached <= ledger.expected(call)
        assert call.output == ask(http, replace(call, salt="after the loss")).output
        wait_until(lambda: pid_of_daemon(service, "h1") != daemons["h1"], DEADLINE_S, "a new daemon on h1")
        ledger.blocks |= call.computed_blocks
        following = Call((*call.prompt, *call.output, 1000))
        wait_until(
            lambda: ask(http, following).cached == ledger.expected(following),
            DEADLINE_S,
            "everything is found again",
        )
        assert pid_of_daemon(service, "h0") == daemons["h0"]
        assert {name: group["incarnation"] for name, group in service.status["groups"].items()} == groups
    service.wait_empty(DEADLINE_S)
    service.stop()
    assert service.process.returncode == 0
    log = service.log_file.read_text()
    assert all(f'"node.down", "process": "node-{host}"' in log for host in ("h0", "h1"))
    assert "node.hung" not in log
