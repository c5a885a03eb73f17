"""What `millpond metadata` runs: one metadata shard, from start to a clean end."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import structlog

from millpond.core.errors import ConfigError, InvariantBroken, MillpondError
from millpond.core.pool_map import PoolMap
from millpond.store.clock import SystemClock
from millpond.store.files import DiskFiles
from millpond.store.index import warm_up
from millpond.store.metadata.server import MetadataServer, MetadataServerParams
from millpond.store.signals import block_stop_signals, stop_asked

log = structlog.get_logger(__name__)

LOOK_S = 1.0
EXIT_HUNG = 3
"""Exit status if the disk did not take the last checkpoint in time."""


@dataclass(frozen=True, slots=True)
class MetadataSpec:
    """What the command line says."""

    name: str
    listen: str
    data: Path
    token: str = ""
    address: str = ""
    """Under which the pool map names the shard; empty: where it listens."""
    map_file: Path | None = None
    """JSON; counts if it is newer than the map that was saved."""
    params: MetadataServerParams = field(default_factory=MetadataServerParams)
    stop_s: float = 20.0


def run_metadata(spec: MetadataSpec) -> None:
    """Serve until SIGTERM or SIGINT, then write a checkpoint and return. Prints the address once it serves.

    Raises:
        ConfigError: No such map or folder, the folder is in use, or the address is taken.
        InvariantBroken: A thread ended by a bug.
    """
    block_stop_signals()
    given = read_map_file(spec.map_file) if spec.map_file is not None else None
    try:
        files = DiskFiles(spec.data)
        files.claim()
        warm_up()
        server = MetadataServer(
            files,
            spec.listen,
            advertised=spec.address,
            name=spec.name,
            token=spec.token,
            clock=SystemClock(),
            params=spec.params,
        )
        if given is not None:
            server.take_map(given)
    except OSError as error:
        raise ConfigError(f"folder {spec.data}: {error.strerror}", param="data") from error
    except MillpondError as error:
        raise ConfigError(error.message) from error
    server.start()
    log.info("metadata.up", shard=spec.name, address=server.address, num_extents=server.status().num_extents)
    sys.stdout.write(server.address + "\n")
    sys.stdout.flush()
    while not server.wait(0) and not stop_asked(LOOK_S):
        pass
    if not server.stop(spec.stop_s):
        log.error("metadata.hung", shard=spec.name, deadline_s=spec.stop_s)
        os._exit(EXIT_HUNG)  # some thread waits in the kernel: nothing else ends it
    if server.failure is not None:
        raise InvariantBroken("a thread of the metadata shard ended") from server.failure
    log.info("metadata.down", shard=spec.name)


def read_map_file(path: Path) -> PoolMap:
    """A pool map in JSON.

    Raises:
        ConfigError: The file cannot be read, or is none.
    """
    try:
        return msgspec.json.decode(path.read_bytes(), type=PoolMap)
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}", param="map") from error
    except msgspec.DecodeError as error:
        raise ConfigError(f"{path} is no pool map: {error}", param="map") from error


def write_map_file(path: Path, pool_map: PoolMap) -> None:
    """Write what `read_map_file` reads."""
    path.write_bytes(msgspec.json.format(msgspec.json.encode(pool_map)))
