"""The link between client calls and the service: submit, cancel, lose, restart."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from millpond.core.errors import DeadlineExceeded, OverloadError
from millpond.core.events import Cancel, ServiceState, Submit, TokensOut
from millpond.core.ids import GatewayId, GroupId, RequestId
from millpond.core.plan import RequestEnded, Resubmit, TokenOut
from millpond.core.request import CachedPrefix, FinishReason, RequestSpec, SamplingParams, token_ids
from millpond.core.units import SECOND_NS
from millpond.serve.gateway.call import Ending
from millpond.serve.gateway.link import ControllerLink


class Wire:
    """Keeps what was sent; can be closed."""

    def __init__(self) -> None:
        self.sent: list[object] = []
        self.is_open = True

    def send(self, message: object) -> bool:
        if self.is_open:
            self.sent.append(message)
        return self.is_open

    def take(self, kind: type) -> list[object]:
        taken = [message for message in self.sent if isinstance(message, kind)]
        self.sent.clear()
        return taken


class Clock:
    def __init__(self) -> None:
        self.now_ns = 0

    def __call__(self) -> int:
        return self.now_ns


@pytest.fixture
def wire() -> Wire:
    return Wire()


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def link(wire: Wire, clock: Clock) -> ControllerLink:
    link = ControllerLink(GatewayId("gw0"), wire, now_ns=clock)
    link.on_message(ServiceState(1, 100, is_ready=True))
    return link


def spec(choice: int = 0) -> RequestSpec:
    return RequestSpec(
        RequestId(f"call-{choice}"),
        0,
        GatewayId("gw0"),
        "ipc://nowhere",
        token_ids((1, 2, 3)),
        SamplingParams(max_tokens=10, seed=0, choice=choice),
    )


def tokens(*entries: tuple[int, int, int], finish: FinishReason | None = None) -> TokensOut:
    """(choice, attempt, index) of each token; `finish` belongs to the last."""
    made = [TokenOut(RequestId(f"call-{c}"), attempt, 3 + index, 50 + index) for c, attempt, index in entries]
    made[-1] = replace(made[-1], finish=finish)
    return TokensOut(GroupId("d0"), tuple(made))


def events(call):
    return asyncio.run(asyncio.wait_for(call.next_events(), 20))


def test_leaving_a_call_cancels_every_sequence_that_runs(link: ControllerLink, wire: Wire) -> None:
    with link.open([spec(0), spec(1), spec(2)]):
        link.on_message(tokens((1, 0, 0), finish=FinishReason.STOP))
        wire.sent.clear()
    assert wire.take(Cancel) == [Cancel(RequestId("call-0")), Cancel(RequestId("call-2"))]
    assert (link.num_open, link.num_waiting, link.num_waiting_tokens) == (0, 0, 0)


def test_tokens_after_the_end_of_a_call_are_dropped_and_counted(link: ControllerLink) -> None:
    with link.open([spec()]):
        pass
    link.on_message(tokens((0, 0, 0)))
    assert (link.num_tokens, link.num_dropped) == (0, 1)


def test_events_of_several_sequences_come_in_order_of_arrival(link: ControllerLink) -> None:
    with link.open([spec(0), spec(1)]) as call:
        link.on_message(tokens((1, 0, 0), (0, 0, 0)))
        link.on_message(tokens((1, 0, 1)))
        assert [(choice, event.position) for choice, event in events(call)] == [(1, 3), (0, 3), (1, 4)]


def test_a_lost_attempt_is_submitted_again_with_what_was_delivered(link: ControllerLink, wire: Wire) -> None:
    with link.open([spec()]) as call:
        link.on_message(tokens((0, 0, 0), (0, 0, 1)))
        wire.sent.clear()
        link.on_message(Resubmit(RequestId("call-0"), 0, "worker lost"))
        link.on_message(Resubmit(RequestId("call-0"), 0, "worker lost"))
        (submit,) = wire.take(Submit)
        assert (submit.spec.attempt, list(submit.spec.output_ids)) == (1, [50, 51])
        link.on_message(tokens((0, 0, 2)))  # the old worker is not dead after all
        link.on_message(tokens((0, 1, 1), (0, 1, 2)))
        assert [(e.attempt, e.position) for _, e in events(call)] == [(0, 3), (0, 4), (1, 5)]
    assert (link.num_resubmitted, link.num_dropped) == (1, 3)


def test_a_new_attempt_waits_for_what_is_found_of_it(link: ControllerLink, wire: Wire) -> None:
    found: list[RequestSpec] = []
    link.on_new_attempt = found.append
    with link.open([spec(0), spec(1)]) as call:
        wire.sent.clear()
        for choice in range(2):
            link.on_message(Resubmit(RequestId(f"call-{choice}"), 0, "worker lost"))
        link.on_message(Resubmit(RequestId("call-0"), 1, "lost again"))
        assert not wire.take(Submit)
        call.cancel(1)
        wire.sent.clear()
        for attempt in found:
            link.submit_again(replace(attempt, cached=CachedPrefix(128)))
        (submit,) = wire.take(Submit)
        assert (submit.spec.request_id, submit.spec.attempt) == ("call-0", 2)
        assert submit.spec.cached == CachedPrefix(128)
        link.on_message(ServiceState(2, 100, is_ready=True))
        assert wire.take(Submit) == [submit]


@pytest.mark.parametrize("is_fresh", [True, False], ids=["just gone", "gone for long"])
def test_calls_that_no_controller_heard_of_leave_nothing(
    link: ControllerLink, wire: Wire, clock: Clock, is_fresh: bool
) -> None:
    wire.is_open = False
    clock.now_ns += 0 if is_fresh else 100 * SECOND_NS
    for _ in range(3):
        if is_fresh:
            with link.open([spec(0), spec(1)]):
                link.announce()
        else:
            with pytest.raises(OverloadError):
                link.open([spec(0), spec(1)])
    wire.is_open = True
    link.announce()
    assert not wire.take(Cancel)
    assert link.num_open == link.num_waiting == 0


def test_a_restarted_controller_gets_every_open_sequence_again(link: ControllerLink, wire: Wire) -> None:
    with link.open([spec(0), spec(1), spec(2)]):
        link.on_message(tokens((0, 0, 0)))
        link.on_message(tokens((1, 0, 0), finish=FinishReason.LENGTH))
        wire.sent.clear()
        link.on_message(ServiceState(1, 100, is_ready=True))
        assert wire.sent == []
        link.on_message(ServiceState(2, 100, is_ready=True))
        again = {s.spec.request_id: (s.spec.attempt, list(s.spec.output_ids)) for s in wire.take(Submit)}
        assert again == {"call-0": (0, [50]), "call-2": (0, [])}


def test_what_could_not_be_sent_is_sent_with_the_next_announcement(link: ControllerLink, wire: Wire) -> None:
    call = link.open([spec(0), spec(1), spec(2)])
    wire.is_open = False
    link.on_message(Resubmit(RequestId("call-0"), 0, "lost"))
    link.on_message(Resubmit(RequestId("call-1"), 0, "lost"))
    call.cancel(1)
    call.cancel(2)
    link.announce()
    wire.is_open = True
    wire.sent.clear()
    link.announce()
    assert [s.spec.attempt for s in wire.sent if isinstance(s, Submit)] == [1]
    cancels = [c for c in wire.sent if isinstance(c, Cancel)]
    assert cancels == [Cancel(RequestId("call-1")), Cancel(RequestId("call-2"))]
    wire.sent.clear()
    link.announce()
    assert wire.take(Cancel) == []


def test_a_call_waits_for_a_controller_that_restarts(link: ControllerLink, wire: Wire, clock: Clock) -> None:
    wire.is_open = False
    with link.open([spec(0)]):
        clock.now_ns += SECOND_NS
        link.announce()
        wire.is_open = True
        link.announce()
        assert wire.take(Submit) == [Submit(spec(0))]


def test_a_call_does_not_wait_long(link: ControllerLink, wire: Wire, clock: Clock) -> None:
    wire.is_open = False
    with link.open([spec(0)]) as call:
        clock.now_ns += 60 * SECOND_NS
        link.announce()
        with pytest.raises(OverloadError):
            events(call)


def test_a_call_that_cannot_be_submitted_leaves_nothing_behind(
    link: ControllerLink, wire: Wire, clock: Clock
) -> None:
    wire.is_open = False
    clock.now_ns += 60 * SECOND_NS
    with pytest.raises(OverloadError):
        link.open([spec(0), spec(1)])
    assert (link.num_open, link.num_waiting_tokens) == (0, 0)
    wire.is_open = True
    link.announce()
    assert wire.take(Submit) == []


def test_an_ending_without_a_worker_reaches_the_call_once(link: ControllerLink, wire: Wire) -> None:
    with link.open([spec()]) as call:
        link.on_message(RequestEnded(RequestId("call-0"), 7, FinishReason.FAILED, "another attempt"))
        ended = RequestEnded(RequestId("call-0"), 0, FinishReason.REFUSED, "too large")
        link.on_message(ended)
        link.on_message(ended)
        ((choice, ending),) = events(call)
        assert (choice, ending.reason, ending.detail) == (0, FinishReason.REFUSED, "too large")
        assert isinstance(ending, Ending)
        wire.sent.clear()
    assert wire.sent == []


def test_silence_beyond_the_deadline_is_an_error(link: ControllerLink) -> None:
    async def scenario() -> None:
        with link.open([spec()]) as call:
            link.on_message(tokens((0, 0, 0)))
            await call.next_events()
            waiting = asyncio.ensure_future(call.next_events())
            await asyncio.sleep(0)
            for second in (10, 14, 15):
                assert not waiting.done()
                call.end_if_stalled(
                    second * SECOND_NS, token_deadline_ns=5 * SECOND_NS, client_deadline_ns=SECOND_NS
                )
                await asyncio.sleep(0)
            with pytest.raises(DeadlineExceeded):
                await waiting

    asyncio.run(scenario())


def test_bug_16_silence_is_measured_only_while_work_waits(link: ControllerLink, clock: Clock) -> None:
    clock.now_ns = 100 * SECOND_NS
    assert link.silence_s() == 0
    with link.open([spec()]):
        clock.now_ns += 40 * SECOND_NS
        assert link.silence_s() == 40
        link.on_message(tokens((0, 0, 0)))
        assert link.silence_s() == 0
        clock.now_ns += 7 * SECOND_NS
        assert link.silence_s() == 7
    assert link.silence_s() == 0


def test_a_controller_that_fell_silent_is_not_ready(link: ControllerLink, clock: Clock) -> None:
    assert link.is_ready
    clock.now_ns += 60 * SECOND_NS
    assert not link.is_ready
    link.on_message(ServiceState(1, 100, is_ready=True))
    assert link.is_ready
    link.on_message(ServiceState(1, 0, is_ready=False))
    assert not link.is_ready


def test_a_token_that_never_came_is_asked_for_again(link: ControllerLink, wire: Wire) -> None:
    with link.open([spec()]):
        wire.sent.clear()
        link.on_message(tokens((0, 0, 1)))  # the second token; the worker of the first died with it
        link.announce()
        assert wire.take(Submit) == []  # it may still be on its way
        link.announce()
        (again,) = wire.take(Submit)
        assert isinstance(again, Submit)
        assert again.spec.attempt == 1
        assert list(again.spec.output_ids) == []
        link.on_message(tokens((0, 0, 0)))  # too late: of the attempt before
        link.announce()
        assert wire.take(Submit) == []


def test_a_late_token_closes_the_gap(link: ControllerLink, wire: Wire) -> None:
    with link.open([spec()]):
        wire.sent.clear()
        link.on_message(tokens((0, 0, 1)))
        link.announce()
        link.on_message(tokens((0, 0, 0)))
        link.announce()
        assert wire.take(Submit) == []


def test_calls_are_taken_while_a_worker_restarts(link: ControllerLink) -> None:
    link.on_message(ServiceState(2, 0, is_ready=False))
    assert not link.is_ready
    assert link.takes_calls
    assert link.max_model_len == 100
