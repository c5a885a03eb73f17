"""A whole pool of processes on loopback: it stores, loses processes, restarts, and leaves nothing behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from millpond.config.pool_description import PoolDescription, load_pool_description
from millpond.control.extent_write import WriteEnd
from millpond.core.errors import MillpondError, TransientError
from millpond.core.units import MIB
from millpond.store.local_pool import LocalPool
from millpond.store.metadata.client import MetadataClient
from millpond.store.net.messages import MetadataStatus
from millpond.store.pool import Pool
from millpond.store.pool_settings import PoolParams, PoolSettings
from tests.unit.store.metadata.shards import wait_until
from tests.unit.store.net.peers import within
from tests.unit.store.pool_cluster import LAYOUT, Cluster, chain_of

TOKEN = "secret"


def small(preset: str, *, metadata_shards: int = 1, **placement: int) -> PoolDescription:
    made = load_pool_description(preset)
    storage = tuple(replace(node, targets=2, capacity=128 * MIB) for node in made.storage)
    changed = replace(made.placement, metadata_shards=metadata_shards, **placement)
    return replace(made, storage=storage, placement=changed)


@contextmanager
def client(pool: LocalPool, home: str = "") -> Iterator[Cluster]:
    metadata = MetadataClient(pool.metadata_addresses, name="test", token=TOKEN)
    settings = PoolSettings(pool=PoolParams(num_buffers=6, min_piece_kib=4, home=home))
    try:
        with Pool(LAYOUT, metadata, name="test", token=TOKEN, settings=settings) as made:
            yield Cluster({}, metadata, made)
    finally:
        metadata.close()


def statuses(pool: LocalPool) -> list[MetadataStatus]:
    found = list(pool.metadata.statuses(deadline_ns=within(20)).values())
    assert all(isinstance(status, MetadataStatus) for status in found), found
    return found


CHAINS = [chain_of(40, first_id=100_000 * seed) for seed in range(8)]


def put_all(made: Cluster) -> None:
    for chain in CHAINS:
        assert {result.result for result in made.put(chain)} == {WriteEnd.PUBLISHED}


def check_all(made: Cluster, num_blocks: int = 40) -> None:
    for chain in CHAINS:
        hit, result = made.read(chain)
        assert (hit.num_blocks, result.num_blocks) == (num_blocks, num_blocks)


@pytest.mark.parametrize("preset", ["pooled", "local-affinity"])
def test_both_presets_store_and_return_chains(tmp_path: Path, preset: str):
    with LocalPool(small(preset), tmp_path, token=TOKEN) as pool:
        home = "s1" if preset == "local-affinity" else ""
        with client(pool, home) as made:
            put_all(made)
            check_all(made)
        if home:
            with client(pool, "s0") as other:
                check_all(other)
        assert statuses(pool)[0].num_leases == 0
        assert set(pool.close().values()) == {0}


def test_a_killed_metadata_shard_finds_everything_again_from_the_nodes(tmp_path: Path):
    """Fault 39: no checkpoint was written; it serves misses first, then everything."""
    with LocalPool(small("pooled"), tmp_path, token=TOKEN) as pool, client(pool) as made:
        put_all(made)
        pool.kill_one("m0")
        with pytest.raises(TransientError):
            made.pool.match(CHAINS[0], deadline_ns=within(1))
        pool.restart("m0")
        for chain in CHAINS:
            made.read(chain)  # whatever is found is right
        wait_until(lambda: statuses(pool)[0].rebuild_left == 0, "the index is rebuilt")
        check_all(made)
        pool.kill_one("m0", signal.SIGTERM)
        pool.restart("m0")
        assert statuses(pool)[0].rebuild_left == 0, "a clean stop leaves a checkpoint: nothing to rebuild"
        check_all(made)


def test_several_killed_shards_are_rebuilt_each_with_its_own(tmp_path: Path):
    description = small("pooled", metadata_shards=3)
    with LocalPool(description, tmp_path, token=TOKEN) as pool, client(pool) as made:
        put_all(made)
        before = [(status.num_extents, status.num_blocks) for status in statuses(pool)]
        charged = [kib for status in statuses(pool) for _, kib, _ in status.tenants]
        assert len(set(before)) > 1, "they do not all have everything"
        for name in ("m0", "m1", "m2"):
            pool.kill_one(name)
        for name in ("m0", "m1", "m2"):
            pool.restart(name)
        wait_until(lambda: all(not status.rebuild_left for status in statuses(pool)), "rebuilt")
        assert [(status.num_extents, status.num_blocks) for status in statuses(pool)] == before
        # Records are padded, more so the smaller their rows.
        after = [kib for status in statuses(pool) for _, kib, _ in status.tenants]
        assert after == pytest.approx(charged, rel=0.10)
        check_all(made)


def test_under_load_a_kill_never_gives_a_wrong_byte_and_later_nothing_is_missing(tmp_path: Path):
    options = ("--checkpoint-s", "1")
    with LocalPool(small("pooled"), tmp_path, token=TOKEN, metadata_options=options) as pool:
        stopping, failures, published = threading.Event(), [], set()

        def work(number: int) -> None:
            try:
                with client(pool) as made:
                    turn = 0
                    while not stopping.is_set():
                        turn += 1
                        chain = chain_of(40, first_id=10**6 * number + 10_000 * turn)
                        try:
                            ends = {result.result for result in made.put(chain)}
                            made.read(chain)
                        except MillpondError:
                            continue
                        if ends == {WriteEnd.PUBLISHED}:
                            published.add((number, turn))
            except BaseException as error:  # noqa: BLE001 - raised below
                failures.append(error)

        threads = [threading.Thread(target=work, args=(number,)) for number in (1, 2)]
        for thread in threads:
            thread.start()
        for _ in range(2):
            seen = len(published)
            wait_until(lambda seen=seen: failures or len(published) > seen + 3, "writes go on", 60)
            pool.kill_one("m0")
            pool.restart("m0")
        seen = len(published)
        wait_until(lambda: failures or len(published) > seen, "writes go on", 60)
        stopping.set()
        for thread in threads:
            thread.join(60)
            assert not thread.is_alive()
        if failures:
            raise failures[0]
        wait_until(lambda: statuses(pool)[0].rebuild_left == 0, "rebuilt")
        with client(pool) as made:
            for number, turn in published:
                chain = chain_of(40, first_id=10**6 * number + 10_000 * turn)
                hit, result = made.read(chain)
                assert hit.num_blocks == result.num_blocks == 40


def test_a_pool_that_was_closed_or_killed_is_found_again(tmp_path: Path):
    description = small("pooled")
    with LocalPool(description, tmp_path, token=TOKEN) as pool:
        with client(pool) as made:
            put_all(made)
        assert set(pool.close().values()) == {0}
    with LocalPool(description, tmp_path, token=TOKEN) as pool:
        with client(pool) as made:
            check_all(made)
        pool.kill()
    with LocalPool(description, tmp_path, token=TOKEN) as pool, client(pool) as made:
        wait_until(lambda: all(not status.rebuild_left for status in statuses(pool)), "rebuilt")
        check_all(made)


def test_bug_21_nothing_outlives_a_parent_that_is_killed(tmp_path: Path):
    code = (
        "import sys, time; from pathlib import Path\n"
        "from millpond.config.pool_description import load_pool_description\n"
        "from millpond.store.local_pool import LocalPool\n"
        "pool = LocalPool(load_pool_description('local-affinity'), Path(sys.argv[1]))\n"
        "print(*[child.process.pid for child in pool.processes.values()], flush=True)\n"
        "time.sleep(600)\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    try:
        assert parent.stdout is not None
        children = [int(pid) for pid in parent.stdout.readline().split()]
        assert len(children) == 3
    finally:
        parent.kill()
        parent.wait()
        parent.stdout.close()
    wait_until(lambda: not any(map(is_running, children)), "the children are gone")


def is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    return state != "Z"


def test_a_process_that_cannot_start_says_so_and_the_others_end(tmp_path: Path):
    description = small("pooled")
    (tmp_path / "s1").write_text("not a folder")
    began = time.monotonic()
    with pytest.raises(MillpondError, match="s1"):
        LocalPool(description, tmp_path, token=TOKEN)
    assert time.monotonic() - began < 60
