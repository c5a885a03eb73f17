"""`NodeDaemon`: one loop between a host's ranks and its memory (interfaces A.6).

    drain sockets -> leases -> threads -> what they have done -> drain sockets -> ...

The loop never waits for a disk, another host or a copy: threads find slots for loads (one, in the order in
which they came), carry loads out (several), take in what ranks have written (one) and make room (one). What
they did comes back to the loop as an event; only the loop touches the leases.
"""

from __future__ import annotations

import os
import select
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import structlog

from millpond.config.node_params import NodeParams
from millpond.control.node_leases import Freed, HeldLoad, LoadStage, NodeLeases
from millpond.core.errors import ArenaFull, InvariantBroken, MillpondError
from millpond.core.extents import TenantId
from millpond.core.hashing import DIGEST_BYTES
from millpond.core.ids import RequestId
from millpond.core.node_messages import (
    Load,
    LoadAccepted,
    LoadCancel,
    LoadDone,
    LoadRefused,
    NodeHello,
    NodePing,
    NodeWelcome,
    Put,
    PutClose,
    PutSlots,
    Slot,
    SnapshotPut,
)
from millpond.core.units import MILLISECOND_NS, SECOND_NS
from millpond.serve.node.host_memory import HostMemory
from millpond.serve.node.node_counts import NodeCounts
from millpond.serve.node.snapshots import FoundState
from millpond.serve.rpc import Router, Source, Wakeup, wait_any
from millpond.store.chain import BlockChain
from millpond.store.dram_arena import SlotRef
from millpond.store.load_state import LoadResult, TieredLoad

TICK_NS = 100 * MILLISECOND_NS
MATCH_NS = 500 * MILLISECOND_NS
"""How long the pool may take to say what it has: other loads wait meanwhile."""
MAX_LENT_SHARE = 4
"""Of the memory, at most one part in so many is lent to ranks for new blocks."""
CHECK_NS = 10 * SECOND_NS
"""An idle daemon inspects its invariants this often."""

log = structlog.get_logger(__name__)
Made = TypeVar("Made")


@dataclass(frozen=True, slots=True)
class _Begun:
    """What became of a load that looked for slots."""

    load: TieredLoad | None
    """None: there is nothing to load, or no room."""
    state: FoundState | None = None
    is_full: bool = False


@dataclass(slots=True)
class _Peer:
    """What the daemon knows of a rank, besides its leases."""

    pid: int
    pidfd: int
    """-1: its process cannot be watched."""
    layout_fingerprint: bytes
    is_lending: bool = False
    """Slots are being found for it."""
    chains: dict[tuple[RequestId, int], tuple[bytes, ...]] = field(
        default_factory=dict[tuple[RequestId, int], tuple[bytes, ...]]
    )
    """Digests of the sequences that it puts."""


class NodeDaemon:
    """See module.

    Args:
        memory: Of the host; stays the caller's, who closes it after `run`.
        router: Where ranks connect.
        params: Parameters.
    """

    def __init__(self, memory: HostMemory, router: Router, params: NodeParams) -> None:
        self.counts = NodeCounts()
        self._memory = memory
        self._router = router
        self._wakeup = Wakeup()
        self._leases = NodeLeases(int(params.lease_s * SECOND_NS))
        self._flush_s = params.flush_s
        self._peers: dict[str, _Peer] = {}
        self._dead: dict[int, int] = {}
        """pidfd -> pid of processes that are no peer's any more."""
        self._tiered: dict[HeldLoad, TieredLoad] = {}
        """Loads that hold something."""
        self._is_making_room = False
        self._tried_ns = 0
        """When a load last found no room."""
        self._is_stopping = False
        self._last_check_ns = 0
        self._starter = ThreadPoolExecutor(1, "start load")
        self._loaders = ThreadPoolExecutor(params.num_load_threads, "load")
        self._putter = ThreadPoolExecutor(1, "put")
        self._maker = ThreadPoolExecutor(1, "make room")
        self._jobs: set[Future[Any]] = set()

    # --- life --------------------------------------------------------------------------------

    def run(self, is_stopping: Callable[[], bool], on_tick: Callable[[], None]) -> None:
        """Serve until `is_stopping`. Raises what breaks the daemon; the supervisor restarts it.

        Args:
            is_stopping: Asked ten times a second.
            on_tick: Called as often.
        """
        while not is_stopping():
            self.turn()
            on_tick()

    def turn(self) -> None:
        """Wait for something to do, a tenth of a second at most, and do it."""
        wait_any(self._sources(), TICK_NS / SECOND_NS)
        while (received := self._router.recv()) is not None:
            self._on_message(*received)
        for done in self._wakeup.take():
            assert callable(done)  # noqa: S101 - posted by `_submit` only
            done()
        self._memory.require_alive()
        self._on_time(time.monotonic_ns())
        self._start_loads()

    def stop(self) -> bool:
        """Refuse and end all loads, take in what ranks have put; whether all threads have ended in time."""
        self._is_stopping = True
        for load in [load for load in self._leases.loads() if not load.is_ended]:
            if load.stage in {LoadStage.WAITING, LoadStage.STARTING}:
                self._send_refusal(load, "stopping")
            self._give_back(self._leases.cancel(load.peer, load.order.number))
        until_ns = time.monotonic_ns() + int(self._flush_s * SECOND_NS)
        while self._jobs and time.monotonic_ns() < until_ns:
            self.turn()
        for executor in (self._starter, self._loaders, self._putter, self._maker):
            executor.shutdown(wait=False, cancel_futures=True)
        started = [job for job in self._jobs if not job.cancelled()]
        is_over = not wait(started, max(0, until_ns - time.monotonic_ns()) / SECOND_NS).not_done
        for pidfd in self._pidfds():
            os.close(pidfd)
        self._wakeup.close()
        return is_over

    def check(self) -> list[str]:
        """Return violated laws; that of the slots that are lent only while no thread is at work."""
        problems = self._leases.check() + self._memory.snapshots.check()
        held = {load for load in self._leases.loads() if load.stage in {LoadStage.RUNNING, LoadStage.DONE}}
        if held != self._tiered.keys():
            problems.append(f"{len(held)} loads hold slots, {len(self._tiered)} are known")
        if not self._jobs:
            level = self._memory.level
            with level.lock:
                num_lent = level.blocks.num_lent
            if num_lent != self._leases.num_lent():
                problems.append(f"{num_lent} slots are lent, {self._leases.num_lent()} have a rank")
        return problems

    def _sources(self) -> tuple[Source, ...]:
        return (self._router, self._wakeup, _Descriptors(self._pidfds()))

    def _pidfds(self) -> tuple[int, ...]:
        return (*(peer.pidfd for peer in self._peers.values() if peer.pidfd >= 0), *self._dead)

    # --- messages ----------------------------------------------------------------------------

    def _on_message(self, name: str, message: object) -> None:
        now_ns = time.monotonic_ns()
        if isinstance(message, NodeHello):
            self._on_hello(now_ns, name, message)
            return
        peer = self._peers.get(name)
        if peer is None or not self._leases.heard(now_ns, name):
            return  # its lease is over; it will notice by our silence, and say hello
        match message:
            case NodePing():
                self._welcome(name)
            case Load():
                self._on_load(name, peer, message)
            case LoadCancel():
                self._give_back(self._leases.cancel(name, message.number))
            case Put():
                self._on_put(name, peer, message)
            case PutClose():
                peer.chains.pop((message.request_id, message.attempt), None)
            case SnapshotPut():
                self._memory.snapshots.put(message)
            case _:
                log.warning("node.message_unexpected", kind=type(message).__name__, peer=name)

    def _on_hello(self, now_ns: int, name: str, hello: NodeHello) -> None:
        old = self._peers.get(name)
        pidfd = old.pidfd if old is not None and old.pid == hello.pid else _open_pid(hello.pid)
        # Of a process that cannot be watched nothing is kept when it falls silent.
        freed = self._leases.hello(now_ns, name, hello if pidfd >= 0 else replace(hello, pid=0))
        if freed is None:
            return
        self._give_back(freed)
        if old is not None and old.pidfd not in (-1, pidfd):
            self._dead[old.pidfd] = old.pid
        self._peers[name] = _Peer(hello.pid, pidfd, hello.layout_fingerprint)
        log.info("node.hello", peer=name, pid=hello.pid)
        self._welcome(name)
        self._lend(name)

    def _welcome(self, name: str) -> None:
        arena = self._memory.arena
        self._router.send(name, NodeWelcome(str(arena.path), arena.epoch, self._leases.incarnation(name)))

    def _on_load(self, name: str, peer: _Peer, order: Load) -> None:
        load = self._leases.ask(name, order)
        if load is None:
            return
        self.counts.loads += 1
        if self._is_stopping:
            self._refuse_waiting(load, "stopping")
        elif not self._knows_layout(peer):
            self._refuse_waiting(load, "layout")

    def _on_put(self, name: str, peer: _Peer, put: Put) -> None:
        slots = self._leases.take_back(name, put.slots)
        chain = _chain_of(put, peer.chains.get((put.request_id, put.attempt), ()))
        if chain is None or len(slots) < len(put.slots):
            self.counts.puts_skipped += len(put.slots)
            self._take_back(slots)
            return
        peer.chains[put.request_id, put.attempt] = chain.digests
        self._submit(self._putter, lambda: self._put(chain, put, slots), self._on_put_done)
        self._lend(name)

    # --- threads -----------------------------------------------------------------------------

    def _submit(
        self, executor: ThreadPoolExecutor, work: Callable[[], Made], then: Callable[[Made], None]
    ) -> None:
        """Have a thread do `work`, and the loop what comes after it."""
        job = executor.submit(work)
        self._jobs.add(job)
        job.add_done_callback(lambda _: self._wakeup.post(lambda: self._after(job, then)))

    def _after(self, job: Future[Made], then: Callable[[Made], None]) -> None:
        """Go on, or end the daemon: threads translate what may happen, all else is a bug."""
        self._jobs.discard(job)
        if not job.cancelled():
            then(job.result())

    def _begin(self, order: Load) -> _Begun:
        """Find slots for a load, and a state if it wants one. The starter's thread."""
        try:
            chain = BlockChain(TenantId(order.kv.tenant), order.kv.root, _digests(order.digests))
            until_ns = min(order.deadline_ns, time.monotonic_ns() + MATCH_NS)
            load = self._memory.loader.begin(chain, order.located, deadline_ns=until_ns)
        except ArenaFull:
            return _Begun(None, is_full=True)
        except MillpondError as error:
            log.info("node.load_absent", code=error.code, error=error.message)
            return _Begun(None)
        if load is None or not order.wants_state:
            return _Begun(load)
        return _Begun(load, self._memory.snapshots.find(chain.digests[: load.num_blocks]))

    def _put(self, chain: BlockChain, put: Put, slots: Sequence[Slot]) -> tuple[int, int]:
        """Take blocks in. The putter's thread."""
        refs = [SlotRef(*slot) for slot in slots]
        num_new = self._memory.level.put_slots(chain, put.first_block, refs, lineage=int(put.is_approximate))
        return len(slots), num_new

    def _find_slots(self, count: int) -> list[SlotRef]:
        """Slots to lend; writes what waits if there are too few. The maker's thread."""
        level = self._memory.level
        refs = level.take_slots(count)
        if len(refs) < count and level.make_room(
            count - len(refs), deadline_ns=self._memory.spill_until_ns()
        ):
            refs += level.take_slots(count - len(refs))
        return refs

    # --- loads -------------------------------------------------------------------------------

    def _start_loads(self) -> None:
        load = self._leases.start()
        if load is not None:
            self._submit(
                self._starter, lambda: self._begin(load.order), lambda made: self._on_begun(load, made)
            )

    def _on_begun(self, load: HeldLoad, made: _Begun) -> None:
        tiered = made.load
        if made.is_full:
            self._tried_ns = time.monotonic_ns()
            self._leases.no_room(load)
            self._make_room(len(load.order.digests) // DIGEST_BYTES)
        elif tiered is None:
            if self._leases.refuse(load):
                self._send_refusal(load, "absent")
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
        )
        self.counts.count_accepted(wants_state=order.wants_state, has_state=state is not None)
        self._router.send(load.peer, accepted)
        deadline_ns = order.deadline_ns
        self._submit(
            self._loaders,
            lambda: self._memory.loader.run(tiered, deadline_ns=deadline_ns),
            lambda result: self._on_loaded(load, tiered, result),
        )

    def _on_loaded(self, load: HeldLoad, tiered: TieredLoad, result: LoadResult) -> None:
        order = load.order
        self.counts.count_loaded(result, len(tiered.slots))
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
        self._router.send(load.peer, done)
        if not is_held:
            self._release(self._tiered.pop(load))

    def _send_refusal(self, load: HeldLoad, reason: str) -> None:
        self.counts.refused[reason] += 1
        order = load.order
        self._router.send(load.peer, LoadRefused(order.request_id, order.attempt, reason, order.number))

    def _refuse_waiting(self, load: HeldLoad, reason: str) -> None:
        self._give_back(self._leases.cancel(load.peer, load.order.number))
        self._send_refusal(load, reason)

    def _release(self, tiered: TieredLoad) -> None:
        self._memory.loader.release(tiered)
        self._leases.room()

    # --- slots -------------------------------------------------------------------------------

    def _lend(self, name: str) -> None:
        """Bring a rank's free slots to the number that it wants."""
        peer = self._peers.get(name)
        count = self._leases.num_wanted(name, self._memory.arena.num_slots // MAX_LENT_SHARE)
        if peer is None or not count or peer.is_lending or self._is_stopping or not self._knows_layout(peer):
            return
        peer.is_lending = True
        incarnation = self._leases.incarnation(name)
        self._submit(
            self._maker,
            lambda: self._find_slots(count),
            lambda refs: self._on_slots(name, peer, incarnation, refs),
        )

    def _knows_layout(self, peer: _Peer) -> bool:
        return peer.layout_fingerprint == self._memory.layout.fingerprint

    def _on_slots(self, name: str, peer: _Peer, incarnation: int, refs: Sequence[SlotRef]) -> None:
        peer.is_lending = False
        slots = tuple((ref.slot, ref.generation) for ref in refs)
        if not slots:
            return
        if self._leases.lend(name, incarnation, slots):
            self._router.send(name, PutSlots(slots, incarnation))
        else:
            self._memory.level.give_back_slots(refs)
            self._leases.room()

    def _on_put_done(self, done: tuple[int, int]) -> None:
        num_slots, num_new = done
        self.counts.puts += num_new
        self.counts.puts_known += num_slots - num_new
        self._leases.room()  # blocks that were known have given their slots back

    def _take_back(self, slots: Sequence[Slot]) -> None:
        self._memory.level.give_back_slots([SlotRef(*slot) for slot in slots])
        self._leases.room()

    def _make_room(self, count: int) -> None:
        """Write what waits, so that the load at the head of the queue finds slots."""
        if self._is_making_room:
            return
        self._is_making_room = True
        level, until_ns = self._memory.level, self._memory.spill_until_ns()
        self._submit(
            self._maker, lambda: level.make_room(count, deadline_ns=until_ns), lambda _: self._on_room_made()
        )

    def _on_room_made(self) -> None:
        self._is_making_room = False

    # --- time and ends -----------------------------------------------------------------------

    def _on_time(self, now_ns: int) -> None:
        for pidfd in _ended(self._pidfds()):
            self._on_death(pidfd)
        freed = self._leases.expire(now_ns)
        for name in freed.peers:
            self.counts.leases_expired += 1
            log.warning("node.rank_silent", peer=name)
            self._forget_chains(name)
        self._give_back(freed)
        is_blocked = not self._leases.has_room
        if is_blocked and now_ns - self._tried_ns >= TICK_NS and not self._is_making_room:
            self._leases.room()  # blocks may have been written
        for load in self._leases.late(now_ns):
            if self._leases.refuse(load):
                self._send_refusal(load, "no_room" if is_blocked else "deadline")
        for name in self._leases.peers():
            self._lend(name)
        if now_ns - self._last_check_ns >= CHECK_NS:
            self._last_check_ns = now_ns
            self._memory.snapshots.expire()
            problems = self.check()
            if problems:
                raise InvariantBroken("; ".join(problems))

    def _on_death(self, pidfd: int) -> None:
        pid = self._dead.pop(pidfd, 0)
        if pid:
            os.close(pidfd)
        else:
            name, peer = next((n, p) for n, p in self._peers.items() if p.pidfd == pidfd)
            pid = peer.pid
            log.info("node.rank_gone", peer=name, pid=pid)
            os.close(pidfd)
            del self._peers[name]
        self._give_back(self._leases.died(pid))

    def _forget_chains(self, name: str) -> None:
        peer = self._peers.get(name)
        if peer is not None:
            peer.chains.clear()

    def _give_back(self, freed: Freed) -> None:
        for load in freed.loads:
            if load.stage is LoadStage.RUNNING:
                self._memory.loader.cancel(self._tiered[load])
            elif load.stage is LoadStage.DONE:
                self._release(self._tiered.pop(load))
        if freed.slots:
            self._memory.level.give_back_slots([SlotRef(*slot) for slot in freed.slots])
            self._leases.room()


@dataclass(frozen=True, slots=True)
class _Descriptors:
    """Process descriptors: readable when the process has ended."""

    descriptors: tuple[int, ...]

    def poll_items(self) -> tuple[int, ...]:
        return self.descriptors


def _open_pid(pid: int) -> int:
    """A descriptor that tells of the end of a process; -1 if there is none, or none is named."""
    try:
        return os.pidfd_open(pid) if pid > 0 else -1
    except OSError:
        return -1


def _ended(descriptors: Sequence[int]) -> list[int]:
    """Of process descriptors those whose process has ended."""
    poller = select.poll()
    for descriptor in descriptors:
        poller.register(descriptor, select.POLLIN)
    return [descriptor for descriptor, _ in poller.poll(0)]


def _digests(packed: bytes) -> tuple[bytes, ...]:
    return tuple(packed[begin : begin + DIGEST_BYTES] for begin in range(0, len(packed), DIGEST_BYTES))


def _chain_of(put: Put, known: tuple[bytes, ...]) -> BlockChain | None:
    """The chain up to the last block put; None if the message makes no sense.

    Args:
        put: Brings the digests of its blocks, or of all blocks up to its last one.
        known: What the rank told of the sequence before.
    """
    digests, end = _digests(put.digests), put.first_block + len(put.slots)
    if len(digests) == len(put.slots) and len(known) == put.first_block:
        digests = known + digests
    if len(digests) != end or not put.slots:
        return None
    try:
        return BlockChain(TenantId(put.kv.tenant), put.kv.root, digests)
    except MillpondError:
        return None
