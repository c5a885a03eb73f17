"""`NodeLoad`: one load of a rank, as far as it has come."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from millpond.core.errors import InvariantBroken
from millpond.core.hashing import BLOCK_HASH_BYTES
from millpond.core.ids import RequestId
from millpond.core.kv_layout import KvLayout
from millpond.core.node_messages import LoadAccepted, Slot
from millpond.store.dram_arena import DramArena, SlotRef


@dataclass(slots=True, eq=False)
class NodeLoad:
    """See module. Written by the thread of the `NodeClient`, read by any.

    Rows that are ready stay so until the load is ended or void; `num_valid` says afterwards whether that
    happened while they were copied.
    """

    request_id: RequestId
    attempt: int
    number: int
    """Of this load among all of the client's."""
    layout: KvLayout
    deadline_ns: int
    """What has not come by then will not."""
    digests: tuple[bytes, ...] = ()
    """32 bytes per block that was asked for."""
    slots: tuple[int, ...] = ()
    """Of the leading blocks that seem to be had; known once the load is accepted."""
    num_blocks: int | None = None
    """Leading blocks of which every row came, once no more will; None before."""
    state_position: int = -1
    """Leading tokens that `state` stands for; -1: there is none."""
    state: bytes = b""
    is_approximate: bool = False
    """As `LoadAccepted.is_approximate`."""
    is_answered: bool = False
    """`Loaded` was posted."""
    is_void: bool = False
    """Refused, or accepted by a daemon that is gone."""
    _arena: DramArena | None = None
    _lane: int = 0
    _refs: tuple[SlotRef, ...] = field(default=(), repr=False)

    @property
    def is_held(self) -> bool:
        """Whether it was accepted and is not void."""
        return self._arena is not None and not self.is_void

    @property
    def num_coming(self) -> int | None:
        """Leading blocks that a step may count on: all of them once the first row of each is there, what came
        once the load is over; None before: a step would wait for nothing it knows of.
        """
        if self.num_blocks is not None:
            return self.num_blocks
        return len(self.slots) if self.is_held and self.rows_ready(0) == len(self.slots) else None

    def rows_ready(self, row: int) -> int:
        """Leading blocks whose row can be read now; grows until the load is over."""
        if self.num_blocks is not None:
            return self.num_blocks
        arena = self._arena
        return 0 if arena is None else min(arena.rows_ready(self._lane, row), len(self.slots))

    def row_memory(self, row: int) -> memoryview:
        """`[slots of the arena, row bytes]`, uint8, strided. Of an accepted load, void or not.

        Raises:
            InvariantBroken: It was not accepted.
        """
        if self._arena is None:
            raise InvariantBroken("a load that was not accepted has no rows")
        sizes = [each.num_bytes for each in self.layout.rows]
        begin = sum(sizes[:row])
        return self._arena.slots[:, begin : begin + sizes[row]].data

    def num_valid(self, begin: int, end: int) -> int:
        """Of blocks `[begin, end)`, the leading ones whose slots still are theirs.

        To be asked before and after bytes are copied: those of the others count for nothing.
        """
        arena = self._arena
        if arena is None or self.is_void:
            return 0
        held = zip(self._refs[begin:end], self.digests[begin:end], strict=False)
        for index, (ref, digest) in enumerate(held):
            if not arena.is_filling_or_holds(ref, digest[:BLOCK_HASH_BYTES]):
                return index
        return len(self._refs[begin:end])

    # --- for the client -----------------------------------------------------------------------

    def accept(self, arena: DramArena, message: LoadAccepted) -> None:
        """The daemon found slots for it."""
        slots: Sequence[Slot] = message.slots[: len(self.digests)]
        self._refs = tuple(SlotRef(*slot) for slot in slots)
        self._lane = message.lane
        self.state_position, self.state = message.state_position, message.state
        self.is_approximate = message.is_approximate
        self.slots = tuple(ref.slot for ref in self._refs)
        self._arena = arena

    def finish(self, num_blocks: int) -> None:
        """No more rows will come."""
        self.num_blocks = min(num_blocks, len(self.slots))

    def give_up(self) -> None:
        """What has not come is not waited for any more."""
        if self.num_blocks is None:
            self.finish(min(self.rows_ready(row) for row in range(len(self.layout.rows))))

    def void(self) -> None:
        """Nothing of it can be had any more."""
        self.is_void = True
        self.num_blocks = 0
