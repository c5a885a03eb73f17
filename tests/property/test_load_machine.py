"""Loads against a dict: any order of loads, puts, spills and damage, also while a load is on its way."""

from __future__ import annotations

import itertools
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from millpond.control.extent_write import WriteEnd
from millpond.core.errors import ArenaFull, TransferFailed
from millpond.core.extents import ExtentId, StripeId, StripeShape
from millpond.core.kv_layout import uniform_layout
from millpond.policies.spill import SpillParams
from millpond.store.chain import BlockChain, Hit, HitExtent, cut_at_windows
from millpond.store.codec.reed_solomon import ReedSolomon
from millpond.store.dram import DramLevel, DramParams
from millpond.store.dram_arena import NUM_LANES, DramArena, SlotRef
from millpond.store.dram_directory import DramDirectory, DramHost
from millpond.store.dram_peers import DramPeers
from millpond.store.extent_get import GetEnd, GetResult, RowOrder, RowSink, RowsReady
from millpond.store.extent_put import PutResult
from millpond.store.load_state import TieredLoad
from millpond.store.net.messages import Location
from millpond.store.payload import payload_shape
from millpond.store.stripe import ExtentMeta, encode_extent
from millpond.store.stripe_buffer import StripeBuffer, stripe_bytes
from millpond.store.tiered_load import TieredLoader
from tests.unit.store.pool_cluster import bytes_of, chain_of, soon

LAYOUT = uniform_layout(num_layers=3, kv_bytes_per_token=4, dtype="bf16")
ROW_BYTES = LAYOUT.rows[0].num_bytes
NUM_ROWS = len(LAYOUT.rows)
WINDOW, NUM_SLOTS, LENGTH = 4, 14, 10
ROOT = chain_of(LENGTH)
CHAINS = [
    ROOT,
    *(
        replace(ROOT, digests=(*ROOT.digests[:common], *chain_of(LENGTH, first_id=n).digests[common:]))
        for n, common in ((10**6, 0), (2 * 10**6, 6))
    ),
]
CODEC = ReedSolomon(4, 2)


@dataclass(frozen=True)
class Extent:
    chain: BlockChain
    begin: int
    end: int

    @property
    def names(self) -> tuple[bytes, ...]:
        return self.chain.digests[self.begin : self.end]


class DictPool:
    """A pool in a dict: `put` as `WriteExtents`, the rest as `LoadPool`. Loses extents, fails, and may be
    interrupted between two groups of rows."""

    window = WINDOW

    def __init__(self) -> None:
        self.extents: dict[tuple[bytes, int], Extent] = {}
        self.is_down = False
        self.fail_after: int | None = None
        """Groups of rows until a get is short of shards."""
        self.group_rows = 1
        """Rows that come at once: extents of different length are cut differently."""
        self.meanwhile: list[Callable[[], None]] = []
        """One is done after each group of rows."""

    def put(
        self, chain: BlockChain, first_block: int, blocks: list[np.ndarray], **options: object
    ) -> list[PutResult]:
        if self.is_down:
            raise TransferFailed("down", code="test")
        results = []
        for begin, end in cut_at_windows(first_block, first_block + len(blocks), WINDOW):
            for index in range(begin, end):
                right = right_bytes(chain.digests[index])
                assert np.array_equal(blocks[index - first_block], right), "wrong bytes written"
            self.extents[chain.digests[end - 1], end - begin] = Extent(chain, begin, end)
            results.append(PutResult(begin, end, WriteEnd.PUBLISHED))
        return results

    def match(self, chain: BlockChain, *, deadline_ns: int | None = None) -> Hit:
        if self.is_down:
            raise TransferFailed("down", code="test")
        parts: list[HitExtent] = []
        covered = 0
        while covered < len(chain.digests):
            reach = {
                key: sum(a == b for a, b in zip(one.names, chain.digests[one.begin : one.end], strict=False))
                for key, one in self.extents.items()
                if one.begin <= covered < one.end
            }
            best = max(reach, key=lambda key: self.extents[key].begin + reach[key], default=None)
            if best is None or self.extents[best].begin + reach[best] <= covered:
                break
            location = Location(best[0], best[1], 0, 0, 0)
            parts.append(HitExtent(location, self.extents[best].begin, reach[best]))
            covered = parts[-1].end
        return Hit(chain, covered, tuple(parts))

    def begin_get(self, hit: Hit, sink: RowSink, *, deadline_ns: int, order: RowOrder) -> DictGet:
        assert order is RowOrder.ROWS
        return DictGet(self, hit, sink)


class DictGet:
    def __init__(self, pool: DictPool, hit: Hit, sink: RowSink) -> None:
        self.pool, self.hit, self.sink = pool, hit, sink
        self.is_cancelled = False

    def cancel(self) -> None:
        self.is_cancelled = True

    def run(self) -> GetResult:
        limit, why = len(self.hit.extents), GetEnd.WHOLE
        num_rows = self.pool.group_rows
        for row in range(0, NUM_ROWS, num_rows):
            for index, part in enumerate(self.hit.extents[:limit]):
                pool = self.pool
                if self.is_cancelled or pool.fail_after == 0:
                    limit = index
                    why = GetEnd.CANCELLED if self.is_cancelled else GetEnd.LOST
                    break
                if pool.fail_after is not None:
                    pool.fail_after -= 1
                self._deliver(part, row, min(row + num_rows, NUM_ROWS))
                if pool.meanwhile:
                    pool.meanwhile.pop(0)()
        ends = [GetEnd.WHOLE if i < limit else GetEnd.BEHIND for i in range(len(self.hit.extents))]
        if limit < len(ends):
            ends[limit] = why
        return GetResult(self.hit.extents[limit - 1].end if limit else 0, tuple(ends), ())

    def _deliver(self, part: HitExtent, begin: int, end: int) -> None:
        extent = self.pool.extents[part.location.digest, part.location.num_blocks]
        shape, buffer = encoded(extent)
        self.sink.on_rows(RowsReady(shape, buffer, begin, end, part.begin, part.num_blocks))


@cache
def right_bytes(digest: bytes) -> np.ndarray:
    return bytes_of(digest, LAYOUT)


@cache
def encoded(extent: Extent) -> tuple[StripeShape, StripeBuffer]:
    names = extent.names
    shape = StripeShape(LAYOUT, len(names), CODEC.k, CODEC.m)
    payload = payload_shape(shape)
    memory = np.zeros(stripe_bytes(payload) + 64, np.uint8)
    buffer = StripeBuffer(payload, memory[-memory.ctypes.data % 64 :])
    meta = ExtentMeta(
        ExtentId(names[-1], len(names)),
        StripeId(0, 0, 0),
        extent.chain.parent(extent.begin),
        extent.chain.domain,
        extent.begin,
        b"".join(name[:16] for name in names),
    )
    encode_extent(CODEC, shape, buffer, meta, [right_bytes(name) for name in names])
    return shape, buffer


class HandClock:
    def __init__(self) -> None:
        self.now_ns = 0

    def monotonic_ns(self) -> int:
        return self.now_ns

    def unix_s(self) -> int:
        return 0


chains = st.integers(0, len(CHAINS) - 1)
actions = st.lists(
    st.tuples(
        st.sampled_from(["put", "put_slots", "begin", "cancel", "release", "spill", "lend", "flip"]),
        st.integers(0, 100),
    ),
    max_size=5,
)


class LoadMachine(RuleBasedStateMachine):
    @initialize(evict=st.sampled_from(["lru", "s3fifo"]))
    def start(self, evict: str) -> None:
        self.folder = tempfile.TemporaryDirectory()
        self.pool, self.clock, self.directory = DictPool(), HandClock(), DramDirectory()
        path = Path(self.folder.name) / "arena"
        arena = DramArena.create(path, 3 * 4096 + NUM_SLOTS * (4096 + 40), LAYOUT, epoch=1)
        assert arena.num_slots == NUM_SLOTS
        self.directory.join("h", DramHost("", 1))
        self.level = DramLevel(
            arena,
            host="h",
            directory=self.directory,
            window=WINDOW,
            write=self.pool.put,
            params=DramParams(evict, SpillParams(idle_s=30, retry_s=5), 0.75),
            clock=self.clock,
        )
        self.peers = DramPeers(self.directory, name="h", token="t")
        self.loader = TieredLoader(self.level, self.directory, self.peers, self.pool)
        self.reader = DramArena.attach(path)
        for chain in CHAINS[:2]:  # there is something to load from the first step on
            self.pool.put(chain, 0, [right_bytes(digest) for digest in chain.digests])
        self.loads: list[TieredLoad] = []
        self.has_run: set[TieredLoad] = set()
        self.lent: list[SlotRef] = []
        self.given: set[bytes] = set()
        self.may_be_lost: set[bytes] = set()
        self.damaged: set[tuple[int, int]] = set()
        """(slot, generation) of slots with a flipped bit."""
        self.numbers = itertools.count()

    # --- what may happen, also during a load ----------------------------------------------------

    @rule(chain=chains, begin=st.integers(0, LENGTH - 1), length=st.integers(1, 6))
    def put(self, chain: int, begin: int, length: int) -> None:
        wanted = CHAINS[chain].digests[begin : begin + length]
        blocks = [right_bytes(digest) for digest in wanted]
        count = self.level.put(CHAINS[chain], begin, blocks, deadline_ns=soon())
        self.given.update(wanted[:count])

    @rule(chain=chains, begin=st.integers(0, LENGTH - 1), length=st.integers(1, 6))
    def put_in_slots(self, chain: int, begin: int, length: int) -> None:
        wanted = CHAINS[chain].digests[begin : begin + length]
        count = min(len(wanted), len(self.lent))
        refs, self.lent = self.lent[:count], self.lent[count:]
        for ref, digest in zip(refs, wanted, strict=False):
            self.level.arena.view(ref.slot)[:] = right_bytes(digest)
        self.level.put_slots(CHAINS[chain], begin, refs)
        self.given.update(wanted[:count])

    @rule(count=st.integers(0, 5))
    def lend(self, count: int) -> None:
        refs = self.level.take_slots(count)
        assert len(refs) <= count
        for ref in refs:
            self.level.arena.view(ref.slot)[:] = 0xAA
        self.lent += refs

    @rule(count=st.integers(0, 8))
    def give_back(self, count: int) -> None:
        self.level.give_back_slots(self.lent[:count])
        del self.lent[:count]

    @rule(chain=chains, length=st.integers(1, LENGTH))
    def begin(self, chain: int, length: int) -> None:
        wanted = replace(CHAINS[chain], digests=CHAINS[chain].digests[:length])
        num_free = self.level.arena.num_free
        try:
            load = self.loader.begin(wanted, b"", deadline_ns=soon())
        except ArenaFull:
            assert self.level.arena.num_free == num_free
            return
        if load is not None:
            assert 1 <= load.num_blocks <= length
            self.loads.append(load)

    @rule(number=st.integers(0, 9))
    def cancel(self, number: int) -> None:
        if self.loads:
            self.loader.cancel(self.loads[number % len(self.loads)])

    @rule(number=st.integers(0, 9))
    def release(self, number: int) -> None:
        if self.loads:
            self.loader.release(self.loads.pop(number % len(self.loads)))

    @rule(seconds=st.sampled_from([1, 6, 31]))
    def spill(self, seconds: int) -> None:
        self.clock.now_ns += seconds * 10**9
        self.level.spill_due(deadline_ns=soon())

    @rule(slot=st.integers(0, NUM_SLOTS - 1))
    def flip(self, slot: int) -> None:
        """Damage a slot of which no load was told anything: what was told is the rank's already."""
        told = {ref.slot for load in self.loads for ref, n in zip(load.slots, load.told, strict=True) if n}
        if slot not in told:
            self.level.arena.view(slot)[100] ^= 1
            self.may_be_lost |= self.given  # which block it was, and those behind it in its window

    # --- the pool and the loads -----------------------------------------------------------------

    @rule(
        is_down=st.booleans(), fail_after=st.none() | st.integers(0, 8), group_rows=st.integers(1, NUM_ROWS)
    )
    def pool_becomes(self, is_down: bool, fail_after: int | None, group_rows: int) -> None:
        self.pool.is_down, self.pool.fail_after, self.pool.group_rows = is_down, fail_after, group_rows

    @rule(number=st.integers(0, 50))
    def lose_an_extent(self, number: int) -> None:
        if self.pool.extents:
            key = list(self.pool.extents)[number % len(self.pool.extents)]
            self.may_be_lost.update(self.pool.extents.pop(key).names)

    @rule(chain=chains, length=st.integers(1, LENGTH), meanwhile=actions)
    def begin_and_run(self, chain: int, length: int, meanwhile: list[tuple[str, int]]) -> None:
        num_loads = len(self.loads)
        self.begin(chain, length)
        if len(self.loads) > num_loads:
            self._run(self.loads[-1], meanwhile)

    @rule(number=st.integers(0, 9), meanwhile=actions)
    def run(self, number: int, meanwhile: list[tuple[str, int]]) -> None:
        waiting = [load for load in self.loads if load not in self.has_run]
        if waiting:
            self._run(waiting[number % len(waiting)], meanwhile)

    def _run(self, load: TieredLoad, meanwhile: list[tuple[str, int]]) -> None:
        self.has_run.add(load)
        self.pool.meanwhile = [lambda action=action: self._act(*action) for action in meanwhile]
        result = self.loader.run(load, deadline_ns=soon())
        self.pool.meanwhile = []
        assert 0 <= result.num_blocks <= load.num_blocks
        assert result.from_memory + result.from_pool == result.num_blocks
        assert bool(result.reasons) == (result.num_blocks < load.num_blocks)
        if load in self.loads:
            assert self.reader.rows_ready(load.lane, NUM_ROWS - 1) == result.num_blocks

    def _act(self, kind: str, number: int) -> None:
        chain, begin = number % len(CHAINS), number % LENGTH
        match kind:
            case "put":
                self.put(chain, begin, 1 + number % 3)
            case "put_slots":
                self.put_in_slots(chain, begin, 1 + number % 3)
            case "begin":
                self.begin(chain, 1 + begin)
            case "cancel":
                self.cancel(number)
            case "release":
                self.release(number)
            case "spill":
                self.spill(31)
            case "lend":
                self.lend(number % 4)
            case _:
                self.flip(number % NUM_SLOTS)
        self.everything_told_is_right()

    @invariant()
    def everything_told_is_right(self) -> None:
        self.loader.check()
        assert self.level.arena.num_free_lanes >= NUM_LANES - len(self.loads) - 1
        for load in self.loads:
            counts = [self.reader.rows_ready(load.lane, row) for row in range(NUM_ROWS)]
            assert counts == sorted(counts, reverse=True)
            for row, count in enumerate(counts):
                cut = slice(row * ROW_BYTES, (row + 1) * ROW_BYTES)
                for ref, digest in zip(load.slots[:count], load.chain.digests, strict=False):
                    assert self.reader.is_filling_or_holds(ref, digest[:16])
                    right = right_bytes(digest)[cut]
                    assert np.array_equal(self.reader.view(ref.slot)[cut], right), "wrong bytes"

    @invariant()
    def nothing_is_wrong_and_nothing_is_lost(self) -> None:
        out = np.zeros(LAYOUT.block_bytes, np.uint8)
        on_disk = {name for extent in self.pool.extents.values() for name in extent.names}
        for digest in self.given:
            if self.level.read(digest[:16], out):
                assert np.array_equal(out, right_bytes(digest))
            elif digest not in self.may_be_lost:
                assert digest in on_disk

    def teardown(self) -> None:
        for load in self.loads:
            self.loader.release(load)
        self.level.give_back_slots(self.lent)
        self.loader.check()
        assert self.loader.num_loads == 0
        assert self.level.arena.num_free_lanes == NUM_LANES
        assert self.level.arena.num_free + self.level.num_blocks == NUM_SLOTS
        self.peers.close()
        self.reader.close()
        self.pool.is_down = False
        self.level.close(deadline_ns=soon())
        self.folder.cleanup()


TestLoadMachine = LoadMachine.TestCase
TestLoadMachine.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
