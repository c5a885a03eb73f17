"""The gateway's side of the controller and of the workers' token stream.

`ControllerLink` holds no socket and no task: a shell feeds it messages with `on_message`, and it sends
through a `ControlChannel`. It owns the token log of every open sequence; a client call sees its own
sequences through a `Call`.

An attempt after the first may find more of its KV than the one before, or less: `on_new_attempt` may look
for it before the attempt is submitted.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterable
from typing import Protocol

from millpond.core.errors import OverloadError
from millpond.core.events import (
    Cancel,
    GatewayUp,
    ServiceState,
    StatusQuery,
    StatusReport,
    Submit,
    TokensOut,
)
from millpond.core.ids import GatewayId, RequestId
from millpond.core.plan import RequestEnded, Resubmit
from millpond.core.request import RequestSpec
from millpond.core.units import SECOND_NS
from millpond.serve.gateway.call import Call, Ending
from millpond.serve.gateway.token_log import TokenLog


class ControlChannel(Protocol):
    """Way to the controller."""

    def send(self, message: object) -> bool:
        """Queue a message without waiting; False if the queue is full."""
        ...


class _Open:
    """One sequence in flight."""

    __slots__ = ("call", "choice", "gap_position", "is_told", "log")

    def __init__(self, call: Call, choice: int, log: TokenLog) -> None:
        self.call = call
        self.choice = choice
        self.log = log
        self.is_told = False
        """The controller was sent it."""
        self.gap_position = -1
        """Position that was missing at the last `announce` although later ones were there."""


class ControllerLink:
    """All open sequences of this gateway.

    Args:
        gateway: This gateway's name.
        channel: Way to the controller.
        now_ns: Monotonic clock.
        lease_s: A controller that said nothing for so long counts as gone.
    """

    def __init__(
        self,
        gateway: GatewayId,
        channel: ControlChannel,
        *,
        now_ns: Callable[[], int],
        lease_s: float = 10.0,
    ) -> None:
        self._gateway = gateway
        self._channel = channel
        self._now_ns = now_ns
        self._lease_ns = int(lease_s * SECOND_NS)
        self._open: dict[RequestId, _Open] = {}
        self.on_new_attempt: Callable[[RequestSpec], None] = self.submit_again
        """Takes each attempt after the first; `submit_again` must follow soon."""
        self._unsent: dict[RequestId, Submit | Cancel] = {}
        """What must reach the controller but could not yet; the later one of a sequence counts."""
        self._state: ServiceState | None = None
        self._heard_ns = 0
        self._max_model_len = 0
        self.num_tokens = 0
        """Output tokens delivered since the start."""
        self.num_dropped = 0
        """Worker messages that added nothing: duplicates, old attempts, closed sequences."""
        self.num_resubmitted = 0
        """Attempts after the first."""
        self.num_waiting = 0
        """Open sequences without a first token."""
        self.num_waiting_tokens = 0
        """Prompt tokens of those."""
        self._progress_ns = now_ns()
        self._queries: dict[int, asyncio.Future[str]] = {}
        self._num_queries = 0

    # --- what the service is like -------------------------------------------------------------

    @property
    def num_open(self) -> int:
        """Sequences in flight."""
        return len(self._open)

    @property
    def max_model_len(self) -> int:
        """Longest sequence the service takes; 0 while it is unknown."""
        return self._max_model_len

    @property
    def takes_calls(self) -> bool:
        """A complete path was up once. While a worker restarts, calls wait in the controller's queue."""
        return self.max_model_len > 0

    @property
    def is_ready(self) -> bool:
        """A controller answers, and a complete path through the workers is up."""
        return self._state is not None and self._is_fresh and self._state.is_ready

    @property
    def _is_fresh(self) -> bool:
        """The controller said something lately."""
        return self._now_ns() - self._heard_ns <= self._lease_ns

    def silence_s(self) -> float:
        """Seconds without progress: no token was produced although work waits. 0 when idle."""
        return (self._now_ns() - self._progress_ns) / SECOND_NS if self._open else 0.0

    async def fetch_report(self, deadline_s: float) -> str | None:
        """Ask the controller for its status; the JSON text, or None if it does not answer in time."""
        self._num_queries += 1
        query_id = self._num_queries
        if not self._channel.send(StatusQuery(query_id)):
            return None
        answer = asyncio.get_running_loop().create_future()
        self._queries[query_id] = answer
        try:
            async with asyncio.timeout(deadline_s):
                return await answer
        except TimeoutError:
            return None
        finally:
            del self._queries[query_id]

    # --- calls --------------------------------------------------------------------------------

    def open(self, specs: Iterable[RequestSpec]) -> Call:
        """Submit the sequences of one client call.

        Raises:
            OverloadError: If the controller has been away for long; nothing stays submitted.
        """
        logs = [TokenLog(spec) for spec in specs]
        call = Call(self, logs)
        if not self._open:
            self._progress_ns = self._now_ns()
        for choice, log in enumerate(logs):
            self._open[log.spec.request_id] = _Open(call, choice, log)
            self.num_waiting += 1
            self.num_waiting_tokens += log.spec.num_prompt_tokens
        with contextlib.ExitStack() as undo:
            undo.push(call)
            for log in logs:
                self._submit(log.spec)
            undo.pop_all()
        return call

    def drop(self, log: TokenLog) -> None:
        """Forget a sequence; tell the controller unless it has ended or never was told of."""
        entry = self._close(log)
        if entry is not None and entry.is_told and not log.is_finished:
            self._send_surely(log.spec.request_id, Cancel(log.spec.request_id))

    def _submit(self, spec: RequestSpec) -> None:
        if self._is_fresh:
            # A controller that restarts is back within a second; the submission waits for it here.
            self._send_surely(spec.request_id, Submit(spec))
        elif self._channel.send(Submit(spec)):
            self._open[spec.request_id].is_told = True
        else:
            raise _controller_gone()

    def _send_surely(self, request_id: RequestId, message: Submit | Cancel) -> None:
        if self._channel.send(message):
            self._unsent.pop(request_id, None)
            if request_id in self._open:
                self._open[request_id].is_told = True
        else:
            self._unsent[request_id] = message

    def _close(self, log: TokenLog) -> _Open | None:
        entry = self._open.pop(log.spec.request_id, None)
        if entry is not None:
            self._unsent.pop(log.spec.request_id, None)
            if log.num_delivered == 0:
                self._leave_waiting(log)
        return entry

    def _leave_waiting(self, log: TokenLog) -> None:
        self.num_waiting -= 1
        self.num_waiting_tokens -= log.spec.num_prompt_tokens

    # --- messages -----------------------------------------------------------------------------

    def announce(self) -> None:
        """Introduce this gateway and send what could not be sent before.

        To be called on every connection and as a heartbeat; the controller answers with its state.
        """
        if self._channel.send(GatewayUp(self._gateway)):
            for request_id, message in tuple(self._unsent.items()):
                self._send_surely(request_id, message)
        elif not self._is_fresh:
            self._fail_unsubmitted()
        for entry in tuple(self._open.values()):
            self._heal_gap(entry)

    def _fail_unsubmitted(self) -> None:
        """End the calls that no controller ever heard of: it has been away too long to wait for it."""
        for request_id, message in tuple(self._unsent.items()):
            entry = self._open.get(request_id)
            if entry is not None and isinstance(message, Submit) and entry.log.num_delivered == 0:
                entry.call.fail(_controller_gone())

    def _heal_gap(self, entry: _Open) -> None:
        """Ask for the next attempt if the same token is missing at two announcements in a row.

        A worker killed right after its last token was computed takes that token along, while the worker
        it handed the sequence to goes on with the ones behind it.
        """
        log = entry.log
        if not log.has_gap:
            return
        if entry.gap_position != log.next_position:
            entry.gap_position = log.next_position
            return
        spec = log.next_attempt(log.spec.attempt)
        if spec is not None:
            self.num_resubmitted += 1
            self.on_new_attempt(spec)

    def on_message(self, message: object) -> None:
        """Take one message of the controller or of a worker; kinds not meant for a gateway are dropped."""
        match message:
            case TokensOut():
                self._on_tokens(message)
            case ServiceState():
                self._on_state(message)
            case Resubmit():
                self._on_resubmit(message)
            case RequestEnded():
                self._on_ended(message)
            case StatusReport(query_id=query_id, json_text=text):
                query = self._queries.get(query_id)
                if query is not None and not query.done():
                    query.set_result(text)
            case _:
                self.num_dropped += 1

    def _on_tokens(self, message: TokensOut) -> None:
        for token in message.tokens:
            entry = self._open.get(token.request_id)
            if entry is None:
                self.num_dropped += 1
                continue
            log = entry.log
            is_first = log.num_delivered == 0
            ready = log.add(token)
            if not ready:
                self.num_dropped += 1
                continue
            if is_first:
                self._leave_waiting(log)
            for each in ready:
                entry.call.put(entry.choice, each)
            self.num_tokens += len(ready)
            if log.is_finished:
                self._close(log)
        self._progress_ns = self._now_ns()

    def _on_state(self, state: ServiceState) -> None:
        before = self._state
        self._state = state
        # A restarted controller does not know it until its groups have reported.
        self._max_model_len = state.max_model_len or self._max_model_len
        self._heard_ns = self._now_ns()
        if before is not None and before.controller_incarnation != state.controller_incarnation:
            # The same attempt on purpose: a controller that learns from the group's own report that a
            # worker still runs it can leave it there.
            for request_id, entry in self._open.items():
                self._send_surely(request_id, Submit(entry.log.as_of_now()))

    def _on_resubmit(self, message: Resubmit) -> None:
        entry = self._open.get(message.request_id)
        spec = entry.log.next_attempt(message.attempt) if entry is not None else None
        if entry is None or spec is None:
            self.num_dropped += 1
            return
        self.num_resubmitted += 1
        self.on_new_attempt(spec)

    def submit_again(self, spec: RequestSpec) -> None:
        """Submit an attempt after the first, if it is still wanted.

        Args:
            spec: As `on_new_attempt` got it, `cached` may be another one.
        """
        entry = self._open.get(spec.request_id)
        if entry is not None and entry.log.spec.attempt == spec.attempt:
            entry.log.spec = spec
            self._send_surely(spec.request_id, Submit(spec))

    def _on_ended(self, message: RequestEnded) -> None:
        entry = self._open.get(message.request_id)
        if entry is None or message.attempt != entry.log.spec.attempt:
            self.num_dropped += 1
            return
        self._end(entry, Ending(message.reason, message.detail))

    def _end(self, entry: _Open, ending: Ending) -> None:
        self._close(entry.log)
        entry.log.is_finished = True
        entry.call.put(entry.choice, ending)


def _controller_gone() -> OverloadError:
    return OverloadError(
        "the controller does not take requests now", code="service.controller_busy", retry_after_s=1
    )
