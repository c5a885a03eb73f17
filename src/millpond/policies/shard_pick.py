"""Which shards of a stripe to ask first, and when to ask for one more.

Any k of the k + m shards give the extent, so a reader asks k + 1 nodes at once and the rest only when the
read is later than most reads of its size. Nodes that keep losing are left out for a while.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from millpond.core.extents import NodeId
from millpond.core.units import MIB, MILLISECOND_NS, SECOND_NS


@dataclass(frozen=True, slots=True)
class ShardPickParams:
    """Choice of shards and of the moment to hedge."""

    latency_weight: float = 0.05
    """Largest weight of the newest sample in a node's mean latency, 0 to 1."""
    latency_memory_s: float = 0.5
    """Time over which samples are averaged when they come often, so that a short stall ejects nobody."""
    max_latency_ratio: float = 8.0
    """A sample counts at most this many medians, so that one stall does not eject a node."""
    loser_ratio: float = 3.0
    """A shard that was not needed any more counts as this many times the time it had taken until then."""
    eject_ratio: float = 3.0
    """Mean latency in medians above which a node is left out. Source: kvstore 2.5."""
    max_ejected_ratio: float = 0.15
    """Share of the nodes that may be left out for being slow, about m of k + m: with more, reads would have
    to ask them all the same. Broken connections eject beyond it."""
    max_strikes: int = 3
    """Failed or corrupt shards in a row that eject a node."""
    min_eject_s: float = 5.0
    """How long a node is left out the first time; doubles while its probes fail. Source: kvstore 2.5."""
    max_eject_s: float = 30.0
    """Longest time a node is left out between two probes."""
    hedge_quantile: float = 0.95
    """A read later than this share of the reads of its size gets one more shard."""
    min_hedge_us: int = 200
    """Shortest wait before one more shard is asked for. Source: kvstore 2.5."""
    first_hedge_ms: int = 10
    """The same while too few reads of a size were seen to know the quantile."""
    extra_ratio: float = 0.15
    """Bytes asked for beyond k shards, as a share of k shards, in the long run. Source: kvstore 2.5."""
    extra_burst_bytes: int = 16 * MIB
    """Extra bytes that may be asked for at once after a quiet time."""
    late_above_utilisation: float = 0.7
    """Busy share of the storage nodes above which reads start with k shards only. Source: kvstore 2.5."""


class LatencyDigest:
    """Quantiles of a stream of durations, older ones forgotten by halves.

    A histogram with eight buckets per power of two: a quantile is at most an eighth too high.
    """

    _MAX_SAMPLES = 8192
    _REFRESH = 64
    MIN_SAMPLES = 32

    def __init__(self, quantile: float) -> None:
        self._quantile = quantile
        self._counts: dict[int, int] = {}
        self._num_samples = 0
        self._until_refresh = self.MIN_SAMPLES
        self._value: int | None = None

    @property
    def value_ns(self) -> int | None:
        """The quantile; None before `MIN_SAMPLES` samples."""
        return self._value

    def add(self, duration_ns: int) -> None:
        """Count one sample."""
        width = max(duration_ns.bit_length(), 4)
        bucket = width * 8 + ((duration_ns >> (width - 4)) & 7)
        self._counts[bucket] = self._counts.get(bucket, 0) + 1
        self._num_samples += 1
        self._until_refresh -= 1
        if not self._until_refresh:
            self._refresh()

    def _refresh(self) -> None:
        self._until_refresh = self._REFRESH
        wanted = self._quantile * self._num_samples
        for bucket in sorted(self._counts):
            wanted -= self._counts[bucket]
            if wanted <= 0:
                width, step = divmod(bucket, 8)
                self._value = (8 + step + 1) << (width - 4)
                break
        if self._num_samples >= self._MAX_SAMPLES:
            self._counts = {bucket: half for bucket, count in self._counts.items() if (half := count // 2)}
            self._num_samples = sum(self._counts.values())


@dataclass(slots=True)
class _NodeState:
    latency_ratio: float = 1.0
    sampled_ns: int = 0
    strikes: int = 0
    eject_ns: int = 0
    """How long it was left out the last time; 0: it is healthy."""
    ejected_until_ns: int = 0
    is_probed: bool = False


class NodeHealth:
    """What one reader knows about the speed of its storage nodes.

    A node's latency is kept in medians of the shards of the same size class, so that nodes with other
    mixes of sizes compare. An ejected node is asked again only when its time is over, by one read at
    a time, and must then be among the k that the read needed.
    """

    def __init__(self, params: ShardPickParams) -> None:
        self._params = params
        self._min_eject_ns = int(params.min_eject_s * SECOND_NS)
        self._max_eject_ns = int(params.max_eject_s * SECOND_NS)
        self._memory_ns = int(params.latency_memory_s * SECOND_NS)
        self._nodes: dict[NodeId, _NodeState] = {}
        self._ejected: dict[NodeId, _NodeState] = {}
        self._medians: dict[int, LatencyDigest] = {}

    @property
    def ejected(self) -> frozenset[NodeId]:
        """Nodes that are left out or on probation."""
        return frozenset(self._ejected)

    def latency_ratio(self, node: NodeId) -> float:
        """Mean latency of a node in medians; 1 if it was never asked."""
        state = self._nodes.get(node)
        return state.latency_ratio if state else 1.0

    def pick_order(self, now_ns: int, nodes: Sequence[NodeId]) -> Sequence[int]:
        """Order the shards of a stripe: those to ask first come first.

        Args:
            now_ns: Time.
            nodes: Node of each shard, data shards first.

        Returns:
            Indices into `nodes`: at most one probe, the shards of healthy nodes in their own order, which
            makes the decode cheapest (data, the XOR parity, others), then the shards of ejected nodes.

        Guarantees:
            A permutation. A node whose ejection is over stands among the first for one read at a time.
        """
        if self._ejected.keys().isdisjoint(nodes):
            return range(len(nodes))
        healthy: list[int] = []
        probes: list[int] = []
        shunned: list[int] = []
        for index, node in enumerate(nodes):
            state = self._ejected.get(node)
            if state is None:
                healthy.append(index)
            elif now_ns >= state.ejected_until_ns and not state.is_probed and not probes:
                state.is_probed = True
                probes.append(index)
            else:
                shunned.append(index)
        return [*probes, *healthy, *shunned]

    def observe(self, now_ns: int, node: NodeId, num_bytes: int, latency_ns: int) -> None:
        """Learn that a valid shard of `num_bytes` arrived `latency_ns` after it was asked for."""
        digest = self._digest_of(num_bytes)
        digest.add(latency_ns)
        state = self._state_of(node)
        state.strikes = 0
        ratio = latency_ns / digest.value_ns if digest.value_ns else 1.0
        if state.eject_ns:
            if state.is_probed:
                self._end_probe(now_ns, node, state, is_good=ratio <= self._params.eject_ratio)
            return
        self._mix(now_ns, node, state, ratio)

    def lost_race(self, now_ns: int, node: NodeId, num_bytes: int, elapsed_ns: int) -> None:
        """Learn that a shard had not come when its read had enough others."""
        state = self._state_of(node)
        if state.eject_ns:
            if state.is_probed:
                self._end_probe(now_ns, node, state, is_good=False)
            return
        median_ns = self._digest_of(num_bytes).value_ns
        if median_ns:
            self._mix(now_ns, node, state, self._params.loser_ratio * elapsed_ns / median_ns)

    def withdraw(self, node: NodeId) -> None:
        """Learn that a shard is not wanted any more, for a reason that says nothing about its node."""
        state = self._ejected.get(node)
        if state is not None:
            state.is_probed = False

    def strike(self, now_ns: int, node: NodeId) -> None:
        """Learn that a node answered with corrupt bytes or an error."""
        state = self._state_of(node)
        state.strikes += 1
        if state.strikes >= self._params.max_strikes or state.is_probed:
            self.eject(now_ns, node)

    def eject(self, now_ns: int, node: NodeId) -> None:
        """Leave a node out from now on, for example because its connection broke."""
        state = self._state_of(node)
        if state.eject_ns and not state.is_probed and now_ns < state.ejected_until_ns:
            return
        state.eject_ns = min(state.eject_ns * 2 or self._min_eject_ns, self._max_eject_ns)
        state.ejected_until_ns = now_ns + state.eject_ns
        state.is_probed = False
        self._ejected[node] = state

    def _end_probe(self, now_ns: int, node: NodeId, state: _NodeState, *, is_good: bool) -> None:
        if not is_good:
            self.eject(now_ns, node)
            return
        del self._ejected[node]
        self._nodes[node] = _NodeState()

    def _mix(self, now_ns: int, node: NodeId, state: _NodeState, ratio: float) -> None:
        params = self._params
        ratio = min(ratio, params.max_latency_ratio)
        weight = min((now_ns - state.sampled_ns) / self._memory_ns, params.latency_weight)
        state.sampled_ns = now_ns
        state.latency_ratio += weight * (ratio - state.latency_ratio)
        is_room = len(self._ejected) < params.max_ejected_ratio * len(self._nodes)
        if state.latency_ratio > params.eject_ratio and is_room:
            self.eject(now_ns, node)

    def _state_of(self, node: NodeId) -> _NodeState:
        state = self._nodes.get(node)
        if state is None:
            state = self._nodes[node] = _NodeState()
        return state

    def _digest_of(self, num_bytes: int) -> LatencyDigest:
        size_class = num_bytes.bit_length()
        digest = self._medians.get(size_class)
        if digest is None:
            digest = self._medians[size_class] = LatencyDigest(0.5)
        return digest


class HedgeTimer:
    """When a read is late: the quantile of whole reads of the same size class and first width.

    Whole reads and not shards are counted: the slowest shard of each read is never seen to arrive, which
    would make a quantile of shards too low and the hedges too many.
    """

    def __init__(self, params: ShardPickParams) -> None:
        self._params = params
        self._digests: dict[tuple[int, int], LatencyDigest] = {}

    def observe(self, num_bytes: int, width: int, duration_ns: int) -> None:
        """Learn how long a read took whose first `width` shards had `num_bytes` each."""
        key = (num_bytes.bit_length(), width)
        digest = self._digests.get(key)
        if digest is None:
            digest = self._digests[key] = LatencyDigest(self._params.hedge_quantile)
        digest.add(duration_ns)

    def wait_ns(self, num_bytes: int, width: int) -> int:
        """How long to wait for a read before one more shard is asked for."""
        size_class = num_bytes.bit_length()
        # Until reads of this width were seen, the quantile of those one shard wider or narrower must do.
        for seen in (width, width + 1, width - 1):
            digest = self._digests.get((size_class, seen))
            if digest is not None and digest.value_ns is not None:
                return max(digest.value_ns, self._params.min_hedge_us * 1_000)
        return self._params.first_hedge_ms * MILLISECOND_NS


class HedgeBudget:
    """Token bucket of the bytes that reads may ask for beyond what they need."""

    def __init__(self, params: ShardPickParams) -> None:
        self._ratio = params.extra_ratio
        self._burst = float(params.extra_burst_bytes)
        self._bytes = self._burst

    def earn(self, num_bytes: int) -> None:
        """Count bytes that a read needs."""
        self._bytes = min(self._bytes + self._ratio * num_bytes, self._burst)

    def spend(self, num_bytes: int) -> bool:
        """Take extra bytes; False, and nothing taken, if the bucket does not hold them."""
        if num_bytes > self._bytes:
            return False
        self._bytes -= num_bytes
        return True
