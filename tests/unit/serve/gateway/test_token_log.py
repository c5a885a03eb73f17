"""Laws of the token log: whatever workers and controller say, the client gets one stream, once."""

from __future__ import annotations

import hypothesis.strategies as st
from hypothesis import given

from millpond.core.ids import GatewayId, RequestId
from millpond.core.plan import TokenOut
from millpond.core.request import FinishReason, RequestSpec, SamplingParams, token_ids
from millpond.serve.gateway.token_log import TokenLog

PROMPT = (5, 6, 7)


def make_log() -> TokenLog:
    return TokenLog(
        RequestSpec(
            RequestId("call-0"),
            0,
            GatewayId("gw0"),
            "ipc://nowhere",
            token_ids(PROMPT),
            SamplingParams(max_tokens=100, seed=0),
        )
    )


def token(attempt: int, index: int, num_tokens: int) -> TokenOut:
    """Token `index` of the output; its id tells attempt and index, so that a mix-up shows."""
    finish = FinishReason.LENGTH if index + 1 == num_tokens else None
    return TokenOut(RequestId("call-0"), attempt, len(PROMPT) + index, index, finish=finish)


@given(st.data())
def test_any_duplication_reordering_and_resubmission_gives_one_stream(data: st.DataObject) -> None:
    num_tokens = data.draw(st.integers(1, 12))
    log = make_log()
    delivered: list[TokenOut] = []
    for attempt in range(data.draw(st.integers(0, 3)) + 1):
        messages = st.lists(
            st.tuples(st.integers(0, attempt + 1), st.integers(0, num_tokens - 1)), max_size=30
        )
        for of_attempt, index in data.draw(messages):
            delivered += log.add(token(of_attempt, index, num_tokens))
        lost = data.draw(st.integers(0, attempt + 1))
        spec = log.next_attempt(lost)
        assert (spec is None) == (log.is_finished or lost != log.spec.attempt - (spec is not None))
        if spec is not None:
            assert list(spec.output_ids) == [each.token_id for each in delivered]
    # In the end the current attempt sends everything that is missing, in order.
    for index in range(num_tokens):
        delivered += log.add(token(log.spec.attempt, index, num_tokens))

    assert [each.position for each in delivered] == [len(PROMPT) + i for i in range(num_tokens)]
    assert [each.token_id for each in delivered] == list(range(num_tokens))
    assert [each.finish for each in delivered] == [None] * (num_tokens - 1) + [FinishReason.LENGTH]
    assert log.is_finished
    assert log.add(token(log.spec.attempt, 0, num_tokens)) == []
    assert log.next_attempt(log.spec.attempt) is None


def test_a_token_that_overtook_the_first_waits_for_it() -> None:
    log = make_log()
    assert log.add(token(0, 1, 3)) == []
    assert [each.token_id for each in log.add(token(0, 0, 3))] == [0, 1]
    assert log.num_delivered == 2


def test_a_token_that_waited_for_a_lost_attempt_is_not_used_by_the_next() -> None:
    log = make_log()
    log.add(token(0, 1, 3))
    log.next_attempt(0)
    assert [each.attempt for each in log.add(token(1, 0, 3))] == [1]


def test_nothing_after_the_ending_is_delivered() -> None:
    log = make_log()
    log.add(token(0, 1, 9))
    ending = TokenOut(RequestId("call-0"), 0, len(PROMPT), 0, finish=FinishReason.STOP)
    assert log.add(ending) == [ending]
    assert log.add(token(0, 1, 9)) == []


def test_a_submitted_spec_does_not_change_when_more_tokens_come() -> None:
    log = make_log()
    log.add(token(0, 0, 9))
    spec = log.as_of_now()
    log.add(token(0, 1, 9))
    assert list(spec.output_ids) == [0]
