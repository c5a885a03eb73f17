"""`ArenaFile`: where a node daemon's arena lies, and what dead daemons have left there."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

from millpond.core.errors import ConfigError

_PREFIX = "millpond-node-"


class ArenaFile:
    """A path for an arena. A lock beside it says that its daemon lives; the kernel drops it with the process.

    What is left of daemons that were killed is removed.

    Args:
        folder: In shared memory; may be used by other services.
        name: Of this service and host.

    Raises:
        ConfigError: Such a daemon runs already, or the folder cannot be used.
    """

    def __init__(self, folder: Path, name: str) -> None:
        self.path = folder / f"{_PREFIX}{os.getuid()}-{name}.arena"
        try:
            file = _lock(self.path)
            for leftover in folder.glob(f"{_PREFIX}{os.getuid()}-*.arena"):
                if leftover != self.path:
                    _remove_dead(leftover)
        except OSError as error:
            raise ConfigError(
                f"no shared memory in {folder}: {error.strerror}", param="transfer.shm_dir"
            ) from error
        if file is None:
            raise ConfigError(f"a node daemon uses {self.path} already")
        self._file = file

    def close(self) -> None:
        """Remove the arena, if it is still there, and the lock."""
        self.path.unlink(missing_ok=True)
        _lock_path(self.path).unlink(missing_ok=True)
        os.close(self._file)


def _lock_path(path: Path) -> Path:
    return path.with_suffix(".lock")


def _lock(path: Path) -> int | None:
    """A descriptor of the lock; None if another process has it."""
    while True:
        file = os.open(_lock_path(path), os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(file)
            return None
        if _is_at(file, _lock_path(path)):
            return file
        os.close(file)  # who had it has removed it since we opened it: others lock another one


def _is_at(file: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(file), os.lstat(path))
    except FileNotFoundError:
        return False


def _remove_dead(path: Path) -> None:
    file = _lock(path)
    if file is None:
        return
    path.unlink(missing_ok=True)
    _lock_path(path).unlink(missing_ok=True)
    os.close(file)
