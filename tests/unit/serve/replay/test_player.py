"""Turns of a session follow each other, grow by the answers that were given, and become figures."""

from __future__ import annotations

import asyncio
import json
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import httpx
import pytest

from millpond.serve.loadgen.client import StreamClient
from millpond.serve.replay.counters import difference, read_counters
from millpond.serve.replay.figures import make_figures
from millpond.serve.replay.player import Player, SessionRecord, ideal_tokens
from millpond.serve.replay.sessions import Piece, Session, Turn

VOCABULARY = range(1000, 1500)


class Server:
    """Answers with ids that depend on the prompt; knows how many requests were open at once."""

    def __init__(self, *, tells_ids: bool = True, fails_at: int = -1) -> None:
        self.bodies: list[dict[str, Any]] = []
        self.tells_ids = tells_ids
        self.fails_at = fails_at
        self.num_open = 0
        self.peak = 0

    async def answer(self, request: httpx.Request) -> httpx.Response:
        body = json.loads(request.content)
        self.bodies.append(body)
        if len(self.bodies) - 1 == self.fails_at:
            return httpx.Response(503, json={"error": {"message": "full"}})
        self.num_open += 1
        self.peak = max(self.peak, self.num_open)
        await asyncio.sleep(0)
        self.num_open -= 1
        count = body["max_tokens"]
        events: list[dict[str, Any]] = []
        for i in range(count):
            finish = "length" if i == count - 1 else None
            if "prompt" in body:
                choice: dict[str, Any] = {"index": 0, "text": "x", "finish_reason": finish}
                if self.tells_ids:
                    choice["token_ids"] = [len(body["prompt"]) + i]
            else:
                choice = {"index": 0, "delta": {"content": "y"}, "finish_reason": finish}
            events.append({"choices": [choice]})
        num_prompt = len(body.get("prompt", ())) or 7
        details = {"cached_tokens": num_prompt // 2}
        usage = {"prompt_tokens": num_prompt, "completion_tokens": count, "prompt_tokens_details": details}
        events.append({"choices": [], "usage": usage})
        text = "".join(f"data: {json.dumps(event)}\n\n" for event in events) + "data: [DONE]\n\n"
        return httpx.Response(200, text=text)


def play(server: Server, sessions: Sequence[Session], concurrency: int | None = None) -> list[SessionRecord]:
    async def run() -> list[SessionRecord]:
        transport = httpx.MockTransport(server.answer)
        async with httpx.AsyncClient(transport=transport, base_url="http://server") as http:
            ticks = iter(range(10**9))
            client = StreamClient(http, "m", lambda: next(ticks) * 1000, ignore_eos=True)
            return await Player(client, VOCABULARY, "m", lambda _: None).play(sessions, concurrency)

    return asyncio.run(run())


def growing(name: str, num_turns: int = 3) -> Session:
    turns: list[Turn] = []
    for i in range(num_turns):
        kept = turns[-1].num_prompt_tokens + turns[-1].num_output_tokens if turns else 0
        turns.append(Turn(kept, (Piece(f"{name}/{i}", 200),), 60))
    return Session(name, tuple(turns))


def test_prompts_go_on_from_the_answers():
    server = Server()
    (record,) = play(server, [growing("a")])
    first, second, third = (body["prompt"] for body in server.bodies)
    assert second[:260] == first + list(range(200, 260))
    assert third[:520] == second + list(range(460, 520))
    assert (len(second), len(third)) == (460, 720)
    assert all(
        body["ignore_eos"] and body["min_tokens"] == 60 == body["max_tokens"] for body in server.bodies
    )
    assert [turn.num_ideal_tokens for turn in record.turns] == [0, 256, 512]
    assert [turn.request.num_cached_tokens for turn in record.turns] == [100, 230, 360]
    assert record.end_ns > record.begin_ns


def test_a_server_that_tells_no_ids_still_gets_prompts_of_the_right_length():
    server = Server(tells_ids=False)
    (record,) = play(server, [growing("a", 2)])
    assert len(server.bodies[1]["prompt"]) == 460
    assert not any(turn.has_own_answer for turn in record.turns)
    assert make_figures([record], {}).num_answers_not_told == 2


def test_texts_are_chats_with_everything_before():
    server = Server()
    play(server, [Session("talk", (Turn(0, (), 2, text="Hello"), Turn(0, (), 3, text="And?")))])
    assert server.bodies[1]["messages"] == [
        {"role": "user", "content": "Hello"},
        {"role": "assistant", "content": "yy"},
        {"role": "user", "content": "And?"},
    ]


def test_a_failed_turn_ends_its_session_and_no_other():
    server = Server(fails_at=1)
    bad, good = play(server, [growing("a"), growing("b")], concurrency=1)
    assert (len(bad.turns), bad.end_ns) == (2, -1)
    assert len(good.turns) == 3
    figures = make_figures([bad, good], {})
    assert (figures.num_turns, figures.num_failed) == (5, 1)
    assert figures.errors == {"HTTP 503: full": 1}


def test_so_many_sessions_run_at_once():
    server = Server()
    play(server, [growing(str(i)) for i in range(9)], concurrency=3)
    assert server.peak == 3
    by_session: dict[int, list[int]] = defaultdict(list)
    for body in server.bodies:
        by_session[body["prompt"][0]].append(len(body["prompt"]))
    assert all(lengths == [200, 460, 720] for lengths in by_session.values())


@pytest.mark.parametrize(
    ("num_prompt", "num_common", "ideal"),
    [(1000, 500, 384), (1000, 512, 512), (513, 600, 512), (512, 600, 384), (100, 100, 0)],
)
def test_the_ideal_is_whole_blocks_and_leaves_one_token(num_prompt: int, num_common: int, ideal: int):
    known = [1] * num_common + [2] * 300
    prompt = ([1] * num_common + [3] * 1000)[:num_prompt]
    assert ideal_tokens(prompt, known) == ideal


BEFORE = """# HELP something
millpond_node_blocks_loaded_total{group="node-h0",source="memory"} 5.0
millpond_node_blocks_loaded_total{group="node-h1",source="memory"} 1.0
millpond_prefix_match_total{outcome="hit"} 3.0
millpond_loads_total{group="p0",source=""} 9.0
millpond_handoff_send_num_bytes{group="p0",source=""} 100.0
millpond_rank_kv_tokens{group="p0"} 7.0
vllm:num_requests_running{model_name="m"} 1.0
"""


def test_counters_are_summed_by_kind_and_gauges_left_out():
    assert difference({}, read_counters(BEFORE)) == {
        "millpond_node_blocks_loaded_total:memory": 6.0,
        "millpond_prefix_match_total:hit": 3.0,
        "millpond_loads_total": 9.0,
        "millpond_handoff_send_num_bytes": 100.0,
    }


def test_a_process_that_restarted_does_not_hide_what_others_counted():
    def counted(p0: int, p1: int) -> dict[str, float]:
        name = "millpond_prompt_tokens_total"
        p0_text, p1_text = (f'{name}{{group="p{i}",source="computed"}} {n}' for i, n in enumerate((p0, p1)))
        return read_counters(f"{p0_text}\n{p1_text}\n")

    moved = difference(counted(1000, 500), counted(10, 600))
    assert moved == {"millpond_prompt_tokens_total:computed": 110.0}


@pytest.mark.parametrize(
    "name",
    [
        "millpond_loads_refused_total:no_daemon",
        "millpond_loads_refused_total:deadline",
        "millpond_loads_refused_total:daemon_lost",
        "millpond_replays_total",
        "millpond_node_shortened_total:no_room",
        "millpond_node_matches_failed_total",
        "millpond_node_directory_failed_total:find",
        "millpond_node_peer_reads_failed_total",
        "millpond_node_pool_reads_total:lost",
        "millpond_node_pool_bad_shards_total",
        "millpond_node_snapshots_total:missized",
        "millpond_node_blocks_given_up_total",
        "millpond_prefix_match_total:partial",
        "millpond_prefix_match_total:late",
        "millpond_prefix_match_total:failed",
    ],
)
def test_every_fallback_is_told(name: str):
    figures = make_figures([], {name: 3.0, "millpond_prefix_match_total:hit": 2.0})
    assert figures.fallbacks == {name: 3}


def test_differences_survive_a_restart_of_what_counts():
    after = BEFORE.replace("} 5.0", "} 8.0").replace("} 9.0", "} 2.0")
    after += 'millpond_node_blocks_loaded_total{group="node-h0",source="pool"} 4.0\n'
    moved = difference(read_counters(BEFORE), read_counters(after))
    assert moved == {
        "millpond_loads_total": 2.0,
        "millpond_node_blocks_loaded_total:memory": 3.0,
        "millpond_node_blocks_loaded_total:pool": 4.0,
    }
    figures = make_figures([], moved | {"millpond_node_loads_refused_total:no_room": 2.0})
    assert figures.loaded_blocks == 7
    assert figures.loaded_share_by_level == {"host memory": 3 / 7, "other hosts": 0.0, "disks": 4 / 7}
    assert figures.fallbacks == {"millpond_node_loads_refused_total:no_room": 2}
