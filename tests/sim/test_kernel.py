"""Virtual time and the ways between simulated processes."""

from __future__ import annotations

from millpond.core.chance import Chance
from millpond.sim.kernel import Kernel
from millpond.sim.network import Network


def test_events_run_by_time_then_order_then_as_they_were_asked_for():
    kernel, seen = Kernel(), []
    for time_ns, order, name in [(5, 0, "e"), (1, 2, "c"), (1, 1, "a"), (1, 2, "d"), (1, 1, "b")]:
        kernel.at(time_ns, order, lambda name=name: seen.append((kernel.now_ns, name)))
    assert not kernel.run(lambda: False, until_ns=100)
    assert seen == [(1, "a"), (1, "b"), (1, "c"), (1, "d"), (5, "e")]


def test_a_run_ends_when_it_is_over_or_time_is_up():
    kernel, seen = Kernel(), []
    for time_ns in (1, 2, 3, 9):
        kernel.at(time_ns, 0, lambda: seen.append(kernel.now_ns))
    assert kernel.run(lambda: len(seen) == 2, until_ns=100)
    assert not kernel.run(lambda: False, until_ns=5)
    assert (seen, kernel.now_ns, kernel.next_time_ns) == ([1, 2, 3], 3, 9)


def test_nothing_happens_in_the_past():
    kernel, seen = Kernel(), []
    kernel.at(7, 0, lambda: kernel.at(3, 0, lambda: seen.append(kernel.now_ns)))
    kernel.run(lambda: False, until_ns=100)
    assert seen == [7]


def network(jitter_ns=0):
    kernel = Kernel()
    return kernel, Network(kernel, 100, jitter_ns, Chance(1, "jitter"))


def test_messages_arrive_in_order_whatever_the_jitter():
    kernel, net = network(jitter_ns=1000)
    seen = []
    net.attach("b", 0, seen.append)
    for i in range(50):
        assert net.send("a", "b", i)
    kernel.run(lambda: False, until_ns=10_000)
    assert seen == list(range(50))
    assert kernel.now_ns > 100


def test_a_message_to_the_dead_is_lost_and_never_reaches_the_successor():
    kernel, net = network()
    old, new = [], []
    net.attach("b", 0, old.append)
    net.send("a", "b", "for the old")
    net.detach("b")
    assert not net.send("a", "b", "for nobody")
    net.attach("b", 0, new.append)
    net.send("a", "b", "for the new")
    kernel.run(lambda: False, until_ns=1000)
    assert (old, new) == ([], ["for the new"])
