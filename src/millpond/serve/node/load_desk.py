"""`LoadDesk`: the loads of all ranks of a host, from the order to the return of their slots.

Slots are found for one load after the other, in the order in which they came: the queue of a scheduler is
also the prefetch. One that finds no room waits until something is given back or written, and all behind it
wait too, but for those that are in memory already and need none. It does not wait long if some of it is in
memory: then it goes on with that.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

import structlog

from millpond.control.node_leases import HeldLoad, LoadStage, NodeLeases
from millpond.core.errors import ArenaFull, MillpondError
from millpond.core.extents import TenantId
from millpond.core.hashing import DIGEST_BYTES
from millpond.core.node_messages import Load, LoadAccepted, LoadDone, LoadRefused
from millpond.core.units import MILLISECOND_NS
from millpond.serve.node.host_memory import HostMemory
from millpond.serve.node.jobs import Jobs
from millpond.serve.node.node_counts import NodeCounts
from millpond.serve.node.room_maker import RoomMaker
from millpond.serve.node.snapshots import FoundState
from millpond.store.chain import BlockChain, cut_digests
from millpond.store.load_state import LoadResult, TieredLoad

MATCH_NS = 500 * MILLISECOND_NS
"""How long the pool may take to say what it has: other loads wait meanwhile."""
RETRY_NS = 100 * MILLISECOND_NS
"""A load that found no room tries again after so long, for blocks may have been written."""

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class _Begun:
    """What became of a load that looked for slots."""

    load: TieredLoad | None
    """None: there is nothing to load, or no room."""
    state: FoundState | None = None
    is_full: bool = False


class LoadDesk:
    """See module. All methods are the loop's.

    Args:
        memory: Of the host.
        leases: Of its ranks.
        jobs: Threads.
        room: Makes room.
        counts: Of the daemon.
        send: Sends a message to a rank.
    """

    def __init__(
        self,
        memory: HostMemory,
        leases: NodeLeases,
        jobs: Jobs,
        room: RoomMaker,
        counts: NodeCounts,
        send: Callable[[str, object], bool],
    ) -> None:
        self._memory = memory
        self._leases = leases
        self._jobs = jobs
        self._room = room
        self._counts = counts
        self._send = send
        self._tiered: dict[HeldLoad, TieredLoad] = {}
        """Loads that hold something."""
        self._tried_ns = 0
        """When a load last found no room."""

    def ask(self, peer: str, order: Load, refusal: str) -> None:
        """A rank asks for a load.

        Args:
            peer: The rank.
            order: Its message.
            refusal: Why it gets none, or nothing.
        """
        load = self._leases.ask(peer, order)
        if load is None:
            return
        self._counts.loads += 1
        if refusal:
            self._leases.cancel(peer, order.number)
            self._refuse(load, refusal)

    def start(self, now_ns: int) -> None:
        """Have slots found for the load whose turn it is."""
        load = self._leases.start(now_ns)
        if load is not None:
            self._jobs.submit(
                self._jobs.starter, lambda: self._begin(load), lambda made: self._on_begun(load, made)
            )

    def pass_time(self, now_ns: int) -> None:
        """Refuse what has waited too long; let the head of the queue try again."""
        is_blocked = not self._leases.has_room
        for load in self._leases.late(now_ns):
            if self._leases.refuse(load):
                self._refuse(load, "no_room" if is_blocked else "deadline")
        if is_blocked and now_ns - self._tried_ns >= RETRY_NS:
            self._leases.room()

    def end(self, loads: Iterable[HeldLoad]) -> None:
        """Nobody needs these any more: stop them, or give back what they hold."""
        for load in loads:
            if load.stage is LoadStage.RUNNING:
                self._release(self._tiered[load])  # at once if no thread has begun to run it
            elif load.stage is LoadStage.DONE:
                self._release(self._tiered.pop(load))

    def stop(self) -> None:
        """End all loads; who waits for an answer is refused."""
        for load in [load for load in self._leases.loads() if not load.is_ended]:
            if load.stage in {LoadStage.WAITING, LoadStage.STARTING}:
                self._refuse(load, "stopping")
            self.end(self._leases.cancel(load.peer, load.order.number).loads)

    def check(self) -> list[str]:
        """Return violated laws: what holds slots is known, and nothing else."""
        held = {load for load in self._leases.loads() if load.stage in {LoadStage.RUNNING, LoadStage.DONE}}
        if held != self._tiered.keys():
            return [f"{len(held)} loads hold slots, {len(self._tiered)} are known"]
        return []

    def _begin(self, load: HeldLoad) -> _Begun:
        """Find slots for a load, and a state if it wants one. The starter's thread."""
        order = load.order
        try:
            chain = BlockChain(TenantId(order.kv.tenant), order.kv.root, cut_digests(order.digests))
            tiered = self._find_slots(load, chain)
        except ArenaFull:
            return _Begun(None, is_full=True)
        except MillpondError as error:
            log.info("node.load_absent", code=error.code, error=error.message)
            return _Begun(None)
        if tiered is None or not order.wants_state:
            return _Begun(tiered)
        return _Begun(tiered, self._memory.snapshots.find(chain.digests[: tiered.num_blocks]))

    def _find_slots(self, load: HeldLoad, chain: BlockChain) -> TieredLoad | None:
        """As `TieredLoader.begin`, and as the load may: with new slots, or with none."""
        loader, located = self._memory.loader, load.order.located
        until_ns = min(load.order.deadline_ns, time.monotonic_ns() + MATCH_NS)
        if load.takes_slots:
            try:
                return loader.begin(chain, located, deadline_ns=until_ns)
            except ArenaFull as error:
                if not load.takes_less or error.code != "dram.full":
                    raise  # room comes with the end of other loads
        num_here, num_asked = loader.num_here(chain), len(chain.digests)
        if not num_here or (num_here < num_asked and not load.takes_less):
            raise ArenaFull(f"{num_asked - num_here} blocks need a new slot", code="dram.full")
        here = replace(chain, digests=chain.digests[:num_here])
        tiered = loader.begin(here, located, deadline_ns=until_ns, takes_slots=False)
        if tiered is not None and num_here < num_asked:
            tiered.cut_by = "no_room"
        return tiered

    def _on_begun(self, load: HeldLoad, made: _Begun) -> None:
        tiered = made.load
        if made.is_full:
            now_ns = time.monotonic_ns()
            self._leases.no_room(now_ns, load)
            if load.takes_slots:
                self._tried_ns = now_ns
                self._room.make(len(load.order.digests) // DIGEST_BYTES)
        elif tiered is None:
            if self._leases.refuse(load):
                self._refuse(load, "absent")
        elif self._leases.started(load):
            self._tiered[load] = tiered
            self._accept(load, tiered, made.state)
        else:
            self._release(tiered)

    def _accept(self, load: HeldLoad, tiered: TieredLoad, state: FoundState | None) -> None:
        order = load.order
        accepted = LoadAccepted(
            request_id=order.request_id,
            attempt=order.attempt,
            lane=tiered.lane,
            slots=tuple((ref.slot, ref.generation) for ref in tiered.slots),
            state_position=state.position if state is not None else -1,
            state=state.state if state is not None else b"",
            number=order.number,
            is_approximate=tiered.is_approximate or (state is not None and state.is_approximate),
        )
        self._counts.count_accepted(
            wants_state=order.wants_state, has_state=state is not None, cut_by=tiered.cut_by
        )
        self._send(load.peer, accepted)
        self._jobs.submit(
            self._jobs.prover if tiered.is_here else self._jobs.loader,
            lambda: self._memory.loader.run(tiered, deadline_ns=order.deadline_ns),
            lambda result: self._on_loaded(load, tiered, result),
        )

    def _on_loaded(self, load: HeldLoad, tiered: TieredLoad, result: LoadResult) -> None:
        order = load.order
        self._counts.count_loaded(result, tiered.num_blocks, was_cut=bool(tiered.cut_by))
        is_held = self._leases.finish(load)
        done = LoadDone(
            request_id=order.request_id,
            attempt=order.attempt,
            num_blocks=result.num_blocks,
            reasons=result.reasons,
            from_memory=result.from_memory,
            from_peers=result.from_peers,
            from_pool=result.from_pool,
            number=order.number,
        )
        self._send(load.peer, done)
        if not is_held:
            self._release(self._tiered.pop(load))

    def _refuse(self, load: HeldLoad, reason: str) -> None:
        self._counts.refused[reason] += 1
        order = load.order
        self._send(load.peer, LoadRefused(order.request_id, order.attempt, reason, order.number))

    def _release(self, tiered: TieredLoad) -> None:
        self._memory.loader.release(tiered)
        self._leases.room()
