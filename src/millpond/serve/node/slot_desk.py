"""`SlotDesk`: slots that ranks write new blocks into, from the loan to the block in memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from millpond.control.node_leases import NodeLeases
from millpond.core.errors import MillpondError
from millpond.core.extents import TenantId
from millpond.core.ids import RequestId
from millpond.core.node_messages import Put, PutClose, PutSlots, Slot
from millpond.serve.node.host_memory import HostMemory
from millpond.serve.node.jobs import Jobs
from millpond.serve.node.node_counts import NodeCounts
from millpond.serve.node.room_maker import RoomMaker
from millpond.store.chain import BlockChain, cut_digests
from millpond.store.dram_arena import SlotRef

MAX_LENT_SHARE = 4
"""Of the memory, at most one part in so many is lent."""

Key = tuple[str, RequestId, int]
"""(rank, request, attempt)."""


class SlotDesk:
    """See module. All methods are the loop's.

    Args:
        memory: Of the host.
        leases: Of its ranks.
        jobs: Threads.
        room: Makes room.
        counts: Of the daemon.
        send: Sends a message to a rank.
    """

    def __init__(
        self,
        memory: HostMemory,
        leases: NodeLeases,
        jobs: Jobs,
        room: RoomMaker,
        counts: NodeCounts,
        send: Callable[[str, object], bool],
    ) -> None:
        self._memory = memory
        self._leases = leases
        self._jobs = jobs
        self._room = room
        self._counts = counts
        self._send = send
        self._chains: dict[Key, tuple[bytes, ...]] = {}
        """Digests of the sequences that ranks put."""
        self._max_lent = memory.arena.num_slots // MAX_LENT_SHARE

    def lend(self, peer: str) -> None:
        """Bring a rank's free slots to the number that it wants, as far as there are any now."""
        count = self._leases.num_wanted(peer, self._max_lent)
        if not count:
            return
        refs = self._memory.level.take_slots(count)
        if len(refs) < count:
            self._room.make(count - len(refs))
        if not refs:
            return
        slots = tuple((ref.slot, ref.generation) for ref in refs)
        incarnation = self._leases.incarnation(peer)
        self._leases.lend(peer, incarnation, slots)
        self._send(peer, PutSlots(slots, incarnation))

    def put(self, peer: str, put: Put) -> None:
        """A rank has written blocks into slots that it was lent."""
        key = (peer, put.request_id, put.attempt)
        slots = self._leases.take_back(peer, put.slots)
        chain = _chain_of(put, self._chains.get(key, ()))
        if chain is None or len(slots) < len(put.slots):
            self._counts.puts_skipped += len(put.slots)
            self.give_back(slots)
            return
        self._chains[key] = chain.digests
        self._jobs.submit(self._jobs.putter, lambda: self._take_in(chain, put), self._on_taken_in)

    def close(self, peer: str, end: PutClose) -> None:
        """No more blocks of a sequence will come."""
        self._chains.pop((peer, end.request_id, end.attempt), None)

    def forget(self, peer: str) -> None:
        """A lease has ended: its rank tells its chains anew, if it comes back."""
        for key in [key for key in self._chains if key[0] == peer]:
            del self._chains[key]

    def give_back(self, slots: Sequence[Slot]) -> None:
        """Slots are nobody's any more, and what is in them is nothing."""
        if slots:
            self._memory.level.give_back_slots([SlotRef(*slot) for slot in slots])
            self._leases.room()

    def check(self) -> list[str]:
        """Return violated laws: what is lent has a rank. Only while no thread is at work."""
        level = self._memory.level
        with level.lock:
            num_lent = level.blocks.num_lent
        if num_lent != self._leases.num_lent():
            return [f"{num_lent} slots are lent, {self._leases.num_lent()} have a rank"]
        return []

    def _take_in(self, chain: BlockChain, put: Put) -> tuple[int, int]:
        """Blocks put, and those of them that are new. The putter's thread."""
        refs = [SlotRef(*slot) for slot in put.slots]
        num_new = self._memory.level.put_slots(chain, put.first_block, refs, lineage=int(put.is_approximate))
        return len(refs), num_new

    def _on_taken_in(self, done: tuple[int, int]) -> None:
        num_put, num_new = done
        self._counts.puts += num_new
        self._counts.puts_known += num_put - num_new
        self._leases.room()  # blocks that were known have given their slots back


def _chain_of(put: Put, known: tuple[bytes, ...]) -> BlockChain | None:
    """The chain up to the last block put; None if the message makes no sense.

    Args:
        put: Brings the digests of its blocks, or of all blocks up to its last one.
        known: What the rank told of the sequence before.
    """
    digests, end = cut_digests(put.digests), put.first_block + len(put.slots)
    if len(digests) == len(put.slots) and len(known) == put.first_block:
        digests = known + digests
    if len(digests) != end or not put.slots:
        return None
    try:
        return BlockChain(TenantId(put.kv.tenant), put.kv.root, digests)
    except MillpondError:
        return None
