"""Asks a running service for its status: the controller, and the processes of the KV pool."""

from __future__ import annotations

import json
import os
import time
from typing import Any

import msgspec

from millpond.config.sections import Config
from millpond.core.errors import DeadlineExceeded, MillpondError
from millpond.core.events import StatusQuery, StatusReport
from millpond.core.units import SECOND_NS
from millpond.serve.network import Network
from millpond.serve.rpc import Dealer, wait_any
from millpond.serve.run_folder import RunFolder, control_endpoint, run_path
from millpond.store.net.messages import MetadataStatus, NodeStatus
from millpond.store.pool_admin import PoolAdmin

ASK_AGAIN_S = 1.0


def fetch_status(config: Config, deadline_s: float = 5.0) -> dict[str, Any]:
    """Return the controller's status: `controller`, `gateways`, `groups`, `queue`.

    Raises:
        ConfigError: No service runs in the config's run folder.
        DeadlineExceeded: Its controller does not answer.
    """
    folder = RunFolder(run_path(config))
    until_ns = time.monotonic_ns() + int(deadline_s * SECOND_NS)
    with (
        Network(folder.load_keys()) as network,
        Dealer(network, control_endpoint(config, folder), f"status-{os.getpid()}") as controller,
    ):
        while (left_ns := until_ns - time.monotonic_ns()) > 0:
            controller.send(StatusQuery(query_id=1))  # again each round: before the connection it is not kept
            wait_any((controller,), min(left_ns / SECOND_NS, ASK_AGAIN_S))
            while (message := controller.recv()) is not None:
                if isinstance(message, StatusReport):
                    return json.loads(message.json_text)
    raise DeadlineExceeded(f"the controller did not answer within {deadline_s:g} s", code="status.deadline")


def fetch_pool_status(config: Config) -> dict[str, Any] | None:
    """Return the state of the pool's processes: `is_healthy`, `nodes`, `metadata`; None without a pool.

    A process that does not answer is described by its `error`.
    """
    access = RunFolder(run_path(config)).load_pool_access()
    if access is None:
        return None
    try:
        with PoolAdmin(access.metadata, access.token) as admin:
            found = admin.status()
    except MillpondError as error:
        return {"is_healthy": False, "error": error.message, "nodes": {}, "metadata": {}}
    return {
        "is_healthy": found.is_healthy,
        "nodes": {name: _state(state) for name, state in found.nodes.items()},
        "metadata": {address: _state(state) for address, state in found.metadata.items()},
    }


def _state(state: NodeStatus | MetadataStatus | MillpondError) -> dict[str, Any]:
    if isinstance(state, MillpondError):
        return {"error": state.message}
    return msgspec.structs.asdict(state)
