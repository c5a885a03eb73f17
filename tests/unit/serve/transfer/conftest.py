"""Folders, deadlines and a connected pair; and a check that no test leaves anything behind."""

from __future__ import annotations

import os
import tempfile
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from millpond.config.transfer_params import TransferParams
from tests.unit.serve.transfer.harness import Pair, until


@pytest.fixture
def folder() -> Iterator[Path]:
    """Private, and short enough for a socket."""
    with tempfile.TemporaryDirectory() as name:
        yield Path(name)


@pytest.fixture
def params() -> TransferParams:
    """Deadlines that a test can wait for."""
    return TransferParams(ring_bytes=100_000, lease_s=1.0, gap_s=2.0, stall_s=1.0)


@pytest.fixture(params=["unix", "tcp"])
def pair(request: pytest.FixtureRequest, folder: Path, params: TransferParams) -> Iterator[Pair]:
    """Ring on `unix`, inline on `tcp`."""
    pair = Pair(folder, request.param, replace(params, lease_s=30.0, gap_s=30.0, stall_s=10.0))
    yield pair
    pair.stop()


@pytest.fixture(autouse=True)
def nothing_left(folder: Path) -> Iterator[None]:
    """No thread, descriptor or shared memory survives a test."""
    num_open = len(os.listdir("/proc/self/fd"))
    yield
    until(lambda: not [thread for thread in threading.enumerate() if thread.name.startswith("handoff")])
    assert len(os.listdir("/proc/self/fd")) == num_open
    assert not (folder / "shm").exists() or not list((folder / "shm").iterdir())
