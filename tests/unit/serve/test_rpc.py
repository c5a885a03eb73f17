"""Control sockets: addressing, limits, reconnection, privacy, and garbage that changes nothing."""

from __future__ import annotations

import asyncio
import socket as std_socket
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

import pytest
import uvloop
import zmq

from millpond.config import wire
from millpond.core import events
from millpond.core.errors import ConfigError, DataError
from millpond.core.ids import GatewayId, RequestId
from millpond.core.units import SECOND_NS
from millpond.serve.keys import make_keys
from millpond.serve.rpc import Connected, Dealer, Network, Pull, Push, Router, Wakeup, wait_any

DEADLINE_S = 30
Got = TypeVar("Got")
HELLO = events.GatewayUp(GatewayId("g0"))
CANCEL = events.Cancel(RequestId("r"))


def until(source: Router | Dealer | Pull, attempt: Callable[[], Got | None]) -> Got:
    """Repeat `attempt` until it gives something, waiting on `source` between."""
    deadline_ns = time.monotonic_ns() + DEADLINE_S * SECOND_NS
    while time.monotonic_ns() < deadline_ns:
        got = attempt()
        if got:
            return got
        wait_any((source,), 0.02)
    raise AssertionError("nothing arrived in time")


@pytest.fixture
def run_folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as folder:  # mode 700 and short
        yield Path(folder)


@pytest.fixture
def network() -> Iterator[Network]:
    with Network() as network:
        yield network


def connect(network: Network, endpoint: str, identity: str = "d0") -> Dealer:
    dealer = Dealer(network, endpoint, identity)
    assert until(dealer, dealer.recv) == Connected()
    return dealer


def test_messages_reach_the_named_peer_and_carry_its_name(network: Network, run_folder: Path) -> None:
    with (
        Router(network, f"ipc://{run_folder}/c") as router,
        connect(network, router.endpoint, "p0") as first,
        connect(network, router.endpoint, "d0") as second,
    ):
        assert first.send(HELLO)
        assert until(router, router.recv) == ("p0", HELLO)
        assert second.send(CANCEL)
        assert until(router, router.recv) == ("d0", CANCEL)
        assert router.send("d0", events.Tick())
        assert until(second, second.recv) == events.Tick()
        assert first.recv() is None


def test_an_absent_peer_is_reported_and_counted(network: Network, run_folder: Path) -> None:
    with Router(network, f"ipc://{run_folder}/c") as router:
        assert not router.send("nobody", HELLO)
        assert router.num_unsent == 1
    with Dealer(network, f"ipc://{run_folder}/unbound", "p0") as dealer:
        assert not dealer.send(HELLO)
        assert dealer.num_unsent == 1


def test_a_dealer_reports_the_connection_to_a_restarted_peer(network: Network, run_folder: Path) -> None:
    endpoint = f"ipc://{run_folder}/c"
    router = Router(network, endpoint)
    with connect(network, endpoint, "p0") as dealer:
        router.close()
        until(dealer, lambda: not dealer.send(CANCEL))  # the loss is noticed
        with Router(network, endpoint) as successor:
            assert until(dealer, dealer.recv) == Connected()
            assert dealer.send(HELLO)
            assert until(successor, successor.recv) == ("p0", HELLO)  # and nothing meant for the old one
            assert successor.send("p0", events.Tick())
            assert until(dealer, dealer.recv) == events.Tick()


def test_a_restarted_peer_takes_its_name_back(network: Network, run_folder: Path) -> None:
    with Router(network, f"ipc://{run_folder}/c") as router, connect(network, router.endpoint, "p0") as old:
        old.send(HELLO)
        until(router, router.recv)
        with connect(network, router.endpoint, "p0") as new:
            new.send(HELLO)
            until(router, router.recv)
            assert router.send("p0", events.Tick())
            assert until(new, new.recv) == events.Tick()


def test_garbage_is_counted_and_dropped(network: Network, run_folder: Path) -> None:
    with Router(network, f"ipc://{run_folder}/c") as router, connect(network, router.endpoint) as dealer:
        raw = network.context.socket(zmq.DEALER)
        raw.linger = 0
        raw.identity = b"rude"
        raw.connect(router.endpoint)
        unnamed = network.context.socket(zmq.DEALER)
        unnamed.linger = 0
        unnamed.connect(router.endpoint)
        try:
            raw.send(b"\xc1 nothing")
            raw.send_multipart([b"two", wire.encode(HELLO)])
            raw.send(wire.encode(HELLO).replace(b"GatewayUp", b"GatewayXX"))
            unnamed.send(wire.encode(HELLO))
            assert until(router, lambda: router.recv() is None and router.num_garbage == 4)
            dealer.send(HELLO)
            assert until(router, router.recv) == ("d0", HELLO)
        finally:
            raw.close()
            unnamed.close()


def test_too_large_a_message_is_refused_on_both_sides(network: Network, run_folder: Path) -> None:
    big = events.Cancel(RequestId("r" * 5000))
    with Router(network, f"ipc://{run_folder}/c", max_bytes=1000) as router:
        with (
            Dealer(network, router.endpoint, "p0", max_bytes=1000) as dealer,
            pytest.raises(DataError, match="limit"),
        ):
            dealer.send(big)
        with connect(network, router.endpoint, "rude") as rude:
            rude.send(big)
            # libzmq cuts the connection before it allocates; the peer comes back
            assert until(rude, rude.recv) == Connected()
            assert router.recv() is None
            rude.send(HELLO)
            assert until(router, router.recv) == ("rude", HELLO)


def test_pushers_may_send_before_the_connection_is_up(network: Network, run_folder: Path) -> None:
    endpoint = f"ipc://{run_folder}/t"
    with Push(network, endpoint) as first, Push(network, endpoint) as second:
        assert first.send(HELLO)
        assert second.send(HELLO)
        with Pull(network, endpoint) as pull:
            assert until(pull, pull.recv) == HELLO
            assert until(pull, pull.recv) == HELLO


def test_an_endpoint_in_use_is_named(network: Network, run_folder: Path) -> None:
    endpoint = f"ipc://{run_folder}/c"
    with Router(network, endpoint), pytest.raises(ConfigError, match=f"{run_folder}/c.*listens there"):
        Router(network, endpoint)


def test_the_socket_file_of_a_dead_process_is_replaced(network: Network, run_folder: Path) -> None:
    path = run_folder / "c"
    with std_socket.socket(std_socket.AF_UNIX) as stale:
        stale.bind(str(path))
    assert path.exists()
    with Router(network, f"ipc://{path}") as router, connect(network, router.endpoint) as dealer:
        dealer.send(HELLO)
        assert until(router, router.recv) == ("d0", HELLO)


def test_a_folder_that_others_can_enter_is_refused(network: Network, run_folder: Path) -> None:
    run_folder.chmod(0o755)
    with pytest.raises(ConfigError, match="700"):
        Router(network, f"ipc://{run_folder}/c")
    with pytest.raises(ConfigError, match="700"):
        Dealer(network, f"ipc://{run_folder}/c", "p0")


def test_a_path_too_long_for_a_socket_is_refused(network: Network, run_folder: Path) -> None:
    with pytest.raises(ConfigError, match="107"):
        Router(network, f"ipc://{run_folder}/{'c' * 120}")


def test_tcp_without_keys_and_unknown_transports_are_refused(network: Network) -> None:
    with pytest.raises(ConfigError, match="keys"):
        Router(network, "tcp://127.0.0.1:*")
    with pytest.raises(ConfigError, match="neither"):
        Dealer(network, "inproc://x", "p0")


def test_tcp_works_between_holders_of_the_keys_only(run_folder: Path) -> None:
    keys, foreign = make_keys(run_folder / "keys"), make_keys(run_folder / "foreign")
    with Network(keys) as network, Router(network, "tcp://127.0.0.1:*") as router:
        port = router.endpoint.rpartition(":")[2]
        assert int(port) > 0
        with Network(keys) as peers, connect(peers, router.endpoint) as dealer:
            dealer.send(HELLO)
            assert until(router, router.recv) == ("d0", HELLO)
            # a client that knows the server's key but has its own pair
            half = replace(keys, client_public=foreign.client_public, client_secret=foreign.client_secret)
            with Network(half) as outsiders, Dealer(outsiders, router.endpoint, "x") as outsider:
                assert_never_connected(outsider, dealer, router)
            # a client without encryption
            raw = peers.context.socket(zmq.DEALER)
            raw.linger = 0
            raw.identity = b"plain"
            raw.connect(router.endpoint)
            try:
                raw.send(wire.encode(HELLO))
                dealer.send(CANCEL)
                assert until(router, router.recv) == ("d0", CANCEL)
            finally:
                raw.close()
        with Network(keys) as other, pytest.raises(ConfigError, match=port):
            Router(other, f"tcp://127.0.0.1:{port}")


def assert_never_connected(outsider: Dealer, member: Dealer, router: Router) -> None:
    """The outsider is still out after the member exchanged a hundred messages."""
    for _ in range(100):
        member.send(CANCEL)
        assert until(router, router.recv) == ("d0", CANCEL)
        assert outsider.recv() is None
        assert not outsider.send(HELLO)


def test_a_thread_wakes_a_waiting_loop(network: Network, run_folder: Path) -> None:
    wakeup = Wakeup()
    with Router(network, f"ipc://{run_folder}/c") as router:
        assert not wait_any((router, wakeup), 0.0)
        posters = [
            threading.Thread(target=lambda k=k: [wakeup.post((k, i)) for i in range(50)]) for k in range(4)
        ]
        for poster in posters:
            poster.start()
        taken: list[object] = []
        while len(taken) < 200:
            assert wait_any((router, wakeup), DEADLINE_S)
            taken += wakeup.take()
        for poster in posters:
            poster.join(DEADLINE_S)
        assert [event for event in taken if event[0] == 2] == [(2, i) for i in range(50)]
        assert not wait_any((router, wakeup), 0.0)
        assert wakeup.take() == []
    wakeup.close()
    wakeup.post("late")


@pytest.mark.parametrize("new_loop", [asyncio.new_event_loop, uvloop.new_event_loop])
def test_coroutines_receive_while_others_send(
    run_folder: Path, new_loop: Callable[[], asyncio.AbstractEventLoop]
) -> None:
    async def answer(router: Router) -> None:
        while True:
            peer, message = await router.recv_async()
            router.send(peer, message)

    async def scenario() -> int:
        with Network() as network, Router(network, f"ipc://{run_folder}/c") as router:
            server = asyncio.create_task(answer(router))
            with Dealer(network, router.endpoint, "g0") as dealer:
                assert await dealer.recv_async() == Connected()
                num_received = 0
                for size in (1, 2, 7, 300):
                    for _ in range(size):
                        assert dealer.send(HELLO)
                    for _ in range(size):
                        assert await dealer.recv_async() == HELLO
                        num_received += 1
            server.cancel()
            with pytest.raises(asyncio.CancelledError):
                await server
            return num_received

    with asyncio.Runner(loop_factory=new_loop) as runner:
        assert runner.run(asyncio.wait_for(scenario(), DEADLINE_S)) == 310
