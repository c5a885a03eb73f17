"""The begin of a load: what it holds, and what it does without."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from millpond.store import tiered_load
from millpond.store.chain import BlockChain, Hit
from tests.unit.store.dram_hosts import Hosts, hosts
from tests.unit.store.pool_cluster import chain_of


@pytest.fixture
def made(tmp_path: Path) -> Iterator[Hosts]:
    with hosts(tmp_path) as made:
        yield made


def test_the_laws_hold_at_every_moment_of_a_begin(made: Hosts, monkeypatch: pytest.MonkeyPatch) -> None:
    host, chain = made.add("h0"), chain_of(4)
    host.put(chain)
    problems: list[BaseException] = []
    cut_hit, begin_load = tiered_load.cut_hit, tiered_load.TieredLoad.__init__

    def check() -> None:
        try:
            host.loader.check()
        except BaseException as error:  # noqa: BLE001 - the test says what
            problems.append(error)

    def check_meanwhile() -> None:
        """As the periodic check does, from another thread: it may have to wait until the begin is over."""
        thread = threading.Thread(target=check)
        thread.start()
        thread.join(0.2)
        checks.append(thread)

    def watched_cut(hit: Hit, wanted: BlockChain) -> Hit:
        check_meanwhile()
        return cut_hit(hit, wanted)

    def watched_load(*args: object) -> None:
        check_meanwhile()
        begin_load(*args)  # type: ignore[arg-type]

    checks: list[threading.Thread] = []
    monkeypatch.setattr(tiered_load, "cut_hit", watched_cut)
    monkeypatch.setattr(tiered_load.TieredLoad, "__init__", watched_load)
    load = host.begin(chain)
    for thread in checks:
        thread.join(20)
        assert not thread.is_alive()
    assert len(checks) == 2
    assert problems == []
    assert load is not None
    host.loader.release(load)
