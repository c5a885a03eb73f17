"""Where arenas lie: one daemon each, and nothing of dead ones stays."""

from __future__ import annotations

import fcntl
import subprocess
import sys
from pathlib import Path

import pytest

from millpond.core.errors import ConfigError
from millpond.serve.node.arena_file import ArenaFile

HOLDER = """
import sys
from pathlib import Path
from millpond.serve.node.arena_file import ArenaFile

file = ArenaFile(Path(sys.argv[1]), "h0")
file.path.write_bytes(b"arena")
print(file.path, flush=True)
input()
"""


def test_a_living_daemon_keeps_its_arena_and_a_dead_one_leaves_nothing(tmp_path: Path):
    command = [sys.executable, "-c", HOLDER, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as holder:
        try:
            assert holder.stdout is not None
            path = Path(holder.stdout.readline().strip())
            with pytest.raises(ConfigError, match="already"):
                ArenaFile(tmp_path, "h0")
            ArenaFile(tmp_path, "h1").close()
            assert path.read_bytes() == b"arena"
        finally:
            holder.kill()
    other = ArenaFile(tmp_path, "h1")
    assert not path.exists()
    other.path.touch()
    other.close()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("is_made_anew", [False, True])
def test_a_lock_that_was_removed_while_it_was_taken_is_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, is_made_anew: bool
):
    """Its holder ends between our opening and our locking; perhaps a third one has come meanwhile."""
    flock = fcntl.flock
    third: list[ArenaFile] = []

    def flock_late(file: int, how: int) -> None:
        monkeypatch.setattr(fcntl, "flock", flock)
        (lock,) = tmp_path.glob("*.lock")
        lock.unlink()
        if is_made_anew:
            third.append(ArenaFile(tmp_path, "h0"))
        flock(file, how)

    monkeypatch.setattr(fcntl, "flock", flock_late)
    if not is_made_anew:
        third.append(ArenaFile(tmp_path, "h0"))
    with pytest.raises(ConfigError, match="already"):
        ArenaFile(tmp_path, "h0")
    third[0].close()
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_is_not_there_is_named(tmp_path: Path):
    with pytest.raises(ConfigError, match="nowhere") as caught:
        ArenaFile(tmp_path / "nowhere", "h0")
    assert caught.value.param == "transfer.shm_dir"
