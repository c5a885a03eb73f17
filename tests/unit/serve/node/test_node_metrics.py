"""What a node daemon counts reaches the controller's status and `/metrics`."""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from millpond.control.dispatcher import Dispatcher, DispatchParams
from millpond.core.events import StatusQuery, StatusReport, Telemetry
from millpond.core.ids import GatewayId, GroupId
from millpond.serve.controller import Controller
from millpond.serve.gateway.service_metrics import render_service
from millpond.serve.rpc import Connected, Dealer, Router
from tests.unit.serve.node.rig import Rig, chain, poll, rig


@pytest.fixture
def made(tmp_path: Path) -> Iterator[Rig]:
    with rig(tmp_path) as made:
        yield made


def test_counts_of_a_daemon_are_shown_by_its_name(made: Rig):
    daemon = made.start()
    rank = made.rank(daemon)
    rank.put(chain(3))
    poll(lambda: daemon.daemon.counts.puts == 3, "puts")
    assert rank.read(3) == 3
    values = daemon.daemon.counts.values(daemon.memory)
    report = status_after(made, Telemetry(GroupId("node-h0"), 7, os.getpid(), tuple(sorted(values.items()))))
    assert json.loads(report)["nodes"]["node-h0"]["pid"] == os.getpid()
    text = render_service(report, GatewayId("gw0"), 0).decode()
    assert 'millpond_node_puts_total{group="node-h0",source=""} 3.0' in text
    assert 'millpond_node_blocks_loaded_total{group="node-h0",source="memory"} 3.0' in text
    assert 'millpond_node_pool_open{group="node-h0",source=""}' in text


def status_after(made: Rig, telemetry: Telemetry) -> str:
    """What the controller says of the service once it has this."""
    with Router(made.network, f"ipc://{made.folder / 'control.sock'}") as router:
        dispatcher = Dispatcher(DispatchParams(), frozenset({GroupId("p0")}), time.monotonic_ns())
        is_over = threading.Event()
        thread = threading.Thread(target=Controller(dispatcher, router, 1).run, args=(is_over.is_set,))
        thread.start()
        try:
            with Dealer(made.network, router.endpoint, "node-h0") as dealer:
                poll(lambda: isinstance(dealer.recv(), Connected), "a connection")
                assert dealer.send(telemetry)
                assert dealer.send(StatusQuery(1))
                received: list[object] = []
                poll(lambda: received.append(dealer.recv()) or received[-1] is not None, "a report")
                assert isinstance(received[-1], StatusReport)
                return received[-1].json_text
        finally:
            is_over.set()
            thread.join()
