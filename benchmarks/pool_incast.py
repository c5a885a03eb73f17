"""Many senders, one receiver with a slow link and a shallow queue: reads with and without bounded flight.

    python -m benchmarks.pool_incast NUM_READS

runs the storage nodes in one network namespace and the reader in another. `--reader ADDRESSES` is the reader.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from benchmarks.harness import say
from benchmarks.pool_nodes import NodeProcesses, NodeSpeed
from benchmarks.pool_reads import fill, read_all
from millpond.core.extents import NodeId
from millpond.core.kv_layout import uniform_layout
from millpond.core.pool_map import PlacementEpoch, PoolMap, StorageNodeInfo
from millpond.core.units import GIB, KIB
from millpond.policies.receive_window import ReceiveWindowParams
from millpond.serve.testbed.netns import LinkShape, NetworkBed
from millpond.store.local_metadata import LocalMetadata
from millpond.store.metadata.core import MetadataCore
from millpond.store.pool import Pool
from millpond.store.pool_settings import PoolParams, PoolSettings

LINK = LinkShape(100_000_000, queue_bytes=64 * KIB)
"""So slow that the link and not the processor is what reads wait for; a queue of five milliseconds."""
BOUNDED = ReceiveWindowParams(max_in_flight_bytes=192 * KIB)
UNBOUNDED = ReceiveWindowParams(max_in_flight_bytes=GIB)
LAYOUT = uniform_layout(num_layers=4, kv_bytes_per_token=24, dtype="bf16")
NUM_NODES = 12
READER_S = 120


@dataclass(frozen=True, slots=True)
class IncastFigures:
    """What one reader saw, and the link before it."""

    num_reads: int
    num_failed: int
    p50_ms: float
    p99_ms: float
    bytes_per_s: float
    peak_in_flight_bytes: int
    dropped_packets: int = 0
    retransmits: int = 0


def incast(window: ReceiveWindowParams, num_reads: int) -> IncastFigures:
    """Read full extents over a shaped link.

    Raises:
        ConfigError: No network namespaces here.
    """
    with tempfile.TemporaryDirectory() as folder, NetworkBed(["snic"]) as bed:
        bed.add_host("pool", {"snic": None})
        bed.add_host("reader", {"snic": LINK})
        place = {"prefix": bed.command("pool", []), "host": bed.address("pool", "snic")}
        with NodeProcesses(Path(folder), [NodeSpeed()], per_process=NUM_NODES, **place) as nodes:
            addresses = [info.address for info in nodes.infos]
            argv = [sys.executable, "-m", "benchmarks.pool_incast", str(num_reads)]
            argv += ["--reader", *addresses, "--window", json.dumps(asdict(window))]
            done = subprocess.run(
                bed.command("reader", argv), capture_output=True, text=True, timeout=READER_S, check=False
            )
            if done.returncode:
                raise RuntimeError(done.stderr)
            found = IncastFigures(**json.loads(done.stdout.splitlines()[-1]))
            link = bed.received("reader", "snic")
            return replace(found, dropped_packets=link.dropped_packets, retransmits=_retransmits(bed))


def _retransmits(bed: NetworkBed) -> int:
    text = subprocess.run(
        bed.command("pool", ["cat", "/proc/net/snmp"]), capture_output=True, text=True, timeout=10, check=True
    ).stdout
    names, values = (line.split() for line in text.splitlines() if line.startswith("Tcp:"))
    return int(values[names.index("RetransSegs")])


def _read(addresses: list[str], window: ReceiveWindowParams, num_reads: int) -> IncastFigures:
    names = tuple(NodeId(f"s{index}") for index in range(len(addresses)))
    groups = tuple(tuple((first + shard) % 12 for shard in range(12)) for first in range(12))
    infos = tuple(StorageNodeInfo(name, address) for name, address in zip(names, addresses, strict=True))
    metadata = LocalMetadata(
        MetadataCore(), PoolMap(1, infos, (PlacementEpoch(0, 10, 2, names, groups),), ())
    )
    settings = PoolSettings(pool=PoolParams(num_buffers=8, min_piece_kib=1024), window=window)
    with Pool(LAYOUT, metadata, name="incast", settings=settings) as pool:
        hits = fill(pool, LAYOUT, num_chains=6)
        found = read_all(pool, hits, num_reads, readers=2)
        peak = pool.client.reads.counts.peak_in_flight_bytes
    return IncastFigures(
        found.num_reads, found.num_failed, found.p50_ms, found.p99_ms, found.bytes_per_s, peak
    )


def main() -> None:
    """Compare both windows, or be the reader of one."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("num_reads", type=int)
    parser.add_argument("--reader", nargs="+", default=[])
    parser.add_argument("--window", default="{}")
    chosen = parser.parse_args()
    if chosen.reader:
        window = ReceiveWindowParams(**json.loads(chosen.window))
        print(json.dumps(asdict(_read(chosen.reader, window, chosen.num_reads))), flush=True)
        return
    for name, window in (("bounded", BOUNDED), ("unbounded", UNBOUNDED)):
        say(f"{name}: {incast(window, chosen.num_reads)}")


if __name__ == "__main__":
    main()
