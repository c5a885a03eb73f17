"""`LoadLine`: a rank's loads, from the order to the answer.

    load (any thread) -> ask -> on_accepted, on_refused, on_done -> answer_due -> `Loaded`

`Loaded` is posted once: when the first row of all blocks is there, when the load is refused or over, or at
its deadline. So no step waits for a load of which nothing comes.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from millpond.core.events import Loaded
from millpond.core.hashing import HashChain
from millpond.core.ids import RequestId
from millpond.core.kv_layout import KvLayout
from millpond.core.node_messages import Load, LoadAccepted, LoadCancel, LoadDone, LoadRefused
from millpond.core.plan import LoadStart
from millpond.core.units import BLOCK_TOKENS, MILLISECOND_NS
from millpond.serve.node.node_load import NodeLoad
from millpond.store.dram_arena import DramArena

LOOK_NS = 2 * MILLISECOND_NS
"""The counters of an accepted load are looked at this often until its first row is there."""

Key = tuple[RequestId, int]
"""(request, attempt)."""


@dataclass(slots=True)
class LoadCounts:
    """Since the start."""

    loads: int = 0
    refused: Counter[str] = field(default_factory=Counter[str])
    """Loads of which nothing will come, by reason."""
    voided: int = 0
    """Loads that were held when the daemon was gone."""


class LoadLine:
    """See module. The client's thread only, but for `add`, `remove` and `find`.

    Args:
        layout: Of the rank's blocks.
        send: Sends a message, if the daemon lives and knows us. It may call `void`.
        post: Takes `Loaded`.
    """

    def __init__(
        self, layout: KvLayout, send: Callable[[object], bool], post: Callable[[object], None]
    ) -> None:
        self.counts = LoadCounts()
        self._layout = layout
        self._send = send
        self._post = post
        self._lock = threading.Lock()
        self._loads: dict[Key, NodeLoad] = {}
        self._by_number: dict[int, NodeLoad] = {}
        self._num_loads = 0

    # --- any thread --------------------------------------------------------------------------

    def add(self, order: LoadStart, deadline_ns: int) -> NodeLoad:
        """A new load, in place of none; `ask` for it."""
        with self._lock:
            self._num_loads += 1
            load = NodeLoad(order.request_id, order.attempt, self._num_loads, self._layout, deadline_ns)
            self._loads[order.request_id, order.attempt] = self._by_number[load.number] = load
        return load

    def remove(self, request_id: RequestId, attempt: int) -> LoadCancel | None:
        """A load is over for the rank: what is to be told to the daemon."""
        with self._lock:
            load = self._loads.pop((request_id, attempt), None)
            if load is None:
                return None
            del self._by_number[load.number]
        return LoadCancel(request_id, attempt, load.number)

    def find(self, request_id: RequestId, attempt: int) -> NodeLoad | None:
        """A load that was added and not removed."""
        return self._loads.get((request_id, attempt))

    # --- the client's thread -----------------------------------------------------------------

    def ask(self, load: NodeLoad, order: LoadStart) -> None:
        """Ask the daemon for a load, unless it was removed meanwhile."""
        if self._by_number.get(load.number) is not load:
            return
        chain = HashChain(order.kv.root)
        chain.extend(order.token_ids)
        load.digests = tuple(chain.digests)
        self.counts.loads += 1
        message = Load(
            request_id=load.request_id,
            attempt=load.attempt,
            kv=order.kv,
            digests=b"".join(load.digests),
            located=order.located,
            deadline_ns=load.deadline_ns,
            wants_state=order.wants_state,
            number=load.number,
        )
        if not self._send(message):
            self._refuse(load, "no_daemon")

    def on_accepted(self, arena: DramArena, message: LoadAccepted) -> None:
        """The daemon has slots for a load, or has it already."""
        load = self._by_number.get(message.number)
        if load is not None and not load.is_answered:  # otherwise the daemon was told, or will be
            load.accept(arena, message)

    def on_refused(self, message: LoadRefused) -> None:
        """Nothing will come of a load."""
        load = self._by_number.get(message.number)
        if load is not None:
            self._refuse(load, message.reason)

    def on_done(self, message: LoadDone) -> None:
        """No more of a load will come."""
        load = self._by_number.get(message.number)
        if load is not None and load.is_held:
            load.finish(message.num_blocks)

    def answer_due(self, now_ns: int) -> None:
        """Answer loads that have begun to come or are over, and for the daemon at the deadline."""
        for load in self._unanswered():
            if now_ns >= load.deadline_ns:
                self._give_up(load)
            num_blocks = load.num_coming
            if num_blocks is not None and not load.is_answered:
                self._promise(load, num_blocks * BLOCK_TOKENS)

    def due_ns(self, now_ns: int, latest_ns: int) -> int:
        """When `answer_due` is to be called next, at the latest at `latest_ns`."""
        due = (now_ns + LOOK_NS if load.is_held else load.deadline_ns for load in self._unanswered())
        return min([latest_ns, *due])

    def void(self, reason: str) -> None:
        """The daemon is gone, and all that it gave."""
        for load in self._by_number.copy().values():
            self.counts.voided += load.is_held
            self._refuse(load, reason)

    def _unanswered(self) -> list[NodeLoad]:
        return [load for load in self._by_number.copy().values() if not load.is_answered]

    def _give_up(self, load: NodeLoad) -> None:
        if load.is_held:
            load.give_up()
        else:
            self._send(LoadCancel(load.request_id, load.attempt, load.number))
            self._refuse(load, "deadline")

    def _promise(self, load: NodeLoad, num_tokens: int) -> None:
        loaded = Loaded(
            request_id=load.request_id,
            attempt=load.attempt,
            num_tokens=num_tokens,
            state_position=load.state_position if load.state_position <= num_tokens else -1,
            is_approximate=load.is_approximate,
        )
        self._answer(load, loaded)

    def _refuse(self, load: NodeLoad, reason: str) -> None:
        load.void()
        if not load.is_answered:
            self.counts.refused[reason] += 1
            self._answer(load, Loaded(load.request_id, load.attempt, 0, refused=reason))

    def _answer(self, load: NodeLoad, loaded: Loaded) -> None:
        load.is_answered = True
        self._post(loaded)
