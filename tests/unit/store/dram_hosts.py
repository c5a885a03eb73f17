"""Hosts with a DRAM level each over a pool of real sockets, and what a rank does with them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from millpond.policies.spill import SpillParams
from millpond.store.chain import BlockChain
from millpond.store.dram import DramLevel, DramParams
from millpond.store.dram_arena import DramArena, SlotRef
from millpond.store.dram_directory import DramDirectory, DramHost
from millpond.store.dram_peers import DramPeers
from millpond.store.dram_spill import WriteExtents
from millpond.store.load_state import LoadResult, TieredLoad
from millpond.store.net.dram_server import DramServer
from millpond.store.tiered_load import TieredLoader
from tests.unit.store.pool_cluster import LAYOUT, Cluster, blocks_of, bytes_of, chain_of, cluster, soon

SLOT_BYTES = LAYOUT.block_bytes + 40
S = 10**9


class HandClock:
    def __init__(self) -> None:
        self.now_ns = 0

    def monotonic_ns(self) -> int:
        return self.now_ns

    def unix_s(self) -> int:
        return self.now_ns // S


@dataclass(frozen=True)
class Got:
    num_blocks: int
    from_memory: int = 0
    from_peers: int = 0
    from_pool: int = 0


@dataclass
class Host:
    name: str
    level: DramLevel
    loader: TieredLoader
    server: DramServer
    clock: HandClock

    def put(self, chain: BlockChain, begin: int = 0, end: int | None = None, *, lineage: int = 0) -> int:
        blocks = blocks_of(chain, begin, end)
        return self.level.put(chain, begin, blocks, deadline_ns=soon(), lineage=lineage)

    def put_in_slots(self, chain: BlockChain, begin: int = 0, end: int | None = None) -> list[SlotRef]:
        """As a rank does: through another mapping of the arena, into slots that were lent."""
        blocks = blocks_of(chain, begin, end)
        refs = self.level.take_slots(len(blocks))
        arena = DramArena.attach(self.level.arena.path, writable=True)
        for ref, block in zip(refs, blocks, strict=True):
            arena.view(ref.slot)[:] = block
        arena.close()
        assert self.level.put_slots(chain, begin, refs) <= len(refs)
        return refs

    def begin(self, chain: BlockChain, located: bytes = b"") -> TieredLoad | None:
        return self.loader.begin(chain, located, deadline_ns=soon())

    def run(self, load: TieredLoad) -> LoadResult:
        """Carry a load out; checks that every byte of its blocks is right, and its lane."""
        result = self.loader.run(load, deadline_ns=soon())
        self.check_load(load)
        return result

    def check_load(self, load: TieredLoad) -> None:
        """Whatever its lane says can be read is right."""
        arena = self.level.arena
        begin = 0
        for row, shape in enumerate(LAYOUT.rows):
            end = begin + shape.num_bytes
            count = arena.rows_ready(load.lane, row)
            for ref, digest in zip(load.slots[:count], load.chain.digests[:count], strict=True):
                found, right = arena.view(ref.slot)[begin:end], bytes_of(digest)[begin:end]
                assert np.array_equal(found, right), "wrong bytes"
            begin = end

    def read(self, chain: BlockChain, located: bytes = b"") -> Got:
        """Load a chain, check every byte, and give all back."""
        load = self.begin(chain, located)
        if load is None:
            return Got(0)
        try:
            result = self.run(load)
            assert self.level.arena.rows_ready(load.lane, len(LAYOUT.rows) - 1) == result.num_blocks
        finally:
            self.loader.release(load)
        return Got(result.num_blocks, result.from_memory, result.from_peers, result.from_pool)


@dataclass
class Hosts:
    made: Cluster
    directory: DramDirectory
    folder: Path
    stack: ExitStack

    def add(
        self,
        name: str,
        num_slots: int = 64,
        *,
        epoch: int = 1,
        evict: str = "lru",
        max_pinned_ratio: float = 1.0,
        write: WriteExtents | None = None,
    ) -> Host:
        path = self.folder / f"{name}-{epoch}.arena"
        arena = DramArena.create(path, num_slots * SLOT_BYTES + 4 * 4096, LAYOUT, epoch=epoch)
        assert arena.num_slots == num_slots
        server = DramServer(arena, name, "127.0.0.1:0", token="t")
        server.start()
        self.directory.join(name, DramHost(server.address, epoch))
        clock = HandClock()
        level = DramLevel(
            arena,
            host=name,
            directory=self.directory,
            window=self.made.pool.window,
            write=write or self.made.pool.put,
            params=DramParams(evict, SpillParams(idle_s=30, retry_s=5), max_pinned_ratio),
            clock=clock,
        )
        peers = DramPeers(self.directory, name=name, token="t")
        loader = TieredLoader(level, self.directory, peers, self.made.pool)
        self.stack.callback(level.close, deadline_ns=soon(60))
        self.stack.callback(loader.check)
        self.stack.callback(peers.close)
        self.stack.callback(server.stop, 5.0)
        return Host(name, level, loader, server, clock)


@contextmanager
def hosts(folder: Path) -> Iterator[Hosts]:
    with cluster() as made, ExitStack() as stack:
        yield Hosts(made, DramDirectory(), folder, stack)


def other_chain(num_blocks: int, number: int = 1) -> BlockChain:
    return chain_of(num_blocks, first_id=10**6 * number)
