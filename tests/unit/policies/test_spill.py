"""When tails are written."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from millpond.policies.spill import SpillParams, TailBook

S = 10**9
PARAMS = SpillParams(idle_s=30, retry_s=5)


def add(book: TailBook, now_s: int, begin: int, end: int, session: str = "a") -> None:
    for index in range(begin, end):
        book.add(now_s * S, tip(session, index), index, index + 1, tip(session, index + 1))


def tip(session: str, end: int) -> bytes:
    return f"{session}{end}".encode()


def spans(tails: list) -> list[tuple[int, int]]:
    return [(tail.begin, tail.end) for tail in tails]


def test_a_full_window_is_due_at_once_and_the_rest_after_the_idle_time() -> None:
    book = TailBook(4, PARAMS)
    add(book, 0, 0, 10)
    assert spans(book.take_due(0)) == [(0, 4), (4, 8)]
    assert book.take_due(30 * S - 1) == []
    assert spans(book.take_due(30 * S)) == [(8, 10)]
    assert len(book) == 0


def test_turns_of_a_session_grow_one_tail_and_restart_its_clock() -> None:
    book = TailBook(8, PARAMS)
    add(book, 0, 0, 2)
    add(book, 20, 2, 3)
    assert book.take_due(40 * S) == []
    book.touch(45 * S, tip("a", 3))
    assert book.take_due(60 * S) == []
    assert spans(book.take_due(75 * S)) == [(0, 3)]


def test_touching_does_not_hold_back_a_full_window() -> None:
    book = TailBook(2, PARAMS)
    add(book, 0, 0, 2)
    book.touch(1 * S, tip("a", 2))
    assert spans(book.take_due(1 * S)) == [(0, 2)]


def test_two_sessions_that_part_inside_a_window_have_a_tail_each() -> None:
    book = TailBook(8, PARAMS)
    add(book, 0, 0, 3)
    add(book, 1, 3, 4)
    book.add(2 * S, tip("a", 3), 3, 4, tip("b", 4))
    assert sorted(spans(book.all())) == [(0, 4), (3, 4)]


def test_pressure_takes_the_tails_that_waited_longest_until_it_is_enough() -> None:
    book = TailBook(8, PARAMS)
    for order, session in enumerate("abc"):
        add(book, order, 0, 3, session)
    book.touch(5 * S, tip("a", 3))
    assert [tail.tip for tail in book.take_oldest(4)] == [tip("b", 3), tip("c", 3)]
    assert [tail.tip for tail in book.take_oldest(100)] == [tip("a", 3)]


def test_what_could_not_be_written_is_tried_again_later() -> None:
    book = TailBook(2, PARAMS)
    add(book, 0, 0, 2)
    (tail,) = book.take_due(0)
    book.give_back(1 * S, tail)
    assert book.take_due(6 * S - 1) == []
    assert spans(book.take_due(6 * S)) == [(0, 2)]


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(1, 5), st.integers(0, 40)), max_size=30))
def test_every_block_is_in_one_tail_and_no_tail_crosses_a_window(steps: list[tuple[str, int, int]]) -> None:
    book, ends, now, taken = TailBook(4, PARAMS), dict.fromkeys("abc", 0), 0, []
    for session, length, pause in steps:
        now += pause
        add(book, now, ends[session], ends[session] + length, session)
        ends[session] += length
        taken += book.take_due(now * S)
    taken += book.take_oldest(10**6)
    assert all(tail.begin // 4 == (tail.end - 1) // 4 for tail in taken)
    for session, end in ends.items():
        mine = sorted((tail.begin, tail.end) for tail in taken if tail.tip.decode().startswith(session))
        assert [index for begin, stop in mine for index in range(begin, stop)] == list(range(end))
