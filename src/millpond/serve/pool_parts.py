"""What a storage node and a metadata shard of the service run, from config and state folder alone."""

from __future__ import annotations

from pathlib import Path

from millpond.config.sections import Config
from millpond.serve.run_folder import POOL_FOLDER
from millpond.store.pool_folder import PoolFolder


def run_storage(config: Config, name: str) -> None:
    """Be one storage node until SIGTERM.

    Raises:
        ConfigError: As `run_storage_node`.
    """
    from millpond.store.net.daemon import DaemonSpec, run_storage_node  # noqa: PLC0415 - each process loads its own

    home = _folder(config)
    spec = next(node for node in config.storage if node.name == name)
    address = home.addresses()[name]
    run_storage_node(
        DaemonSpec(name, address, home.token(), home.targets(spec), stop_s=config.supervise.pool_stop_s)
    )


def run_shard(config: Config, name: str) -> None:
    """Be one metadata shard until SIGTERM.

    Raises:
        ConfigError: As `run_metadata`.
    """
    from millpond.store.metadata.daemon import MetadataSpec, run_metadata  # noqa: PLC0415 - each process loads its own

    home = _folder(config)
    run_metadata(
        MetadataSpec(
            name,
            home.addresses()[name],
            home.data(name),
            home.token(),
            map_file=home.map_file,
            stop_s=config.supervise.pool_stop_s,
        )
    )


def _folder(config: Config) -> PoolFolder:
    return PoolFolder(Path(config.supervise.state_dir) / POOL_FOLDER)
