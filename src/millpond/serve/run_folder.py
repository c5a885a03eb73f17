"""The run folder: sockets, keys and the resolved config of one running service (mode 700)."""

from __future__ import annotations

import os
import tempfile
from dataclasses import dataclass
from pathlib import Path

import msgspec

from millpond.config.sections import Config, from_json, to_json
from millpond.core.errors import ConfigError
from millpond.core.ids import GatewayId, GroupId
from millpond.engine.kv_identity import WeightDigests, configured_fingerprint
from millpond.serve.keys import ClusterKeys, load_keys, make_keys, make_private_folder

CONTROLLER_SOCKET = "control.sock"
GATEWAY = GatewayId("gw0")
POOL_FOLDER = "pool"
"""Name of the KV pool's folder within the state folder."""


class PoolAccess(msgspec.Struct, frozen=True):
    """How a client of this service's KV pool finds it."""

    metadata: tuple[str, ...]
    """`host:port` of all metadata shards."""
    token: str
    """Cluster token of the pool."""


@dataclass(frozen=True, slots=True)
class RunFolder:
    """Paths inside the run folder of one service."""

    path: Path

    @property
    def config_file(self) -> Path:
        """The resolved config, as JSON."""
        return self.path / "config.json"

    @property
    def key_file(self) -> Path:
        """Secrets of the cluster, made anew with each start."""
        return self.path / "cluster.keys"

    @property
    def pid_file(self) -> Path:
        """Process id of the supervisor."""
        return self.path / "supervisor.pid"

    @property
    def pool_file(self) -> Path:
        """`PoolAccess` as JSON; absent without a pool."""
        return self.path / "pool.json"

    @property
    def fingerprint_file(self) -> Path:
        """Fingerprint of the model that the service serves."""
        return self.path / "model.fingerprint"

    def reason_file(self, process: str) -> Path:
        """Where a process that cannot start leaves its reason for the supervisor."""
        return self.path / f"{process}.reason"

    def socket(self, name: str) -> str:
        """Endpoint of a host-local ZeroMQ socket."""
        return f"ipc://{self.path / name}"

    def data_socket(self, group: GroupId, rank: int) -> str:
        """Address of a rank's handoff receiver on the same host."""
        return f"unix:{self.path / f'{group}-{rank}.kv'}"

    def token_socket(self) -> str:
        """Endpoint on which the gateway receives tokens."""
        return self.socket("gw0.tokens")

    def group_socket(self, group: GroupId) -> str:
        """Endpoint on which a group's leader waits for its other ranks."""
        return self.socket(f"{group}.ranks")

    def load_config(self) -> Config:
        """Read the config that the supervisor wrote."""
        return from_json(self.config_file.read_bytes())

    def write_pool_access(self, access: PoolAccess) -> None:
        """Tell the processes of this service where its pool is."""
        _write_private(self.pool_file, msgspec.json.encode(access))

    def load_pool_access(self) -> PoolAccess | None:
        """Where the pool is; None if the service has none."""
        try:
            return msgspec.json.decode(self.pool_file.read_bytes(), type=PoolAccess)
        except FileNotFoundError:
            return None

    def load_fingerprint(self) -> bytes:
        """Fingerprint of the model that the service serves, as its files were when it started."""
        return self.fingerprint_file.read_bytes()

    def require_served_model(self, config: Config) -> None:
        """Make sure that what a process loads from the model's files is what the names of the KV say.

        Raises:
            ConfigError: The files have changed since the service started.
            UnknownModel, ModelFormatError: They cannot be used any more.
        """
        if fingerprint_of(config) != self.load_fingerprint():
            raise ConfigError(
                f"the files of model {config.engine.model!r} (config, weights, tokenizer) are not those with"
                " which this service started: KV that was kept under their name would be mixed with other"
                " KV; restart the service to serve the new files, or bring the old ones back",
                param="engine.model",
            )

    def load_keys(self) -> ClusterKeys:
        """Read the cluster's secrets."""
        return load_keys(self.key_file)


def run_path(config: Config) -> Path:
    """Return where the run folder of this config lies."""
    if config.supervise.run_dir:
        return Path(config.supervise.run_dir)
    name = str(config.gateway.port or f"pid{os.getpid()}")
    return Path(tempfile.gettempdir()) / f"millpond-{os.getuid()}-{name}"


def fingerprint_of(config: Config) -> bytes:
    """Fingerprint of the configured model. Reads the files whose digests the state folder does not know.

    Raises:
        UnknownModel: There is no such model.
        ModelFormatError: Its files cannot be used.
    """
    return configured_fingerprint(config.engine, WeightDigests(Path(config.supervise.state_dir)))


def make_run_folder(config: Config) -> RunFolder:
    """Make the folder and fill in config, secrets and the fingerprint of the model.

    Raises:
        ConfigError: A service runs there already, or the folder is not private.
        UnknownModel: There is no such model.
        ModelFormatError: Its files cannot be used.
    """
    fingerprint = fingerprint_of(config)
    path = run_path(config)
    make_private_folder(path)
    folder = RunFolder(path)
    if folder.pid_file.exists():
        pid = int(folder.pid_file.read_text() or 0)
        if pid != os.getpid() and _is_alive(pid):
            raise ConfigError(
                f"a service with process id {pid} already runs in {path}", param="supervise.run_dir"
            )
    for leftover in path.iterdir():
        if leftover.is_file() or leftover.is_socket():
            leftover.unlink()
    _write_private(folder.pid_file, str(os.getpid()).encode())
    make_keys(folder.key_file)
    _write_private(folder.fingerprint_file, fingerprint)
    _write_private(folder.config_file, to_json(config))
    return folder


def control_endpoint(config: Config, folder: RunFolder) -> str:
    """Return where the controller listens."""
    if len(config.hosts) == 1:
        return folder.socket(CONTROLLER_SOCKET)
    return f"tcp://{config.hosts[0].cnic}:{config.supervise.control_port}"


def remove_run_folder(folder: RunFolder) -> None:
    """Remove the folder and what the service put there."""
    for leftover in folder.path.iterdir():
        leftover.unlink()
    folder.path.rmdir()


def _write_private(path: Path, data: bytes) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(data)


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
