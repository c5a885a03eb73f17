"""`NodeCounts`: what a node daemon has done, in the names of `/metrics`."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from millpond.control.extent_read import ReadCounts, ReadEnd
from millpond.serve.node.host_memory import HostMemory
from millpond.store.load_state import LoadResult


@dataclass(slots=True)
class NodeCounts:
    """Since the start."""

    loads: int = 0
    """That ranks asked for."""
    accepted: int = 0
    refused: Counter[str] = field(default_factory=Counter[str])
    """By reason."""
    shortened: int = 0
    """Accepted, and fewer blocks came than were asked for."""
    shortened_by: Counter[str] = field(default_factory=Counter[str])
    """Reasons why."""
    blocks: Counter[str] = field(default_factory=Counter[str])
    """Blocks loaded, by where they came from."""
    states_found: int = 0
    states_missed: int = 0
    puts: int = 0
    """Blocks taken in that were not in memory before."""
    puts_known: int = 0
    puts_skipped: int = 0
    """Messages that made no sense, or came when their lease was over."""
    leases_expired: int = 0

    def count_accepted(self, *, wants_state: bool, has_state: bool, cut_by: str) -> None:
        """A load has its slots, if `cut_by` is not empty for fewer blocks than were asked for."""
        self.accepted += 1
        if cut_by:
            self.shortened += 1
            self.shortened_by[cut_by] += 1
        self.states_found += has_state
        self.states_missed += wants_state and not has_state

    def count_loaded(self, result: LoadResult, num_promised: int, *, was_cut: bool) -> None:
        """A load has run."""
        if result.num_blocks < num_promised:
            self.shortened += not was_cut
            self.shortened_by.update(result.reasons)
        self.blocks["memory"] += result.from_memory
        self.blocks["peers"] += result.from_peers
        self.blocks["pool"] += result.from_pool

    def values(self, memory: HostMemory) -> dict[str, float]:
        """Metrics of the daemon and its memory: name, or `name:source`, to value."""
        level, snapshots = memory.level.counts, memory.snapshots.counts
        fetches, heals, directories = memory.snapshots.fetches, memory.pool.heals, memory.directory_counts
        with memory.level.lock:
            num_lent, num_pinned = memory.level.blocks.num_lent, memory.level.blocks.num_pinned
        counters: dict[str, float] = {
            "millpond_node_loads_total": self.loads,
            "millpond_node_loads_accepted_total": self.accepted,
            "millpond_node_loads_shortened_total": self.shortened,
            "millpond_node_puts_total": self.puts,
            "millpond_node_puts_known_total": self.puts_known,
            "millpond_node_puts_skipped_total": self.puts_skipped,
            "millpond_node_leases_expired_total": self.leases_expired,
            "millpond_node_blocks_spilled_total": level.spilled,
            "millpond_node_blocks_evicted_total": level.evicted,
            "millpond_node_blocks_refused_total": level.refused,
            "millpond_node_blocks_damaged_total": level.damaged,
            "millpond_node_blocks_given_up_total": level.given_up,
            "millpond_node_spills_failed_total": level.failed_spills,
            "millpond_node_matches_failed_total": memory.pool.failed_matches,
            "millpond_node_directory_failed_total:find": sum(each.failed_finds for each in directories),
            "millpond_node_directory_failed_total:beat": sum(each.failed_beats for each in directories),
            "millpond_node_peer_reads_failed_total": memory.num_failed_peers,
            "millpond_node_peer_reads_stale_total": memory.num_stale,
            "millpond_node_healed_total": heals.healed,
            "millpond_node_rewritten_total": heals.rewritten,
            "millpond_node_snapshots_total:kept": snapshots.kept,
            "millpond_node_snapshots_total:used": snapshots.used,
            "millpond_node_snapshots_total:missed": self.states_missed,
            "millpond_node_snapshots_total:replaced": snapshots.replaced,
            "millpond_node_snapshots_total:evicted": snapshots.evicted,
            "millpond_node_snapshots_total:expired": snapshots.expired,
            "millpond_node_snapshots_total:refused": snapshots.refused,
            "millpond_node_snapshots_total:missized": memory.snapshots.num_missized,
            "millpond_node_snapshots_total:fetched": fetches.fetched,
            "millpond_node_snapshots_total:late": fetches.late,
            "millpond_node_pool_open": int(memory.pool.is_open),
            "millpond_node_blocks": memory.level.num_blocks,
            "millpond_node_blocks_waiting": memory.level.num_waiting,
            "millpond_node_blocks_capacity": memory.arena.num_slots,
            "millpond_node_slots_lent": num_lent,
            "millpond_node_slots_pinned": num_pinned,
            "millpond_node_snapshots": memory.snapshots.num_held,
            "millpond_node_snapshot_bytes": memory.snapshots.num_bytes,
        }
        counters |= _pool_reads(memory.pool.reads)
        counters |= {f"millpond_node_blocks_loaded_total:{each}": n for each, n in self.blocks.items()}
        counters |= {f"millpond_node_loads_refused_total:{each}": n for each, n in self.refused.items()}
        counters |= {f"millpond_node_shortened_total:{each}": n for each, n in self.shortened_by.items()}
        return counters


def _pool_reads(reads: ReadCounts) -> dict[str, float]:
    """How the pool's coded reads went."""
    ends: dict[str, float] = {
        f"millpond_node_pool_reads_total:{end.name.lower()}": reads.ends[end] for end in ReadEnd
    }
    return ends | {
        "millpond_node_pool_reads_begun_total": reads.reads,
        "millpond_node_pool_needed_bytes_total": reads.needed_bytes,
        "millpond_node_pool_asked_bytes_total": reads.asked_bytes,
        "millpond_node_pool_hedges_total": reads.hedges,
        "millpond_node_pool_hedges_refused_total": reads.hedges_refused,
        "millpond_node_pool_narrow_reads_total": reads.narrow_reads,
        "millpond_node_pool_losers_total": reads.losers,
        "millpond_node_pool_bad_shards_total": reads.bad_shards,
        "millpond_node_pool_peak_bytes": reads.peak_in_flight_bytes,
    }
