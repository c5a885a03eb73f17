"""What the process of a node daemon runs, from the run folder alone."""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Callable
from pathlib import Path

import structlog

from millpond.config.pool_params import GroupKind
from millpond.config.sections import Config
from millpond.core.events import Telemetry
from millpond.core.ids import GroupId
from millpond.core.units import SECOND_NS
from millpond.engine.kv_identity import configured_layout
from millpond.serve.node.daemon import NodeDaemon
from millpond.serve.node.host_memory import HostMemory, NodeSetup
from millpond.serve.rpc import Dealer, Network, Router
from millpond.serve.run_folder import RunFolder, control_endpoint

EXIT_HUNG = 3
"""Exit status if some thread did not end in time."""
TELEMETRY_NS = SECOND_NS

log = structlog.get_logger(__name__)


def node_name(host: str) -> str:
    """How a host's daemon is called in status and metrics."""
    return f"node-{host}"


def run_node(
    config: Config, folder: RunFolder, host: str, incarnation: int, is_stopping: Callable[[], bool]
) -> None:
    """Be the node daemon of one host until `is_stopping`; then write what waits, for a few seconds at most.

    Raises:
        ConfigError: The memory cannot be had, an address cannot be bound, or there is no such host.
        InvariantBroken: A law does not hold, or a thread ended by a bug.
    """
    memory = HostMemory(make_setup(config, folder, host, incarnation))
    is_over = False
    try:
        with (
            Network(folder.load_keys()) as network,
            Router(network, folder.socket(node_name(host))) as router,
            Dealer(network, control_endpoint(config, folder), node_name(host)) as controller,
        ):
            daemon = NodeDaemon(memory, router, config.node)
            reporter = _Reporter(daemon, memory, controller, host, incarnation)
            log.info("node.up", host=host, num_slots=memory.arena.num_slots)
            daemon.run(is_stopping, reporter.report)
            is_over = daemon.stop()
    finally:
        is_over &= memory.close(config.node.flush_s)
    if not is_over:
        log.error("node.hung", host=host)
        os._exit(EXIT_HUNG)  # some thread waits for another process: nothing else ends it
    log.info("node.down", host=host)


def make_setup(config: Config, folder: RunFolder, host: str, incarnation: int) -> NodeSetup:
    """What the daemon of a host is to be.

    Raises:
        ConfigError: There is no such host.
        UnknownModel, ModelFormatError: The model's config cannot be used.
    """
    spec = config.host(host)
    access = folder.load_pool_access()
    home = ""
    if config.pool.groups is GroupKind.HOST:
        home = next((node.name for node in config.storage if node.host == host), "")
    snapshot_host = spec.cnic if config.node.snapshot_network == "cnic" else spec.snic
    return NodeSetup(
        host=host,
        epoch=incarnation,
        layout=configured_layout(config.engine, config.synthetic),
        arena_folder=Path(config.transfer.shm_dir),
        arena_name=f"{_short_digest(folder.path)}-{host}",
        arena_bytes=spec.arena + spec.dram,
        snapshot_bytes=int(spec.dram * config.node.snapshot_ratio),
        metadata=access.metadata if access is not None else (),
        token=access.token if access is not None else "",
        home=home,
        block_address=f"{spec.cnic}:0",
        snapshot_address=f"{snapshot_host}:0",
        params=config.node,
    )


def _short_digest(path: Path) -> str:
    """Tells run folders of one machine apart, all of whose arenas lie in one folder."""
    return hashlib.sha256(str(path.resolve()).encode()).hexdigest()[:16]


class _Reporter:
    """Sends the daemon's counts to the controller once a second."""

    def __init__(
        self, daemon: NodeDaemon, memory: HostMemory, controller: Dealer, host: str, incarnation: int
    ) -> None:
        self._daemon = daemon
        self._memory = memory
        self._controller = controller
        self._group = GroupId(node_name(host))
        self._incarnation = incarnation
        self._last_ns = 0

    def report(self) -> None:
        while self._controller.recv() is not None:
            pass  # the controller has nothing to say to us
        now_ns = time.monotonic_ns()
        if now_ns - self._last_ns < TELEMETRY_NS:
            return
        self._last_ns = now_ns
        values = tuple(sorted(self._daemon.counts.values(self._memory).items()))
        self._controller.send(Telemetry(self._group, self._incarnation, os.getpid(), values))
