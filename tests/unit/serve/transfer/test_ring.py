"""Ring files: shared while mapped, private, checked, and never left behind."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from millpond.core.errors import DataError
from millpond.serve.transfer.ring import Ring, remove_leftovers


def test_both_sides_see_the_same_bytes_after_the_name_is_gone(folder: Path) -> None:
    ours = Ring.create(folder, ring_bytes=100_000, piece_bytes=5000)
    assert (ours.num_slots, ours.slot_bytes) == (12, 8192)
    assert ours.path.stat().st_mode & 0o777 == 0o600
    theirs = Ring.attach(ours.path, 12, 8192)
    ours.unlink()
    assert not list(folder.iterdir())
    ours.slot(11, 5)[:] = b"hello"
    assert bytes(theirs.slot(11, 5)) == b"hello"
    with pytest.raises(TypeError):
        theirs.slot(0, 1)[:] = b"x"  # the receiver's mapping is read-only


def test_a_small_ring_still_has_slots_for_the_largest_piece(folder: Path) -> None:
    ring = Ring.create(folder, ring_bytes=1, piece_bytes=100_000)
    ring.unlink()
    assert ring.num_slots == 4
    assert len(ring.slot(3, 100_000)) == 100_000


@pytest.mark.parametrize(("num_slots", "slot_bytes"), [(11, 8192), (13, 8192), (0, 0), (2**31, 2**31)])
def test_a_ring_of_another_size_than_announced_is_refused(
    folder: Path, num_slots: int, slot_bytes: int
) -> None:
    ring = Ring.create(folder, ring_bytes=100_000, piece_bytes=5000)
    with pytest.raises(DataError):
        Ring.attach(ring.path, num_slots, slot_bytes)


def test_links_and_files_open_to_others_are_refused(folder: Path) -> None:
    ring = Ring.create(folder, ring_bytes=100_000, piece_bytes=5000)
    link = folder / "link"
    link.symlink_to(ring.path)
    with pytest.raises(OSError, match="symbolic"):
        Ring.attach(link, 12, 8192)
    ring.path.chmod(0o644)
    with pytest.raises(DataError):
        Ring.attach(ring.path, 12, 8192)


def test_rings_of_dead_processes_are_removed_and_nothing_else(folder: Path) -> None:
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait(30)
    leftover = folder / f"millpond-ring-{dead.pid}-0123456789abcdef"
    leftover.write_bytes(b"")
    (folder / f"millpond-ring-{dead.pid}-notes").write_text("not ours")
    ring = Ring.create(folder, ring_bytes=100_000, piece_bytes=5000)
    assert remove_leftovers(folder) == 1
    assert ring.path.exists()
    assert not leftover.exists()
    assert len(list(folder.iterdir())) == 2
