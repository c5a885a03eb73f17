"""What a storage node keeps, for how long, and what it refuses when its wear budget runs low.

Decisions go by class of block, never by user. A draw is a number in [0, 1) that all nodes of a stripe share,
so that they refuse the same stripes instead of leaving each with too few shards.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

HOUR_S = 3600
LOW_LEVEL = 0.2
"""Of the wear budget: below it the classes of least value give way."""
LAST_LEVEL = 0.05
"""Below it the others give way too."""


class BlockClass(IntEnum):
    """What a block is part of, as the scheduler knows it. Numbers stand in record headers."""

    TURN = 0
    """Turns of a session: the next turn reads them."""
    PROMPT = 1
    """System prompts and tool definitions: shared."""
    REASONING = 2
    SUB_AGENT = 3
    ONE_SHOT = 4
    """Not expected to be read again."""


LOW_CLASSES = frozenset({BlockClass.REASONING, BlockClass.SUB_AGENT, BlockClass.ONE_SHOT})


@dataclass(frozen=True, slots=True)
class RetentionParams:
    """How long blocks live."""

    ttl_s: int = 24 * HOUR_S
    """Time to live; reading refreshes it."""
    one_shot_ttl_s: int = 2 * HOUR_S
    """The same for `ONE_SHOT`."""
    partitions: int = 24
    """Segments that share a time to live are sealed this often in it: data expires at most that much late."""

    def ttl_of(self, block_class: BlockClass) -> int:
        """Time to live in seconds of a class."""
        return self.one_shot_ttl_s if block_class is BlockClass.ONE_SHOT else self.ttl_s

    def partition_s(self, ttl_s: int) -> int:
        """How long a segment with this time to live takes records."""
        return max(1, ttl_s // self.partitions)


def expiry_s(*, newest_s: int, ttl_s: int) -> int:
    """When a segment whose last record was added at `newest_s` is over."""
    return newest_s + ttl_s


def is_worth_copying(*, last_read_s: int, ttl_s: int, now_s: int) -> bool:
    """Whether a record of an expired segment was read recently enough to live on."""
    return 2 * (now_s - last_read_s) <= ttl_s


def admits(block_class: BlockClass, *, level: float, draw: float) -> bool:
    """Whether a record may be written.

    Args:
        block_class: Its class.
        level: What is left of the wear budget, 0 to 1.
        draw: In [0, 1), the same on every node of the stripe.
    """
    threshold = LOW_LEVEL if block_class in LOW_CLASSES else LAST_LEVEL
    return level >= threshold or draw * threshold < level
