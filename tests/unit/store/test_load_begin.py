"""The begin of a load: what it holds, and what it does without."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from millpond.core.errors import ArenaFull
from millpond.store import tiered_load
from millpond.store.chain import BlockChain, Hit
from tests.unit.store.dram_hosts import Hosts, hosts, other_chain
from tests.unit.store.pool_cluster import chain_of, soon


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


def test_a_load_that_may_take_no_slot_holds_what_has_one(made: Hosts) -> None:
    host, chain, other = made.add("h0", 8), chain_of(6), other_chain(4)
    host.put(chain, 0, 4)
    made.made.put(chain)
    made.made.put(other)
    assert host.loader.num_here(chain) == 4
    with pytest.raises(ArenaFull) as refused:
        host.loader.begin(chain, b"", deadline_ns=soon(), takes_slots=False)
    assert refused.value.code == "dram.full"
    host.loader.check()
    coming = host.begin(other)
    assert coming is not None
    assert host.loader.num_here(other) == 4, "a load brings them"
    shared = host.loader.begin(other, b"", deadline_ns=soon(), takes_slots=False)
    assert shared is not None
    assert shared.slots == coming.slots
    for load in (coming, shared):
        assert host.run(load).num_blocks == 4
        host.loader.release(load)


def test_a_load_says_why_it_has_less_than_was_asked_for(made: Hosts) -> None:
    host = made.add("h0", 16, max_pinned_ratio=0.75)
    made.made.put(chain_of(20))
    host.put(other_chain(3))
    for chain, num_blocks, reason in (
        (chain_of(12), 12, ""),
        (chain_of(13), 12, "no_room"),
        (other_chain(5), 3, "absent"),
    ):
        load = host.begin(chain)
        assert load is not None
        assert (load.num_blocks, load.cut_by) == (num_blocks, reason)
        host.loader.release(load)
