"""Traces become sessions whose prompts have the trace's lengths and share what the trace's prompts share."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from millpond.core.errors import DataError
from millpond.serve.loadgen.inputs import TraceScale
from millpond.serve.replay.readers import TraceFormat, read_sessions
from millpond.serve.replay.sessions import Piece, Session, Turn, cut_to_context, piece_tokens

PLAIN = TraceScale()
VOCABULARY = range(1000, 2000)


def prompts(session: Session) -> list[list[int]]:
    """Prompts as a player makes them, with answers of zeros."""
    known: list[int] = []
    made: list[list[int]] = []
    for turn in session.turns:
        prompt = known[: turn.num_kept]
        for piece in turn.pieces:
            prompt += piece_tokens(piece, VOCABULARY)
        made.append(prompt)
        known = prompt + [0] * turn.num_output_tokens
    return made


def common(one: list[int], other: list[int]) -> int:
    return next(
        (i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other))
    )


def weka(requests: list[dict], **fields: object) -> str:
    return json.dumps({"id": "t1", "block_size": 64, "requests": requests, **fields})


def call(num_input: int, runs: list[int], num_output: int = 10, think: float = 0.0) -> dict:
    return {"t": 0.0, "type": "n", "in": num_input, "out": num_output, "think_time": think, "hash_runs": runs}


def test_our_own_sessions_grow_by_answer_and_news():
    text = json.dumps(
        {
            "sessions": [
                {
                    "turns": [
                        {"new_tokens": 100, "output_tokens": 8},
                        {"new_tokens": 20, "output_tokens": 9, "delay_s": 0.5},
                    ]
                },
                {"name": "talk", "begin_s": 2, "turns": [{"text": "Hello", "output_tokens": 4}]},
            ]
        }
    )
    first, talk = read_sessions(text, PLAIN)
    assert [turn.num_prompt_tokens for turn in first.turns] == [100, 128]
    assert first.turns[1] == Turn(108, (Piece("session0/1", 20),), 9, delay_ns=500_000_000)
    assert (talk.name, talk.begin_ns, talk.turns[0].text) == ("talk", 2 * 10**9, "Hello")


def test_a_weka_session_goes_on_from_its_answers_and_forgets_where_the_trace_does():
    text = weka([call(200, [1, 4]), call(300, [1, 5], think=2.0), call(150, [1, 1, 90, 2])])
    (session,) = read_sessions(text, PLAIN)
    one, two, three = prompts(session)
    assert [len(one), len(two), len(three)] == [200, 300, 150]
    assert common(one, two) == 200
    assert two[200:210] == [0] * 10, "the answer of the first turn"
    assert common(two, three) == 64
    assert [turn.delay_ns for turn in session.turns] == [0, 2 * 10**9, 0]


def test_raw_ids_and_runs_of_ids_are_the_same_trace():
    runs = weka([call(200, [1, 3, 9, 1])])
    raw = call(200, [])
    del raw["hash_runs"]
    raw["hash_ids"] = [1, 2, 3, 9]
    assert read_sessions(runs, PLAIN) == read_sessions(weka([raw]), PLAIN)


def test_a_sub_agent_is_a_session_that_shares_its_parents_blocks():
    inner = {"t": 7.0, "type": "subagent", "agent_id": "a1", "requests": [call(130, [1, 2])]}
    parent, child = read_sessions(weka([call(200, [1, 4]), inner]), PLAIN)
    assert (child.name, child.begin_ns) == ("t1/a1", 7 * 10**9)
    assert common(prompts(parent)[0], prompts(child)[0]) == 128


def test_rounds_are_sorted_into_sessions():
    def line(session: str, index: int, prefix: int, total: int) -> str:
        return json.dumps(
            {
                "session_id": session,
                "round_index": index,
                "prefix_tokens": prefix,
                "newly_append_tokens": total - prefix,
                "input_tokens_total": total,
                "output_tokens": 5,
            }
        )

    text = "\n".join([line("b", 1, 105, 160), line("a", 0, 50, 90), line("b", 0, 0, 100)])
    by_name = {session.name: session for session in read_sessions(text, PLAIN)}
    assert [turn.num_prompt_tokens for turn in by_name["b"].turns] == [100, 160]
    assert by_name["b"].turns[1].num_kept == 105
    assert by_name["a"].turns[0].num_kept == 0, "what was cached before the trace began is new to us"


def test_mooncake_calls_share_blocks_whoever_sends_them():
    lines = [
        {"timestamp": 0, "input_length": 1100, "output_length": 3, "hash_ids": [0, 1, 2]},
        {"timestamp": 1500, "input_length": 600, "output_length": 3, "hash_ids": [0, 7]},
    ]
    one, two = read_sessions("\n".join(map(json.dumps, lines)), TraceScale(0.5, 2.0))
    assert two.begin_ns == 3 * 10**9
    (first,), (second,) = prompts(one), prompts(two)
    assert (len(first), len(second), common(first, second)) == (550, 300, 256)


@given(
    st.lists(st.tuples(st.integers(1, 900), st.integers(1, 50), st.integers(0, 14)), min_size=1, max_size=6),
    st.floats(0.02, 2.0),
)
def test_every_prompt_has_its_length(calls: list[tuple[int, int, int]], ratio: float):
    requests = [
        call(num_input, [1, num_shared, 100 * index + 100, 20], num_output)
        for index, (num_input, num_output, num_shared) in enumerate(calls)
    ]
    (session,) = read_sessions(weka(requests), TraceScale(ratio))
    for (num_input, num_output, _), turn, prompt in zip(calls, session.turns, prompts(session), strict=True):
        assert len(prompt) == turn.num_prompt_tokens == max(1, round(num_input * ratio))
        assert turn.num_output_tokens == max(1, round(num_output * ratio))


def test_sessions_end_before_the_turn_that_does_not_fit():
    turns = tuple(Turn(0, (Piece("x", n),), 10) for n in (50, 80, 95, 20))
    kept, num_cut = cut_to_context([Session("a", turns), Session("b", turns[2:])], 100)
    assert ([len(session.turns) for session in kept], num_cut) == ([2], 4)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "empty"),
        ("{nonsense", "line 1"),
        ("[1, 2]", "no object"),
        ('{"fields": 1}', "no trace format"),
        ('{"sessions": [{}]}', "sessions"),
        ('{"id": "x", "requests": [{"in": 5, "out": 1}], "block_size": 64}', "weka"),
    ],
)
def test_what_is_no_trace_is_refused(text: str, says: str):
    with pytest.raises(DataError, match=says):
        read_sessions(text, PLAIN)


def test_a_format_can_be_named():
    with pytest.raises(DataError, match="mooncake"):
        read_sessions('{"sessions": []}', PLAIN, TraceFormat.MOONCAKE)
