"""Which block leaves the DRAM level when it is full (kvstore 1.9).

An order holds the blocks that may leave: those that the disks have too. Chains are shown to it tail first, so
that of one chain the blocks that nothing else builds on leave first.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable
from typing import Protocol

from millpond.core.errors import ConfigError

MAX_USES = 3
"""S3-FIFO counts no further."""


class EvictionOrder(Protocol):
    """Blocks in the order in which they leave."""

    def __len__(self) -> int:
        """Blocks that may leave."""
        ...

    def insert(self, block: bytes) -> None:
        """Take in a block that is not there."""
        ...

    def touch(self, block: bytes) -> None:
        """Count a use; nothing happens if the block is not there."""
        ...

    def discard(self, block: bytes) -> None:
        """Take a block out, if it is there."""
        ...

    def pop(self) -> bytes | None:
        """Take out the block that leaves next; None if there is none."""
        ...


class Lru:
    """Least recently used first."""

    def __init__(self, capacity: int) -> None:
        self._blocks: OrderedDict[bytes, None] = OrderedDict()

    def __len__(self) -> int:
        """See `EvictionOrder`."""
        return len(self._blocks)

    def insert(self, block: bytes) -> None:
        """See `EvictionOrder`."""
        self._blocks[block] = None

    def touch(self, block: bytes) -> None:
        """See `EvictionOrder`."""
        if block in self._blocks:
            self._blocks.move_to_end(block)

    def discard(self, block: bytes) -> None:
        """See `EvictionOrder`."""
        self._blocks.pop(block, None)

    def pop(self) -> bytes | None:
        """See `EvictionOrder`."""
        return self._blocks.popitem(last=False)[0] if self._blocks else None


class S3Fifo:
    """Two queues; a block that was not used while it went through the small one leaves early.

    So a scan of blocks that are read once takes a tenth of the memory and not all of it. Names of blocks that
    left early are remembered: one that comes back goes to the main queue.

    Args:
        capacity: Blocks of the whole level.

    Source:
        S3-FIFO (Yang et al., SOSP 2023).
    """

    def __init__(self, capacity: int) -> None:
        self._max_small = max(1, capacity // 10)
        self._max_ghosts = max(1, capacity - self._max_small)
        self._small: deque[bytes] = deque()
        self._main: deque[bytes] = deque()
        self._uses: dict[bytes, int] = {}
        """Of every block that is here; a name in a queue that is not is passed over."""
        self._in_small: set[bytes] = set()
        self._ghosts: OrderedDict[bytes, None] = OrderedDict()

    def __len__(self) -> int:
        """See `EvictionOrder`."""
        return len(self._uses)

    def insert(self, block: bytes) -> None:
        """See `EvictionOrder`."""
        self._uses[block] = 0
        if block in self._ghosts:
            del self._ghosts[block]
            self._main.append(block)
        else:
            self._small.append(block)
            self._in_small.add(block)

    def touch(self, block: bytes) -> None:
        """See `EvictionOrder`."""
        if block in self._uses:
            self._uses[block] = min(MAX_USES, self._uses[block] + 1)

    def discard(self, block: bytes) -> None:
        """See `EvictionOrder`."""
        if self._uses.pop(block, None) is None:
            return
        # Rare: the block is about to be written again as part of a longer extent.
        (self._small if block in self._in_small else self._main).remove(block)
        self._in_small.discard(block)

    def pop(self) -> bytes | None:
        """See `EvictionOrder`."""
        while self._uses:
            if self._small and (len(self._small) >= self._max_small or not self._main):
                block = self._small.popleft()
                self._in_small.discard(block)
                if self._uses[block] > 1:
                    self._uses[block] = 0
                    self._main.append(block)
                    continue
                self._remember(block)
            else:
                block = self._main.popleft()
                if self._uses[block]:
                    self._uses[block] -= 1
                    self._main.append(block)
                    continue
            del self._uses[block]
            return block
        return None

    def _remember(self, block: bytes) -> None:
        self._ghosts[block] = None
        if len(self._ghosts) > self._max_ghosts:
            self._ghosts.popitem(last=False)


_ORDERS: dict[str, Callable[[int], EvictionOrder]] = {"lru": Lru, "s3fifo": S3Fifo}


def make_order(name: str, capacity: int) -> EvictionOrder:
    """Make an eviction order.

    Args:
        name: `lru`, or `s3fifo` which resists scans.
        capacity: Blocks of the level.

    Raises:
        ConfigError: No such order.
    """
    if name not in _ORDERS:
        raise ConfigError(f"no eviction order {name!r}: {', '.join(sorted(_ORDERS))}")
    return _ORDERS[name](capacity)
