"""Mixed load on a pool: every byte that comes back is checked, every call is timed."""

from __future__ import annotations

import hashlib
import threading
import time
from array import array
from collections import Counter
from dataclasses import dataclass, field
from functools import lru_cache

import numpy as np

from millpond.control.extent_write import WriteEnd
from millpond.core.chance import Chance
from millpond.core.errors import QuotaExceeded, TransientError
from millpond.core.extents import TenantId
from millpond.core.hashing import HashChain, root_digest
from millpond.core.kv_layout import uniform_layout
from millpond.core.units import MILLISECOND_NS, SECOND_NS
from millpond.store.chain import BlockChain, Hit
from millpond.store.extent_get import BlockSink
from millpond.store.pool import Pool

LAYOUT = uniform_layout(num_layers=4, kv_bytes_per_token=8, dtype="bf16")
NUM_CHAINS = 40
MAX_BLOCKS = 96
PIN_NS = 3 * SECOND_NS
OVERRUN_NS = SECOND_NS
"""What a call may take beyond its deadline."""
SHORT_OVERRUN_NS = 10 * OVERRUN_NS
"""The same beside other tests."""


@lru_cache(maxsize=NUM_CHAINS)
def chain_of(index: int) -> BlockChain:
    """Chains of three tenants; every second one shares its first 40 blocks with the one before."""
    tenant = index // 2 % 3
    hashes = HashChain(root_digest(b"m", LAYOUT.fingerprint, b"tenant %d" % tenant, b""))
    ids = np.full(128 * MAX_BLOCKS, index, np.int32)
    ids[: 128 * 40] = index - index % 2
    hashes.extend(array("i", ids.tobytes()))
    return BlockChain(TenantId(tenant), hashes.root, tuple(hashes.digests))


@lru_cache(maxsize=8192)
def bytes_of(digest: bytes) -> np.ndarray:
    """Content of the block with this digest, which no other block has."""
    return np.frombuffer(hashlib.shake_128(digest).digest(LAYOUT.block_bytes), np.uint8)


@dataclass
class LoadRecord:
    """What all clients saw. Threads add to it one at a time."""

    overrun_ns: int = OVERRUN_NS
    """Later than this behind its deadline, a call counts as late."""
    counts: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    late: list[str] = field(default_factory=list)
    failures: list[BaseException] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def count(self, name: str, number: int = 1) -> None:
        with self.lock:
            self.counts[name] += number


class LoadClient(threading.Thread):
    """One client: random calls until it is told to stop."""

    def __init__(self, pool: Pool, seed: int, record: LoadRecord, stop: threading.Event) -> None:
        super().__init__(name=f"load {seed}")
        self._pool = pool
        self._chance = Chance(seed, "load")
        self._record = record
        self._stop_asked = stop

    def run(self) -> None:
        works = (self.put, self.put, self.read, self.read, self.read, self.prefetch, self.evict, self.touch)
        try:
            while not self._stop_asked.is_set():
                work = works[self._chance.below(len(works))]
                try:
                    work(chain_of(self._chance.below(NUM_CHAINS)))
                except (TransientError, QuotaExceeded) as error:
                    self._record.count(f"{work.__name__} refused: {error.code}")
                    self._stop_asked.wait(0.05)  # as a caller would that tries again
        except BaseException as error:  # noqa: BLE001 - handed to the test, which raises it
            self._record.failures.append(error)

    def put(self, chain: BlockChain) -> None:
        """Write a piece of a chain, from its begin or from a window on."""
        begin = self._pool.window * self._chance.below(2)
        self.put_blocks(chain, begin, begin + 1 + self._chance.below(MAX_BLOCKS - begin))

    def put_blocks(self, chain: BlockChain, begin: int, end: int) -> set[WriteEnd]:
        """Write blocks `[begin, end)`; how their extents ended."""
        blocks = [bytes_of(digest) for digest in chain.digests[begin:end]]
        with self._timed("put", 3 * SECOND_NS) as call:
            results = self._pool.put(chain, begin, blocks, deadline_ns=call.deadline_ns)
        for result in results:
            self._record.count(f"put {result.result.name.lower()}")
        return {result.result for result in results}

    def read(self, chain: BlockChain) -> int:
        """Match, sometimes pin, get, check; how many blocks came."""
        hit = self._match(chain)
        if not hit.num_blocks:
            self._record.count("misses")
            return 0
        pins = self._chance.below(3) == 0
        if pins:
            with self._timed("pin", 2 * SECOND_NS):
                self._pool.pin(hit, PIN_NS)
        blocks = _empty(hit)
        with self._timed("get", (200 + self._chance.below(2000)) * MILLISECOND_NS) as call:
            result = self._pool.get(hit, BlockSink(blocks), deadline_ns=call.deadline_ns)
        self._check(hit, blocks, result.num_blocks)
        if pins and self._chance.below(2):
            with self._timed("release", 2 * SECOND_NS):
                self._pool.release(hit)
        return result.num_blocks

    def prefetch(self, chain: BlockChain) -> None:
        """The same in the background, half of them cancelled."""
        hit = self._match(chain)
        if not hit.num_blocks:
            return
        blocks = _empty(hit)
        with self._timed("prefetch", 2 * SECOND_NS) as call:
            prefetch = self._pool.prefetch(hit, BlockSink(blocks), deadline_ns=call.deadline_ns)
            if self._chance.below(2):
                prefetch.cancel()
            result = prefetch.result(deadline_ns=call.deadline_ns + self._record.overrun_ns)
        self._check(hit, blocks, result.num_blocks)

    def evict(self, chain: BlockChain) -> None:
        """Forget the end of a chain, seldom."""
        if self._chance.below(4) == 0:
            with self._timed("evict", 2 * SECOND_NS):
                self._record.count("evicted", self._pool.evict(chain, self._chance.below(MAX_BLOCKS)))

    def touch(self, chain: BlockChain) -> None:
        """Renew a chain."""
        with self._timed("touch", 2 * SECOND_NS):
            self._pool.touch(chain)

    def _match(self, chain: BlockChain) -> Hit:
        with self._timed("match", SECOND_NS) as call:
            return self._pool.match(chain, deadline_ns=call.deadline_ns)

    def _check(self, hit: Hit, blocks: list[np.ndarray], num_blocks: int) -> None:
        for index in range(num_blocks):
            if not np.array_equal(blocks[index], bytes_of(hit.chain.digests[index])):
                self._record.wrong.append(f"block {index} of {hit.chain.digests[index].hex()}")
        self._record.count("blocks read", num_blocks)
        self._record.count("blocks lost", hit.num_blocks - num_blocks)

    def _timed(self, name: str, limit_ns: int) -> _TimedCall:
        return _TimedCall(self._record, name, limit_ns)


class _TimedCall:
    def __init__(self, record: LoadRecord, name: str, limit_ns: int) -> None:
        self._record = record
        self._name = name
        self.deadline_ns = time.monotonic_ns() + limit_ns

    def __enter__(self) -> _TimedCall:
        return self

    def __exit__(self, *_: object) -> None:
        over_ns = time.monotonic_ns() - self.deadline_ns
        if over_ns > self._record.overrun_ns:
            self._record.late.append(f"{self._name}: {over_ns / SECOND_NS:.2f} s beyond its deadline")
        self._record.count(self._name)


def _empty(hit: Hit) -> list[np.ndarray]:
    return [np.zeros(LAYOUT.block_bytes, np.uint8) for _ in range(hit.num_blocks)]
