"""Ranks, their node daemon and the pool: puts, loads, leases, and what becomes of them when somebody goes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.unit.serve.node.rig import Rig, chain, check_bytes, poll, rig


@pytest.fixture
def made(tmp_path: Path) -> Iterator[Rig]:
    with rig(tmp_path) as made:
        yield made


def test_what_a_rank_puts_another_one_loads_from_memory(made: Rig):
    daemon = made.start()
    writer, reader = made.rank(daemon), made.rank(daemon)
    writer.put(chain(10))
    poll(lambda: daemon.daemon.counts.puts == 10, "ten puts")
    request = reader.order(12)
    assert reader.answer(request).num_tokens == 10 * 128
    load = reader.finish(request)
    assert check_bytes(load, chain(12)) == 10
    daemon.check()
    reader.client.end(request, 0)
    daemon.check()
    assert daemon.daemon.counts.blocks == {"memory": 10, "peers": 0, "pool": 0}


def test_a_restarted_daemon_finds_everything_on_the_disks(made: Rig):
    daemon = made.start()
    rank = made.rank(daemon)
    rank.put(chain(40))
    poll(lambda: daemon.daemon.counts.puts == 40, "forty puts")
    daemon.end()  # writes what waits
    again = made.start()
    poll(lambda: again.memory.pool.is_open, "the pool")
    rank.wait_up(again)
    assert rank.read(40) == 40
    assert again.daemon.counts.blocks["pool"] == 40
    again.check()
