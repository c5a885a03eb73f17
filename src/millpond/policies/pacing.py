"""How fast work in the background may go, so that readers do not notice it. Time is passed in."""

from __future__ import annotations

from dataclasses import dataclass, field

from millpond.core.units import SECOND_NS


@dataclass(slots=True)
class RatePacer:
    """At most so many bytes a second, without saving up what was not used."""

    bytes_per_s: float
    """0: no limit."""
    _free_ns: int = field(default=0)

    def wait_ns(self, now_ns: int, num_bytes: int) -> int:
        """How long to wait before the next `num_bytes`, which count from then on."""
        if not self.bytes_per_s:
            return 0
        begin_ns = max(now_ns, self._free_ns)
        self._free_ns = begin_ns + int(num_bytes / self.bytes_per_s * SECOND_NS)
        return begin_ns - now_ns


@dataclass(frozen=True, slots=True)
class DutyPacer:
    """Busy for at most a share of the time: what a node can do is then used to that share, whatever it is."""

    share: float
    """Of the time, above 0 to 1."""

    def rest_ns(self, busy_ns: int) -> int:
        """How long to rest after having been busy for so long."""
        return int(busy_ns * (1 - self.share) / self.share)
