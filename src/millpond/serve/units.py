"""What the supervisor starts: which processes there are, which of them live together, and their cores."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import IntEnum
from pathlib import Path

from millpond.config.sections import Config
from millpond.serve.process import ProcessSpec


class Stage(IntEnum):
    """Order in which units are told to stop; each has ended before the next one is told."""

    GATEWAY = 0
    """Lets its streams end."""
    WORKERS = 1
    """Groups and controller."""
    NODE = 2
    """Node daemons: write to the pool what waits in memory."""
    POOL = 3
    """Storage nodes and metadata: seal and sync."""


@dataclass(slots=True)
class Unit:
    """Processes that live and die together: all ranks of a group, or a single process of another role."""

    name: str
    stage: Stage
    make_specs: Callable[[int], list[ProcessSpec]]
    cores: list[frozenset[int] | None] = field(default_factory=lambda: [None])
    """Per process, the cores it is pinned to."""
    threads: int = 1
    is_group: bool = False
    incarnation: int = 0
    processes: list[subprocess.Popen[bytes]] = field(default_factory=list[subprocess.Popen[bytes]])
    pidfds: list[int] = field(default_factory=list[int])
    started_ns: int = 0
    restart_at_ns: int | None = None
    delay_s: float = 0.0
    num_restarts: int = 0

    def poll_items(self) -> tuple[int, ...]:
        """What `wait_any` watches: a pidfd becomes readable when its process ends."""
        return tuple(self.pidfds)


def make_units(config: Config, run_dir: Path, journal: Path | None) -> list[Unit]:
    """All units of a service, in the order in which they are started."""

    def single(role: str, stage: Stage, name: str = "") -> Unit:
        def specs(incarnation: int) -> list[ProcessSpec]:
            return [ProcessSpec(role, run_dir, incarnation, name, journal=journal)]

        return Unit(specs(0)[0].name, stage, specs)

    def ranks(group: str, num_ranks: int) -> Callable[[int], list[ProcessSpec]]:
        return lambda incarnation: [
            ProcessSpec("rank", run_dir, incarnation, group, rank, journal) for rank in range(num_ranks)
        ]

    pool: list[Unit] = []
    if config.pool.enabled:
        pool += [single("metadata", Stage.POOL, f"m{i}") for i in range(config.pool.metadata_shards)]
        pool += [single("storage", Stage.POOL, node.name) for node in config.storage]
        pool += [single("node", Stage.NODE, host) for host in hosts_of_ranks(config)]
    cores = assign_cores(config)
    return [
        *pool,
        single("controller", Stage.WORKERS),
        single("gateway", Stage.GATEWAY),
        *(
            Unit(
                group.name,
                Stage.WORKERS,
                ranks(group.name, group.ranks),
                cores[group.name],
                group.threads_per_rank,
                is_group=True,
            )
            for group in config.groups
        ),
    ]


def hosts_of_ranks(config: Config) -> list[str]:
    """Hosts on which engines run, in the order of the config: each has a node daemon."""
    busy = {group.hosts[rank % len(group.hosts)] for group in config.groups for rank in range(group.ranks)}
    return [host.name for host in config.hosts if host.name in busy]


def assign_cores(config: Config) -> dict[str, list[frozenset[int] | None]]:
    """Give each engine process cores of its own, if there are enough for all of them."""
    available = sorted(os.sched_getaffinity(0))
    wanted = sum(group.ranks * group.threads_per_rank for group in config.groups)
    assigned: dict[str, list[frozenset[int] | None]] = {}
    for group in config.groups:
        assigned[group.name] = []
        for _ in range(group.ranks):
            if not config.supervise.pin_cores or wanted > len(os.sched_getaffinity(0)):
                assigned[group.name].append(None)
                continue
            assigned[group.name].append(frozenset(available[: group.threads_per_rank]))
            available = available[group.threads_per_rank :]
    return assigned
