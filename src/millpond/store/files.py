"""`Files`: one folder of flat files, as a storage target uses it.

The edge to the operating system, and the place where tests put a disk that fails, tears writes or loses
what was not synced.
"""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol, TypeAlias

Bytes: TypeAlias = bytes | bytearray | memoryview


class Files(Protocol):
    """A folder. Every method but `close` may raise OSError. Files are named by the number of an open file."""

    def names(self) -> list[str]:
        """Names of all files, in any order."""
        ...

    def create(self, name: str) -> int:
        """Create and open a file that does not exist."""
        ...

    def open(self, name: str) -> int:
        """Open an existing file, for reading and writing if possible."""
        ...

    def write(self, file: int, offset: int, views: Sequence[Bytes]) -> None:
        """Write all `views`, one after the other, at `offset`."""
        ...

    def read_into(self, file: int, offset: int, view: memoryview) -> int:
        """Fill `view` from `offset`; bytes read, less than asked at the end of the file."""
        ...

    def size(self, file: int) -> int:
        """Bytes of the file."""
        ...

    def truncate(self, file: int, num_bytes: int) -> None:
        """Cut the file."""
        ...

    def sync(self, file: int) -> None:
        """Make the content durable. After an error nothing is known about it; never try again."""
        ...

    def sync_names(self) -> None:
        """Make created and removed names durable."""
        ...

    def rename(self, name: str, new_name: str) -> None:
        """Give a file another name; one that has it already is replaced."""
        ...

    def remove(self, name: str) -> None:
        """Remove a name; open files stay readable."""
        ...

    def close(self, file: int) -> None:
        """Close an open file."""
        ...


class DiskFiles:
    """A folder of the file system.

    Args:
        path: The folder.
        create: Make it if it is missing.

    Raises:
        OSError: It cannot be opened.
    """

    def __init__(self, path: Path, *, create: bool = True) -> None:
        if create:
            path.mkdir(parents=True, exist_ok=True)
        self._folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY)

    def claim(self) -> None:
        """Be the only one who writes here, until this process ends.

        Raises:
            BlockingIOError: Another process, or another part of this one, is.
            OSError: The file system cannot tell.
        """
        fcntl.flock(self._folder, fcntl.LOCK_EX | fcntl.LOCK_NB)

    def names(self) -> list[str]:
        """See `Files`."""
        return os.listdir(self._folder)

    def create(self, name: str) -> int:
        """See `Files`."""
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        return os.open(name, flags, 0o600, dir_fd=self._folder)

    def open(self, name: str) -> int:
        """See `Files`."""
        try:
            return os.open(name, os.O_RDWR | os.O_CLOEXEC, dir_fd=self._folder)
        except OSError as error:
            if not isinstance(error, PermissionError) and error.errno != errno.EROFS:
                raise
        return os.open(name, os.O_RDONLY | os.O_CLOEXEC, dir_fd=self._folder)

    def write(self, file: int, offset: int, views: Sequence[Bytes]) -> None:
        """See `Files`."""
        left = [memoryview(view) for view in views]
        while left:
            written = os.pwritev(file, left, offset)
            offset += written
            while left and written >= left[0].nbytes:
                written -= left.pop(0).nbytes
            if written:
                left[0] = left[0][written:]

    def read_into(self, file: int, offset: int, view: memoryview) -> int:
        """See `Files`."""
        done = 0
        while done < view.nbytes:
            got = os.preadv(file, [view[done:]], offset + done)
            if not got:
                break
            done += got
        return done

    def size(self, file: int) -> int:
        """See `Files`."""
        return os.fstat(file).st_size

    def truncate(self, file: int, num_bytes: int) -> None:
        """See `Files`."""
        os.ftruncate(file, num_bytes)

    def sync(self, file: int) -> None:
        """See `Files`."""
        os.fdatasync(file)

    def sync_names(self) -> None:
        """See `Files`."""
        os.fsync(self._folder)

    def rename(self, name: str, new_name: str) -> None:
        """See `Files`."""
        os.rename(name, new_name, src_dir_fd=self._folder, dst_dir_fd=self._folder)

    def remove(self, name: str) -> None:
        """See `Files`."""
        os.unlink(name, dir_fd=self._folder)

    def close(self, file: int) -> None:
        """See `Files`."""
        os.close(file)

    def close_folder(self) -> None:
        """Give the folder back; open files stay open."""
        os.close(self._folder)


class CachedFiles(DiskFiles):
    """The same, but reads take what the system has in memory and never wait for a drive."""

    def read_into(self, file: int, offset: int, view: memoryview) -> int:
        """See `Files`.

        Raises:
            BlockingIOError: Some of it is not in memory, or this file system cannot tell.
        """
        done = 0
        while done < view.nbytes:
            try:
                got = os.preadv(file, [view[done:]], offset + done, os.RWF_NOWAIT)
            except OSError as error:
                if error.errno != errno.EOPNOTSUPP:
                    raise
                raise BlockingIOError(errno.EAGAIN, "cannot tell what is in memory") from error
            if not got:
                break
            done += got
        return done
