"""Where the service runs: hosts, groups, storage, links (interfaces A.7)."""

from __future__ import annotations

from dataclasses import dataclass

from millpond.control.group_scheduler import GroupRole
from millpond.core.units import GIB, MIB


@dataclass(frozen=True, slots=True)
class HostSpec:
    """One machine, or one network namespace that stands for a machine."""

    name: str
    """How groups and links refer to it."""
    snic: str = "127.0.0.1"
    """Address of the network to the storage."""
    cnic: str = "127.0.0.1"
    """Address of the network between workers; KV is handed over on it."""
    arena: int = 128 * MIB
    """Bytes of shared memory for KV on its way to and from the engines of this host."""
    dram: int = 384 * MIB
    """Bytes of memory for cached blocks on this host."""


@dataclass(frozen=True, slots=True)
class GroupSpec:
    """One DP group: ranks that step together."""

    name: str
    """How it appears in logs, metrics and `millpond status`."""
    role: GroupRole
    """`prefill`, `decode`, or `mixed` (both in one scheduler)."""
    hosts: tuple[str, ...] = ("h0",)
    """Hosts of its ranks; rank i runs on hosts[i mod len(hosts)]."""
    ranks: int = 1
    """DP ranks, which are also its EP ranks."""
    threads_per_rank: int = 1
    """CPU threads of one rank's process; never more than there are cores."""
    device: str = "cpu"
    """Device of the engine, in torch's spelling."""
    kv_memory: int = 0
    """Bytes of KV block memory of one rank; 0: as `engine.kv_memory`."""


@dataclass(frozen=True, slots=True)
class StorageSpec:
    """One storage node of the KV pool."""

    name: str
    """How it appears in logs and metrics."""
    host: str = ""
    """Host it runs on. Empty: the first one."""
    targets: int = 12
    """Directories or disks it serves."""
    capacity: int = 8 * GIB
    """Bytes it may fill, over all its targets."""


@dataclass(frozen=True, slots=True)
class LinkSpec:
    """Speed of one host's connection to one network. Only the testbed and the simulator read it."""

    a: str
    """Host."""
    net: str
    """`snic` or `cnic`."""
    rate: int = 400_000_000
    """Bits per second in each direction."""


DEFAULT_HOSTS = (HostSpec("h0"),)
DEFAULT_GROUPS = (GroupSpec("p0", GroupRole.PREFILL), GroupSpec("d0", GroupRole.DECODE))
"""One prefill and one decode process on this machine."""
DEFAULT_STORAGE = (StorageSpec("s0"),)
"""One storage node with twelve folders, 8 GiB in all."""
