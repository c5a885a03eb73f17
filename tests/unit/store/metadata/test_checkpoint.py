"""Checkpoints of a metadata shard: whole or refused, whatever the crash or the damage."""

from __future__ import annotations

import numpy as np
import pytest

from millpond.core.chance import Chance
from millpond.core.errors import OverloadError
from millpond.core.extents import ExtentId, StripeId, TenantId
from millpond.core.pool_map import PoolMap, StorageNodeInfo
from millpond.store.index import BlockIndex, ExtentEntry
from millpond.store.metadata.checkpoint import (
    Checkpoint,
    load_checkpoint,
    load_map,
    save_checkpoint,
    save_map,
)
from millpond.store.metadata.quotas import TenantQuota
from tests.unit.store.crash_disk import Crash, CrashDisk
from tests.unit.store.metadata.names import digests, hashes

CHAIN = digests(range(400))


def index_of(num_blocks: int) -> BlockIndex:
    index = BlockIndex(2048)
    for at in range(0, num_blocks, 8):
        entry = ExtentEntry(ExtentId(CHAIN[at + 7], 8), StripeId(0, 1, at), at, 0, False, TenantId(1), 5, 100)
        index.insert(entry, hashes(CHAIN[at : at + 8]))
    return index


def checkpoint(num_blocks: int, unix_s: int = 1000) -> Checkpoint:
    return Checkpoint(unix_s, True, index_of(num_blocks).save(), {3: TenantQuota(1, 2.5, 4)}, {9: 77})


def load(disk: CrashDisk, now_s: int = 1000, max_age_s: int = 3600) -> Checkpoint | None:
    return load_checkpoint(disk, now_s=now_s, max_age_s=max_age_s)


def num_known(found: Checkpoint) -> int:
    return BlockIndex.restore(found.index, 2048).match(hashes(CHAIN), 8, 5)[0]


def test_a_checkpoint_comes_back_whole_and_replaces_the_one_before():
    disk = CrashDisk()
    assert load(disk) is None
    save_checkpoint(disk, checkpoint(80))
    save_checkpoint(disk, checkpoint(160))
    found = load(disk)
    assert (found.unix_s, found.is_clean, found.quotas, found.dropped) == (
        1000, True, {3: TenantQuota(1, 2.5, 4)}, {9: 77},
    )  # fmt: skip
    assert num_known(found) == 160
    assert disk.names() == ["index.2"]
    assert disk.num_open == 0


def test_an_old_checkpoint_is_refused():
    disk = CrashDisk()
    save_checkpoint(disk, checkpoint(80))
    assert load(disk, now_s=4600) is not None
    assert load(disk, now_s=4601) is None


def test_a_checkpoint_that_is_too_large_says_so():
    disk = CrashDisk()
    big = BlockIndex(1 << 15)
    for n in range(8000):
        chain = digests((n,))
        entry = ExtentEntry(ExtentId(chain[0], 1), StripeId(0, 0, n), 0, 0, False, TenantId(1), 5, 100)
        big.insert(entry, hashes(chain))
    save_checkpoint(disk, Checkpoint(1000, True, big.save()))
    found = load(disk)
    with pytest.raises(OverloadError, match="more than 1024"):
        BlockIndex.restore(found.index, 1024)


def test_after_a_crash_at_any_point_the_old_or_the_new_one_is_there():
    """Every step of the second save, many torn states of each."""
    both = set()
    chance = Chance(5, "crashes")
    steps = 0
    while True:
        disk = CrashDisk()
        save_checkpoint(disk, checkpoint(80))
        save_map(disk, PoolMap(1, (), (), ("a:1",)))
        disk.sync_names()
        base = disk.num_changes
        disk.crash_at = base + steps + 1
        try:
            save_checkpoint(disk, checkpoint(160))
            save_map(disk, PoolMap(2, (), (), ("a:1",)))
        except Crash:
            pass
        else:
            break
        for _ in range(8):
            after = disk.image(chance)
            known = num_known(load(after))
            both.add((known, load_map(after).version))
            save_checkpoint(after, checkpoint(240))
            assert num_known(load(after)) == 240, "the next one is written beside what the crash left"
        steps += 1
    assert steps > 6
    assert {known for known, _ in both} == {80, 160}
    assert {version for _, version in both} == {1, 2}


def test_any_flipped_bit_and_any_cut_is_refused():
    chance = Chance(6, "damage")
    save = CrashDisk()
    save_checkpoint(save, checkpoint(80))
    (name,) = save.names()
    size = save.file_bytes(name)
    places = [*range(512), *(chance.below(size * 8) for _ in range(300))]
    for bit in places:
        save.flip(name, bit)
        assert load(save) is None, bit
        save.flip(name, bit)
    assert num_known(load(save)) == 80
    for cut in (0, 3, 20, 100, size // 2, size - 1):
        disk = CrashDisk()
        save_checkpoint(disk, checkpoint(80))
        file = disk.open(name)
        disk.truncate(file, cut)
        disk.close(file)
        assert load(disk) is None


def test_maps_come_back_and_damaged_ones_do_not():
    disk = CrashDisk()
    pool_map = PoolMap(3, (StorageNodeInfo("s0", "h:1", "r", 2, "p"),), (), ("a:1",), 8, ((b"x" * 16, 32),))
    save_map(disk, pool_map)
    assert load_map(disk) == pool_map
    disk.flip(disk.names()[0], 333)
    assert load_map(disk) is None


def test_arrays_of_other_sizes_are_refused():
    disk = CrashDisk()
    wrong = index_of(80).save() | {"entries": np.zeros(7, np.uint64)}
    save_checkpoint(disk, Checkpoint(1000, True, wrong))
    assert load(disk) is None
