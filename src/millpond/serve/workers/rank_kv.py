"""What a rank does with its host's node daemon: loads, swap-ins, and keeping what it computes."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass, field

from millpond.core.errors import InvariantBroken
from millpond.core.events import RankReport
from millpond.core.ids import RequestId
from millpond.core.plan import LoadEnd, LoadStart, PrefillChunk, RankPlan, SwapIn
from millpond.core.ports import Engine
from millpond.core.units import SECOND_NS
from millpond.serve.node.client import NodeClient
from millpond.serve.workers.persist import Persister
from millpond.serve.workers.swap_in import Key, RowsReady, SwapIns


@dataclass(slots=True)
class RankKv:
    """Loads in and blocks out. The engine's thread only.

    Args:
        engine: Of the rank.
        node: Line to the daemon; stopped with this object.
        load_deadline_s: What has not come after so long is computed instead.
        rows_ready: Told when loaded rows are in the engine's memory.
    """

    engine: Engine
    node: NodeClient
    load_deadline_s: float
    rows_ready: RowsReady
    swaps: SwapIns = field(init=False)
    persister: Persister = field(init=False)
    compute_ns: int = 0
    """CPU time of the engine's thread in steps: what the persister's is measured by."""
    _attempts: dict[RequestId, int] = field(default_factory=dict[RequestId, int])
    """Attempt of each load."""

    def __post_init__(self) -> None:
        """Make the parts."""
        self.swaps = SwapIns(self.engine, self.rows_ready)
        self.persister = Persister(self.engine, self.node)

    def end_loads(self, ends: Iterable[LoadEnd]) -> None:
        """Afterwards no thread writes into their blocks. Unknown ones are ignored."""
        for end in ends:
            self.swaps.end((end.request_id, end.attempt))
            self.node.end(end.request_id, end.attempt)
            if self._attempts.get(end.request_id) == end.attempt:
                del self._attempts[end.request_id]

    def start_loads(self, loads: Iterable[LoadStart], swaps: Iterable[SwapIn]) -> None:
        """Order loads, and begin to copy those that have memory now.

        Raises:
            InvariantBroken: The line to the daemon has ended by a bug; nothing would ever be answered.
        """
        if self.node.failure is not None:
            raise InvariantBroken("the line to the node daemon has ended") from self.node.failure
        for order in loads:
            self._attempts[order.request_id] = order.attempt
            self.node.load(order, time.monotonic_ns() + int(self.load_deadline_s * SECOND_NS))
        for swap in swaps:
            load = self.node.load_of(swap.request_id, swap.attempt)
            self.swaps.start(swap, load if load is not None and load.is_held else None)

    def before_step(self, part: RankPlan) -> set[RequestId]:
        """Forget what is gone and bring states back; returns the requests whose state is gone."""
        self.persister.forget(part.forget)
        lost: set[RequestId] = set()
        for copy in part.restore:
            load = self.node.load_of(*self._key(copy.request_id))
            if load is not None and load.state_position == copy.position and load.state:
                self.engine.write_state(copy.slot, memoryview(load.state))
            else:
                self.swaps.end(self._key(copy.request_id))  # without its state the rest is of no use
                lost.add(copy.request_id)
        return lost

    def loading(self, chunks: Iterable[PrefillChunk]) -> tuple[RequestId, ...]:
        """Those of a step's requests that have a load."""
        return tuple(chunk.request_id for chunk in chunks if chunk.request_id in self._attempts)

    def wait_for(self, request_ids: Iterable[RequestId], row: int) -> set[RequestId]:
        """Wait for a row of their loads; returns those that will not have it."""
        keys = [self._key(request_id) for request_id in request_ids]
        return {request_id for request_id, _ in self.swaps.wait_for(keys, row)}

    def settle(self, request_id: RequestId) -> int:
        """End the swap-in of a broken load; returns the leading tokens that are in place after all."""
        return self.swaps.settle(self._key(request_id))

    def after_step(self, part: RankPlan, report: RankReport) -> None:
        """Keep what the step completed."""
        self.persister.after_step(part, report)
        self.persister.forget(request_id for request_id, _ in report.lost)

    def counters(self) -> dict[str, float]:
        """What happened, as metrics."""
        swaps, kept = self.swaps.stats(), self.persister.stats
        loads, puts = self.node.load_counts, self.node.put_counts
        return {
            "millpond_swap_ins_open": swaps.num_open,
            "millpond_swap_in_rows_total": swaps.num_rows,
            "millpond_swap_in_bytes_total": swaps.num_bytes,
            "millpond_swap_in_seconds_total": swaps.copy_seconds,
            "millpond_swap_in_wait_seconds_total": swaps.wait_seconds,
            "millpond_swap_in_broken_total": swaps.num_broken,
            "millpond_persist_blocks_total": kept.num_blocks,
            "millpond_persist_skipped_total": kept.num_skipped + puts.lost,
            "millpond_persist_aside_total": puts.aside,
            "millpond_persist_seconds_total": kept.seconds,
            "millpond_persist_states_total": kept.num_states,
            "millpond_persist_states_lost_total": self.node.counts.snapshots_lost,
            "millpond_compute_seconds_total": self.compute_ns / SECOND_NS,
            "millpond_loads_total": loads.loads,
            "millpond_loads_voided_total": loads.voided,
            **{f"millpond_loads_refused_total:{why}": count for why, count in loads.refused.copy().items()},
        }

    def stop(self) -> None:
        """Stop the threads."""
        self.swaps.stop()
        self.node.stop()

    def _key(self, request_id: RequestId) -> Key:
        attempt = self._attempts.get(request_id)
        if attempt is None:
            raise InvariantBroken(f"{request_id} has no load")
        return (request_id, attempt)
