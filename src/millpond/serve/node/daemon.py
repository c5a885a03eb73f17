"""`NodeDaemon`: one loop between a host's ranks and its memory (interfaces A.6).

    drain sockets -> leases -> threads -> what they have made -> drain sockets -> ...

The loop never waits for a disk, another host or a copy: threads do, and what they made comes back to the loop
as an event. Only the loop touches the leases.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace

import structlog

from millpond.config.node_params import NodeParams
from millpond.control.node_leases import Freed, NodeLeases
from millpond.core.errors import InvariantBroken
from millpond.core.node_messages import (
    Load,
    LoadCancel,
    NodeHello,
    NodePing,
    NodeWelcome,
    Put,
    PutClose,
    SnapshotPut,
)
from millpond.core.units import MILLISECOND_NS, SECOND_NS
from millpond.serve.node.host_memory import HostMemory
from millpond.serve.node.jobs import Jobs
from millpond.serve.node.load_desk import LoadDesk
from millpond.serve.node.node_counts import NodeCounts
from millpond.serve.node.process_watch import ProcessWatch
from millpond.serve.node.room_maker import RoomMaker
from millpond.serve.node.slot_desk import SlotDesk
from millpond.serve.rpc import Router, wait_any

TICK_NS = 100 * MILLISECOND_NS
CHECK_NS = 10 * SECOND_NS
"""The daemon inspects its invariants this often."""

log = structlog.get_logger(__name__)


class NodeDaemon:
    """See module.

    Args:
        memory: Of the host; stays the caller's, who closes it after `run`.
        router: Where ranks connect.
        params: Parameters.
    """

    def __init__(self, memory: HostMemory, router: Router, params: NodeParams) -> None:
        self.counts = NodeCounts()
        self.leases = NodeLeases(int(params.lease_s * SECOND_NS))
        """Of the ranks. The loop's; others may look."""
        self._memory = memory
        self._router = router
        self._flush_s = params.flush_s
        self._jobs = Jobs(params.num_load_threads)
        self._processes = ProcessWatch()
        room = RoomMaker(memory, self._jobs)
        self._loads = LoadDesk(memory, self.leases, self._jobs, room, self.counts, router.send)
        self._slots = SlotDesk(memory, self.leases, self._jobs, room, self.counts, router.send)
        self._has_our_layout: dict[str, bool] = {}
        """By rank."""
        self._is_stopping = False
        self._last_check_ns = 0

    def run(self, is_stopping: Callable[[], bool], on_tick: Callable[[], None]) -> None:
        """Serve until `is_stopping`. Raises what breaks the daemon; the supervisor restarts it.

        Args:
            is_stopping: Asked ten times a second.
            on_tick: Called as often.
        """
        while not is_stopping():
            self._turn()
            on_tick()

    def stop(self) -> bool:
        """Refuse and end all loads, take in what ranks have put; whether all threads have ended in time."""
        self._is_stopping = True
        self._loads.stop()
        until_ns = time.monotonic_ns() + int(self._flush_s * SECOND_NS)
        while not self._jobs.is_idle and time.monotonic_ns() < until_ns:
            self._turn()
        self._processes.close()
        return self._jobs.stop(until_ns)

    def check(self) -> list[str]:
        """Return violated laws."""
        problems = self.leases.check() + self._loads.check() + self._memory.snapshots.check()
        return problems + self._slots.check() if self._jobs.is_idle else problems

    def _turn(self) -> None:
        """Wait for something to do, a tenth of a second at most, and do it."""
        wait_any((self._router, self._jobs.wakeup, self._processes), TICK_NS / SECOND_NS)
        while (received := self._router.recv()) is not None:
            self._on_message(*received)
        self._jobs.go_on()
        self._memory.require_alive()
        now_ns = time.monotonic_ns()
        self._pass_time(now_ns)
        self._loads.start(now_ns)

    def _on_message(self, name: str, message: object) -> None:
        now_ns = time.monotonic_ns()
        if isinstance(message, NodeHello):
            self._on_hello(now_ns, name, message)
            return
        if not self.leases.heard(now_ns, name):
            return  # its lease is over; it will notice by our silence, and say hello
        match message:
            case NodePing():
                self._welcome(name)
            case Load():
                self._loads.ask(name, message, self._refusal(name))
            case LoadCancel():
                self._give_back(self.leases.cancel(name, message.number))
            case Put():
                self._slots.put(name, message)
                self._lend(name)
            case PutClose():
                self._slots.close(name, message)
            case SnapshotPut():
                self._memory.snapshots.put(message)
            case _:
                log.warning("node.message_unexpected", kind=type(message).__name__, peer=name)

    def _on_hello(self, now_ns: int, name: str, hello: NodeHello) -> None:
        if not self._processes.watch(hello.pid):
            # Of a process that cannot be watched nothing is kept when it falls silent.
            hello = replace(hello, pid=0)
        freed = self.leases.hello(now_ns, name, hello)
        if freed is None:
            return
        self._give_back(freed)
        self._has_our_layout[name] = hello.layout_fingerprint == self._memory.layout.fingerprint
        log.info("node.hello", peer=name, pid=hello.pid)
        self._welcome(name)
        self._lend(name)

    def _welcome(self, name: str) -> None:
        arena = self._memory.arena
        self._router.send(name, NodeWelcome(str(arena.path), arena.epoch, self.leases.incarnation(name)))

    def _refusal(self, name: str) -> str:
        """Why a rank gets no loads."""
        if self._is_stopping:
            return "stopping"
        return "" if self._has_our_layout[name] else "layout"

    def _lend(self, name: str) -> None:
        if not self._refusal(name):
            self._slots.lend(name)

    def _pass_time(self, now_ns: int) -> None:
        for pid in self._processes.take_ended():
            log.info("node.process_ended", pid=pid)
            self._give_back(self.leases.died(pid))
        freed = self.leases.expire(now_ns)
        if freed.peers:
            self.counts.leases_expired += len(freed.peers)
            log.warning("node.ranks_silent", peers=freed.peers)
        self._give_back(freed)
        self._loads.pass_time(now_ns)
        for name in self.leases.peers():
            self._lend(name)
        if now_ns - self._last_check_ns >= CHECK_NS:
            self._last_check_ns = now_ns
            self._memory.snapshots.expire()
            problems = self.check()
            if problems:
                raise InvariantBroken("; ".join(problems))

    def _give_back(self, freed: Freed) -> None:
        self._loads.end(freed.loads)
        self._slots.give_back(freed.slots)
        for name in freed.peers:
            self._slots.forget(name)
