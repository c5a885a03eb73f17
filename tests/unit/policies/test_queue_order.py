"""Order of the controller's queue."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from millpond.policies.queue_order import OrderedQueue, QueueOrderParams


def drain(queue):
    taken = []
    while (head := queue.head()) is not None:
        queue.pop(head)
        taken.append(head)
    return taken


def test_lower_priority_number_first_then_arrival():
    queue = OrderedQueue(QueueOrderParams())
    for arrival, (key, priority) in enumerate([("a", 1), ("b", 0), ("c", 1), ("d", 0)]):
        queue.push(key, priority, arrival)
    assert drain(queue) == ["b", "d", "a", "c"]
    assert len(queue) == 0


def test_head_does_not_remove():
    queue = OrderedQueue(QueueOrderParams())
    queue.push("a", 0, 1)
    assert [queue.head(), queue.head(), len(queue)] == ["a", "a", 1]


def test_discarded_requests_never_come_up():
    queue = OrderedQueue(QueueOrderParams())
    queue.push("a", 0, 1)
    queue.push("b", 0, 2)
    queue.discard("a")
    queue.discard("unknown")
    assert drain(queue) == ["b"]


def test_pushed_again_takes_its_new_place():
    queue = OrderedQueue(QueueOrderParams())
    queue.push("a", 0, 1)
    queue.push("b", 0, 2)
    queue.discard("a")
    queue.push("a", 0, 3)
    assert drain(queue) == ["b", "a"]


@given(
    st.lists(st.one_of(st.integers(-2, 2), st.none()), max_size=120),
    st.integers(0, 5),
)
def test_the_longest_waiting_is_overtaken_at_most_so_often(moves, max_overtakes):
    """None takes the head, a number pushes a request of that priority."""
    queue = OrderedQueue(QueueOrderParams(max_overtakes))
    waiting, overtakes = [], 0
    for arrival, move in enumerate(moves):
        if move is not None:
            queue.push(str(arrival), move, arrival)
            waiting.append(str(arrival))
        elif waiting:
            head = queue.head()
            assert head in waiting
            overtakes = 0 if head == waiting[0] else overtakes + 1
            assert overtakes <= max_overtakes
            queue.pop(head)
            waiting.remove(head)
        assert list(queue) == waiting
    assert sorted(drain(queue)) == sorted(waiting)
