"""Parameters of the node daemon: one per host, between the engines and the KV pool."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from millpond.policies.spill import SpillParams


@dataclass(frozen=True, slots=True)
class NodeParams:
    """Loads, puts, snapshots and upkeep of every host's node daemon. Its memory is `arena` + `dram` of the
    host.
    """

    put_slots: int = 16
    """Free slots that a rank has at hand for blocks that it computes, >= 1. Each takes one block of memory,
    of smollm2-135m 3 MB."""
    num_load_threads: int = 4
    """Loads that run at once, >= 1; more wait in order."""
    load_deadline_s: float = 10.0
    """What has not come after so long is computed instead."""
    lease_s: float = 5.0
    """A rank, or a daemon, that was silent for so long is taken for gone, and what it held is given back."""
    snapshot_ratio: float = 0.1
    """Memory for snapshots of window state, in addition to the host's `dram` and as a part of it; 0 keeps
    none. Models without window state take none."""
    snapshot_ttl_s: float = 600.0
    """A snapshot that was not used for so long is dropped."""
    snapshot_network: Literal["snic", "cnic"] = "snic"
    """Network over which hosts read snapshots from each other: `snic`, the one to the storage, or `cnic`."""
    snapshot_deadline_s: float = 0.2
    """A snapshot of another host that takes longer counts as none."""
    evict: Literal["lru", "s3fifo"] = "lru"
    """Which block leaves the memory first: `lru`, or `s3fifo` where it is small against what is read."""
    spill: SpillParams = field(default_factory=SpillParams)
    """How long blocks wait for others before they are written to the disks."""
    spill_deadline_s: float = 20.0
    """A write to the disks that takes longer is tried again later."""
    heal_period_s: float = 1.0
    """How often what reads found to be missing is put back; 0 switches it off."""
    flush_s: float = 5.0
    """How long writing what waits may take when the service stops."""
    pool_buffers: int = 12
    """Extents on their way to or from the pool at once, >= 1; each takes 1.2 times its blocks' memory."""
    pool_retry_s: float = 1.0
    """Pause between tries to reach a pool that is not there."""
