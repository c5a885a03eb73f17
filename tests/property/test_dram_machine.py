"""The DRAM level against a dict: any order of turns, pauses, failing disks and flipped bits."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from millpond.control.extent_write import WriteEnd
from millpond.core.errors import QuotaExceeded, TransferFailed
from millpond.core.kv_layout import uniform_layout
from millpond.policies.spill import SpillParams
from millpond.store.chain import BlockChain, cut_at_windows
from millpond.store.dram import DramLevel, DramParams
from millpond.store.dram_arena import DramArena
from millpond.store.dram_directory import DramDirectory, DramHost
from millpond.store.extent_put import PutResult
from tests.unit.store.pool_cluster import bytes_of, chain_of, soon

LAYOUT = uniform_layout(num_layers=1, kv_bytes_per_token=4, dtype="bf16")
WINDOW, NUM_SLOTS, LENGTH = 4, 12, 14
ROOT = chain_of(LENGTH)
FORKS = [
    replace(ROOT, digests=(*ROOT.digests[:common], *chain_of(LENGTH, first_id=10**6 * n).digests[common:]))
    for n, common in enumerate((0, 5, 6), start=1)
]
CHAINS = [ROOT, *FORKS]


class Disks:
    """Where extents go; may fail."""

    def __init__(self) -> None:
        self.blocks: dict[bytes, bytes] = {}
        self.failure = "none"

    def put(
        self, chain: BlockChain, first_block: int, blocks: Sequence[np.ndarray], **options: object
    ) -> list[PutResult]:
        if self.failure == "down":
            raise TransferFailed("down", code="test")
        if self.failure == "quota":
            raise QuotaExceeded("full", code="test")
        results = []
        for begin, end in cut_at_windows(first_block, first_block + len(blocks), WINDOW):
            if self.failure == "second" and results:
                results.append(PutResult(begin, end, WriteEnd.REFUSED))
                continue
            for index in range(begin, end):
                self.blocks[chain.digests[index]] = bytes(blocks[index - first_block])
            results.append(PutResult(begin, end, WriteEnd.PUBLISHED))
        return results


class HandClock:
    def __init__(self) -> None:
        self.now_ns = 0

    def monotonic_ns(self) -> int:
        return self.now_ns

    def unix_s(self) -> int:
        return 0


class DramMachine(RuleBasedStateMachine):
    @initialize(evict=st.sampled_from(["lru", "s3fifo"]))
    def start(self, evict: str) -> None:
        self.folder = tempfile.TemporaryDirectory()
        self.disks, self.clock, directory = Disks(), HandClock(), DramDirectory()
        arena = DramArena.create(
            Path(self.folder.name) / "arena",
            3 * 4096 + NUM_SLOTS * (4096 + 40),
            LAYOUT,
            epoch=1,
        )
        assert arena.num_slots == NUM_SLOTS
        directory.join("h", DramHost("", 1))
        self.level = DramLevel(
            arena,
            host="h",
            directory=directory,
            window=WINDOW,
            write=self.disks.put,
            params=DramParams(evict, SpillParams(idle_s=30, retry_s=5)),
            clock=self.clock,
        )
        self.may_be_lost: set[bytes] = set()
        self.given: set[bytes] = set()

    @rule(chain=st.integers(0, 3), begin=st.integers(0, LENGTH - 1), length=st.integers(1, 6))
    def put(self, chain: int, begin: int, length: int) -> None:
        wanted = CHAINS[chain].digests[begin : begin + length]
        blocks = blocks_of_layout(CHAINS[chain], begin, begin + length)
        count = self.level.put(CHAINS[chain], begin, blocks, deadline_ns=soon())
        assert count == len(wanted) or self.disks.failure in {"down", "second"}
        self.given.update(wanted[:count])
        if self.disks.failure == "quota":  # whatever was written meanwhile was refused for good
            self.may_be_lost |= self.given

    @rule(chain=st.integers(0, 3), length=st.integers(1, LENGTH))
    def touch(self, chain: int, length: int) -> None:
        self.level.touch(replace(CHAINS[chain], digests=CHAINS[chain].digests[:length]))

    @rule(seconds=st.sampled_from([1, 6, 31]))
    def wait(self, seconds: int) -> None:
        self.clock.now_ns += seconds * 10**9
        if self.disks.failure == "quota":
            self.may_be_lost |= self.given
        self.level.spill_due(deadline_ns=soon())

    @rule(failure=st.sampled_from(["none", "none", "down", "quota", "second"]))
    def disks_become(self, failure: str) -> None:
        self.disks.failure = failure

    @rule(slot=st.integers(0, NUM_SLOTS - 1))
    def flip_a_bit(self, slot: int) -> None:
        self.level.arena.view(slot)[100] ^= 1
        self.may_be_lost |= self.given  # which block it was, and those behind it in its window

    @invariant()
    def nothing_is_wrong_and_nothing_is_lost(self) -> None:
        self.level.check()
        out = np.zeros(LAYOUT.block_bytes, np.uint8)
        for digest in self.given:
            if self.level.read(digest[:16], out):
                assert np.array_equal(out, bytes_of(digest, LAYOUT))
            elif digest not in self.may_be_lost:
                assert digest in self.disks.blocks
        for digest, content in self.disks.blocks.items():
            assert content == bytes(bytes_of(digest, LAYOUT))

    def teardown(self) -> None:
        self.level.close(deadline_ns=soon())
        self.folder.cleanup()


def blocks_of_layout(chain: BlockChain, begin: int, end: int) -> list[np.ndarray]:
    return [bytes_of(digest, LAYOUT) for digest in chain.digests[begin:end]]


TestDramMachine = DramMachine.TestCase
TestDramMachine.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
