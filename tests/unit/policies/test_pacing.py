"""Background work keeps to its rate and to its share of the time."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from millpond.policies.pacing import DutyPacer, RatePacer

S = 10**9


@given(
    rate=st.floats(1, 1e9),
    steps=st.lists(st.tuples(st.integers(0, 10**10), st.integers(1, 10**8)), min_size=1, max_size=40),
)
def test_no_period_has_more_than_its_bytes(rate: float, steps: list[tuple[int, int]]) -> None:
    pacer, now_ns = RatePacer(rate), 0
    starts: list[tuple[int, int]] = []
    for pause_ns, num_bytes in steps:
        now_ns += pause_ns
        now_ns += pacer.wait_ns(now_ns, num_bytes)
        starts.append((now_ns, num_bytes))
    for first in range(len(starts)):
        taken = 0
        for at_ns, num_bytes in starts[first:]:
            # What began before this piece has been paid for by the time that passed.
            assert taken <= (at_ns - starts[first][0]) / S * rate * (1 + 1e-6) + rate * 1e-6 + 1
            taken += num_bytes


def test_an_idle_time_is_not_saved_up_and_zero_is_no_limit() -> None:
    pacer = RatePacer(100)
    assert pacer.wait_ns(1000 * S, 100) == 0
    assert pacer.wait_ns(1000 * S, 100) == S
    assert RatePacer(0).wait_ns(0, 10**12) == 0


@given(st.floats(0.001, 1), st.integers(0, 10**12))
def test_busy_and_rest_add_up_to_the_share(share: float, busy_ns: int) -> None:
    rest_ns = DutyPacer(share).rest_ns(busy_ns)
    assert abs((busy_ns + rest_ns) * share - busy_ns) <= 1 + busy_ns * 1e-9
