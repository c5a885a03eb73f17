"""Plays sessions against a live server and records every turn."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from millpond.core.units import BLOCK_TOKENS
from millpond.serve.loadgen.client import RequestRecord, StreamClient
from millpond.serve.replay.sessions import Piece, Session, Turn, piece_tokens


@dataclass(slots=True)
class TurnRecord:
    """What happened to one turn."""

    session: str
    number: int
    request: RequestRecord
    num_ideal_tokens: int = 0
    """Prompt tokens in whole blocks that the session's last prompt and answer had too; all but one at most.
    0 of a chat: its tokens are the server's."""
    has_own_answer: bool = True
    """The answer's tokens were told, and the next prompt goes on from them."""


@dataclass(slots=True)
class SessionRecord:
    """What happened to one session."""

    name: str
    begin_ns: int = -1
    end_ns: int = -1
    """Since the start of the run; -1: a turn failed, and the rest was not sent."""
    turns: list[TurnRecord] = field(default_factory=list)


class Player:
    """Plays sessions side by side, the turns of each one after the other.

    Args:
        client: Sends requests.
        vocabulary: Ordinary token ids; pieces are made of them.
        model: Name to ask for.
        on_turn: Told after each turn.
    """

    def __init__(
        self,
        client: StreamClient,
        vocabulary: Sequence[int],
        model: str,
        on_turn: Callable[[TurnRecord], None],
    ) -> None:
        self._client = client
        self._vocabulary = vocabulary
        self._model = model
        self._on_turn = on_turn

    async def play(self, sessions: Sequence[Session], concurrency: int | None) -> list[SessionRecord]:
        """Play all of them.

        Args:
            sessions: In the order of their begins.
            concurrency: So many at once, one after the other; None: each at its own time.
        """
        records = [SessionRecord(session.name) for session in sessions]
        pending = iter(zip(sessions, records, strict=True))

        async def agent() -> None:
            for session, record in pending:
                await self._play(session, record)

        async def timed(session: Session, record: SessionRecord) -> None:
            await asyncio.sleep(max(0, session.begin_ns - self._client.now_ns()) / 1e9)
            await self._play(session, record)

        async with asyncio.TaskGroup() as group:
            if concurrency is not None:
                for _ in range(min(concurrency, len(sessions))):
                    group.create_task(agent())
            else:
                for session, record in pending:
                    group.create_task(timed(session, record))
        return records

    async def _play(self, session: Session, record: SessionRecord) -> None:
        record.begin_ns = self._client.now_ns()
        ids: list[int] = []
        messages: list[dict[str, str]] = []
        for number, turn in enumerate(session.turns):
            if turn.delay_ns:
                await asyncio.sleep(turn.delay_ns / 1e9)
            if turn.text:
                made = await self._chat(session, number, turn, messages)
            else:
                made, ids = await self._complete(session, number, turn, ids)
            record.turns.append(made)
            self._on_turn(made)
            if made.request.error:
                return
        record.end_ns = self._client.now_ns()

    async def _complete(
        self, session: Session, number: int, turn: Turn, known: list[int]
    ) -> tuple[TurnRecord, list[int]]:
        prompt = known[: turn.num_kept]
        for piece in turn.pieces:
            prompt += piece_tokens(piece, self._vocabulary)
        body = self._body(turn) | {"prompt": prompt, "return_token_ids": True}
        request = await self._client.stream(number, "/v1/completions", body)
        record = TurnRecord(session.name, number, request, ideal_tokens(prompt, known))
        answer = request.token_ids
        if len(answer) != turn.num_output_tokens:
            record.has_own_answer = False
            answer = piece_tokens(
                Piece(f"{session.name}/answer{number}", turn.num_output_tokens), self._vocabulary
            )
        return record, [*prompt, *answer]

    async def _chat(
        self, session: Session, number: int, turn: Turn, messages: list[dict[str, str]]
    ) -> TurnRecord:
        messages.append({"role": "user", "content": turn.text})
        body = self._body(turn) | {"messages": list(messages)}
        request = await self._client.stream(number, "/v1/chat/completions", body)
        messages.append({"role": "assistant", "content": request.text})
        return TurnRecord(session.name, number, request, has_own_answer=False)

    def _body(self, turn: Turn) -> dict[str, Any]:
        count = turn.num_output_tokens
        return {
            "model": self._model,
            "max_tokens": count,
            "min_tokens": count,
            "ignore_eos": True,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }


def ideal_tokens(prompt: Sequence[int], known: Sequence[int]) -> int:
    """Tokens of a prompt in whole blocks that begin a known sequence too; at least one is left to compute."""
    common = 0
    for mine, other in zip(prompt, known, strict=False):
        if mine != other:
            break
        common += 1
    return min(common, len(prompt) - 1) // BLOCK_TOKENS * BLOCK_TOKENS
