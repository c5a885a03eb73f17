"""The pool against memory, the raw disk, plain reads and Mooncake store.

Every part runs in a process of its own, so that its memory and threads disturb no other; parts that look at
no clock run two at a time, after the others.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from itertools import repeat

from benchmarks.harness import Report, Result, log_to_stderr, say
from millpond.core.units import GIB, MIB

DISK_BYTES = 4 * GIB
QUICK_DISK_BYTES = 128 * MIB
QUICK_READS = 200


@dataclass(frozen=True, slots=True)
class Part:
    """Some levels that are measured together."""

    measure: Callable[[Report], None]
    levels: tuple[str, ...]
    is_timed: bool = True
    """Looks at a clock."""
    is_quick_timed: bool = False
    """The same for its quick form."""


def run(*, quick: bool, only: set[str]) -> Result:
    """Measure the levels of [pool]."""
    report = Report("pool", quick, only)
    parts = [part for part in PARTS if report.wants(*part.levels)]
    for num_processes, is_timed in ((1, True), (2, False)):
        todo = [part for part in parts if is_timed == (part.is_quick_timed if quick else part.is_timed)]
        spawn = multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(
            num_processes, spawn, initializer=log_to_stderr, max_tasks_per_child=1
        ) as processes:
            for found in processes.map(_measure, todo, repeat(quick), repeat(only)):
                report.merge(found)
    return report.finish()


def _measure(part: Part, quick: bool, only: set[str]) -> Report:
    report = Report("pool", quick, only)
    say(f"pool: {', '.join(part.levels)}")
    part.measure(report)
    return report


def _codec(report: Report) -> None:
    from benchmarks.pool_codec import PoolCodecBench

    bench = PoolCodecBench()
    sides = {
        "encode_sum_vs_memmove": bench.encode_sum,
        "rebuild_one_vs_memmove": bench.rebuild_one,
        "get_inplace_vs_memmove": bench.get_inplace,
        "get_copyout_vs_memmove": bench.get_copyout,
    }
    _ = bench.headers
    for level, make in sides.items():
        if report.wants(level):
            side = make()
            report.add_ratio(level, side.ours, side.memmove)


def _disk(report: Report) -> None:
    from benchmarks.pool_disk import measure_disk

    found = measure_disk(QUICK_DISK_BYTES if report.quick else DISK_BYTES)
    report.figures["disk"] = asdict(found)
    report.add("write_amplification", found.write_amplification, f"{found.logical_bytes / MIB:.0f} MiB put")
    if not report.quick:
        report.add("put_vs_disk_write", found.put / found.raw_write)
        report.add(
            "get_cold_vs_disk_read",
            None if found.failed_reads else found.get / found.raw_read,
            f"{found.failed_reads} reads failed",
        )


def _hedge_virtual(report: Report) -> None:
    from benchmarks.pool_reads import hedge_virtual

    found = hedge_virtual(rhos=(0.4,) if report.quick else (0.2, 0.4, 0.6))
    report.figures["hedge_virtual"] = found.by_rho
    note = f"worst of utilisations {', '.join(found.by_rho)}"
    report.add("hedge_p999_ratio_virtual", found.p999_ratio, note)
    report.add("hedge_extra_bytes", found.extra_ratio, note)


def _hedge_real(report: Report) -> None:
    from benchmarks.pool_reads import hedge_real

    ratio, found = hedge_real()
    report.figures["hedge_real"] = {name: asdict(row) for name, row in found.items()}
    report.add("hedge_p99_ratio_real", ratio)


def _bad_node(report: Report) -> None:
    from benchmarks.pool_reads import bad_node

    ratio, found = bad_node()
    report.figures["bad_node"] = {name: asdict(row) for name, row in found.items()}
    report.add("slow_node_p99_ratio", ratio, "worse of slow and stopped")


def _two_dead(report: Report) -> None:
    from benchmarks.pool_reads import two_dead

    readable, ratio, found = two_dead(QUICK_READS if report.quick else 1000)
    report.figures["two_dead"] = {name: asdict(row) for name, row in found.items()}
    report.add("two_dead_readable", readable)
    if not report.quick:
        report.add("two_dead_throughput_ratio", ratio)


def _rebuild(report: Report) -> None:
    from benchmarks.pool_rebuild import NODE_COUNTS, rebuild_read_max_over_mean

    by_nodes = {count: rebuild_read_max_over_mean(count) for count in NODE_COUNTS}
    report.figures["rebuild_read_max_over_mean_by_nodes"] = by_nodes
    report.add("rebuild_read_max_over_mean", max(by_nodes.values()), f"worst of {NODE_COUNTS} nodes")


def _restart(report: Report) -> None:
    from benchmarks.pool_restart import restart_entries_per_s

    report.add("restart_index_entries_per_s", restart_entries_per_s())


def _index(report: Report) -> None:
    from benchmarks.pool_metadata import measure_index

    found = measure_index()
    report.figures["index"] = asdict(found)
    report.add("lpm512_us_p50", found.lpm512_us_p50)
    report.add("index_bytes_per_block", found.bytes_per_block)


def _match(report: Report) -> None:
    from benchmarks.pool_metadata import measure_client

    found = measure_client()
    report.figures["match"] = asdict(found)
    report.add("lpm512_rtts_p50", found.rtts)


def _balance(report: Report) -> None:
    from benchmarks.pool_metadata import TRACE, measure_balance

    if not TRACE.is_file():
        report.add("metadata_shard_max_over_mean", None, "no trace beside the repository")
        return
    found = measure_balance()
    report.figures["metadata_balance"] = asdict(found)
    report.add("metadata_shard_max_over_mean", found.worst, "worse of both workloads")


def _mooncake(report: Report) -> None:
    from benchmarks.pool_mooncake import measure_mooncake

    measure_mooncake(report)


PARTS = (
    Part(
        _codec,
        (
            "encode_sum_vs_memmove",
            "rebuild_one_vs_memmove",
            "get_inplace_vs_memmove",
            "get_copyout_vs_memmove",
        ),
        is_quick_timed=True,
    ),
    Part(_restart, ("restart_index_entries_per_s",), is_quick_timed=True),
    Part(_match, ("lpm512_rtts_p50",), is_quick_timed=True),
    Part(_index, ("lpm512_us_p50", "index_bytes_per_block")),
    Part(_balance, ("metadata_shard_max_over_mean",), is_timed=False),
    Part(_hedge_virtual, ("hedge_p999_ratio_virtual", "hedge_extra_bytes"), is_timed=False),
    Part(_rebuild, ("rebuild_read_max_over_mean",), is_timed=False),
    Part(_disk, ("write_amplification", "put_vs_disk_write", "get_cold_vs_disk_read")),
    Part(_two_dead, ("two_dead_readable", "two_dead_throughput_ratio")),
    Part(_hedge_real, ("hedge_p99_ratio_real",)),
    Part(_bad_node, ("slow_node_p99_ratio",)),
    Part(_mooncake, ("put_vs_mooncake", "get_vs_mooncake", "get_local_vs_mooncake_local")),
)
