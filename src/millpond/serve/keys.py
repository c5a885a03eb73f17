"""Who belongs to the cluster: the file of secrets, and the folder that only this user can enter.

Sockets on one host live in a private folder (mode 700), so reaching one proves to be this user. Sockets
on TCP prove membership with the cluster's keys, which the supervisor makes once in a mode-600 file.
"""

from __future__ import annotations

import json
import os
import secrets
import socket
import stat
from dataclasses import asdict, dataclass, field
from pathlib import Path

import zmq
from zmq.utils import z85

from millpond.core.errors import ConfigError

TOKEN_BYTES = 32
MAX_KEY_FILE_BYTES = 4096
MAX_SOCKET_PATH_BYTES = 107
"""sockaddr_un holds 108 bytes with the closing zero."""
PROBE_S = 1.0


@dataclass(frozen=True, slots=True)
class ClusterKeys:
    """Secrets that every process of one cluster holds."""

    server_public: str
    """CURVE key of binding sockets, Z85."""
    server_secret: str = field(repr=False)
    client_public: str
    """CURVE key of connecting sockets, Z85; the only one that binding sockets admit."""
    client_secret: str = field(repr=False)
    handoff_token: bytes = field(repr=False)
    """Proves membership on the data plane, 32 bytes."""


def make_keys(path: Path) -> ClusterKeys:
    """Load the keys at `path`, making them first if there is no such file.

    Two processes that race get the same keys.

    Raises:
        ConfigError: The file cannot be used; see `load_keys`.
    """
    if not path.exists():
        server_public, server_secret = zmq.curve_keypair()
        client_public, client_secret = zmq.curve_keypair()
        keys = ClusterKeys(
            server_public=server_public.decode(),
            server_secret=server_secret.decode(),
            client_public=client_public.decode(),
            client_secret=client_secret.decode(),
            handoff_token=secrets.token_bytes(TOKEN_BYTES),
        )
        text = json.dumps({**asdict(keys), "handoff_token": keys.handoff_token.hex()}, indent=1)
        draft = path.with_name(f"{path.name}.{os.getpid()}.{secrets.token_hex(4)}")
        descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "w") as file:
            file.write(text)
        try:
            os.link(draft, path)  # unlike rename, it never replaces the file of a faster process
        except FileExistsError:
            pass
        finally:
            draft.unlink()
    return load_keys(path)


def load_keys(path: Path) -> ClusterKeys:
    """Read the cluster's keys.

    Raises:
        ConfigError: No such file, not ours, readable by others, or not a key file.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
    except OSError as error:
        raise ConfigError(f"cannot read the key file {path}: {error.strerror}") from error
    with os.fdopen(descriptor, "rb") as file:
        status = os.fstat(file.fileno())
        if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid() or status.st_mode & 0o077:
            raise ConfigError(
                f"key file {path} has mode {status.st_mode & 0o777:o} and owner {status.st_uid}; "
                f"it must be a plain file of mode 600 owned by {os.geteuid()} (chmod 600)"
            )
        data = file.read(MAX_KEY_FILE_BYTES)
    try:
        raw = json.loads(data)
        keys = ClusterKeys(**{**raw, "handoff_token": bytes.fromhex(raw["handoff_token"])})
        for key in (keys.server_public, keys.server_secret, keys.client_public, keys.client_secret):
            if len(z85.decode(key)) != TOKEN_BYTES:
                raise ValueError("wrong key length")
        if len(keys.handoff_token) != TOKEN_BYTES:
            raise ValueError("wrong token length")
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise ConfigError(f"{path} is not a key file; remove it to have a new one made") from error
    return keys


def make_private_folder(path: Path) -> None:
    """Make `path` (and its parents) unless it exists; then `check_private_folder`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.mkdir(mode=0o700, exist_ok=True)
    check_private_folder(path)


def check_private_folder(path: Path) -> None:
    """Refuse a folder that another user could enter.

    Raises:
        ConfigError: Missing, not a folder, not ours, or of a mode other than 700.
    """
    try:
        status = path.lstat()
    except OSError as error:
        raise ConfigError(f"cannot use the folder {path}: {error.strerror}") from error
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid() or status.st_mode & 0o077:
        raise ConfigError(
            f"{path} has mode {status.st_mode & 0o777:o} and owner {status.st_uid}; "
            f"it must be a folder of mode 700 owned by {os.geteuid()} (chmod 700)"
        )


def check_socket_path(path: Path) -> None:
    """Refuse a socket that does not lie in a private folder, or whose path is too long for one.

    Raises:
        ConfigError: Naming the path.
    """
    if len(os.fsencode(path)) > MAX_SOCKET_PATH_BYTES:
        raise ConfigError(f"{path} is longer than {MAX_SOCKET_PATH_BYTES} bytes; choose a shorter run folder")
    check_private_folder(path.parent)


def claim_socket_path(path: Path) -> None:
    """Make `path` free for binding: remove the socket file of a dead process, respect a live one's.

    Raises:
        ConfigError: A live process listens there, or `check_socket_path` fails.
    """
    check_socket_path(path)
    with socket.socket(socket.AF_UNIX) as probe:
        probe.settimeout(PROBE_S)
        try:
            probe.connect(str(path))
        except FileNotFoundError:
            return
        except ConnectionRefusedError:
            path.unlink(missing_ok=True)
            return
        except OSError as error:
            raise ConfigError(f"cannot listen on {path}: {error.strerror or error}") from error
    raise ConfigError(f"cannot listen on {path}: another process listens there")
