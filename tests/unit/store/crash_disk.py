"""A disk in memory that keeps what a crash may do: unsynced pages are lost, kept or torn, in any combination.

A page that was written since its file's last sync may hold, after a crash, any version it had since, whole or
as a prefix of sectors over the version before. Names that were made or removed since the last sync of the
folder may or may not be there. A page that was never synced may show what a removed file had in its place.
Errors can be planted.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Sequence

from millpond.core.chance import Chance

PAGE = 4096
SECTOR = 512


class Crash(BaseException):
    """The process dies here. Not an Exception: nothing may catch it."""


class Inode:
    def __init__(self) -> None:
        self.size = 0
        self.sizes = [0]
        """Sizes since the last sync, the synced one first."""
        self.pages: dict[int, list[bytes]] = {}
        """Versions of a page since the last sync, the synced one first."""
        self.poisoned = False
        """A sync failed: the cache calls its pages clean, so that later syncs succeed and write nothing."""

    def read(self, offset: int, num_bytes: int) -> bytes:
        end = min(offset + num_bytes, self.size)
        parts = []
        while offset < end:
            number, begin = divmod(offset, PAGE)
            part = self.page(number)[begin : min(PAGE, begin + end - offset)]
            parts.append(part)
            offset += len(part)
        return b"".join(parts)

    def page(self, number: int) -> bytes:
        versions = self.pages.get(number)
        return versions[-1] if versions else bytes(PAGE)

    def write(self, offset: int, data: bytes) -> None:
        while data:
            number, begin = divmod(offset, PAGE)
            part = data[: PAGE - begin]
            old = self.page(number)
            new = old[:begin] + part + old[begin + len(part) :]
            self.pages.setdefault(number, [bytes(PAGE)]).append(new)
            data = data[len(part) :]
            offset += len(part)
            self.set_size(max(self.size, offset))

    def set_size(self, num_bytes: int) -> None:
        for number in [number for number in self.pages if number * PAGE >= num_bytes]:
            self.pages[number].append(bytes(PAGE))
        self.size = num_bytes
        self.sizes.append(num_bytes)

    def sync(self) -> None:
        if self.poisoned:
            return
        self.pages = {number: [versions[-1]] for number, versions in self.pages.items()}
        self.sizes = [self.size]

    def image(self, chance: Chance, donor: Inode | None) -> Inode:
        """One state that a crash may leave; `donor` is a removed file whose pages came to this one."""
        after = Inode()
        nothing_was_written = chance.below(4) == 0
        for number, versions in self.pages.items():
            if donor is not None and not any(versions[0]):
                versions = [donor.page(number), *versions[1:]]
            after.pages[number] = [_crashed(versions[:1] if nothing_was_written else versions, chance)]
        after.size = self.sizes[chance.below(len(self.sizes))]
        after.sizes = [after.size]
        return after


def _crashed(versions: list[bytes], chance: Chance) -> bytes:
    choice = chance.below(len(versions))
    page = versions[choice]
    if choice and chance.below(3) == 0:
        cut = SECTOR * chance.below(PAGE // SECTOR + 1)
        page = page[:cut] + versions[choice - 1][cut:]
    return page


class CrashDisk:
    """`Files` in memory.

    Args:
        crash_at: Number of the changing operation in which the process dies.
        fail: Asked before each operation (kind, name) for an errno to raise, or 0.
    """

    def __init__(self, *, crash_at: int = -1, fail: Callable[[str, str], int] = lambda *_: 0) -> None:
        self.crash_at = crash_at
        self.fail = fail
        self.num_changes = 0
        self.written_bytes = 0
        self._inodes: dict[str, Inode] = {}
        self._synced_names: dict[str, Inode] = {}
        self._open: dict[int, tuple[str, Inode]] = {}
        self._removed: list[Inode] = []
        self._next_file = 100

    def names(self) -> list[str]:
        self._check("names", "")
        return list(self._inodes)

    def create(self, name: str) -> int:
        self._change("create", name)
        if name in self._inodes:
            raise FileExistsError(errno.EEXIST, "exists", name)
        self._inodes[name] = Inode()
        return self._opened(name)

    def open(self, name: str) -> int:
        self._check("open", name)
        if name not in self._inodes:
            raise FileNotFoundError(errno.ENOENT, "missing", name)
        return self._opened(name)

    def write(self, file: int, offset: int, views: Sequence[bytes | bytearray | memoryview]) -> None:
        name, inode = self._open[file]
        data = b"".join(views)
        self._change("write", name, lambda: inode.write(offset, data[: len(data) // 2]))
        inode.write(offset, data)
        self.written_bytes += len(data)

    def read_into(self, file: int, offset: int, view: memoryview) -> int:
        name, inode = self._open[file]
        self._check("read", name)
        data = inode.read(offset, view.nbytes)
        view[: len(data)] = data
        return len(data)

    def size(self, file: int) -> int:
        return self._open[file][1].size

    def truncate(self, file: int, num_bytes: int) -> None:
        name, inode = self._open[file]
        self._change("truncate", name)
        inode.set_size(num_bytes)

    def sync(self, file: int) -> None:
        name, inode = self._open[file]
        try:
            self._change("sync", name)
        except OSError:
            inode.poisoned = True
            raise
        inode.sync()

    def sync_names(self) -> None:
        self._change("sync_names", "")
        self._synced_names = dict(self._inodes)

    def rename(self, name: str, new_name: str) -> None:
        self._change("rename", name)
        self._inodes[new_name] = self._inodes.pop(name)

    def remove(self, name: str) -> None:
        self._change("remove", name)
        self._removed = [*self._removed[-3:], self._inodes.pop(name)]

    def close(self, file: int) -> None:
        del self._open[file]

    @property
    def num_open(self) -> int:
        return len(self._open)

    def flip(self, name: str, bit: int) -> None:
        """Flip one bit of a file, at rest."""
        inode = self._inodes[name]
        at = bit // 8
        page = bytearray(inode.page(at // PAGE))
        page[at % PAGE] ^= 1 << bit % 8
        inode.pages[at // PAGE] = [bytes(page)]

    def file_bytes(self, name: str) -> int:
        return self._inodes[name].size

    def image(self, chance: Chance) -> CrashDisk:
        """A disk in one of the states that a crash may leave."""
        after = CrashDisk()
        for name in sorted(self._inodes.keys() | self._synced_names.keys()):
            now, synced = self._inodes.get(name), self._synced_names.get(name)
            kept = now if now is synced or chance.below(2) else synced
            if kept is not None:
                donors = [None, *self._removed]
                after._inodes[name] = kept.image(chance, donors[chance.below(len(donors))])
        after._removed = list(self._removed)
        after._synced_names = dict(after._inodes)
        return after

    def _opened(self, name: str) -> int:
        self._next_file += 1
        self._open[self._next_file] = (name, self._inodes[name])
        return self._next_file

    def _check(self, kind: str, name: str) -> None:
        if number := self.fail(kind, name):
            raise OSError(number, os.strerror(number), name)

    def _change(self, kind: str, name: str, tear: Callable[[], None] = lambda: None) -> None:
        self.num_changes += 1
        if self.num_changes == self.crash_at:
            tear()
            raise Crash
        self._check(kind, name)
