"""`TieredLoader`: brings the leading blocks of a chain into slots of the arena, row after row.

A load holds one slot per block: blocks that are in memory stay there, and the others come from other hosts'
memory or from the disks into slots that become blocks of the level once they are whole. Loads that want the
same block share its slot: one of those that run fetches it, the others are told of its rows too, and take
over if it fails.

How far a load has come is counted in its lane of the arena, for whoever reads the slots. What was told once
stays true as long as the load is held: the bytes of a row are not written again, whatever happens. The same
goes for its lineage: a load that was begun as exact takes nothing that is downstream of a replay.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import structlog

from millpond.core.errors import ArenaFull, InvalidRequest, MillpondError
from millpond.core.hashing import BLOCK_HASH_BYTES
from millpond.core.units import MILLISECOND_NS, SECOND_NS
from millpond.store.chain import BlockChain, Hit
from millpond.store.codec.checksum import checksum
from millpond.store.dram import DramLevel
from millpond.store.dram_directory import Directory, DramPlace
from millpond.store.dram_peers import DramPeers, PeerCall
from millpond.store.extent_get import GetEnd, RowOrder
from millpond.store.held_block import HeldBlock
from millpond.store.load_state import LoadPool, LoadResult, TieredLoad, cut_hit, num_had, rows_ready
from millpond.store.located import parse_located
from millpond.store.slot_sink import SlotSink

log = structlog.get_logger(__name__)

_SOON_NS = 500 * MILLISECOND_NS
"""So long a load waits for hosts that may hang, and for a new match, while the disks could be read."""


class TieredLoader:
    """See module. Thread-safe.

    Args:
        level: This host's memory.
        directory: Which other host has what.
        peers: Reads from them.
        pool: The disks.
    """

    def __init__(self, level: DramLevel, directory: Directory, peers: DramPeers, pool: LoadPool) -> None:
        self._level = level
        self._arena = level.arena
        self._directory = directory
        self._peers = peers
        self._pool = pool
        self._changed = threading.Condition(level.lock)
        """One lock for blocks and loads: what a load is told of a block cannot change between."""
        self._loads: list[TieredLoad] = []
        self._owners: dict[HeldBlock, TieredLoad] = {}
        """Which load fetches a block now."""

    @property
    def num_loads(self) -> int:
        """Loads that were begun and not yet given back."""
        return len(self._loads)

    def num_here(self, chain: BlockChain) -> int:
        """Leading blocks that need no new slot now: they are in memory, or a load brings them."""
        with self._changed:
            knows = self._level.blocks.knows
            missing = (i for i, digest in enumerate(chain.digests) if not knows(digest[:BLOCK_HASH_BYTES]))
            return next(missing, len(chain.digests))

    def begin(
        self, chain: BlockChain, located: bytes, *, deadline_ns: int, takes_slots: bool = True
    ) -> TieredLoad | None:
        """Hold slots for the longest prefix that seems to be had. May wait for the metadata.

        Args:
            chain: The blocks wanted.
            located: Packed `Matched` of this chain, a hint; anything else counts as nothing.
            deadline_ns: For what is asked, on the monotonic clock.
            takes_slots: Whether it may take new slots; if not, it holds blocks that have one.

        Returns:
            A load to `run` and to `release`; None if not even the first block is to be had.

        Raises:
            ArenaFull: No room, or no lane, now. Nothing is held. `DramLevel.make_room` may help.
            InvalidRequest: The chain has a block twice.
        """
        names = [digest[:BLOCK_HASH_BYTES] for digest in chain.digests]
        if len(set(names)) != len(names):
            raise InvalidRequest("a chain has a block twice", code="dram.chain")
        with self._changed:
            here = {index for index, name in enumerate(names) if self._level.blocks.knows(name)}
        elsewhere = [index for index in range(len(names)) if index not in here]
        places = self._find(names, elsewhere)
        hit = parse_located(chain, located, self._pool.window)
        length = num_had(len(names), here, places, hit)
        has_matched = length < len(names)
        if has_matched:
            hit = max(hit, self._match(chain, deadline_ns), key=lambda one: one.num_blocks)
            length = num_had(len(names), here, places, hit)
        if not length:
            return None
        # For slots that are lent it would wait in vain: ranks keep them.
        most = min(self._level.blocks.max_pinned, self._arena.num_slots - self._level.blocks.num_lent)
        wanted = replace(chain, digests=chain.digests[: min(length, max(1, most))])
        hit = cut_hit(hit, wanted)
        with self._changed:  # at once: whoever looks between would find slots that no load holds
            blocks, lane = self._hold(
                [digest[:BLOCK_HASH_BYTES] for digest in wanted.digests], takes_slots=takes_slots
            )
            load = TieredLoad(wanted, blocks, lane, hit, places)
            load.has_matched = has_matched
            load.has_asked.update(elsewhere)
            if load.num_blocks < len(names):
                load.cut_by = "absent" if load.num_blocks == length else "no_room"
            self._loads.append(load)
            load.told[:] = [0 if held.is_whole else held.num_rows for held in blocks]
            for index, held in enumerate(blocks):
                if not held.is_whole and held.num_pins == 1:
                    held.lineage = load.lineage_to_come(index)
            load.is_here = all(held.is_whole for held in blocks)
            load.is_approximate = any(held.lineage for held in blocks)
            self._count(load)
        return load

    def run(self, load: TieredLoad, *, deadline_ns: int) -> LoadResult:
        """Bring what is missing, in the caller's thread. Once for each load.

        Returns:
            The valid prefix. Nothing about memory, peers or pool raises.
        """
        with self._changed:
            if load.is_released:
                return LoadResult(0, ("cancelled",), 0, 0, 0)
            load.is_running = True
        try:
            self._verify(load)
            while wanted := self._claim(load, deadline_ns):
                self._fetch(load, wanted, deadline_ns)
        finally:
            with self._changed:
                load.is_running = False
                if load.is_released:
                    self._end(load)
        num_blocks = min(load.limit, int(rows_ready(load.told, self._arena.num_rows)[-1]))
        self._level.touch(replace(load.chain, digests=load.chain.digests[:num_blocks]))
        from_peers, from_pool = (
            sum(index < num_blocks for index in came) for came in (load.from_peers, load.from_pool)
        )
        reasons = tuple(dict.fromkeys(load.reasons)) if num_blocks < load.num_blocks else ()
        return LoadResult(num_blocks, reasons, num_blocks - from_peers - from_pool, from_peers, from_pool)

    def cancel(self, load: TieredLoad) -> None:
        """Give up, from any thread: `run` returns soon, with what it has."""
        with self._changed:
            load.is_cancelled = True
            get, calls = load.get, list(load.calls)
            self._changed.notify_all()
        if get is not None:
            get.cancel()
        for _, call in calls:
            call.cancel()

    def release(self, load: TieredLoad) -> None:
        """Give lane and slots back, from any thread: now, or when `run` has stopped. Once is enough."""
        self.cancel(load)
        with self._changed:
            if load.is_released:
                return
            load.is_released = True
            if not load.is_running:
                self._end(load)

    def check(self) -> None:
        """Check that the loads hold what is held.

        Raises:
            InvariantBroken: They do not.
        """
        self._level.check()
        with self._changed:
            self._level.blocks.check_pins([load.blocks for load in self._loads])

    # --- one load ---------------------------------------------------------------------------------

    def _verify(self, load: TieredLoad) -> None:
        """Prove what is in memory; what is damaged is to be fetched like what is not here."""
        num_rows = self._arena.num_rows
        for index, held in enumerate(load.blocks):
            if load.is_cancelled or index >= load.limit:
                return
            if not held.is_whole:
                continue
            is_intact = self._arena.is_intact(held.ref)
            with self._changed:
                if is_intact and held.is_whole:
                    held.num_rows = load.told[index] = num_rows
                    self._count(load)
                elif not self._level.blocks.reopen(held) or load.told[index]:
                    self._level.blocks.forsake(held)  # what this load was told is not written again
                    self._cut(load, index, "damaged")

    def _claim(self, load: TieredLoad, deadline_ns: int) -> list[int]:
        """Blocks that this load is to fetch, waiting for other loads if there is nothing else to do.

        Empty at the end: everything is there, or nothing more will come.
        """
        with self._changed:
            while True:
                missing = np.flatnonzero(load.told[: load.limit] < self._arena.num_rows).tolist()
                if not missing:
                    return []
                left_ns = deadline_ns - time.monotonic_ns()
                if load.is_cancelled or left_ns <= 0:
                    self._cut(load, missing[0], "cancelled" if load.is_cancelled else "late")
                    return []
                ours = [index for index in missing if load.blocks[index] not in self._owners]
                # Others were told rows of it when it was whole: they must not be written.
                damaged = [index for index in ours if load.blocks[index].num_rows > load.told[index]]
                if damaged:
                    self._cut(load, damaged[0], "damaged")
                elif ours:
                    self._owners.update((load.blocks[index], load) for index in ours)
                    return ours
                else:
                    self._changed.wait(left_ns / SECOND_NS)

    def _fetch(self, load: TieredLoad, wanted: Sequence[int], deadline_ns: int) -> None:
        """Fetch blocks that are ours, and let go of them. Other hosts' memory comes first: one that hangs
        holds up its own blocks for half of the time that is left, and the others for a moment.
        """
        now_ns = time.monotonic_ns()
        half_ns = now_ns + (deadline_ns - now_ns) // 2
        soon_ns = min(half_ns, now_ns + _SOON_NS)
        reasons = dict.fromkeys(wanted, "absent")
        calls: dict[int, PeerCall] = {}
        try:
            calls = self._ask_peers(load, wanted, soon_ns, half_ns)
            slow: list[int] = []
            for index, call in calls.items():
                if call.wait(soon_ns):
                    self._take(load, index, call, soon_ns)
                else:
                    slow.append(index)
            reasons |= self._fetch_from_pool(load, [i for i in wanted if i not in slow], deadline_ns)
            for index in slow:
                self._take(load, index, calls[index], half_ns)
            reasons |= self._fetch_from_pool(load, slow, deadline_ns)
        finally:
            for call in calls.values():
                call.cancel()  # after this nothing of it is written into a slot
            self._settle(load, reasons)

    def _settle(self, load: TieredLoad, reasons: dict[int, str]) -> None:
        """Whole blocks become blocks of the level; of the others another load may have more luck."""
        num_rows = self._arena.num_rows
        contents = {
            index: checksum(self._arena.view(load.blocks[index].ref.slot).data)
            for index in reasons
            if load.told[index] == num_rows
        }
        with self._changed:
            for index, reason in reversed(reasons.items()):  # tail first: it is to leave first
                held = load.blocks[index]
                del self._owners[held]
                if index in contents:
                    self._level.blocks.complete(held, contents[index])
                else:
                    self._level.blocks.forsake(held)
                    self._cut(load, index, "cancelled" if load.is_cancelled else reason)
            self._changed.notify_all()

    def _ask_peers(
        self, load: TieredLoad, wanted: Sequence[int], soon_ns: int, deadline_ns: int
    ) -> dict[int, PeerCall]:
        """Begin to read what other hosts have, all at once; until `soon_ns` they may greet.

        Their bytes land in the slots before they are proved, so not where somebody may read rows already.
        """
        unasked = [index for index in wanted if index not in load.has_asked]
        load.has_asked.update(unasked)
        load.places |= self._find([held.name for held in load.blocks], unasked)
        calls: dict[int, PeerCall] = {}
        for index in wanted:
            place, held = load.places.get(index), load.blocks[index]
            if place is None or held.num_rows or load.is_cancelled:
                continue
            out = self._arena.view(held.ref.slot)
            call = self._peers.start(place, held.name, out, up_ns=soon_ns, deadline_ns=deadline_ns)
            if call is not None:
                calls[index] = call
        with self._changed:
            load.calls = list(calls.items())
        if load.is_cancelled:
            self.cancel(load)
        return calls

    def _take(self, load: TieredLoad, index: int, call: PeerCall, deadline_ns: int) -> None:
        """Take a block from another host, if it comes in time and is what the load may have."""
        held = load.blocks[index]
        if call.finish(deadline_ns=deadline_ns) and call.lineage <= held.lineage:
            held.lineage = call.lineage
            load.from_peers.add(index)
            self._tell(load, [index], self._arena.num_rows)

    def _fetch_from_pool(self, load: TieredLoad, wanted: Sequence[int], deadline_ns: int) -> dict[int, str]:
        """Read the extents with those of the blocks that did not come yet; returns why they did not."""
        wanted = [index for index in wanted if load.told[index] < self._arena.num_rows]
        if not wanted:
            return {}
        if wanted[-1] >= load.hit.num_blocks and not load.has_matched:
            load.has_matched = True
            until_ns = min(deadline_ns, time.monotonic_ns() + _SOON_NS)
            found = cut_hit(self._match(load.chain, until_ns), load.chain)
            load.hit = max(found, load.hit, key=lambda hit: hit.num_blocks)
        lineages = load.lineages_on_disk()
        had = {i for i in wanted if i in lineages and lineages[i] <= load.blocks[i].lineage}
        parts = tuple(part for part in load.hit.extents if had.intersection(range(part.begin, part.end)))
        if not parts:
            return {}
        blocks = {index: load.blocks[index] for index in had}
        untouched = {index for index in had if not blocks[index].num_rows}
        sink = SlotSink(self._arena, blocks, lambda indices, rows: self._tell(load, indices, rows))
        hit = Hit(load.chain, parts[-1].end, parts)
        get = self._pool.begin_get(hit, sink, deadline_ns=deadline_ns, order=RowOrder.ROWS)
        with self._changed:
            load.get = get
        if load.is_cancelled:
            get.cancel()
        result = get.run()
        came = {index for index in had if load.told[index] == self._arena.num_rows}
        load.from_pool |= came
        for index in came & untouched:
            blocks[index].lineage = lineages[index]
        why = next((end for end in result.ends if end != GetEnd.WHOLE), None)
        return {} if why is None else dict.fromkeys(wanted, why.name.lower())

    def _tell(self, load: TieredLoad, indices: Sequence[int], num_rows: int) -> None:
        """Leading rows of blocks that a load fetches are in place: tell all loads that hold them."""
        with self._changed:
            for index in indices:
                load.blocks[index].num_rows = max(load.blocks[index].num_rows, num_rows)
            for one in self._loads:
                shared = [i for i in indices if i < one.num_blocks and one.blocks[i] is load.blocks[i]]
                if shared:
                    one.told[shared] = np.maximum(one.told[shared], num_rows)
                    self._count(one)
            if num_rows == self._arena.num_rows:
                self._changed.notify_all()

    def _count(self, load: TieredLoad) -> None:
        self._arena.count_ready(load.lane, rows_ready(load.told, self._arena.num_rows))

    def _cut(self, load: TieredLoad, limit: int, reason: str) -> None:
        if limit < load.limit:
            load.limit = limit
            load.reasons.append(reason)

    def _end(self, load: TieredLoad) -> None:
        self._loads.remove(load)
        for held in load.blocks:
            self._level.blocks.unpin(held)
        self._arena.give_back_lane(load.lane)

    def _hold(self, names: Sequence[bytes], *, takes_slots: bool) -> tuple[list[HeldBlock], int]:
        """Slots and a lane, or neither. With the lock held."""
        if not takes_slots and not all(map(self._level.blocks.knows, names)):
            raise ArenaFull("a block needs a new slot", code="dram.full")
        lane = self._arena.take_lane()
        if lane is None:
            raise ArenaFull("as many loads as there may be", code="dram.lanes")
        try:
            return self._level.blocks.pin(names), lane
        except ArenaFull:
            self._arena.give_back_lane(lane)
            raise

    def _find(self, names: Sequence[bytes], wanted: Sequence[int]) -> dict[int, DramPlace]:
        if not wanted:
            return {}
        places = self._directory.find(b"".join(names[index] for index in wanted))
        return {
            index: place
            for index, place in zip(wanted, places, strict=True)
            if place is not None and place.host != self._level.host
        }

    def _match(self, chain: BlockChain, deadline_ns: int) -> Hit:
        try:
            return self._pool.match(chain, deadline_ns=deadline_ns)
        except MillpondError as error:
            log.info("disks not asked", code=error.code)
            return Hit(chain, 0, ())
