"""A level of one storage node: how fast it knows its records again when it starts."""

from __future__ import annotations

import tempfile
import time
from pathlib import Path

import numpy as np

from millpond.core.units import GIB, KIB, MIB, align_up
from millpond.store.files import DiskFiles
from millpond.store.generations import GenerationTable
from millpond.store.segment import DIRECTORY, PAGE_BYTES, SegmentId, pack_footer, pack_segment_header
from millpond.store.target import Target, TargetParams, TargetState

SHARD_BYTES = 182 * KIB
"""Record of a 16-block extent of V4.1-Flash."""
SEGMENT_BYTES = 256 * MIB
NOW_S = 1_800_000_000


def restart_entries_per_s(num_segments: int = 300, repeats: int = 3) -> float:
    """Records a target indexes per second of one core when it starts, from the footers of full segments."""
    per_segment = SEGMENT_BYTES // SHARD_BYTES
    with tempfile.TemporaryDirectory() as folder:
        _make_footers(DiskFiles(Path(folder)), num_segments, per_segment)
        best_s = float("inf")
        for _ in range(repeats):
            begin_s = time.thread_time()
            target = Target(DiskFiles(Path(folder)), TargetParams(capacity_bytes=1024 * GIB), now_s=NOW_S)
            best_s = min(best_s, time.thread_time() - begin_s)
            if target.num_shards != num_segments * per_segment or target.state is not TargetState.OK:
                raise RuntimeError(f"{target.num_shards} records found: {target.fault}")
            target.close(now_s=NOW_S)
    return num_segments * per_segment / best_s


def _make_footers(files: DiskFiles, num_segments: int, per_segment: int) -> None:
    """Sealed segments without the bytes of their records, which a start does not read."""
    table = GenerationTable.create(files)
    rng = np.random.default_rng(1)
    for _ in range(num_segments):
        slot, generation = table.begin()
        segment = SegmentId(slot, generation, NOW_S, 24 * 3600)
        directory = np.empty(per_segment, DIRECTORY)
        directory["fingerprint"] = rng.integers(0, 1 << 64, per_segment, dtype=np.uint64)
        directory["page"] = 1 + np.arange(per_segment) * (SHARD_BYTES // PAGE_BYTES + 1)
        directory["num_bytes"] = SHARD_BYTES
        end_bytes = align_up(PAGE_BYTES * int(directory["page"][-1]) + SHARD_BYTES, PAGE_BYTES)
        file = files.create(segment.name)
        files.write(file, 0, [pack_segment_header(segment)])
        files.write(file, end_bytes, [pack_footer(segment, directory, NOW_S, end_bytes)])
        files.close(file)
    table.close()


if __name__ == "__main__":
    print(f"{restart_entries_per_s():,.0f} records/s")
