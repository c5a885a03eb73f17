"""`ShardIndex`: where each shard of a target lies, in memory. Rebuilt from footers and scans.

A record is known by the 64-bit fingerprint of its key; the record itself proves the rest. A newer copy takes
the place of an older one, which waits until the newer is durable: only then may it be marked as dropped.
"""

from __future__ import annotations

from collections.abc import Callable

from millpond.store.live_segment import LiveSegment, pack_location
from millpond.store.segment import Directory


class ShardIndex:
    """Fingerprint -> location (`live_segment.pack_location`). The target locks it; `get` needs no lock.

    About 110 bytes per record; the records themselves have 100 KB and more.
    """

    def __init__(self) -> None:
        self._locations: dict[int, int] = {}
        self._older: dict[int, list[int]] = {}

    def __len__(self) -> int:
        return len(self._locations)

    def __contains__(self, fingerprint: int) -> bool:
        return fingerprint in self._locations

    def get(self, fingerprint: int) -> int | None:
        """Location of the current copy."""
        return self._locations.get(fingerprint)

    def is_current(self, fingerprint: int, generation: int, page: int) -> bool:
        """Whether this copy is the current one."""
        return self._locations.get(fingerprint) == pack_location(generation, page)

    def point(self, fingerprint: int, location: int) -> None:
        """Make this copy the current one."""
        older = self._locations.get(fingerprint)
        if older is not None:
            self._older.setdefault(fingerprint, []).append(older)
        self._locations[fingerprint] = location

    def load(self, segment: LiveSegment) -> None:
        """Take over the records of a segment that was found on disk; segments come oldest first."""
        directory = segment.directory()
        fingerprints: list[int] = directory["fingerprint"].tolist()
        first = pack_location(segment.generation, 0)
        locations: list[int] = (directory["page"].astype("u8") + first).tolist()
        new = set(fingerprints)
        if len(new) == len(fingerprints) and self._locations.keys().isdisjoint(new):
            self._locations.update(zip(fingerprints, locations, strict=True))
            return
        for fingerprint, location in zip(fingerprints, locations, strict=True):
            self.point(fingerprint, location)  # sorted by page where fingerprints are equal: newest last

    def forget(self, fingerprint: int) -> tuple[int, ...]:
        """Remove a record; locations of all its copies, none if it was not there."""
        location = self._locations.pop(fingerprint, None)
        return () if location is None else (*self._older.pop(fingerprint, ()), location)

    def forget_segment(self, segment: LiveSegment) -> None:
        """Remove every current copy that lies in this segment."""
        for fingerprint, page, _ in segment.directory().tolist():
            if self.is_current(fingerprint, segment.generation, page):
                del self._locations[fingerprint]

    def live_directory(self, segment: LiveSegment) -> Directory:
        """Directory of the copies that are current, or would be again if a newer one were lost."""
        directory = segment.directory()
        keep = [
            self.is_current(fingerprint, segment.generation, page)
            or pack_location(segment.generation, page) in self._older.get(fingerprint, ())
            for fingerprint, page, _ in directory.tolist()
        ]
        return directory[keep] if keep else directory

    def replaced(self) -> dict[int, tuple[int, ...]]:
        """Fingerprint -> copies that a newer one replaced since they were last settled."""
        return {fingerprint: tuple(older) for fingerprint, older in self._older.items()}

    def settle(self, fingerprint: int, older: tuple[int, ...], is_alive: Callable[[int], bool]) -> list[int]:
        """End the wait of older copies, now that everything newer is durable or lost.

        Args:
            fingerprint: The record.
            older: Copies, as `replaced` gave them.
            is_alive: Whether a location's segment still exists.

        Returns:
            Copies to mark as dropped. If the current copy was lost, the newest older one is current again.
        """
        waiting = self._older.pop(fingerprint, None)
        if waiting is None:
            return []  # forgotten meanwhile, with all copies
        if left := [copy for copy in waiting if copy not in older]:
            self._older[fingerprint] = left
        alive = [copy for copy in older if is_alive(copy)]
        if fingerprint not in self._locations and alive:
            self._locations[fingerprint] = alive.pop()
        return alive
