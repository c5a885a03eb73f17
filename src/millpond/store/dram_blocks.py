"""`DramBlocks`: what the slots of a host's arena hold, and which blocks may leave.

    free     nothing
    lent     a rank writes a new block into it
    filling  a load brings its block; readable row by row for the loads that hold it
    whole    a block, readable for everybody

A block that the disks do not have stays, and so does one that a load holds. Any other leaves when the room is
needed: first the directory stops naming its slot, then the slot's generation ends, so that whoever still
holds the old pointer reads nothing. A load's slot that lost its name (damaged beyond repair, not brought in
time, or the block came some other way) is held until the last load lets go of it, and found by nobody.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from millpond.core.errors import ArenaFull, ChecksumMismatch, InvariantBroken, StaleEpoch
from millpond.policies.dram_evict import EvictionOrder
from millpond.store.dram_arena import NUM_LANES, DramArena, SlotRef
from millpond.store.dram_directory import Directory, DramPlace
from millpond.store.held_block import Admission, DramCounts, HeldBlock
from millpond.store.stripe import Block


class DramBlocks:
    """See module. One thread at a time, but for `read` and `in`.

    Args:
        arena: Of this host.
        order: Of the blocks that may leave.
        directory: Of all hosts.
        host: Our name in it.
        max_pinned: Slots that loads may hold.
    """

    def __init__(
        self, arena: DramArena, order: EvictionOrder, directory: Directory, host: str, max_pinned: int
    ) -> None:
        self.arena = arena
        self.counts = DramCounts()
        self.max_pinned = max_pinned
        self._order = order
        """Whole blocks that are on disk and not being written. Some may be pinned."""
        self._directory = directory
        self._host = host
        self._held: dict[bytes, HeldBlock] = {}
        self._nameless: set[HeldBlock] = set()
        """Held by loads only."""
        self._pinned: set[HeldBlock] = set()
        self._lent: dict[int, SlotRef] = {}

    def __len__(self) -> int:
        """Whole blocks in memory."""
        return sum(held.is_whole for held in self._held.values())

    def __contains__(self, name: bytes) -> bool:
        held = self._held.get(name)
        return held is not None and held.is_whole

    def knows(self, name: bytes) -> bool:
        """Whether a block is in memory or a load brings it."""
        return name in self._held

    def lineage(self, name: bytes) -> int:
        """Of a block that is known; 0 of others."""
        held = self._held.get(name)
        return held.lineage if held is not None else 0

    @property
    def num_dirty(self) -> int:
        """Blocks that are not on disk."""
        return sum(held.is_dirty for held in self._held.values())

    @property
    def num_pinned(self) -> int:
        """Slots that loads hold."""
        return len(self._pinned)

    @property
    def num_lent(self) -> int:
        """Slots that ranks write into."""
        return len(self._lent)

    @property
    def num_available(self) -> int:
        """Slots that are free or whose block may leave."""
        num_kept = sum(self._may_leave(held) for held in self._pinned)
        return self.arena.num_free + len(self._order) - num_kept

    def admit(
        self, name: bytes, block: Block, content: int, *, is_dirty: bool, lineage: int = 0
    ) -> Admission:
        """Copy a block in, in the place of another if need be.

        Args:
            name: Its hash.
            block: Its bytes.
            content: Their `checksum`.
            is_dirty: It is not on disk.
            lineage: 1: computed downstream of an approximate replay.
        """
        if name in self:
            self._order.touch(name)
            return Admission.HERE
        ref = self._reserve(name)
        if ref is None:
            return Admission.FULL
        self.arena.view(ref.slot)[:] = block
        self._name(HeldBlock(name, ref, lineage=lineage), content, is_dirty=is_dirty)
        return Admission.TAKEN

    def touch(self, name: bytes) -> None:
        """Count a use."""
        self._order.touch(name)

    def read(self, name: bytes, out: Block) -> bool:
        """Copy a block out, whatever happens meanwhile; whether it was here.

        Raises:
            ChecksumMismatch: It is damaged; see `drop_damaged`.
        """
        for _ in range(2):  # it may have left and come back while it was copied
            held = self._held.get(name)
            if held is None or not held.is_whole:
                return False
            try:
                self.arena.read(held.ref, name, out)
            except StaleEpoch:
                continue
            self.counts.read += 1
            return True
        return False

    def drop_damaged(self, name: bytes, out: Block) -> None:
        """Drop a block that was found to be damaged, unless it is another by now or is being written."""
        held = self._held.get(name)
        if held is None or not held.is_whole or held.is_writing:
            return
        try:
            self.arena.read(held.ref, name, out)
        except ChecksumMismatch:
            self._drop(held)

    # --- new blocks that ranks write into slots ---------------------------------------------------

    def lend(self, count: int) -> list[SlotRef]:
        """Slots to write new blocks into, at most `count`; as many as there are and blocks may leave."""
        refs: list[SlotRef] = []
        while len(refs) < count and (ref := self._reserve()) is not None:
            self._lent[ref.slot] = ref
            refs.append(ref)
        return refs

    def take_back(self, ref: SlotRef) -> None:
        """End a loan; what is in the slot is nothing.

        Raises:
            InvariantBroken: It was not lent.
        """
        self._end_loan(ref)
        self.arena.free(ref)

    def admit_lent(
        self, name: bytes, ref: SlotRef, content: int, *, is_dirty: bool, lineage: int = 0
    ) -> Admission:
        """End a loan: the slot holds a whole block now, unless that is in memory already.

        Raises:
            InvariantBroken: It was not lent.
        """
        self._end_loan(ref)
        if name in self:
            self.arena.free(ref)
            self._order.touch(name)
            return Admission.HERE
        self._name(HeldBlock(name, ref, lineage=lineage), content, is_dirty=is_dirty)
        return Admission.TAKEN

    # --- blocks that loads hold -------------------------------------------------------------------

    def pin(self, names: Sequence[bytes]) -> list[HeldBlock]:
        """Hold blocks: those that are here or come already, and slots for the others.

        Raises:
            ArenaFull: No room for all of them. None is held. Code `dram.pinned`: other loads hold the room.
        """
        here = [held for name in names if (held := self._held.get(name)) is not None]
        num_new = len(names) - len(here)
        num_pinned = len(self._pinned) + sum(not held.num_pins for held in here) + num_new
        if num_pinned > self.max_pinned:
            raise ArenaFull(f"loads would hold {num_pinned} slots of {self.max_pinned}", code="dram.pinned")
        for held in here:
            self._hold(held)
        if num_new > self.num_available:
            for held in here:
                self.unpin(held)
            num_coming = sum(not held.is_dirty for held in self._pinned.difference(here))
            code = "dram.pinned" if num_new <= self.num_available + num_coming else "dram.full"
            raise ArenaFull(f"no room for {num_new} blocks", code=code)
        pinned: list[HeldBlock] = []
        for name in names:
            held = self._held.get(name)
            if held is None:
                ref = self._reserve(name)
                if ref is None:
                    raise InvariantBroken("a slot that was available is not")
                held = self._held[name] = HeldBlock(name, ref)
                self._hold(held)
            pinned.append(held)
        return pinned

    def unpin(self, held: HeldBlock) -> None:
        """Let go of a block. One that did not come goes with the last load that holds it."""
        held.num_pins -= 1
        if held.num_pins:
            return
        held.num_rows = 0
        self._pinned.remove(held)
        if held in self._nameless:
            self._nameless.remove(held)
            self.arena.free(held.ref)
        elif not held.is_whole:
            del self._held[held.name]
            self.arena.free(held.ref)

    def complete(self, held: HeldBlock, content: int) -> None:
        """A load has brought a block whole. Nothing happens if it has come some other way meanwhile.

        Args:
            held: Pinned.
            content: `checksum` of its slot.
        """
        if self._held.get(held.name) is held and not held.is_whole:
            self._name(held, content, is_dirty=False)

    def forsake(self, held: HeldBlock) -> None:
        """A load cannot bring a block. If no other load waits for it, another slot may have the name."""
        if self._held.get(held.name) is held and not held.is_whole and held.num_pins == 1:
            del self._held[held.name]
            self._nameless.add(held)

    def reopen(self, held: HeldBlock) -> bool:
        """A pinned block was found to be damaged: take it from everybody.

        Its slot may be filled again if `num_rows` is 0 then: no load was told that it can be read.

        Returns:
            Whether it was; not if it is being written to the disks, which finds the damage too.
        """
        if held.is_writing:
            return False
        if held.is_whole:
            self._drop(held)
            if held.num_pins == 1:
                held.num_rows = 0
                self._nameless.remove(held)
                self._held[held.name] = held
        return True

    # --- writing to the disks ---------------------------------------------------------------------

    def begin_write(self, name: bytes) -> Block | None:
        """A block to be written, which now stays until `end_write`; None if it is not here or damaged."""
        held = self._held.get(name)
        if held is None or not held.is_whole:
            return None
        if not self.arena.is_intact(held.ref):
            self._drop(held)
            return None
        self._order.discard(name)
        held.is_writing = True
        return self.arena.view(held.ref.slot)

    def end_write(self, name: bytes, *, may_leave: bool) -> bool:
        """The writing of a block is over; whether it was dirty and is not any more.

        Args:
            name: Its hash; nothing happens if it is not here.
            may_leave: It is on disk, or never will be.
        """
        held = self._held.get(name)
        if held is None or not held.is_whole:
            return False
        is_settled = held.is_dirty and may_leave
        if is_settled or (held.is_writing and not held.is_dirty):
            self._order.insert(name)
        held.is_dirty &= not may_leave
        held.is_writing = False
        return is_settled

    def dirty(self) -> Iterator[bytes]:
        """Blocks that are not on disk."""
        return (name for name, held in self._held.items() if held.is_dirty)

    def close(self) -> None:
        """Leave the directory and give the memory back."""
        self._directory.leave(self._host, self.arena.epoch)
        self._held.clear()
        self.arena.close()

    def check(self) -> None:
        """Check that free, held and lent slots are all slots, and that whole blocks are dirty or may leave.

        Raises:
            InvariantBroken: They do not.
        """
        held = [*self._held.values(), *self._nameless]
        self.arena.check([*(one.ref for one in held), *self._lent.values()])
        if self.num_dirty + len(self._order) != len(self):
            raise InvariantBroken(f"{len(self)} blocks: {self.num_dirty} dirty, {len(self._order)} may leave")
        if {one for one in held if one.num_pins} != self._pinned:
            raise InvariantBroken("the blocks that loads hold are counted wrongly")
        if any(not one.num_pins for one in held if not one.is_whole):
            raise InvariantBroken("a slot is filled for nobody")
        if len(self._pinned) > self.max_pinned:
            raise InvariantBroken(f"loads hold {len(self._pinned)} slots of {self.max_pinned}")

    def check_pins(self, loads: Sequence[Sequence[HeldBlock]]) -> None:
        """Check that exactly these loads hold blocks, and a lane each.

        Raises:
            InvariantBroken: They do not.
        """
        pins = Counter(held for load in loads for held in load)
        if pins != {held: held.num_pins for held in self._pinned}:
            raise InvariantBroken("blocks are held by other loads than there are")
        if self.arena.num_free_lanes + len(loads) != NUM_LANES:
            raise InvariantBroken(f"{self.arena.num_free_lanes} lanes are free beside {len(loads)} loads")

    def _reserve(self, name: bytes | None = None) -> SlotRef | None:
        if not self.arena.num_free and not self._evict_one():
            return None
        return self.arena.reserve() if name is None else self.arena.reserve(name)

    def _evict_one(self) -> bool:
        in_use: list[bytes] = []
        found = None
        while found is None and (name := self._order.pop()) is not None:
            if self._held[name].num_pins:
                in_use.append(name)
            else:
                found = self._held[name]
        for name in in_use:
            self._order.insert(name)
        if found is None:
            return False
        self._unname(found)
        self.arena.free(found.ref)
        self.counts.evicted += 1
        return True

    def _name(self, held: HeldBlock, content: int, *, is_dirty: bool) -> None:
        """A whole block takes its name; a slot that was being filled for it loses it."""
        other = self._held.get(held.name)
        if other is not None and other is not held:
            self._nameless.add(other)
        self.arena.seal(held.ref, held.name, content, held.lineage)
        held.is_whole, held.is_dirty = True, is_dirty
        self._held[held.name] = held
        self.counts.put += 1
        if not is_dirty:
            self._order.insert(held.name)
        self._directory.publish([(held.name, self._place(held.ref))])

    def _unname(self, held: HeldBlock) -> None:
        """First nobody is sent here any more, then the slot may have another block."""
        del self._held[held.name]
        self._directory.swap(held.name, self._place(held.ref), None)

    def _drop(self, held: HeldBlock) -> None:
        self.counts.damaged += 1
        self._order.discard(held.name)
        self._unname(held)
        held.is_whole = held.is_dirty = False
        if held.num_pins:
            self.arena.unseal(held.ref)
            self._nameless.add(held)
        else:
            self.arena.free(held.ref)

    def _hold(self, held: HeldBlock) -> None:
        held.num_pins += 1
        self._pinned.add(held)

    def _end_loan(self, ref: SlotRef) -> None:
        if self._lent.get(ref.slot) != ref:
            raise InvariantBroken(f"slot {ref.slot} is not lent")
        del self._lent[ref.slot]

    def _may_leave(self, held: HeldBlock) -> bool:
        """Whether a pinned block is in the order all the same."""
        return held.is_whole and not held.is_dirty and not held.is_writing

    def _place(self, ref: SlotRef) -> DramPlace:
        return DramPlace(self._host, self.arena.epoch, ref)
