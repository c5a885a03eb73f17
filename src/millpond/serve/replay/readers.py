"""Traces as sessions. Lengths and times are scaled on the way, so that a small model can play a large trace.

    sessions   our own JSON: {"sessions": [{"name", "begin_s", "turns": [{...}]}]}, turns with new_tokens and
               output_tokens, or with text; delay_s if there is a pause
    weka       JSON lines, a session each: calls with `in`, `out`, `think_time` and the ids of 64-token blocks
    rounds     JSON lines, a call each: session_id, round_index, prefix_tokens, newly_append_tokens,
               input_tokens_total, output_tokens (TraceLab)
    mooncake   JSON lines, a call each: timestamp (ms), input_length, output_length, ids of 512-token blocks

In traces with block ids a prompt that begins with all whole blocks of the one before it is taken to go on
from that prompt and its answer: ids cannot tell the model's own tokens, and ours differ from theirs anyway.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import chain, islice, pairwise
from typing import Any

from millpond.core.errors import DataError
from millpond.core.units import SECOND_NS
from millpond.serve.loadgen.inputs import MOONCAKE_BLOCK_TOKENS, TraceScale
from millpond.serve.replay.sessions import Piece, Session, Turn

Records = Iterable[Mapping[str, Any]]


class TraceFormat(StrEnum):
    """Layout of a trace; see the module."""

    SESSIONS = "sessions"
    WEKA = "weka"
    ROUNDS = "rounds"
    MOONCAKE = "mooncake"


def read_sessions(
    text: str, scale: TraceScale, trace_format: TraceFormat | None = None, *, max_sessions: int = 1 << 30
) -> list[Session]:
    """Read a trace, no further than it is needed.

    Args:
        text: The file.
        scale: Factor on lengths and on times.
        trace_format: None: told by the fields of the first record.
        max_sessions: So many are enough.

    Raises:
        DataError: It is in none of the formats, or a record lacks something.
    """
    records = _records(text)
    first = next(records, None)
    if first is None:
        raise DataError("the trace is empty", code="replay.trace")
    chosen = trace_format or _guess(first)
    try:
        return list(islice(_READERS[chosen](chain((first,), records), scale), max_sessions))
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise DataError(f"not a trace of the format {chosen}: {error!r}", code="replay.trace") from error


def _records(text: str) -> Iterator[dict[str, Any]]:
    try:
        whole = json.loads(text)
    except ValueError:
        whole = None
    lines = [whole] if whole is not None else text.splitlines()
    for number, line in enumerate(lines, start=1):
        if isinstance(line, str) and not line.strip():
            continue
        try:
            record = json.loads(line) if isinstance(line, str) else line
        except ValueError as error:
            raise DataError(f"line {number} is no JSON: {error}", code="replay.trace") from error
        if not isinstance(record, dict):
            raise DataError(f"line {number} is no object", code="replay.trace")
        yield record


def _guess(record: Mapping[str, Any]) -> TraceFormat:
    for field, trace_format in (
        ("sessions", TraceFormat.SESSIONS),
        ("requests", TraceFormat.WEKA),
        ("newly_append_tokens", TraceFormat.ROUNDS),
        ("hash_ids", TraceFormat.MOONCAKE),
    ):
        if field in record:
            return trace_format
    raise DataError(
        f"no trace format has the fields {', '.join(sorted(record))}; known: {', '.join(TraceFormat)}",
        code="replay.trace",
    )


# --- our own ---------------------------------------------------------------------------------------------


def _own(records: Records, scale: TraceScale) -> Iterator[Session]:
    for index, each in enumerate(next(iter(records))["sessions"]):
        name = str(each.get("name", f"session{index}"))
        turns: list[Turn] = []
        num_before = 0
        for number, turn in enumerate(each["turns"]):
            num_new = 0 if "text" in turn else _scaled(turn["new_tokens"], scale)
            made = Turn(
                num_kept=num_before,
                pieces=(Piece(f"{name}/{number}", num_new),) if num_new else (),
                num_output_tokens=_scaled(turn["output_tokens"], scale),
                delay_ns=_time_ns(turn.get("delay_s", 0), scale),
                text=str(turn.get("text", "")),
            )
            num_before = made.num_prompt_tokens + made.num_output_tokens
            turns.append(made)
        yield Session(name, tuple(turns), _time_ns(each.get("begin_s", 0), scale))


# --- traces of others ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Call:
    """One call of a trace with block ids, unscaled."""

    num_input: int
    num_output: int
    delay_s: float
    block_ids: Sequence[int]


@dataclass(frozen=True, slots=True)
class _Blocks:
    """What the block ids of some calls stand for."""

    domain: str
    """Equal ids of one domain are equal tokens."""
    num_tokens: int


def _weka(records: Records, scale: TraceScale) -> Iterator[Session]:
    for record in records:
        name = str(record["id"])
        blocks = _Blocks(name, int(record["block_size"]))
        parts = [(name, record["requests"], 0.0)]
        parts += [
            (f"{name}/{entry['agent_id']}", entry["requests"], float(entry["t"]))
            for entry in record["requests"]
            if entry.get("type") == "subagent"
        ]
        for part, requests, begin_s in parts:
            session = _session_of(part, _weka_calls(requests), blocks, scale, begin_s)
            if session.turns:
                yield session


def _weka_calls(requests: Sequence[Mapping[str, Any]]) -> list[_Call]:
    return [
        _Call(
            int(each["in"]),
            max(1, int(each["out"])),
            float(each.get("think_time") or 0.0),
            _block_ids(each),
        )
        for each in requests
        if each.get("type") != "subagent" and int(each["in"]) > 0
    ]


def _block_ids(request: Mapping[str, Any]) -> list[int]:
    if "hash_ids" in request:
        return list(request["hash_ids"])
    runs = request["hash_runs"]
    return [first + i for first, count in zip(runs[::2], runs[1::2], strict=True) for i in range(count)]


def _mooncake(records: Records, scale: TraceScale) -> Iterator[Session]:
    blocks = _Blocks("block", MOONCAKE_BLOCK_TOKENS)
    for index, record in enumerate(records):
        ids = list(record["hash_ids"])
        call = _Call(int(record["input_length"]), max(1, int(record["output_length"])), 0.0, ids)
        yield _session_of(f"call{index}", [call], blocks, scale, float(record["timestamp"]) / 1e3)


def _session_of(
    name: str, calls: Sequence[_Call], blocks: _Blocks, scale: TraceScale, begin_s: float
) -> Session:
    scaled = _Blocks(blocks.domain, max(1, round(blocks.num_tokens * scale.length_ratio)))
    turns: list[Turn] = []
    for before, call in pairwise((None, *calls)):
        assert call is not None  # noqa: S101 - only the first of them is none
        num_input = _scaled(call.num_input, scale)
        num_kept = 0
        if before is not None:
            num_kept = _num_kept(before, call, turns[-1], blocks.num_tokens, scaled.num_tokens)
        num_kept = min(num_kept, num_input)
        turns.append(
            Turn(
                num_kept,
                _pieces(name, len(turns), call.block_ids, num_kept, num_input, scaled),
                _scaled(call.num_output, scale),
                _time_ns(call.delay_s, scale),
            )
        )
    return Session(name, tuple(turns), _time_ns(begin_s, scale))


def _num_kept(before: _Call, call: _Call, turn: Turn, block_tokens: int, scaled_block: int) -> int:
    """Leading tokens of the last prompt and answer with which the next prompt begins."""
    common = 0
    for mine, other in zip(before.block_ids, call.block_ids, strict=False):
        if mine != other:
            break
        common += 1
    if common >= before.num_input // block_tokens:
        return turn.num_prompt_tokens + turn.num_output_tokens
    return common * scaled_block


def _pieces(
    name: str, number: int, ids: Sequence[int], begin: int, end: int, blocks: _Blocks
) -> tuple[Piece, ...]:
    """Tokens `[begin, end)` of a prompt: whole blocks by their ids, the rest the turn's own."""
    pieces: list[Piece] = []
    block_tokens = blocks.num_tokens
    first = -(-begin // block_tokens)
    head = min(first * block_tokens, end) - begin
    if head:
        pieces.append(Piece(f"{name}/head{number}", head))
    pieces += [
        Piece(f"{blocks.domain}/{ids[index]}", min(block_tokens, end - index * block_tokens))
        for index in range(first, min(len(ids), -(-end // block_tokens)))
    ]
    rest = end - begin - sum(piece.num_tokens for piece in pieces)
    if rest > 0:  # rounding, or a block that has no id
        pieces.append(Piece(f"{name}/rest{number}", rest))
    return tuple(pieces)


def _rounds(records: Records, scale: TraceScale) -> Iterator[Session]:
    by_session: dict[str, list[Mapping[str, Any]]] = defaultdict(list)
    for record in records:
        by_session[str(record["session_id"])].append(record)
    for name, rounds in by_session.items():
        turns: list[Turn] = []
        num_before = 0
        for number, each in enumerate(sorted(rounds, key=lambda one: int(one["round_index"]))):
            num_kept = min(_scaled(each["prefix_tokens"], scale), num_before)
            num_new = max(1, _scaled(each["input_tokens_total"], scale) - num_kept)
            turn = Turn(
                num_kept, (Piece(f"{name}/{number}", num_new),), max(1, _scaled(each["output_tokens"], scale))
            )
            num_before = turn.num_prompt_tokens + turn.num_output_tokens
            turns.append(turn)
        yield Session(name, tuple(turns))


def _scaled(num_tokens: Any, scale: TraceScale) -> int:
    return max(1, round(int(num_tokens) * scale.length_ratio))


def _time_ns(seconds: Any, scale: TraceScale) -> int:
    return round(float(seconds) * scale.time_ratio * SECOND_NS)


_READERS: dict[TraceFormat, Callable[[Records, TraceScale], Iterator[Session]]] = {
    TraceFormat.SESSIONS: _own,
    TraceFormat.WEKA: _weka,
    TraceFormat.ROUNDS: _rounds,
    TraceFormat.MOONCAKE: _mooncake,
}
