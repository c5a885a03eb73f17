"""Asks a running service's controller for its status."""

from __future__ import annotations

import json
import os
import time
from typing import Any

from millpond.config.sections import Config
from millpond.core.errors import DeadlineExceeded
from millpond.core.events import StatusQuery, StatusReport
from millpond.core.units import SECOND_NS
from millpond.serve.network import Network
from millpond.serve.rpc import Dealer, wait_any
from millpond.serve.run_folder import RunFolder, control_endpoint, run_path

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
