"""`NodeClient`: a rank's end of the line to its host's node daemon.

A thread of its own speaks with the daemon; the other methods may be called by any thread and do not block.
Bytes never travel over the line: they lie in the arena, which both have mapped.

What the rank holds there is a lease. It ends for the rank before it ends for the daemon: when nothing could
be sent for a while, nothing was heard for a while, or the daemon was restarted, then all loads and slots are
void, and the rank introduces itself anew.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import structlog

from millpond.core.errors import DataError
from millpond.core.ids import RequestId
from millpond.core.kv_layout import KvLayout
from millpond.core.node_messages import (
    LoadAccepted,
    LoadCancel,
    LoadDone,
    LoadRefused,
    NodeHello,
    NodePing,
    NodeWelcome,
    PutClose,
    PutSlots,
    SnapshotPut,
)
from millpond.core.plan import LoadStart
from millpond.core.request import KvIdentity
from millpond.core.units import MILLISECOND_NS, SECOND_NS
from millpond.serve.node.free_slots import FreeSlots, PutSlot
from millpond.serve.node.load_line import LoadCounts, LoadLine
from millpond.serve.node.node_load import NodeLoad
from millpond.serve.node.put_line import PutCounts, PutLine, PutOrder
from millpond.serve.rpc import Connected, Dealer, Network, Wakeup, wait_any
from millpond.store.dram_arena import DramArena

PING_NS = 500 * MILLISECOND_NS
LINGER_S = 0.2
"""At the end, what was put last has so long to reach the daemon."""
HELLO_NS = SECOND_NS
"""While the daemon does not answer, it is greeted this often."""

log = structlog.get_logger(__name__)


@dataclass(slots=True)
class ClientCounts:
    """Since the start."""

    snapshots: int = 0
    snapshots_lost: int = 0
    """Of a time without a daemon."""


class NodeClient:
    """See module. Owns its thread until `stop`.

    Args:
        network: Of the process.
        endpoint: The daemon's socket.
        identity: Name of the rank, `<group>-<rank>`.
        incarnation: Larger after each restart of the rank.
        layout: Of its blocks.
        num_put_slots: Free slots to have at hand.
        post: Takes `Loaded` events.
        lease_s: As the daemon's.
    """

    def __init__(
        self,
        network: Network,
        endpoint: str,
        identity: str,
        incarnation: int,
        layout: KvLayout,
        num_put_slots: int,
        post: Callable[[object], None],
        *,
        lease_s: float = 5.0,
    ) -> None:
        self.counts = ClientCounts()
        self.failure: BaseException | None = None
        """A bug that ended the thread: the process should end too."""
        self._layout = layout
        self._num_put_slots = num_put_slots
        self._lease_ns = int(lease_s * SECOND_NS)
        self._incarnation = incarnation
        self._dealer = Dealer(network, endpoint, identity)
        self._orders = Wakeup()
        self._arena: DramArena | None = None
        """Of the daemon's present life; None while it is not known to live."""
        self._loads = LoadLine(layout, self._send, post)
        self._slots = FreeSlots(layout.block_bytes, num_put_slots)
        self._puts = PutLine(self._slots, self._send)
        self._heard_ns = self._sent_ns = 0
        self._hello_ns = time.monotonic_ns()
        self._is_stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="node client", daemon=True)
        self._thread.start()

    @property
    def epoch(self) -> int:
        """Of the daemon's life that we have a lease of; 0 while there is none."""
        arena = self._arena
        return arena.epoch if arena is not None else 0

    @property
    def num_free_slots(self) -> int:
        """Lent slots that could be taken."""
        return len(self._slots)

    @property
    def num_aside(self) -> int:
        """Blocks that wait for a slot, or are being written."""
        return self._slots.num_spare

    @property
    def load_counts(self) -> LoadCounts:
        """What became of loads."""
        return self._loads.counts

    @property
    def put_counts(self) -> PutCounts:
        """What became of the blocks that were put."""
        return self._puts.counts

    # --- loads -------------------------------------------------------------------------------

    def load(self, order: LoadStart, deadline_ns: int) -> None:
        """Ask for a load. `Loaded` is posted once, as `LoadLine` says, at the latest at the deadline.

        Not if the thread has ended by a bug: see `failure`.
        """
        self.end(order.request_id, order.attempt)
        self._orders.post((self._loads.add(order, deadline_ns), order))

    def end(self, request_id: RequestId, attempt: int) -> None:
        """Give a load back, done or not; unknown ones are ignored. Its slots must not be read any more."""
        cancel = self._loads.remove(request_id, attempt)
        if cancel is not None:
            self._orders.post(cancel)

    def load_of(self, request_id: RequestId, attempt: int) -> NodeLoad | None:
        """A load that was ordered and not ended."""
        return self._loads.find(request_id, attempt)

    # --- puts --------------------------------------------------------------------------------

    def take_slot(self) -> PutSlot | None:
        """Where to write a block: a lent slot, or a buffer from which it goes into the next one; None: no
        room now, or no daemon. It must come back by `put` or `give_back`, and soon: without it, a lost daemon
        is not greeted again.
        """
        # A rank that was frozen for long may come here before its own thread has noticed.
        is_fresh = time.monotonic_ns() - self._sent_ns < self._lease_ns
        return self._slots.take() if is_fresh else None

    def give_back(self, slot: PutSlot) -> None:
        """Keep a slot that was taken and not filled for the next block."""
        self._slots.give_back(slot)

    def put(
        self,
        request_id: RequestId,
        attempt: int,
        kv: KvIdentity,
        first_block: int,
        digests: Sequence[bytes],
        slots: Sequence[PutSlot],
        *,
        is_approximate: bool = False,
    ) -> None:
        """Hand over blocks that were written into slots.

        Args:
            request_id: Of the sequence.
            attempt: Of the sequence.
            kv: Of the sequence.
            first_block: Index in the sequence of the first one.
            digests: 32 bytes per block, from block 0 to the last one put.
            slots: One per block.
            is_approximate: Computed downstream of a bounded replay.
        """
        order = PutOrder(request_id, attempt, kv, first_block, tuple(digests), tuple(slots), is_approximate)
        self._orders.post(order)

    def close_put(self, request_id: RequestId, attempt: int) -> None:
        """No more blocks of this sequence will come."""
        self._orders.post(PutClose(request_id, attempt))

    def snapshot(self, message: SnapshotPut) -> None:
        """Have a copy of a window state kept; lost if the daemon is not there."""
        self._orders.post(message)

    def stop(self) -> None:
        """End the thread; what is held goes back when the process ends."""
        self._is_stopping.set()
        self._orders.post(None)
        self._thread.join()
        self._orders.close()
        self._dealer.close(LINGER_S)
        self._void("stopped")

    # --- the thread --------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while not self._is_stopping.is_set():
                while (message := self._dealer.recv()) is not None:
                    self._on_message(message)
                for order in self._orders.take():
                    self._carry_out(order)
                self._puts.hand_over()
                self._keep_lease(time.monotonic_ns())
                self._loads.answer_due(time.monotonic_ns())
                wait_any((self._dealer, self._orders), self._wait_s(time.monotonic_ns()))
            for order in self._orders.take():
                self._carry_out(order)
            self._puts.hand_over()
        except BaseException as error:
            self.failure = error
            self._void("failed")
            raise

    def _on_message(self, message: object) -> None:
        self._heard_ns = time.monotonic_ns()
        match message:
            case Connected():
                self._greet()
            case NodeWelcome():
                if message.incarnation == self._incarnation and self._arena is None:
                    self._attach(message)
            case LoadAccepted():
                if self._arena is not None:
                    self._loads.on_accepted(self._arena, message)
            case LoadRefused():
                self._loads.on_refused(message)
            case LoadDone():
                self._loads.on_done(message)
            case PutSlots():
                self._on_slots(message)
            case _:
                log.warning("node_client.message_unexpected", kind=type(message).__name__)

    def _attach(self, welcome: NodeWelcome) -> None:
        try:
            arena = DramArena.attach(Path(welcome.arena), writable=True)
        except DataError as error:
            log.warning("node_client.no_arena", error=error.message)  # the daemon is gone again, or another's
            return
        if arena.epoch != welcome.epoch or arena.fingerprint != self._layout.fingerprint:
            log.warning("node_client.wrong_arena", epoch=arena.epoch)
            return
        self._arena = arena

    def _on_slots(self, message: PutSlots) -> None:
        if message.incarnation != self._incarnation or self._arena is None:
            return
        view = self._arena.view
        slots = [PutSlot(*slot, message.incarnation, view(slot[0])) for slot in message.slots]
        self._puts.extend(message.incarnation, slots)

    def _carry_out(self, order: object) -> None:
        match order:
            case (NodeLoad() as load, LoadStart() as start):
                self._loads.ask(load, start)
            case PutOrder() | PutClose():
                self._puts.add(order)
            case LoadCancel():
                self._send(order)
            case SnapshotPut():
                is_sent = self._send(order)
                self.counts.snapshots += is_sent
                self.counts.snapshots_lost += not is_sent
            case _:
                pass  # only to wake up

    def _send(self, message: object) -> bool:
        """Send, if the daemon lives and knows us."""
        if self._arena is None:
            return False
        now_ns = time.monotonic_ns()
        if not self._dealer.send(message):
            log.warning("node_client.daemon_lost")
            self._greet()
            return False
        self._sent_ns = now_ns
        return True

    def _greet(self) -> None:
        """Introduce ourselves anew; what we held is void, here and there."""
        self._void("daemon_lost")
        self._incarnation += 1  # first of all: a late welcome to what is void must not bring it back
        if self._slots.num_in_hand:
            return  # once greeted, the daemon lends these slots to others
        self._hello_ns = time.monotonic_ns()
        hello = NodeHello(self._incarnation, self._layout.fingerprint, self._num_put_slots, os.getpid())
        if self._dealer.send(hello):
            self._sent_ns = self._hello_ns

    def _keep_lease(self, now_ns: int) -> None:
        if self._arena is None:
            if now_ns - self._hello_ns >= HELLO_NS:
                self._greet()
        elif now_ns - min(self._heard_ns, self._sent_ns) >= self._lease_ns:
            log.warning("node_client.daemon_silent")
            self._greet()
        elif now_ns - self._sent_ns >= PING_NS:
            self._send(NodePing())

    def _wait_s(self, now_ns: int) -> float:
        due_ns = self._loads.due_ns(now_ns, now_ns + PING_NS)
        return max(due_ns - now_ns, MILLISECOND_NS) / SECOND_NS

    def _void(self, reason: str) -> None:
        """Let go of everything that a life of the daemon had given us."""
        self._arena = None  # unmapped when nobody reads it any more
        self._puts.void()
        self._loads.void(reason)
