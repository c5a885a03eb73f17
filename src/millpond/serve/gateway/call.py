"""`Call`: the sequences of one client call as one stream of events, each with its token or its ending."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Protocol

from millpond.core.errors import DeadlineExceeded
from millpond.core.events import TokenOut
from millpond.core.request import FinishReason
from millpond.core.units import SECOND_NS
from millpond.serve.gateway.token_log import TokenLog


class Sequences(Protocol):
    """Where the sequences of a call are kept."""

    def drop(self, log: TokenLog) -> None:
        """Nobody wants this sequence any more."""
        ...


class Ending:
    """Terminal answer for a sequence that no worker will finish."""

    __slots__ = ("detail", "reason")

    def __init__(self, reason: FinishReason, detail: str) -> None:
        self.reason = reason
        self.detail = detail


CallEvent = tuple[int, TokenOut | Ending]
"""(index of the sequence in its call, what happened to it)."""


class Call:
    """The open sequences of one client call, as one stream of events.

    Closing it (also by leaving the `with` block for any reason) cancels what has not ended. Deadlines are
    watched from outside by `end_if_stalled`, so that a token costs no timer.
    """

    __slots__ = (
        "_buffer",
        "_failure",
        "_link",
        "_logs",
        "_num_steps",
        "_seen_ns",
        "_seen_steps",
        "_waiter",
        "limit",
    )

    def __init__(self, link: Sequences, logs: Sequence[TokenLog]) -> None:
        self._link = link
        self._logs = logs
        self._buffer: list[CallEvent] = []
        self._waiter: asyncio.Future[None] | None = None
        self._failure: Exception | None = None
        self._num_steps = 0
        self._seen_steps = -1
        self._seen_ns = 0
        self.limit: asyncio.Timeout | None = None
        """Around whatever is done with the events; expires when the call stalls outside of `next_events`."""

    def __enter__(self) -> Call:
        return self

    def __exit__(self, *_exc: object) -> None:
        for log in self._logs:
            self._link.drop(log)

    def put(self, choice: int, event: TokenOut | Ending) -> None:
        """Called by the link: one event for the sequence number `choice` of this call."""
        self._buffer.append((choice, event))
        waiter = self._waiter
        if waiter is not None and not waiter.done():
            waiter.set_result(None)

    async def next_events(self) -> list[CallEvent]:
        """Wait for events: (index of the sequence in the call, token or ending), oldest first.

        Raises:
            Exception: What `fail` was given, for example by `end_if_stalled`.
        """
        if self._failure is not None:
            raise self._failure
        if not self._buffer:
            self._waiter = waiter = asyncio.get_running_loop().create_future()
            await waiter
            self._waiter = None
        self._num_steps += 1
        events = self._buffer
        self._buffer = []
        return events

    def fail(self, error: Exception) -> None:
        """Make `next_events` raise `error`, now or when it is next called: the client left, or we must."""
        self._failure = error
        waiter = self._waiter
        if waiter is not None and not waiter.done():
            waiter.set_exception(error)

    def end_if_stalled(self, now_ns: int, *, token_deadline_ns: int, client_deadline_ns: int) -> None:
        """End the call if nothing has moved since long ago. To be called again and again.

        Args:
            now_ns: Monotonic time.
            token_deadline_ns: Longest wait for a token.
            client_deadline_ns: Longest wait for the client to read.
        """
        if self._num_steps != self._seen_steps:
            self._seen_steps = self._num_steps
            self._seen_ns = now_ns
            return
        stalled_ns = now_ns - self._seen_ns
        if self._waiter is not None:
            if stalled_ns >= token_deadline_ns:
                seconds = stalled_ns // SECOND_NS
                self.fail(DeadlineExceeded(f"no token for {seconds} s", code="request.token_deadline"))
        elif stalled_ns >= client_deadline_ns and self.limit is not None:
            self.limit.reschedule(0)

    def num_found_tokens(self, choice: int) -> int:
        """Prompt tokens of a sequence that were kept before the call."""
        return self._logs[choice].num_found_tokens

    def cancel(self, choice: int) -> None:
        """Stop one sequence: its text is complete or nobody wants it."""
        self._link.drop(self._logs[choice])
