"""`StorageNode`: several targets under one name. Keeps records, proves what it gives, counts its wear.

It knows shards, not stripes: which nodes make up a stripe is the clients' matter. A target that fails takes
its records with it and nothing else.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import xxhash

from millpond.core.errors import BadFrame, DataError, ExtentAbsent, NodeRefused
from millpond.core.units import SECOND_NS
from millpond.policies.retention import BlockClass, admits
from millpond.store.clock import Clock
from millpond.store.live_segment import LiveSegment, OpenRecord
from millpond.store.record import parse_header
from millpond.store.segment import PAGE_BYTES, ShardKey, key_of, read_packed_header
from millpond.store.target import Target, TargetState
from millpond.store.wear import WearBudget

_TARGET_SHIFT = 56
_GENERATION_SHIFT = 24
_PAGE_MASK = (1 << _GENERATION_SHIFT) - 1
_GENERATION_MASK = (1 << _TARGET_SHIFT - _GENERATION_SHIFT) - 1
MAX_TARGETS = 256


@dataclass(frozen=True, slots=True)
class Listing:
    """Part of a node's records."""

    headers: tuple[bytes, ...]
    """Packed."""
    last_read_s: tuple[int, ...]
    """Last use of each, 0 if there was none since the start."""
    next_cursor: int
    """Where the next part begins, 0 at the end."""


class Calendar:
    """Calendar time that no jump of the clock moves while the process runs."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._start_s = clock.unix_s()
        self._start_ns = clock.monotonic_ns()

    def now_s(self) -> int:
        """Seconds since 1970."""
        return self._start_s + (self._clock.monotonic_ns() - self._start_ns) // SECOND_NS


class StorageNode:
    """Targets and what they hold. Thread-safe.

    Args:
        name: Of the node.
        targets: At most 256.
        calendar: Time for expiry, the same that the targets were started with.
        budget: What may be written; without it there is no limit.
    """

    def __init__(
        self, name: str, targets: Sequence[Target], *, calendar: Calendar, budget: WearBudget | None = None
    ) -> None:
        self.name = name
        self.targets = tuple(targets)
        self._calendar = calendar
        self._budget = budget
        self._booked_bytes = 0
        self._lock = threading.Lock()

    @property
    def written_bytes(self) -> int:
        """Bytes written since the start, copies and footers included."""
        return sum(target.written_bytes for target in self.targets)

    @property
    def wear_level(self) -> float:
        """What is left of the wear budget, 0 to 1; 1 without one."""
        with self._lock:
            return self._wear_level()

    def pick(self, fingerprint: int) -> int:
        """Index of the target that a shard belongs on: of those that take writes, the highest draw."""
        return self._order(fingerprint)[0]

    def find(self, fingerprint: int) -> int | None:
        """Index of the target to read a shard from, from memory."""
        return next(iter(self._holders(fingerprint)), None)

    def put(self, key: ShardKey, record: memoryview) -> None:
        """Store a record.

        Raises:
            BadFrame: The record is none, or not the shard that `key` says.
            NodeRefused: No target takes it.
        """
        try:
            header = parse_header(record)
            block_class = BlockClass(header.expiry_class)
        except (DataError, ValueError) as error:
            raise BadFrame(f"not a record: {error}", code="store.bad_request") from error
        if key_of(header) != key or len(record) != header.record_bytes:
            raise BadFrame("the record is not what the request says", code="store.bad_request")
        draw = int.from_bytes(key.digest[:4]) / (1 << 32)
        if not admits(block_class, level=self.wear_level, draw=draw):
            raise NodeRefused(f"wear budget is low: {block_class.name.lower()} is refused", code="store.full")
        packed, payload = record[: header.header_bytes], record[header.header_bytes :]
        refused = NodeRefused("no target takes writes", code="store.read_only")
        for index in self._order(key.fingerprint):
            try:
                self.targets[index].put(header, packed, payload, now_s=self._calendar.now_s())
            except NodeRefused as error:
                refused = error
            else:
                return
        raise refused

    def open_record(self, key: ShardKey, *, is_use: bool = True) -> OpenRecord:
        """Find a record; see `Target.open_record`.

        Raises:
            ExtentAbsent: No target holds it.
            NodeRefused: Its drive cannot read it.
        """
        absent = ExtentAbsent("no such shard", code="store.absent")
        for index in self._holders(key.fingerprint):
            try:
                return self.targets[index].open_record(key, now_s=self._calendar.now_s(), is_use=is_use)
            except ExtentAbsent as error:
                absent = error
        raise absent

    def drop(self, key: ShardKey) -> bool:
        """Forget a shard; whether it was there.

        Raises:
            NodeRefused: Its drive cannot be written.
        """
        now_s = self._calendar.now_s()
        dropped = [target.drop(key, now_s=now_s) for target in self.targets]  # a failed put may have left two
        return any(dropped)

    def list_headers(self, cursor: int, limit: int, max_bytes: int) -> Listing:
        """Headers of records from `cursor` on (0: the first), of at most `limit` and about `max_bytes`.

        Records that are put meanwhile may or may not be among them.

        Raises:
            NodeRefused: A drive cannot be read.
        """
        headers: list[bytes] = []
        last_read_s: list[int] = []
        used_bytes = 0
        for position, segment, page in self._positions(cursor):
            if len(headers) >= limit or used_bytes >= max_bytes:
                return Listing(tuple(headers), tuple(last_read_s), position)
            packed = self._packed_header(position >> _TARGET_SHIFT, segment, page)
            if packed is not None:
                headers.append(packed)
                last_read_s.append(segment.last_read_s.get(page, 0))
                used_bytes += len(packed)
        return Listing(tuple(headers), tuple(last_read_s), 0)

    def upkeep(self, index: int) -> None:
        """Sync, seal and expire on one target; once a second."""
        self.targets[index].upkeep(now_s=self._calendar.now_s())

    def close(self) -> None:
        """Seal and close all targets."""
        for target in self.targets:
            target.close(now_s=self._calendar.now_s())

    def _holders(self, fingerprint: int) -> list[int]:
        """Targets that hold a shard. There are two if it was put again while one did not take writes: the
        one that takes it now comes first, it has the newer copy.
        """
        holders = [index for index, target in enumerate(self.targets) if target.holds(fingerprint)]
        if len(holders) > 1:
            order = self._order(fingerprint)
            holders.sort(key=lambda index: order.index(index) if index in order else len(order))
        return holders

    def _order(self, fingerprint: int) -> list[int]:
        writable = [i for i, target in enumerate(self.targets) if target.state is TargetState.OK]
        seed = fingerprint.to_bytes(8, "little")
        candidates = writable or range(len(self.targets))
        return sorted(candidates, key=lambda i: xxhash.xxh3_64_intdigest(seed, seed=i), reverse=True)

    def _wear_level(self) -> float:
        if self._budget is None:
            return 1.0
        now_s = self._calendar.now_s()
        written = self.written_bytes
        self._budget.spend(written - self._booked_bytes, now_s)
        self._booked_bytes = written
        return self._budget.level(now_s)

    def _positions(self, cursor: int) -> Iterator[tuple[int, LiveSegment, int]]:
        """`(cursor, segment, page)` of the records at `cursor` and behind it."""
        for index in range(cursor >> _TARGET_SHIFT, len(self.targets)):
            target = self.targets[index]
            for segment in target.segments():
                base = index << _TARGET_SHIFT | (segment.generation & _GENERATION_MASK) << _GENERATION_SHIFT
                if base | _PAGE_MASK < cursor:
                    continue
                for page in target.current_pages(segment):
                    if base | page >= cursor:
                        yield base | page, segment, page

    def _packed_header(self, index: int, segment: LiveSegment, page: int) -> bytes | None:
        """Header of a record, None if it is gone or damaged."""
        try:
            with segment.pin():
                packed, dropped = read_packed_header(
                    self.targets[index].files, segment.file, page * PAGE_BYTES
                )
                parse_header(packed)
        except (ExtentAbsent, DataError):
            return None
        except OSError as error:
            raise NodeRefused(f"cannot read: {error.strerror}", code="store.io") from error
        return None if dropped else bytes(packed)
