"""How many bytes may be on their way to one receiver: the answer to incast.

Eleven senders that answer at once overrun the queue in front of one network card; each lost packet then costs
a retransmission timeout. So the receiver asks for no more than the path holds, and spaces its requests.
"""

from __future__ import annotations

from dataclasses import dataclass

from millpond.core.units import MIB, SECOND_NS


@dataclass(frozen=True, slots=True)
class ReceiveWindowParams:
    """Bytes in flight towards one receiver."""

    max_in_flight_bytes: int = 16 * MIB
    """Bytes asked for and not yet there; one shard is always allowed. On a slow link: what the path and
    its queue hold."""
    paced_bytes_per_s: int = 0
    """Rate at which shards are asked for, about the rate of the receiver's card; 0: not spaced."""


class ReceiveWindow:
    """Grants shards to one receiver.

    Attributes:
        in_flight_bytes: Granted and not yet finished.
    """

    def __init__(self, params: ReceiveWindowParams) -> None:
        self._params = params
        self.in_flight_bytes = 0
        self._next_ns = 0

    def try_start(self, now_ns: int, num_bytes: int) -> bool:
        """Grant one shard of `num_bytes`; False if it has to wait."""
        if now_ns < self._next_ns:
            return False
        if self.in_flight_bytes and self.in_flight_bytes + num_bytes > self._params.max_in_flight_bytes:
            return False
        self.in_flight_bytes += num_bytes
        if self._params.paced_bytes_per_s:
            self._next_ns = now_ns + num_bytes * SECOND_NS // self._params.paced_bytes_per_s
        return True

    def finish(self, num_bytes: int) -> None:
        """Give back what `try_start` granted."""
        self.in_flight_bytes -= num_bytes

    def next_start_ns(self, num_bytes: int) -> int | None:
        """When time alone lets the next shard go; None if another one must finish first."""
        if self.in_flight_bytes and self.in_flight_bytes + num_bytes > self._params.max_in_flight_bytes:
            return None
        return self._next_ns
