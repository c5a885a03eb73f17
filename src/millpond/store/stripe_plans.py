"""`StripePlans`: where stripes lie and where the next one goes, as the pool map says."""

from __future__ import annotations

import itertools
from collections.abc import Collection
from dataclasses import dataclass
from functools import lru_cache

from millpond.core.errors import ConfigError, StaleEpoch
from millpond.core.extents import NodeId, StripeId, StripeShape
from millpond.core.kv_layout import KvLayout
from millpond.core.pool_map import PlacementEpoch, PoolMap
from millpond.store.codec.reed_solomon import ReedSolomon

MAX_TRIED_GROUPS = 16


@dataclass(frozen=True, slots=True)
class StripePlan:
    """What placement says about one stripe."""

    nodes: tuple[NodeId, ...]
    """Of each shard."""
    shape: StripeShape
    codec: ReedSolomon


class StripePlans:
    """See module. For one version of the map. Thread-safe.

    Args:
        layout: Of the blocks.
        pool_map: Its last epoch takes the writes.
        nonce_base: 32 random bits of this client in the upper half of 64.
        home: Write only to groups of this node; empty: to all (interfaces A.7, preset `local-affinity`).

    Raises:
        ConfigError: No group takes our writes.
    """

    def __init__(self, layout: KvLayout, pool_map: PoolMap, *, nonce_base: int, home: str = "") -> None:
        self.pool_map = pool_map
        self._layout = layout
        self._nonce_base = nonce_base
        self._epochs = {epoch.epoch: epoch for epoch in pool_map.epochs}
        self._last = pool_map.epochs[-1]
        self._groups = [
            group
            for group in range(len(self._last.groups))
            if not home or set(_nodes(self._last, group)) == {home}
        ]
        if not self._groups:
            raise ConfigError(f"no group of the pool lies on {home!r} alone", param="home")
        self.plan_of = lru_cache(256)(self._make_plan)

    def knows(self, stripe: StripeId) -> bool:
        """Whether the map has the stripe's epoch."""
        return stripe.epoch in self._epochs

    def largest_shape(self, num_blocks: int) -> StripeShape:
        """Shape of a full extent, in the epoch whose stripes take most memory."""
        shapes = [StripeShape(self._layout, num_blocks, epoch.k, epoch.m) for epoch in self._epochs.values()]
        return max(shapes, key=lambda shape: shape.shard_bytes * shape.num_shards)

    def new_stripe(self, nonces: itertools.count[int], shunned: Collection[NodeId]) -> StripeId:
        """The next group whose nodes all do well, or else the one with the fewest that do not.

        Args:
            nonces: Counter of this client's writes.
            shunned: Nodes that do not do well.
        """
        count = next(nonces)
        first = (self._nonce_base >> 32) + count
        num_tried = min(MAX_TRIED_GROUPS, len(self._groups)) if shunned else 1
        tried = [self._groups[(first + step) % len(self._groups)] for step in range(num_tried)]
        group = min(tried, key=lambda group: sum(node in shunned for node in _nodes(self._last, group)))
        return StripeId(self._last.epoch, group, self._nonce_base | (count & 0xFFFFFFFF))

    def _make_plan(self, stripe: StripeId, num_blocks: int) -> StripePlan:
        """Plan of a stripe; cached as `plan_of`.

        Raises:
            StaleEpoch: The map does not have its placement.
        """
        epoch = self._epochs.get(stripe.epoch)
        if epoch is None or stripe.group >= len(epoch.groups):
            raise StaleEpoch(f"no placement {stripe.epoch}, group {stripe.group}", code="pool.stale_epoch")
        shape = _shape(StripeShape(self._layout, num_blocks, epoch.k, epoch.m))
        return StripePlan(_nodes(epoch, stripe.group), shape, _codec(epoch.k, epoch.m))


def _nodes(epoch: PlacementEpoch, group: int) -> tuple[NodeId, ...]:
    return tuple(epoch.points[point] for point in epoch.groups[group])


@lru_cache(maxsize=64)
def _codec(k: int, m: int) -> ReedSolomon:
    return ReedSolomon(k, m)


@lru_cache(maxsize=256)
def _shape(shape: StripeShape) -> StripeShape:
    """One object per shape: what is derived from it is then computed once."""
    return shape
