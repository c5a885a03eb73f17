"""A pool of real processes under mixed load while they are killed, frozen and filled (`make soak S=pool`)."""

from __future__ import annotations

import threading
import time
import warnings
from collections import Counter
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest

from millpond.control.extent_write import WriteEnd
from millpond.core.chance import Chance
from millpond.store.metadata.client import MetadataClient
from millpond.store.net.messages import MetadataStatus
from millpond.store.net.node_link import NodeLink
from millpond.store.pool import Pool
from millpond.store.pool_settings import PoolParams, PoolSettings
from tests.integration.pool_load import (
    LAYOUT,
    MAX_BLOCKS,
    NUM_CHAINS,
    OVERRUN_NS,
    SHORT_OVERRUN_NS,
    LoadClient,
    LoadRecord,
    chain_of,
)
from tests.integration.pool_processes import PoolProcess, PoolProcesses, why_no_small_disk

SHORT_S = 15
NUM_POOLS = 2
CLIENTS_PER_POOL = 2
NODE_MIB = 6
"""Less than all chains take, so that the oldest segments go."""
MAX_TRIES = 4
"""A read finds at most one extent per window to be gone, and has it forgotten; the next write replaces it."""
MAX_FAULTS = 2
"""At once: more would lose data."""
SETTINGS = PoolSettings(pool=PoolParams(num_buffers=8, num_senders=16))


class Faults:
    """What is broken now, and how it is mended."""

    def __init__(self, processes: PoolProcesses, chance: Chance) -> None:
        self.counts: Counter[str] = Counter()
        self._processes = processes
        self._chance = chance
        self._open: list[tuple[float, str, Callable[[], None]]] = []

    def turn(self) -> None:
        """Mend what is due, break something if little is broken."""
        now = time.monotonic()
        for fault in [fault for fault in self._open if fault[0] <= now]:
            self._open.remove(fault)
            fault[2]()
        if len(self._open) < MAX_FAULTS and self._chance.below(4) == 0:
            self._break(now)

    def mend_all(self) -> None:
        for _, _, mend in self._open:
            mend()
        self._open.clear()

    def _break(self, now: float) -> None:
        broken = {name for _, name, _ in self._open}
        whole = [node for node in self._processes.nodes if node.name not in broken]
        small = [node for node in whole if node.is_on_small_disk]
        node = whole[self._chance.below(len(whole))]
        lasts_s = 0.2 + 2 * self._chance.uniform()
        kind = ("kill", "freeze", "fill", "metadata")[self._chance.below(4)]
        if kind == "kill":
            node.kill()
            self._expect(now + lasts_s, kind, node, node.start)
        elif kind == "freeze":
            frozen = node if self._chance.below(4) or "m0" in broken else self._processes.metadata
            frozen.freeze()
            self._expect(now + lasts_s, kind, frozen, frozen.thaw)
        elif kind == "fill" and small:
            small[0].fill_disk()
            self._expect(now + 3 * lasts_s, kind, small[0], small[0].empty_disk)
        elif kind == "metadata" and self._processes.metadata.name not in broken:
            self._processes.metadata.kill()
            self._expect(now + lasts_s, kind, self._processes.metadata, self._processes.metadata.start)

    def _expect(self, at: float, kind: str, process: PoolProcess, mend: Callable[[], None]) -> None:
        self.counts[kind] += 1
        self._open.append((at, process.name, mend))


@pytest.mark.campaign("pool")
def test_campaign_pool_keeps_its_promises_under_faults(
    tmp_path: Path, num_rounds: int, wait_until: Callable[..., None]
) -> None:
    no_disk = why_no_small_disk()
    if no_disk:
        warnings.warn(f"no full disks in this run: {no_disk}", stacklevel=1)
    # The short form runs beside other tests: tenfold margin.
    overrun_ns = OVERRUN_NS if num_rounds else SHORT_OVERRUN_NS
    record, stop = LoadRecord(overrun_ns), threading.Event()
    with (
        PoolProcesses(tmp_path, node_mib=NODE_MIB, num_small_disks=0 if no_disk else 2) as processes,
        closing(MetadataClient([processes.metadata_address], name="campaign")) as metadata,
    ):
        pools = [
            Pool(LAYOUT, metadata, name=f"load {index}", settings=SETTINGS) for index in range(NUM_POOLS)
        ]
        try:
            clients = [
                LoadClient(pool, seed, record, stop)
                for seed, pool in enumerate(pool for pool in pools for _ in range(CLIENTS_PER_POOL))
            ]
            faults = Faults(processes, Chance(num_rounds, "faults"))
            _run(clients, faults, stop, num_rounds or SHORT_S)
            print(f"load {dict(record.counts)}\nfaults {dict(faults.counts)}")
            if record.failures:
                raise record.failures[0]
            assert record.wrong == []
            assert record.late == []
            _check_rest(processes, pools, metadata, wait_until)
            _check_works(LoadClient(pools[0], -1, record, stop))
        finally:
            for pool in pools:
                pool.close()
    assert record.wrong == []
    assert record.counts["blocks read"] > 0
    assert sum(faults.counts.values()) >= 3


def _run(clients: list[LoadClient], faults: Faults, stop: threading.Event, seconds: float) -> None:
    for client in clients:
        client.start()
    try:
        end = time.monotonic() + seconds
        while time.monotonic() < end and all(client.is_alive() for client in clients):
            faults.turn()
            stop.wait(0.1)
    finally:
        stop.set()
        faults.mend_all()
        for client in clients:
            client.join()


def _check_rest(
    processes: PoolProcesses,
    pools: list[Pool],
    metadata: MetadataClient,
    wait_until: Callable[..., None],
) -> None:
    """Nothing is held any more: buffers, bytes in flight, leases, pins. No process ended by itself."""
    for pool in pools:
        wait_until(lambda pool=pool: pool.num_free_buffers == SETTINGS.pool.num_buffers, "buffers are back")
        wait_until(lambda pool=pool: pool.client.reads.in_flight_bytes == 0, "nothing is in flight")
        wait_until(lambda pool=pool: _reaches_all(pool), "all nodes are reached", deadline_s=60)
    for process in [*processes.nodes, processes.metadata]:
        process.assert_alive()

    def is_at_rest() -> bool:
        found = list(metadata.statuses(deadline_ns=time.monotonic_ns() + 2 * 10**9).values())
        return all(
            isinstance(one, MetadataStatus) and not (one.num_leases or one.num_pins or one.rebuild_left)
            for one in found
        )

    wait_until(is_at_rest, "leases and pins are over", deadline_s=60)


def _reaches_all(pool: Pool) -> bool:
    """A node that was away for long is called again only some seconds after it is back."""
    links = [link for link in pool.links.values() if isinstance(link, NodeLink)]
    for link in links:
        link.dial()
    return len(links) == len(pool.links) and all(link.is_up for link in links)


def _check_works(client: LoadClient) -> None:
    """With everything mended, chains can be written and read whole."""
    for index in range(NUM_CHAINS // 4):
        for _ in range(MAX_TRIES):
            ends = client.put_blocks(chain_of(index), 0, MAX_BLOCKS)
            assert ends <= {WriteEnd.PUBLISHED, WriteEnd.EXISTS}
            if client.read(chain_of(index)) == MAX_BLOCKS:
                break
        else:
            pytest.fail(f"chain {index} cannot be read after {MAX_TRIES} writes")
