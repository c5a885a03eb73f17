"""What would keep a process from starting, found out before any is started. No torch here.

A mistake is then one line of the command line, after a second or two, instead of the end of a child process
that loaded torch and a model first.
"""

from __future__ import annotations

import os
import socket
from dataclasses import replace
from pathlib import Path

from millpond.config.sections import Config
from millpond.config.synthetic_params import SYNTHETIC
from millpond.core.errors import ConfigError
from millpond.core.units import BLOCK_TOKENS
from millpond.engine.check_model import check_model
from millpond.engine.synthetic import check_params


def check_before_start(config: Config, journal: Path | None) -> None:
    """Check the port, the folders and the model of a resolved config; makes the journal's folder.

    Raises:
        ConfigError: A parameter cannot be honoured.
        UnknownModel: There is no such model.
        ModelFormatError: Its files cannot be used.
    """
    _require_free_port(config)
    _require_folders(config, journal)
    _require_memory(config)
    if config.engine.model == SYNTHETIC:
        check_params(config.synthetic)
    else:
        for memory_bytes in {group.kv_memory or config.engine.kv_memory for group in config.groups}:
            check_model(replace(config.engine, kv_memory=memory_bytes))


def _require_free_port(config: Config) -> None:
    host, port = config.gateway.host, config.gateway.port
    try:
        with socket.create_server((host, port), family=_family(host)):
            pass
    except OSError as error:
        raise ConfigError(
            f"cannot listen on {host} port {port}: {error.strerror}; choose another gateway.port",
            param="gateway.port",
        ) from error


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET


def _require_memory(config: Config) -> None:
    """All ranks run on this machine: what they allocate at once must be there at all."""
    synthetic = config.synthetic
    groups = [group for group in config.groups if group.device == "cpu"]
    if config.engine.model == SYNTHETIC:
        block_bytes = 2 * BLOCK_TOKENS * synthetic.kv_bytes_per_token * synthetic.num_layers
        path, value = "synthetic.num_blocks", synthetic.num_blocks
        sizes = [(synthetic.num_blocks + 1) * block_bytes] * sum(group.ranks for group in groups)
    else:
        path, value = "engine.kv_memory", config.engine.kv_memory
        sizes = [config.engine_of(group).kv_memory for group in groups for _ in range(group.ranks)]
    memory_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if sum(sizes) > memory_bytes:
        raise ConfigError(
            f"{path} = {value}: {len(sizes)} ranks with {sum(sizes):,} bytes of KV; this machine has"
            f" {memory_bytes:,}",
            param=path,
        )
    if config.engine.host_kv_memory > memory_bytes:
        raise ConfigError(
            f"engine.host_kv_memory = {config.engine.host_kv_memory}: this machine has {memory_bytes:,}",
            param="engine.host_kv_memory",
        )


def _require_folders(config: Config, journal: Path | None) -> None:
    shm_dir = config.transfer.shm_dir
    if not os.access(shm_dir, os.W_OK | os.X_OK) or not Path(shm_dir).is_dir():
        raise ConfigError(
            f"transfer.shm_dir = {shm_dir!r}: no folder that can be written to", param="transfer.shm_dir"
        )
    if journal is None:
        return
    try:
        journal.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"--journal {journal}: cannot be made: {error.strerror}") from error
