"""`millpond serve`: run the whole service on this host until it is told to stop."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import httpx

from millpond.config.sections import Config
from millpond.serve.logs import configure_logging
from millpond.serve.pool_processes import pool_folder, prepare_pool
from millpond.serve.run_folder import make_run_folder, remove_run_folder
from millpond.serve.supervisor import Supervisor

READY_POLL_S = 0.25


def serve(config: Config, journal: Path | None, on_ready: Callable[[str], None]) -> None:
    """Run the service. Returns after SIGTERM or SIGINT, when everything is drained.

    Args:
        config: Resolved configuration, checked by `check_before_start`.
        journal: Folder in which every deciding object records its events and plans.
        on_ready: Called once, from another thread, with the URL when requests are answered.

    Raises:
        ConfigError: The run folder cannot be used, or a process cannot start.
    """
    configure_logging(process="supervisor")
    stopping = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stopping.set())
    with ExitStack() as stack:
        if config.pool.enabled:
            stack.enter_context(pool_folder(config).claimed())
        folder = make_run_folder(config)
        stack.callback(remove_run_folder, folder)
        if config.pool.enabled:
            prepare_pool(config, folder)
        supervisor = Supervisor(config, folder, journal)
        url = f"http://{config.gateway.host}:{config.gateway.port}"
        watcher = threading.Thread(target=_wait_ready, args=(url, stopping, on_ready), daemon=True)
        supervisor.run(stopping.is_set, watcher.start)
        watcher.join()


def _wait_ready(url: str, stopping: threading.Event, on_ready: Callable[[str], None]) -> None:
    with httpx.Client(timeout=5.0) as client:
        while not stopping.wait(READY_POLL_S):
            try:
                if client.get(f"{url}/ready").status_code == httpx.codes.OK:
                    on_ready(url)
                    return
            except httpx.TransportError:
                continue  # not listening yet
