"""Messages between simulated processes: latency, jitter, death of the receiver."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from millpond.core.chance import Chance
from millpond.sim.kernel import Kernel

Handler = Callable[[object], None]


@dataclass(frozen=True, slots=True)
class _Peer:
    handler: Handler
    order: int


class Network:
    """Ways between named processes. In order between two of them, like the sockets of the service.

    A message to a process that is not there, or that dies before it comes, is lost; its successor of the
    same name never sees it.
    """

    def __init__(self, kernel: Kernel, latency_ns: int, jitter_ns: int, chance: Chance) -> None:
        self._kernel = kernel
        self._latency_ns = latency_ns
        self._jitter_ns = jitter_ns
        self._chance = chance
        self._peers: dict[str, _Peer] = {}
        self._last_ns: dict[tuple[str, str], int] = {}

    def attach(self, name: str, order: int, handler: Handler) -> None:
        """A process is there."""
        self._peers[name] = _Peer(handler, order)

    def detach(self, name: str) -> None:
        """A process is gone."""
        self._peers.pop(name, None)

    def is_attached(self, name: str) -> bool:
        """Whether somebody listens under that name."""
        return name in self._peers

    def send(self, sender: str, to: str, message: object) -> bool:
        """Send; False if nobody is there."""
        peer = self._peers.get(to)
        if peer is None:
            return False

        def deliver() -> None:
            if self._peers.get(to) is peer:
                peer.handler(message)

        self._kernel.at(self.arrival_ns(sender, to, self._kernel.now_ns), peer.order, deliver)
        return True

    def arrival_ns(self, sender: str, to: str, sent_ns: int) -> int:
        """Time at which something sent now on this way arrives."""
        jitter_ns = self._chance.below(self._jitter_ns + 1) if self._jitter_ns else 0
        last_ns = self._last_ns.get((sender, to), 0)
        arrival_ns = max(sent_ns + self._latency_ns + jitter_ns, last_ns)
        self._last_ns[sender, to] = arrival_ns
        return arrival_ns
