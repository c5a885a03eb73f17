"""`millpond serve`: run the whole service on this host until it is told to stop."""

from __future__ import annotations

import signal
import socket
import threading
from collections.abc import Callable
from pathlib import Path

import httpx

from millpond.config.sections import Config
from millpond.config.synthetic_params import SYNTHETIC
from millpond.core.errors import ConfigError
from millpond.engine.model_files import locate_model
from millpond.serve.logs import configure_logging
from millpond.serve.run_folder import make_run_folder, remove_run_folder
from millpond.serve.supervisor import Supervisor

READY_POLL_S = 0.25


def serve(config: Config, journal: Path | None, on_ready: Callable[[str], None]) -> None:
    """Run the service. Returns after SIGTERM or SIGINT, when everything is drained.

    Args:
        config: Resolved configuration.
        journal: Folder in which every deciding object records its events and plans.
        on_ready: Called once, from another thread, with the URL when requests are answered.

    Raises:
        ConfigError: The run folder or a port cannot be used.
        UnknownModel: There is no such model.
    """
    configure_logging(process="supervisor")
    stopping = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stopping.set())
    if journal is not None:
        journal.mkdir(parents=True, exist_ok=True)
    _require_free_port(config)
    if config.engine.model != SYNTHETIC:
        locate_model(config.engine.model)
    folder = make_run_folder(config)
    try:
        supervisor = Supervisor(config, folder, journal)
        url = f"http://{config.gateway.host}:{config.gateway.port}"
        watcher = threading.Thread(target=_wait_ready, args=(url, stopping, on_ready), daemon=True)
        supervisor.run(stopping.is_set, watcher.start)
        watcher.join()
    finally:
        remove_run_folder(folder)


def _require_free_port(config: Config) -> None:
    """Fail now, by name, rather than in a child process."""
    host, port = config.gateway.host, config.gateway.port
    try:
        with socket.create_server((host, port)):
            pass
    except OSError as error:
        raise ConfigError(
            f"cannot listen on {host} port {port}: {error.strerror}", param="gateway.port"
        ) from error


def _wait_ready(url: str, stopping: threading.Event, on_ready: Callable[[str], None]) -> None:
    with httpx.Client(timeout=5.0) as client:
        while not stopping.wait(READY_POLL_S):
            try:
                if client.get(f"{url}/ready").status_code == httpx.codes.OK:
                    on_ready(url)
                    return
            except httpx.TransportError:
                continue  # not listening yet
