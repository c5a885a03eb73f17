"""Memory of one rank: block table and state slot of a sequence, granted together or not at all.

Where the rank has home blocks, a sequence that is larger than the whole block memory is streamed: its table
is of home blocks, and beside them it holds staging, as many blocks as have room for one row of each.
"""

from __future__ import annotations

from collections import deque

from millpond.control.block_pool import BlockPool
from millpond.core.blocks import Fit
from millpond.core.errors import InvariantBroken
from millpond.core.ids import BlockId, SlotId
from millpond.core.sequence import KvPart, Sequence
from millpond.core.units import ceil_div, num_blocks_for


class KvAllocator:
    """Blocks and slots of one rank. Check first, then commit: a refusal changes nothing."""

    def __init__(self, num_blocks: int, num_slots: int, num_home_blocks: int = 0, num_rows: int = 1) -> None:
        self._pool = BlockPool(num_blocks)
        self._home = BlockPool(num_home_blocks, first=num_blocks + 1)
        self._num_rows = num_rows
        self._free_slots: deque[SlotId] = deque(SlotId(i) for i in range(num_slots))
        self._owner_by_slot: dict[SlotId, tuple[str, int]] = {}
        self.num_slots = num_slots

    @property
    def num_blocks(self) -> int:
        """Blocks of the rank."""
        return self._pool.num_blocks

    @property
    def num_free_blocks(self) -> int:
        """Blocks nobody owns."""
        return self._pool.num_free

    @property
    def num_home_blocks(self) -> int:
        """Home blocks of the rank."""
        return self._home.num_blocks

    @property
    def num_free_home_blocks(self) -> int:
        """Home blocks nobody owns."""
        return self._home.num_free

    @property
    def num_free_slots(self) -> int:
        """Slots nobody owns."""
        return len(self._free_slots)

    def fits(self, num_tokens: int, reserve_blocks: int = 0) -> Fit:
        """Tell whether a new sequence of `num_tokens` can be granted memory.

        Args:
            num_tokens: Tokens whose KV must be held.
            reserve_blocks: Blocks to leave free for sequences that already run. Does not turn LATER
                into NEVER: a sequence alone on the rank needs no reserve.
        """
        need, home = self._need(num_tokens)
        if need > self._pool.num_blocks or home > self._home.num_blocks or self.num_slots == 0:
            return Fit.NEVER
        if need + reserve_blocks > self._pool.num_free or home > self._home.num_free or not self._free_slots:
            return Fit.LATER
        return Fit.OK

    def _need(self, num_tokens: int) -> tuple[int, int]:
        """Blocks and home blocks of a new sequence."""
        need = num_blocks_for(num_tokens)
        if need <= self._pool.num_blocks or not self._home.num_blocks:
            return need, 0
        return ceil_div(need, self._num_rows), need

    def grant(self, sequence: Sequence, num_tokens: int) -> None:
        """Give a sequence its block table and slot. `fits` must have said OK."""
        if sequence.holds_memory or not self._free_slots:
            raise InvariantBroken(
                f"grant to {sequence.key}: holds={sequence.holds_memory}, slots={len(self._free_slots)}"
            )
        need, home = self._need(num_tokens)
        if home > self._home.num_free:
            raise InvariantBroken(f"{home} home blocks for {sequence.key}, {self._home.num_free} free")
        blocks = self._pool.take(need, sequence.key)
        slot = self._free_slots.popleft()
        self._owner_by_slot[slot] = sequence.key
        if home:
            table = self._home.take(home, sequence.key)
            sequence.kv = KvPart(block_table=table, slot=slot, staging=blocks)
        else:
            sequence.kv = KvPart(block_table=blocks, slot=slot)

    def grow(self, sequence: Sequence, num_tokens: int) -> tuple[BlockId, ...] | None:
        """Extend a sequence's table to cover `num_tokens`.

        Returns:
            The new blocks, possibly none; None when they are not free.

        Raises:
            InvariantBroken: It is streamed: such sequences decode elsewhere.
        """
        need = num_blocks_for(num_tokens) - len(sequence.kv.block_table)
        if need <= 0:
            return ()
        if sequence.kv.staging:
            raise InvariantBroken(f"{sequence.key} is streamed and cannot grow")
        if need > self._pool.num_free:
            return None
        blocks = self._pool.take(need, sequence.key)
        sequence.kv.block_table.extend(blocks)
        return tuple(blocks)

    def release(self, sequence: Sequence) -> None:
        """Take everything back. A sequence without memory is left alone."""
        if sequence.kv.slot is None:
            return
        if self._owner_by_slot.get(sequence.kv.slot) != sequence.key:
            raise InvariantBroken(f"slot {sequence.kv.slot} returned by {sequence.key}")
        kv = sequence.kv
        if kv.staging:
            self._home.give_back(kv.block_table, sequence.key)
        self._pool.give_back(kv.staging or kv.block_table, sequence.key)
        del self._owner_by_slot[sequence.kv.slot]
        self._free_slots.append(sequence.kv.slot)
        sequence.kv = KvPart()

    def check(self) -> list[str]:
        """Return violated laws: free + owned = total for blocks, home blocks and slots."""
        problems = self._pool.check() + self._home.check()
        if len(self._free_slots) + len(self._owner_by_slot) != self.num_slots:
            problems.append(
                f"{len(self._free_slots)} free + {len(self._owner_by_slot)} owned != {self.num_slots} slots"
            )
        return problems
