"""What `millpond storage-node` runs: targets, node and server, from start to a clean end."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import structlog

from millpond.config.sizes import parse_size
from millpond.core.errors import ConfigError, InvariantBroken
from millpond.policies.retention import HOUR_S, RetentionParams
from millpond.store.clock import SystemClock
from millpond.store.files import DiskFiles
from millpond.store.net.peer import ServerParams
from millpond.store.net.server import NodeServer
from millpond.store.node import MAX_TARGETS, Calendar, StorageNode
from millpond.store.signals import block_stop_signals, stop_asked
from millpond.store.target import Target, TargetParams
from millpond.store.wear import DriveSpec, WearBudget

log = structlog.get_logger(__name__)

LOOK_S = 1.0
"""How often a failed thread is looked for."""
EXIT_HUNG = 3
"""Exit status if a drive did not take what had to be sealed."""
WRITE_AMPLIFICATION = 1.05
"""Of a drive under whole-segment writes and removals (kvstore 1.8)."""


@dataclass(frozen=True, slots=True)
class TargetSpec:
    """One folder."""

    path: Path
    capacity_bytes: int

    @classmethod
    def parse(cls, text: str, default_capacity: str) -> Self:
        """Read `DIR` or `DIR:SIZE`.

        Raises:
            ConfigError: The size is none.
        """
        path, colon, size = text.rpartition(":")
        if not colon:
            path, size = text, default_capacity
        try:
            return cls(Path(path), parse_size(size))
        except ValueError as error:
            raise ConfigError(f"target {text!r}: {error}", param="target") from error


@dataclass(frozen=True, slots=True)
class DaemonSpec:
    """What the command line says."""

    name: str
    listen: str
    token: str
    targets: tuple[TargetSpec, ...]
    ttl_s: int = 24 * HOUR_S
    dwpd: float = 0.0
    """0: writes are not limited."""
    stop_s: float = 20.0


def run_storage_node(params: DaemonSpec) -> None:
    """Serve until SIGTERM or SIGINT, then seal and return. Prints the address once it serves.

    Raises:
        ConfigError: No targets, too many, or the address is taken.
        InvariantBroken: A thread ended by a bug.
    """
    if not 0 < len(params.targets) <= MAX_TARGETS:
        raise ConfigError(f"a node has 1 to {MAX_TARGETS} targets, not {len(params.targets)}", param="target")
    block_stop_signals()
    clock = SystemClock()
    node = _make_node(params, Calendar(clock))
    server = NodeServer(node, params.listen, token=params.token, boot=clock.unix_s(), params=ServerParams())
    server.start()
    log.info("node.up", node=node.name, address=server.address, num_shards=server.status().num_shards)
    sys.stdout.write(server.address + "\n")
    sys.stdout.flush()
    while not server.wait(0) and not stop_asked(LOOK_S):
        pass
    if not server.stop(params.stop_s):
        log.error("node.hung", node=node.name, deadline_s=params.stop_s)
        os._exit(EXIT_HUNG)  # its threads wait in the kernel: nothing else ends them
    if server.failure is not None:
        raise InvariantBroken("a thread of the node ended") from server.failure
    log.info("node.down", node=node.name)


def _make_node(params: DaemonSpec, calendar: Calendar) -> StorageNode:
    retention = RetentionParams(ttl_s=params.ttl_s)
    targets: list[Target] = []
    for spec in params.targets:
        try:
            files = DiskFiles(spec.path)
            files.claim()
        except BlockingIOError as error:
            raise ConfigError(f"target {spec.path} is in use by another node", param="target") from error
        except OSError as error:
            raise ConfigError(f"target {spec.path}: {error.strerror}", param="target") from error
        target_params = TargetParams(capacity_bytes=spec.capacity_bytes, retention=retention)
        targets.append(Target(files, target_params, now_s=calendar.now_s()))
    capacity_bytes = sum(spec.capacity_bytes for spec in params.targets)
    budget = None
    if params.dwpd:
        per_day = DriveSpec(capacity_bytes, params.dwpd).budget_bytes_per_day(WRITE_AMPLIFICATION)
        budget = WearBudget(per_day, calendar.now_s())
    return StorageNode(params.name, targets, calendar=calendar, budget=budget)
