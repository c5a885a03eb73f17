"""Sessions whose KV comes from everywhere, while every process between is killed, frozen and started anew.

`make soak S=kv N=seconds`. The engine's text depends on every byte of KV that a token sees, so one wrong,
late, stale or foreign byte of a load shows in the text. Memory is small: blocks are written behind, evicted,
read again and evicted again all the time.
"""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from array import array
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import httpx
import pytest

from millpond.core.chance import Chance
from millpond.core.request import SamplingParams
from millpond.engine.synthetic import expected_tokens
from millpond.serve.pool_processes import is_pool_up
from millpond.serve.run_folder import RunFolder, run_path
from millpond.serve.status import fetch_pool_status
from tests.integration.conftest import Service, wait_until

BLOCK = 128
SHORT_S = 12
MIN_FAULTS = 3
NUM_SESSIONS = 5
MAX_TURNS = 7
BOUND_S = 100.0
"""No call may take longer: tenfold of what one takes while engines start anew on a loaded machine."""
REST_S = 90.0
SALTS = ("", "somebody else")
LEAVE_SHARE = 0.1
"""Of the turns, so many are given up by the client amid the answer."""
CONFIG = """
[synthetic]
num_blocks = 128
kv_bytes_per_token = 8
[gateway]
match_deadline_ms = 500
[supervise]
restart_delay_s = 0.1
max_restart_delay_s = 0.5
[dispatch]
lease_s = 4.0
[node]
lease_s = 1.5
put_slots = 8
load_deadline_s = 4.0
pool_retry_s = 0.2
spill = { idle_s = 0.5, retry_s = 0.5 }
spill_deadline_s = 4.0
[pool]
data_shards = 2
parity_shards = 1
[[storage]]
name = "s0"
targets = 1
capacity = "24 MiB"
[[storage]]
name = "s1"
targets = 1
capacity = "24 MiB"
[[storage]]
name = "s2"
targets = 1
capacity = "24 MiB"
[[storage]]
name = "s3"
targets = 1
capacity = "24 MiB"
[[host]]
name = "h0"
arena = "256 KiB"
dram = "512 KiB"
"""


class Known:
    """The independent count: which prefixes somebody has computed, or may have, under which salt."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: Counter[tuple[str, bytes]] = Counter()

    def note(self, salt: str, ids: list[int]) -> None:
        """A request begins whose tokens, output included, will be these. The last is never computed."""
        with self._lock:
            self._counts.update(_prefixes(salt, ids, (len(ids) - 1) // BLOCK))

    def bound(self, salt: str, prompt: list[int]) -> int:
        """Most tokens of a noted request's prompt that others have computed."""
        count = 0
        with self._lock:
            for prefix in _prefixes(salt, prompt, (len(prompt) - 1) // BLOCK):
                if self._counts[prefix] < 2:  # its own note is one
                    break
                count += BLOCK
        return count


def _prefixes(salt: str, ids: list[int], num_blocks: int) -> list[tuple[str, bytes]]:
    return [(salt, array("i", ids[: BLOCK * (index + 1)]).tobytes()) for index in range(num_blocks)]


class Record:
    """What all sessions saw."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.counts: Counter[str] = Counter()
        self.problems: list[str] = []
        self.slowest_s = 0.0

    def count(self, **numbers: int) -> None:
        with self.lock:
            self.counts.update(numbers)


class Agent(threading.Thread):
    """Plays session after session until told to stop."""

    def __init__(
        self, service: Service, index: int, seed: int, known: Known, record: Record, stop: threading.Event
    ) -> None:
        super().__init__(name=f"agent {index}", daemon=True)
        self._service, self._known, self._record, self._stop_asked = service, known, record, stop
        self._index = index
        self._chance = Chance(seed, f"agent {index}")
        self._salt = SALTS[index % len(SALTS)]
        # All agents begin with these, so that they load the same blocks at once.
        shared = Chance(seed, "shared")
        self._shared = [300 + shared.below(5000) for _ in range(300)]
        self.prompt: list[int] = []
        self._http = httpx.Client(base_url=service.url, timeout=BOUND_S)

    def run(self) -> None:
        try:
            while not self._stop_asked.is_set():
                self.begin_session()
                for _ in range(1 + self._chance.below(MAX_TURNS)):
                    if self._stop_asked.is_set():
                        break
                    self.turn()
        except Exception as error:  # noqa: BLE001 - an agent that ends is a problem, whatever ended it
            self.fail(f"ended by {error!r}")

    def begin_session(self) -> None:
        self.prompt = self._shared[: self._chance.below(len(self._shared))] + self._new(30, 600)

    def turn(self) -> int:
        """One turn; the cached tokens of its answer, -1 if the client left."""
        num_output = 1 + self._chance.below(60)
        is_sampled = self._chance.below(2)
        sampling = SamplingParams(
            max_tokens=num_output, temperature=0.7 * is_sampled, seed=self._chance.below(1000)
        )
        prompt = self.prompt
        text = expected_tokens(
            self._service.config.synthetic, array("i", prompt), sampling, num_output
        ).tolist()
        self._known.note(self._salt, prompt + text)
        body: dict[str, Any] = {
            "model": "synthetic",
            "prompt": prompt,
            "max_tokens": num_output,
            "temperature": sampling.temperature,
            "seed": sampling.seed,
            "ignore_eos": True,
            "return_token_ids": True,
        }
        body |= {"cache_salt": self._salt} if self._salt else {}
        began = time.monotonic()
        if self._chance.uniform() < LEAVE_SHARE:
            self._leave(body, self._chance.below(num_output + 1))
            cached = -1
        else:
            cached = self._ask(body, text)
        took_s = time.monotonic() - began
        with self._record.lock:
            self._record.slowest_s = max(self._record.slowest_s, took_s)
        if took_s > BOUND_S:
            self.fail(f"a turn took {took_s:.1f} s")
        self.prompt = prompt + text + self._new(1, 250)
        return cached

    def _ask(self, body: dict[str, Any], text: list[int]) -> int:
        prompt = body["prompt"]
        response = self._http.post("/v1/completions", json=body)
        if response.status_code != httpx.codes.OK:
            self.fail(f"HTTP {response.status_code}: {response.text}")
            return -1
        answer = response.json()
        got, usage = answer["choices"][0]["token_ids"], answer["usage"]
        if got != text:
            same = next((i for i, (a, b) in enumerate(zip(got, text, strict=False)) if a != b), len(got))
            self.fail(f"wrong from token {same} of {len(text)} on, after a prompt of {len(prompt)}: {usage}")
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        bound = self._known.bound(self._salt, prompt)
        if cached > bound or cached % BLOCK:
            self.fail(f"{cached} cached tokens of {len(prompt)}, {bound} were computed before")
        self._record.count(turns=1, cached=cached, bound=bound, prompt=len(prompt))
        return cached

    def _leave(self, body: dict[str, Any], num_events: int) -> None:
        """Go away amid the answer."""
        with self._http.stream("POST", "/v1/completions", json=body | {"stream": True}) as answer:
            if answer.status_code != httpx.codes.OK:
                self.fail(f"HTTP {answer.status_code}")
            for _, _line in zip(range(2 * num_events), answer.iter_lines(), strict=False):
                pass
        self._record.count(left=1)

    def _new(self, least: int, most: int) -> list[int]:
        return [300 + self._chance.below(5000) for _ in range(least + self._chance.below(most - least))]

    def fail(self, what: str) -> None:
        with self._record.lock:
            self._record.problems.append(f"agent {self._index}, salt {self._salt!r}: {what}")


class Victim:
    """A process that may be killed or frozen; whoever has its number later is not hit."""

    def __init__(self, pid: int) -> None:
        self.pidfd = os.pidfd_open(pid)

    def send(self, number: signal.Signals) -> None:
        with suppress(ProcessLookupError):  # it has ended meanwhile
            signal.pidfd_send_signal(self.pidfd, number)

    def close(self) -> None:
        os.close(self.pidfd)


class Faults:
    """Kills and freezes, never so many at once that nothing could go on."""

    MAX_FROZEN = 2
    ENGINE_PAUSE_S = 4.0
    """Between two kills of engines: a request may fail a few times only."""

    def __init__(self, service: Service, chance: Chance) -> None:
        self.counts: Counter[str] = Counter()
        self._service, self._chance = service, chance
        self._frozen: list[tuple[float, Victim]] = []
        self._engine_at = 0.0

    def turn(self) -> None:
        """Wake up whose time has come; disturb somebody now and then."""
        now = time.monotonic()
        for frozen in [frozen for frozen in self._frozen if frozen[0] <= now]:
            self._frozen.remove(frozen)
            self._thaw(frozen[1])
        if self._chance.below(12) == 0:
            self._disturb(now)

    def mend(self) -> None:
        for _, victim in self._frozen:
            self._thaw(victim)
        self._frozen.clear()

    def _disturb(self, now: float) -> None:
        role = ("rank", "node", "node", "storage", "metadata")[self._chance.below(5)]
        pids = sorted(self._pids_up(role))  # who dies while it starts disturbs nobody
        if not pids:
            return
        pid = pids[self._chance.below(len(pids))]
        is_kill = self._chance.below(2) == 0
        if role == "rank" and is_kill:
            if now - self._engine_at < self.ENGINE_PAUSE_S:
                return
            self._engine_at = now
        try:
            victim = Victim(pid)
        except ProcessLookupError:
            return
        if is_kill:
            victim.send(signal.SIGKILL)
            victim.close()
        elif len(self._frozen) < self.MAX_FROZEN:
            victim.send(signal.SIGSTOP)
            self._frozen.append((now + 0.2 + 2.8 * self._chance.uniform(), victim))
        else:
            victim.close()
            return
        self.counts[f"{role} {'killed' if is_kill else 'frozen'}"] += 1

    def _pids_up(self, role: str) -> set[int]:
        """Processes of a role that serve, if all others of their kind do too."""
        service = self._service
        pids = set(service.pids_of_role(role))
        if role in {"storage", "metadata"}:
            return pids if is_pool_up(service.config, RunFolder(run_path(service.config))) else set()
        status = service.status
        if role == "rank":
            up = {group["pid"] for group in status["groups"].values()}
            return pids & up if len(up) == len(service.config.groups) else set()
        nodes = (status["nodes"][name] for name in status["nodes"] if name.startswith("node-"))
        return pids & {node["pid"] for node in nodes if node["values"]["millpond_node_puts_total"]}

    @staticmethod
    def _thaw(victim: Victim) -> None:
        victim.send(signal.SIGCONT)
        victim.close()


@pytest.mark.campaign("kv")
def test_campaign_kv_never_a_wrong_token_and_nothing_left_over(
    start_service: Callable[..., Service], num_rounds: int
) -> None:
    service = start_service('[engine]\nmodel = "synthetic"\n' + CONFIG, has_pool=True)
    known, record, stop = Known(), Record(), threading.Event()
    agents = [Agent(service, index, num_rounds, known, record, stop) for index in range(NUM_SESSIONS)]
    faults = Faults(service, Chance(num_rounds, "faults"))
    for agent in agents:
        agent.start()
    try:
        wait_until(lambda: record.counts["cached"] > 0 or bool(record.problems), BOUND_S, "a hit")
        end = time.monotonic() + (num_rounds or SHORT_S)
        last = end + BOUND_S  # a loaded machine gives few chances
        while (
            time.monotonic() < (last if faults.counts.total() < MIN_FAULTS else end) and not record.problems
        ):
            faults.turn()
            stop.wait(0.1)
    finally:
        stop.set()
        faults.mend()
        for agent in agents:
            agent.join(BOUND_S)
    print(f"{dict(record.counts)}, slowest {record.slowest_s:.1f} s\n{dict(faults.counts)}")
    assert record.problems == []
    assert not any(agent.is_alive() for agent in agents), "a call hangs"
    assert record.counts["turns"] > 0
    assert faults.counts.total() >= MIN_FAULTS
    check_rest(service)
    check_deaths(service)
    check_works(agents[0], record)


def check_rest(service: Service) -> None:
    """Nothing is held any more: loads, slots, pins, leases, handoffs."""
    service.wait_empty(REST_S)
    num_wanted = len(service.config.groups) * service.config.node.put_slots

    def held() -> dict[str, float]:
        status = service.status
        found: dict[str, float] = {}
        for name, part in [*status["groups"].items(), *status["nodes"].items()]:
            for key, value in part["values"].items():
                if value and key.removeprefix("millpond_") in HELD:
                    found[f"{name} {key}"] = value
        nodes = [status["nodes"][f"node-{host.name}"]["values"] for host in service.config.hosts]
        if not all(node["millpond_node_pool_open"] for node in nodes):
            found["a pool is not open"] = 1
        num_lent = sum(node["millpond_node_slots_lent"] for node in nodes)
        if num_lent > num_wanted:
            found["slots are lent"] = num_lent
        return found

    wait_until(lambda: held() == {}, REST_S, f"nothing is held, but {held()}")

    def is_pool_at_rest() -> bool:
        pool = fetch_pool_status(service.config)
        assert pool is not None
        shards = pool["metadata"].values()
        return pool["is_healthy"] and not any(
            shard["num_leases"] or shard["num_pins"] or shard["rebuild_left"] for shard in shards
        )

    wait_until(is_pool_at_rest, REST_S, f"the pool is at rest, but {fetch_pool_status(service.config)}")


HELD = {
    "swap_ins_open",
    "handoff_send_num_open",
    "handoff_send_num_used_slots",
    "handoff_receive_num_expected",
    "handoff_receive_num_offered",
    "node_slots_pinned",
    "node_blocks_waiting",
}
"""Metrics that are 0 when nothing goes on."""


def check_deaths(service: Service) -> None:
    """No process ended by itself, for example because a law was broken."""
    lines = service.log_file.read_text(errors="replace").splitlines()
    died = [json.loads(line) for line in lines if '"process.died"' in line]
    by_itself = [one for one in died if one["status"] != -signal.SIGKILL]
    tail = "\n".join(line for line in lines if not line.startswith("{"))[-4000:]
    assert not by_itself, f"{by_itself}\n{tail}"


def check_works(agent: Agent, record: Record) -> None:
    """A session of its own hits everything but its tail again."""
    agent.begin_session()

    def is_hit() -> bool:
        before = (len(agent.prompt) - 1) // BLOCK * BLOCK
        return agent.turn() >= before > 0

    agent.turn()
    wait_until(is_hit, BOUND_S, "a turn hits what the one before computed")
    assert record.problems == []
